"""Nodes, a real broker and a join come to the bytes that one daemon comes to on one disk, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel.command import Command
from sentinel.control.commands import RunCommands
from sentinel.fleet.broker import BrokerConfig, connect, ensure_streams
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.join_lease import JoinLease, LeaseTimes
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.overheard import overhear
from sentinel.fleet.run_key import RunKey
from sentinel.fleet.shipping import Shipping
from sentinel.testing import LossJump
from sentinel.wire.spool import read_ack, write_ack

from ..support.certificates import write_pair
from ..support.fleet_parts import (
    ALONE,
    CONFIG,
    STEPS,
    Clock,
    Join,
    Shipper,
    StoppableLease,
    assert_same_results,
    bytes_of,
    go_on,
    nan_on,
    recorded_run,
    split,
)
from ..support.nats_broker import NatsBroker
from ..support.results import decisions, result_bytes
from ..support.serving import NOW, judge_run, small_run
from ..support.waiting import wait_for

pytestmark = [pytest.mark.server, pytest.mark.slow]


class Unchecked(StoppableLease):
    """The positive control: who had the lease once goes by that."""

    @property
    def is_held(self) -> bool:
        return self.epoch > 0


@pytest.mark.parametrize(("layout", "num_nodes"), [
        ("pp2 dp2", 2), ("dp4", 4), ("tp2 dp2", 2),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (
            ("pp4", 4), ("pp2 tp2", 2), ("pp2 dp2 tp2", 4), ("pp2 dp2 tp2", 3), ("dp2 tp4", 2), ("pp2 vpp2", 2),
            ("pp2 dp2, micro-steps", 2), ("dp2, numbered otherwise", 2),
        )),
    ],
)  # fmt: skip
def test_a_fleet_comes_to_the_bytes_of_one_daemon(tmp_path: Path, broker: NatsBroker, layout: str, num_nodes: int) -> None:
    run = recorded_run(tmp_path / "whole", layout)
    nodes = split(run.directory, tmp_path, num_nodes)
    join = Join(tmp_path / "joined", broker.url, num_nodes=num_nodes)
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]

    def all_is_here() -> bool:
        join.turn()
        return join.copies.counts["bytes"] >= bytes_of(nodes)

    wait_for(all_is_here)
    assert [one.end() for one in shippers] == [True] * num_nodes
    join.finish()
    assert_same_results(run.directory, join.run_dir)
    assert not join.problems and not [one for shipper in shippers for one in shipper.problems]


def test_a_fleet_comes_to_the_same_whoever_is_killed(tmp_path: Path, broker: NatsBroker) -> None:
    run = small_run(tmp_path / "whole" / "run", file_bytes=40_000)
    run.plant(nan_on(run, 3), LossJump(step=15, factor=50.0))
    run.write(10)
    nodes, joined = split(run.directory, tmp_path, 2), tmp_path / "joined"
    join = Join(joined, broker.url)
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    join.drop()
    # Nobody takes anything: what is published now lies in the broker alone, which loses it.
    published = [one.shipping.num_published for one in shippers]
    run.write(STEPS - 10)
    run.end()
    go_on(run, nodes)
    wait_for(lambda: all(one.shipping.num_published > before for one, before in zip(shippers, published, strict=True)))
    broker.kill()
    assert broker.lose_messages() > 0
    shippers[0].drop()
    broker.start()
    shippers[0] = Shipper(nodes[0], "node0", broker.url)
    join = Join(joined, broker.url, "j2")
    wait_for(lambda: join.turn() or bytes_of([joined]) >= bytes_of(nodes))
    assert [one.end() for one in shippers] == [True, True]
    join.finish()

    judge_run(run.directory, CONFIG, is_over=True)
    assert_same_results(run.directory, join.run_dir)
    assert not join.problems


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["waited for", "control: not waited for"])
def test_a_node_that_is_stopped_for_a_while_changes_nothing(
    tmp_path: Path, broker: NatsBroker, monkeypatch: pytest.MonkeyPatch, is_waited_for: bool
) -> None:
    run = small_run(tmp_path / "whole" / "run")
    run.plant(nan_on(run, 3), LossJump(step=15, factor=50.0))
    run.write(4)
    nodes, joined = split(run.directory, tmp_path, 2), tmp_path / "joined"
    join = Join(joined, broker.url)
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    if not is_waited_for:
        monkeypatch.setattr("sentinel.fleet.heard_nodes.SILENT_S", 0.0)
    resume = shippers[1].pause()
    chunks = join.copies.counts["chunks"]
    run.write(STEPS - 4)
    run.end()
    go_on(run, nodes)
    wait_for(lambda: join.turn() or join.copies.counts["chunks"] > chunks)
    if is_waited_for:
        assert len(decisions(join.run_dir)) == 4
    else:
        wait_for(lambda: join.turn() or len(decisions(join.run_dir)) > 4)
    resume()
    wait_for(lambda: join.turn() or bytes_of([joined]) >= bytes_of(nodes))
    assert [one.end() for one in shippers] == [True, True]
    join.finish()

    judge_run(run.directory, CONFIG, is_over=True)
    if is_waited_for:
        assert_same_results(run.directory, join.run_dir)
    else:
        assert result_bytes(run.directory) != result_bytes(join.run_dir)


def taken_over(join: Join, clock: Clock) -> bool:
    """Have time pass for a join that stands by; returns whether it does no more."""
    if join.intake.standby_of:
        clock.now += 1.0
    return not join.intake.standby_of


@pytest.mark.parametrize("is_orderly", [False, True], ids=["killed", "ended"])
def test_a_standby_takes_over_and_comes_to_the_same(tmp_path: Path, broker: NatsBroker, is_orderly: bool) -> None:
    run = small_run(tmp_path / "whole" / "run")
    run.plant(nan_on(run, 3), LossJump(step=15, factor=50.0))
    run.write(10)
    nodes, joined, clock = split(run.directory, tmp_path, 2), tmp_path / "joined", Clock()
    lease = StoppableLease("j1", ALONE)
    first = Join(joined, broker.url, lease=lease)
    wait_for(lambda: not first.intake.standby_of)
    second = Join(joined, broker.url, "j2", lease=JoinLease("j2", LeaseTimes(renew_s=0.2), clock=clock))
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    wait_for(lambda: first.turn() or second.turn() or first.copies.counts["bytes"] >= bytes_of(nodes))
    wait_for(lambda: second.intake.standby_of == "j1")
    assert second.run is None and not second.copies.counts and not second.copies.nodes()

    lease.is_stopped = not is_orderly
    first.drop()
    assert not first.intake.lost
    wait_for(lambda: not second.intake.standby_of if is_orderly else taken_over(second, clock))
    # Handed over, or a time that is up: nothing passed, or ten seconds at least.
    assert clock.now == 1000.0 if is_orderly else clock.now >= 1010.0
    assert second.intake._lease.epoch == 2
    run.write(STEPS - 10)
    run.end()
    go_on(run, nodes)
    wait_for(lambda: second.turn() or bytes_of([joined]) >= bytes_of(nodes))
    assert [one.end() for one in shippers] == [True, True]
    second.finish()

    judge_run(run.directory, CONFIG, is_over=True)
    assert_same_results(run.directory, second.run_dir)
    assert not first.problems and not second.problems


@pytest.mark.parametrize("kind", [StoppableLease, Unchecked], ids=["checked", "control: not checked"])
def test_a_join_that_could_not_renew_does_nothing_more(
    tmp_path: Path, broker: NatsBroker, kind: type[StoppableLease]
) -> None:
    run = small_run(tmp_path / "whole" / "run")
    run.write(4)
    nodes, joined, clock = split(run.directory, tmp_path, 2), tmp_path / "joined", Clock()
    lease = kind("j1", LeaseTimes(renew_s=0.2), clock=clock)
    join = Join(joined, broker.url, lease=lease)
    wait_for(lambda: taken_over(join, clock))
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    wait_for(lambda: join.turn() or bytes_of([joined]) >= bytes_of(nodes))
    # The last bytes may have come behind that turn.
    wait_for(lambda: join.turn() or decisions(join.run_dir))
    num_judged = len(decisions(join.run_dir))

    lease.is_stopped = True
    clock.now += lease.times.stop_s
    chunks, held, published = (
        join.copies.counts["chunks"],
        bytes_of([joined]),
        sum(one.shipping.num_published for one in shippers),
    )
    run.write(STEPS - 4)
    run.end()
    go_on(run, nodes)
    wait_for(lambda: sum(one.shipping.num_published for one in shippers) > published)
    if kind is StoppableLease:
        assert join.ended.wait(240)
        join.turn()
        assert "not renewed for 6 s" in join.intake.lost and join.intake.standby_of
        assert (join.copies.counts["chunks"], bytes_of([joined]), len(decisions(join.run_dir))) == (chunks, held, num_judged)
    else:
        wait_for(lambda: join.turn() or len(decisions(join.run_dir)) > num_judged)
        assert join.copies.counts["chunks"] > chunks and bytes_of([joined]) > held
    for one in shippers:
        one.drop()
    join.drop()


def test_acks_and_commands_come_back_and_status_says_where_it_stands(tmp_path: Path, broker: NatsBroker) -> None:
    run = recorded_run(tmp_path / "whole", "pp2 dp2", 8)
    nodes = split(run.directory, tmp_path, 2)
    join = Join(tmp_path / "joined", broker.url)
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    command: Command = RunCommands(join.run_dir).enable(at_step=100, now=NOW)
    for path in nodes:
        there = path / "run" / "control" / f"{command.seq:06d}.json"
        wait_for(lambda there=there: there.exists())
        assert there.read_bytes() == (join.run_dir / "control" / there.name).read_bytes()
    folders = [folder for path in nodes for folder in (path / "run" / "spool").iterdir()]
    for number, folder in enumerate(folders, 1):
        write_ack(join.run_dir / "spool" / folder.name, 0, 1000 * number)
    wait_for(lambda: [read_ack(folder) for folder in folders] == [(0, 1000 * number) for number in range(1, 5)])

    def all_held() -> Any:
        found = asyncio.run(overhear(BrokerConfig(server=broker.url), 1.5))
        return found if [one.node for one in found] == ["node0", "node1"] and not any(one.blocked for one in found) else None

    for one in wait_for(all_held):
        assert (one.run, one.num_spools, one.waiting_bytes, one.join) == ("run", 2, 0, "j1")
        assert one.head == one.held
    assert [one.end() for one in shippers] == [True, True]
    join.finish()


def test_a_shipper_that_nobody_answers_says_so_once(
    tmp_path: Path, broker: NatsBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentinel.fleet.shipping.UNANSWERED_S", 1.0)
    run = small_run(tmp_path / "whole" / "run")
    run.write(2)
    (node,) = split(run.directory, tmp_path, 1)
    join = Join(tmp_path / "joined", broker.url, key=RunKey(b"k" * 32))
    shipping = Shipping(NodeRuns(node, "node0"), BrokerConfig(server=broker.url), drain_s=0.0, says_unanswered=True)

    async def ship() -> bool:
        task = asyncio.ensure_future(shipping.run())
        async with asyncio.timeout(60.0):
            while "no join has answered" not in caplog.text:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        shipping.stop()
        return await task

    assert not asyncio.run(ship())
    assert caplog.text.count("node node0: no join has answered for 1 s: is there one, has it our --key") == 1
    join.drop()


def test_a_torn_tail_and_a_file_pruned_early_are_judged_as_on_one_disk(tmp_path: Path, broker: NatsBroker) -> None:
    run = small_run(tmp_path / "whole" / "run", file_bytes=30_000)
    run.plant(nan_on(run, 2))
    run.write(12)
    run.kill(3)
    run.write(4)
    run.end()
    nodes = split(run.directory, tmp_path, 2)
    # Somebody deletes a file of rank 1 that nobody has read yet, here and there.
    for spool in (run.folder(1), tmp_path / "node0" / "run" / "spool" / run.folder(1).name):
        (spool / "000001.spool").unlink()
    judge_run(run.directory, CONFIG, is_over=True)
    join = Join(tmp_path / "joined", broker.url)
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    assert [one.end() for one in shippers] == [True, True]
    join.finish()

    for path in run.directory.rglob("*.spool"):
        assert (join.run_dir / path.relative_to(run.directory)).read_bytes() == path.read_bytes()
    assert_same_results(run.directory, join.run_dir)


def test_a_stream_at_its_limit_is_said_and_nothing_is_lost(
    tmp_path: Path, broker: NatsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded_run(tmp_path / "whole", "pp2 dp2", 16)
    nodes = split(run.directory, tmp_path, 2)
    config = BrokerConfig(server=broker.url)

    async def make_a_small_stream() -> None:
        client = await connect(config, "test")
        await ensure_streams(client.jetstream(), 100_000)
        await client.close()

    asyncio.run(make_a_small_stream())
    # A join answers, so that nodes begin, and takes nothing: each message stays where it is.
    join = Join(tmp_path / "joined", broker.url)
    monkeypatch.setattr(CopiedRuns, "has_room", lambda self: False)
    shippers = [Shipper(path, path.name, broker.url) for path in nodes]
    wait_for(lambda: any("maximum bytes exceeded" in one.shipping.blocked for one in shippers))
    said = wait_for(lambda: [one for one in asyncio.run(overhear(config, 1.5)) if one.blocked])
    assert "maximum bytes exceeded" in said[0].blocked[0]

    monkeypatch.undo()
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    assert [one.end() for one in shippers] == [True, True]
    join.finish()
    assert_same_results(run.directory, join.run_dir)


def test_tls_and_a_login_from_a_file(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path)
    config = f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}\nauthorization {{ user: node, password: "se cret" }}'
    login = tmp_path / "login"
    login.write_text("node\nse cret\n")
    login.chmod(0o600)
    with NatsBroker(tmp_path / "broker", config) as broker:
        config = BrokerConfig(server=broker.url.replace("nats:", "tls:"), ca_file=str(certificate), login_file=str(login))
        assert asyncio.run(overhear(config, 0.1)) == []
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(overhear(BrokerConfig(server=config.server, login_file=str(login)), 0.1))


def start(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "sentinel.cli", *arguments], stdout=output, stderr=output)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("verb", ["ship", "node"])
def test_verbs_killed_with_sigkill_come_to_the_same(tmp_path: Path, broker: NatsBroker, verb: str) -> None:
    run = recorded_run(tmp_path / "whole", "pp2 dp2", 200, file_bytes=100_000, ranks_per_host=2)
    nodes = split(run.directory, tmp_path, 2)
    joined, log = tmp_path / "joined", tmp_path / "log"
    arguments = ("join", str(joined), "--server", broker.url, "--no-http")
    processes: dict[str, Callable[[], subprocess.Popen[bytes]]] = {
        "join": lambda: start(*arguments, log=log),
        **{
            path.name: lambda path=path: start(verb, str(path), "--server", broker.url, "--node", path.name, log=log)
            for path in nodes
        },
    }
    running = {name: begin() for name, begin in processes.items()}
    try:
        for name in ("node0", "join", "node1"):
            before = bytes_of([joined])
            wait_for(lambda before=before: bytes_of([joined]) > before or bytes_of([joined]) >= bytes_of(nodes))
            os.kill(running[name].pid, signal.SIGKILL)
            running[name].wait()
            running[name] = processes[name]()
        wait_for(lambda: bytes_of([joined]) >= bytes_of(nodes), log.read_text())
        wait_for(lambda: (joined / "run" / ".daemon" / "journal.sqlite").exists() and len(decisions(joined / "run")) >= 200)
        for name in (*(path.name for path in nodes), "join"):
            running[name].send_signal(signal.SIGTERM)
            assert running[name].wait(60) == 0, log.read_text()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    judge_run(joined / "run", CONFIG, is_over=True)

    assert_same_results(run.directory, joined / "run")
