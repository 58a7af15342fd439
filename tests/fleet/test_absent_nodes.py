"""Who is silent, and for whom others wait: the join says it in its answers, and `sentinel fleet status` hears it there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from sentinel.cli.main import run_cli
from sentinel.fleet import heard_nodes, overheard, subjects
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.heard_nodes import ABSENT_S, FORGOTTEN_S, MAX_NODES_SAID, SILENT_S
from sentinel.fleet.overheard import NodeStatus, overhear
from sentinel.fleet.run_copies import WAITED_S
from sentinel.fleet.sealed import AbsentNodes, Answer, Beat, seal, unseal
from sentinel.native import crc32

from ..support.fleet_parts import Join, Shipper, bytes_of, go_on, split
from ..support.nats_broker import NatsBroker
from ..support.serving import small_run
from ..support.waiting import wait_for
from .test_copies_of_spools import Fleet, write
from .test_relayed_node import Chain

NOBODY = AbsentNodes()
ANSWER = Answer(1, "j1", 5, "n1", "run", {}, absent=AbsentNodes((("n3", 41.5),), 1))


class Watched(Fleet):
    """A fleet of which each node has one rank in each run."""

    def train(self, where: Path, *runs: str) -> None:
        for number, node in enumerate(self.nodes):
            for run in runs:
                write(where / node / run / "spool" / f"r{number:05d}-0123abcd", "000000.spool", b"x" * 100)

    def absent(self, node: str = "n1", run: str = "run") -> AbsentNodes:
        """Return what the join answers a node that speaks now."""
        (beat,) = [one for one in self.nodes[node].beats() if one.run == run]
        answer = self.copies.take_beat(beat, is_drained=True)
        assert answer is not None
        self.nodes[node].take_answer(answer)
        return answer.absent

    def go_on(self, seconds: float) -> None:
        """Have so long pass while all nodes speak."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.9
            self.talk()
            self.copies.release()


def test_the_join_names_who_is_waited_for_and_then_who_is_silent(tmp_path: Path) -> None:
    fleet = Watched(tmp_path, "n1", "n2", "n3")
    fleet.train(tmp_path, "run")
    fleet.settle()
    fleet.go_on(2 * ABSENT_S)
    assert fleet.absent() == NOBODY
    stopped = fleet.nodes.pop("n3")
    fleet.train(tmp_path, "run")
    fleet.talk()
    for chunk in fleet.chunks("n1"):
        fleet.copies.take_chunk(chunk)

    fleet.go_on(WAITED_S - 2.0)
    assert fleet.absent() == NOBODY, "nodes of a large fleet speak no more often"
    fleet.go_on(2.0 + ABSENT_S)
    assert fleet.absent() == AbsentNodes(waited_for=("n3",), num_waited_for=1)
    fleet.go_on(SILENT_S)
    said = fleet.absent()
    assert (said.num_silent, said.waited_for, said.silent[0][0]) == (1, (), "n3")
    assert SILENT_S + WAITED_S < said.silent[0][1] < SILENT_S + WAITED_S + 3.0
    fleet.nodes["n3"] = stopped
    fleet.go_on(2 * ABSENT_S)
    assert fleet.absent() == NOBODY

    del fleet.nodes["n3"]
    fleet.go_on(SILENT_S + ABSENT_S)
    assert fleet.absent().num_silent == 1
    fleet.now += FORGOTTEN_S
    fleet.go_on(2 * ABSENT_S)
    assert fleet.absent("n2") == NOBODY, "it is spoken of no more"


def test_who_ended_in_order_or_speaks_of_another_run_is_not_silent(tmp_path: Path) -> None:
    fleet = Watched(tmp_path, "n1", "n2", "n3")
    fleet.train(tmp_path, "run", "old")
    fleet.settle()
    for beat in fleet.nodes.pop("n3").beats(is_leaving=True):
        fleet.copies.take_beat(beat, is_drained=True)
    # Who cleans up deletes a run on one machine before the others.
    (tmp_path / "n2" / "old").rename(tmp_path / "deleted")
    fleet.go_on(SILENT_S + 2 * ABSENT_S)
    assert [fleet.absent(run=run) for run in ("run", "old")] == [NOBODY, NOBODY]
    del fleet.nodes["n2"]
    fleet.go_on(SILENT_S + 2 * ABSENT_S)
    assert [[name for name, _ in fleet.absent(run=run).silent] for run in ("run", "old")] == [["n2"], ["n2"]]


def test_of_many_a_few_are_named_and_nobody_is_looked_for_with_each_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Watched(tmp_path, *(f"n{number}" for number in range(1, 14)))
    fleet.train(tmp_path, "run")
    fleet.settle()
    fleet.nodes = {"n1": fleet.nodes["n1"]}
    fleet.now += SILENT_S
    said = fleet.absent()
    assert (said.num_silent, len(said.silent)) == (12, MAX_NODES_SAID)
    fleet.now += ABSENT_S / 2
    assert fleet.absent() is said
    fleet.now += ABSENT_S / 2
    assert fleet.absent() is not said
    monkeypatch.setattr(heard_nodes, "ABSENT_S", 0.0)
    assert len(seal(msgspec.structs.replace(ANSWER, absent=fleet.absent()))) < 300


@pytest.mark.parametrize("num_fields", [-1, 1], ids=["one that does not say it", "one that says more"])
def test_an_answer_of_another_release_is_understood(num_fields: int) -> None:
    fields = msgspec.msgpack.decode(seal(ANSWER)[4:])
    body = msgspec.msgpack.encode(fields[:num_fields] if num_fields < 0 else [*fields, "newer"])
    expected = msgspec.structs.replace(ANSWER, absent=NOBODY) if num_fields < 0 else ANSWER

    assert unseal(crc32(body).to_bytes(4, "little") + body, Answer) == expected


def test_what_the_join_says_of_other_nodes_a_worker_passes_on(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.turn(number=4)
    other = Beat(1, "n3", "run", ("", 0), {}, [], number=("s", 1))
    chain.join.take_beat(other, is_drained=True)
    chain.now += SILENT_S
    chain.turn(number=8)
    (beat,) = chain.ship.beats()
    answer = chain.worker.take_beat(beat, is_drained=True)

    assert answer is not None and [name for name, _ in answer.absent.silent] == ["n3"]


def said(monkeypatch: pytest.MonkeyPatch, *messages: tuple[str, Beat | Answer]) -> list[NodeStatus]:
    """Return what is made of messages, (subject, message) each, that are heard in this order."""

    class Client:
        async def subscribe(self, subject: str, cb: Callable[[object], Awaitable[None]]) -> None:
            if subject == overheard.HEARD[-1]:
                for name, message in messages:
                    await cb(SimpleNamespace(subject=name, data=seal(message)))

        async def close(self) -> None: ...

    async def connect(broker: BrokerConfig, name: str) -> Client:
        return Client()

    monkeypatch.setattr(overheard, "connect", connect)
    return asyncio.run(overhear(BrokerConfig(server="nats://127.0.0.1:9"), 0.0))


def test_status_goes_by_the_newest_answer_of_a_join_to_any_node_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = [Beat(1, node, "run", ("", 0), {}, [], worker=by) for node, by in (("n1", ""), ("n2", "w1"))]
    to_n2 = msgspec.structs.replace(ANSWER, node="n2")
    heard = said(
        monkeypatch,
        *((subjects.beat("run", one.node), one) for one in beats),
        (subjects.answer("run", "n1"), msgspec.structs.replace(ANSWER, absent=NOBODY)),
        (subjects.answer("run", "n2"), to_n2),
        # Of a worker to a node, which hides nothing; and of the join to a worker that lost the node.
        (subjects.frames_answer("run", "n2"), msgspec.structs.replace(to_n2, join="w1 1f", absent=NOBODY)),
        (subjects.answer("run", "n2"), msgspec.structs.replace(to_n2, stamp=0, num_steps=(0, 0), absent=NOBODY)),
    )

    assert [(one.node, one.join, one.silent, one.num_silent) for one in heard] == [
        ("n1", "j1", {"n3": 41.5}, 1), ("n2", "j1", {"n3": 41.5}, 1),
    ]  # fmt: skip


def test_status_says_whether_any_join_answers_where_none_answers_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = [Beat(1, node, "run", ("", 0), {}, []) for node in ("n1", "n2")]
    spoken = [(subjects.beat("run", one.node), one) for one in beats]
    answered = (subjects.answer("run", "n1"), ANSWER)
    lost = (subjects.answer("run", "n1"), msgspec.structs.replace(ANSWER, stamp=0))

    refused = "join j1 answers other nodes and not this one: has it the join's --key? See /healthz of the join"
    assert [one.blocked for one in said(monkeypatch, *spoken, answered)] == [[], [refused]]
    assert [one.blocked for one in said(monkeypatch, *spoken, lost)] == [[], ["no join answers"]]
    assert [one.blocked for one in said(monkeypatch, *spoken)] == [["no join answers"]] * 2


@pytest.mark.server
@pytest.mark.slow
def test_status_says_that_a_node_is_stopped_and_ends_with_1(
    tmp_path: Path, broker: NatsBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "whole" / "run")
    run.write(4)
    nodes = split(run.directory, tmp_path, 2)
    join = Join(tmp_path / "joined", broker.url)
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))

    def status() -> tuple[int, str]:
        return run_cli(["fleet", "status", "--server", broker.url, "--listen-s", "2.5"]), capsys.readouterr().out

    wait_for(lambda: status()[0] == 0)
    resume = shippers[1].pause()
    run.write(4)
    go_on(run, nodes)
    waiting = wait_for(lambda: (found := status())[0] == 1 and found[1])
    assert "run  what others sent waits for node1; see whether machine and shipper live" in waiting
    monkeypatch.setattr("sentinel.fleet.heard_nodes.SILENT_S", 1.0)
    silent = wait_for(lambda: "silent" in (found := status())[1] and found)
    assert silent[0] == 1
    assert "run  node node1  silent: nothing was heard of it for" in silent[1] and "node node0" in silent[1]
    monkeypatch.undo()
    resume()
    wait_for(lambda: join.turn() or status()[0] == 0)
    assert [one.end() for one in shippers] == [True, True]
    join.finish()
