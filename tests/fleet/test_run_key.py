"""What is not signed by the fleet's key, came before, or comes late, commands nobody and acknowledges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sentinel.control.commands import RunCommands
from sentinel.errors import ConfigError
from sentinel.fleet.broker import BrokerConfig, connect
from sentinel.fleet.node_runs import EXPIRES_S, MAX_REFUSED, SAID_S, NodeRuns
from sentinel.fleet.overheard import overhear
from sentinel.fleet.run_key import HEADER, RunKey
from sentinel.fleet.sealed import VERSION, Answer, FilePlace, SpoolHeld, seal
from sentinel.fleet.subjects import answer as answer_subject

from ..support.fleet_parts import Join, Shipper, split
from ..support.nats_broker import NatsBroker
from ..support.serving import NOW, small_run
from ..support.waiting import wait_for

FOLDER = "r00003-0123abcd"
KEY = RunKey(b"k" * 32)


def test_a_signature_is_of_one_key_one_subject_and_all_bytes() -> None:
    signed = KEY.headers("a.b", b"data")

    assert KEY.has_signed("a.b", b"data", signed)
    for key, subject, data, headers in (
        (RunKey(b"j" * 32), "a.b", b"data", signed), (KEY, "a.c", b"data", signed), (KEY, "a.b", b"dat", signed),
        (KEY, "a.b", b"data", None), (KEY, "a.b", b"data", {HEADER: ""}), (KEY, "a.b", b"data", {HEADER: "\u00e4"}),
    ):  # fmt: skip
        assert not key.has_signed(subject, data, headers)


@pytest.mark.parametrize(
    ("mode", "text", "said"), [(0o644, "k" * 64, "only its owner may read"), (0o600, "short", "32 bytes at least")]
)
def test_a_key_that_others_read_or_guess_is_refused(tmp_path: Path, mode: int, text: str, said: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        RunKey.read(path)
    with pytest.raises(ConfigError, match="expected a file"):
        RunKey.read(tmp_path / "none")


class SigningNode:
    """A node that believes what is signed, and the join's answer to what it says."""

    def __init__(self, where: Path) -> None:
        self.now = 100.0
        self.problems: list[str] = []
        spool = where / "run" / "spool" / FOLDER
        spool.mkdir(parents=True)
        (spool / "000000.spool").write_bytes(b"x" * 100)
        self.runs = NodeRuns(where, "a", clock=lambda: self.now, on_problem=self.problems.append, is_signed=True)
        self.runs.discover()
        self.control = where / "run" / "control"

    def answer(self, name: str) -> Answer:
        beat = next(self.runs.beats())
        held = {FOLDER: SpoolHeld(FilePlace("000000.spool", 50), (0, 50))}
        commands = {name: b"{}"}
        return Answer(VERSION, "j1", int(self.now * 1e9), "a", "run", held, commands, to=beat.number)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda node, answer: (answer, False), "forged"),
        (lambda node, answer: (msgspec.structs.replace(answer, to=("other", 1)), True), "another shipper"),
        (lambda node, answer: (msgspec.structs.replace(answer, to=(answer.to[0], 99)), True), "another shipper"),
        (lambda node, answer: (msgspec.structs.replace(answer, to=(answer.to[0], 1)), True), "answered before"),
    ],
    ids=["forged", "of another session", "of no beat", "repeated"],
)
def test_a_node_refuses_what_is_forged_or_repeated_and_says_so(
    tmp_path: Path, change: Callable[[SigningNode, Answer], tuple[Answer, bool]], said: str
) -> None:
    node = SigningNode(tmp_path)
    node.runs.take_answer(node.answer("000001.json"), has_signature=True)
    assert [path.name for path in node.control.glob("*.json")] == ["000001.json"]

    answer, has_signature = change(node, node.answer("000002.json"))
    node.runs.take_answer(answer, has_signature=has_signature)
    assert [path.name for path in node.control.glob("*.json")] == ["000001.json"]
    assert [said in one for one in node.problems] == [True]
    assert next(node.runs.beats()).refused == node.problems
    node.runs.take_answer(node.answer("000003.json"), has_signature=True)
    assert len(list(node.control.glob("*.json"))) == 2


def test_forged_answers_in_many_names_are_one_reason_which_is_said_for_a_while(tmp_path: Path) -> None:
    node = SigningNode(tmp_path)
    answer = node.answer("000001.json")
    for number in range(3 * MAX_REFUSED):
        node.runs.take_answer(msgspec.structs.replace(answer, join=f"evil{number}"), has_signature=False)
    replaced = msgspec.structs.replace(answer, to=("other", 1))
    node.runs.take_answer(replaced, has_signature=True)

    assert ["evil0: its answer is forged" in one for one in node.problems] == [True, False]
    assert next(node.runs.beats()).refused == node.problems
    node.now += SAID_S / 2
    node.runs.take_answer(replaced, has_signature=True)
    node.now += SAID_S / 2 + 1
    assert next(node.runs.beats()).refused == node.problems[1:]
    node.now += SAID_S
    assert next(node.runs.beats()).refused == [] and not node.runs._runs["run"].refused


def test_an_answer_that_was_kept_back_is_refused_by_the_node_s_own_clock(tmp_path: Path) -> None:
    node = SigningNode(tmp_path)
    answer = node.answer("000001.json")
    node.now += EXPIRES_S + 1
    list(node.runs.beats())
    node.runs.take_answer(answer, has_signature=True)

    assert not list(node.control.glob("*.json")) and "expired" in node.problems[0]


@pytest.mark.server
@pytest.mark.slow
def test_over_a_broker_a_command_of_who_has_the_key_arrives_and_a_forged_one_is_said(tmp_path: Path) -> None:
    run = small_run(tmp_path / "whole" / "run")
    run.write(2)
    nodes = split(run.directory, tmp_path, 2)
    with NatsBroker(tmp_path / "broker") as broker:
        config = BrokerConfig(server=broker.url)
        join = Join(tmp_path / "joined", broker.url, key=KEY)
        shippers = [Shipper(path, path.name, broker.url, key=KEY) for path in nodes]
        wait_for(lambda: join.turn() or join.run is not None)
        command = RunCommands(join.run_dir).enable(at_step=100, now=NOW)
        there = nodes[0] / "run" / "control" / f"{command.seq:06d}.json"
        wait_for(there.exists)

        async def forge() -> None:
            client = await connect(config, "forger")
            forged = Answer(VERSION, "evil", 2**62, "node0", "run", {}, {"000099.json": b"{}"})
            for headers in (None, RunKey(b"j" * 32).headers(answer_subject("run", "node0"), seal(forged))):
                await client.publish(answer_subject("run", "node0"), seal(forged), headers=headers)
            await client.flush()
            await client.close()

        asyncio.run(forge())
        said = wait_for(
            lambda: [one for one in asyncio.run(overhear(config, 1.5)) if any("forged" in why for why in one.blocked)]
        )
        assert [one.node for one in said] == ["node0"] and "evil" in said[0].blocked[0]
        assert not (nodes[0] / "run" / "control" / "000099.json").exists()

        stranger = Shipper(nodes[1], "node7", broker.url)
        wait_for(lambda: any("sn.run.beat.node7" in one for one in join.problems))
        stranger.drop()
        assert [one.end() for one in shippers] == [True, True]
        join.drop()
