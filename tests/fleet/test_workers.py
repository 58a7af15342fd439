"""Machines that only ship, workers, a real broker and a join come to the bytes of one daemon, whoever is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sentinel.cli.main import BAD_USAGE, run_cli
from sentinel.command import Command
from sentinel.control.commands import RunCommands
from sentinel.fleet.broker import BrokerConfig, connect
from sentinel.fleet.join_lease import LeaseTimes
from sentinel.fleet.overheard import NodeStatus, overhear
from sentinel.fleet.run_key import RunKey
from sentinel.fleet.sealed import WorkerReport
from sentinel.fleet.subjects import FRAMES_STREAM, NUM_PARTITIONS, TO_WORKERS, partition_of
from sentinel.testing import SyntheticRun
from sentinel.wire.spool import read_ack, write_ack

from ..support.fleet_parts import (
    CONFIG,
    Join,
    Shipper,
    StoppablePartitions,
    Worker,
    assert_same_results,
    bytes_of,
    go_on,
    split,
)
from ..support.nats_broker import NatsBroker
from ..support.ports import free_port
from ..support.servers import get, get_json, is_up
from ..support.serving import NOW, judge_run
from ..support.waiting import wait_for, wait_for_words
from ..support.warm import cli
from .test_digests import KINDS, STEPS, with_faults

pytestmark = [pytest.mark.server, pytest.mark.slow]
QUICK = LeaseTimes(renew_s=0.2, stop_s=1.5, takeover_s=2.5)
"""A worker whose thread a busy machine keeps from running for so long has lost its partitions: the outcome is the same."""


class Unaware(StoppablePartitions):
    """The positive control: who had a partition once goes by that."""

    def held(self) -> dict[int, int]:
        return dict(self._held)

    def is_held(self, partition: int, epoch: int) -> bool:
        return self._held.get(partition) == epoch

    def raise_floor(self, partition: int, epoch: int) -> None:
        """What the join says to its successor it may hear before it speaks itself."""


class Relayed:
    """A run on two nodes that ship to workers, and a join."""

    def __init__(
        self,
        where: Path,
        broker: NatsBroker,
        layout: str = "tp4 dp2",
        num_steps: int = STEPS,
        num_nodes: int = 2,
        key: RunKey | None = None,
    ) -> None:
        self.broker, self._key = broker, key
        self.run: SyntheticRun = with_faults(where / "whole", layout, num_nodes, num_steps)
        self.nodes, self.joined, self._where = split(self.run.directory, where, num_nodes), where / "joined", where
        self.join = Join(self.joined, broker.url, num_nodes=num_nodes, key=key)
        self.workers: list[Worker] = []
        self.shippers = [Shipper(path, path.name, broker.url, key=key, ways=TO_WORKERS) for path in self.nodes]

    def worker(self, leases: StoppablePartitions | None = None) -> Worker:
        """Start one more, in a directory of its own."""
        name = f"w{len(self.workers) + 1}"
        leases = leases or StoppablePartitions(name, QUICK)
        self.workers.append(Worker(self._where / name, self.broker.url, KINDS, name, leases, self._key))
        return self.workers[-1]

    def has_all(self) -> bool:
        self.join.turn()
        return bytes_of([self.joined]) >= bytes_of(self.nodes)

    def goes_on(self) -> None:
        """Train to the end."""
        self.run.write(STEPS - self.run.step)
        self.run.end()
        go_on(self.run, self.nodes)

    def finish(self) -> None:
        """End all in order, and compare."""
        wait_for(self.has_all)
        assert [one.end() for one in self.shippers] == [True] * len(self.nodes)
        self.join.finish()
        for one in self.workers:
            one.end()
        judge_run(self.run.directory, CONFIG, is_over=True)
        assert_same_results(self.run.directory, self.join.run_dir)
        assert not [one for shipper in self.shippers for one in shipper.problems]
        assert not self.join.copies.rows_of("run").num_gone


async def messages_in(broker: NatsBroker, stream: str) -> int:
    client = await connect(BrokerConfig(server=broker.url), "test")
    try:
        return int((await client.jetstream().stream_info(stream)).state.messages)
    finally:
        await client.close()


def test_workers_come_to_the_bytes_of_one_daemon(tmp_path: Path, broker: NatsBroker) -> None:
    fleet = Relayed(tmp_path, broker)
    fleet.run.end()
    go_on(fleet.run, fleet.nodes)
    fleet.worker()
    wait_for(fleet.has_all)
    wait_for(lambda: fleet.join.turn() or fleet.join.copies.rows_of("run").num_steps >= STEPS - 14)
    assert fleet.join.intake.num_taken_bytes < 0.75 * bytes_of(fleet.nodes)
    wait_for(lambda: asyncio.run(messages_in(broker, FRAMES_STREAM)) == 0)
    fleet.finish()

    assert not fleet.join.problems
    assert 0 < fleet.join.copies.rows_of("run").num_fetched < STEPS // 2


@pytest.mark.parametrize("layout", ["pp2 dp2", pytest.param("dp4", marks=pytest.mark.long)])
def test_a_worker_that_is_killed_is_taken_over(tmp_path: Path, broker: NatsBroker, layout: str) -> None:
    fleet = Relayed(tmp_path, broker, layout, num_steps=14)
    first = fleet.worker()
    wait_for(fleet.has_all)
    second = fleet.worker()
    wait_for(lambda: fleet.join.turn() or (first.held(), second.held()) == (32, 32))
    first.drop()
    fleet.goes_on()
    wait_for(lambda: fleet.join.turn() or second.held() == 64)
    fleet.finish()


@pytest.mark.long
def test_all_that_can_be_killed_is_killed_at_once(tmp_path: Path, broker: NatsBroker) -> None:
    fleet = Relayed(tmp_path, broker, "pp2 dp2", num_steps=14)
    fleet.worker()
    wait_for(fleet.has_all)
    fleet.shippers[0].drop()
    fleet.workers.pop().drop()
    fleet.goes_on()
    fleet.join.drop()
    broker.kill()
    assert broker.lose_messages() >= 0
    broker.start()
    fleet.shippers[0] = Shipper(fleet.nodes[0], "node0", broker.url, ways=TO_WORKERS)
    fleet.join = Join(fleet.joined, broker.url, "j2")
    fleet.worker()
    fleet.finish()


@pytest.mark.long
def test_nodes_of_all_kinds_are_in_one_fleet(tmp_path: Path, broker: NatsBroker) -> None:
    fleet = Relayed(tmp_path, broker, "pp3 dp2", num_steps=14, num_nodes=3)
    for number, kinds in ((0, None), (1, KINDS)):
        fleet.shippers[number].drop()
        fleet.shippers[number] = Shipper(fleet.nodes[number], f"node{number}", broker.url, kinds)
    fleet.worker()
    wait_for(fleet.has_all)
    fleet.goes_on()
    fleet.finish()


@pytest.mark.long
def test_workers_share_the_nodes_and_one_that_ends_in_order_is_followed_at_once(tmp_path: Path, broker: NatsBroker) -> None:
    fleet = Relayed(tmp_path, broker, "pp3 dp2", num_steps=14, num_nodes=3)
    first, second = fleet.worker(), fleet.worker()
    wait_for(lambda: (first.held(), second.held()) == (32, 32))
    wait_for(fleet.has_all)
    shared = [
        {one.node for one in (worker.worker.nodes.find(path.name) for path in fleet.nodes) if one}
        for worker in (first, second)
    ]
    assert sorted(map(len, shared)) == [1, 2] and set.union(*shared) == {path.name for path in fleet.nodes}
    second.end()
    fleet.workers.remove(second)
    fleet.goes_on()
    fleet.finish()
    assert not fleet.join.problems


@pytest.mark.parametrize(
    "knows", [True, pytest.param(False, marks=pytest.mark.long)], ids=["by its clock", "control: it does not know"]
)
def test_a_worker_that_is_stopped_past_its_leases_says_nothing_more_or_is_refused(
    tmp_path: Path, broker: NatsBroker, knows: bool
) -> None:
    fleet = Relayed(tmp_path, broker, "pp2 dp2", num_steps=14)
    first = fleet.worker(None if knows else Unaware("w1", QUICK))
    wait_for(fleet.has_all)
    resume = first.pause()
    second = fleet.worker()
    wait_for(lambda: fleet.join.turn() or second.held() == 64)
    fleet.goes_on()
    wait_for(fleet.has_all)
    if not knows:
        first.leases.is_stopped = True
    resume()
    if knows:
        wait_for(lambda: fleet.join.turn() or (first.held(), second.held()) == (32, 32))
    else:
        wait_for(lambda: fleet.join.turn() or fleet.join.copies.counts["refused"])
        assert any("a worker of epoch 1 speaks of it, and a worker of epoch 2 has it" in one for one in fleet.join.problems)
    fleet.finish()
    # What it had handed over to its socket before may come, and is refused.
    assert not [one for one in fleet.join.problems if "a worker of epoch 1 speaks of it" not in one]


def test_a_ship_that_ends_waits_for_the_join(tmp_path: Path, broker: NatsBroker) -> None:
    fleet = Relayed(tmp_path, broker, "pp2 dp2", num_steps=14)
    fleet.worker()
    wait_for(fleet.has_all)
    fleet.join.drop()
    fleet.goes_on()
    ending = fleet.shippers[0].shipping
    ending.stop()
    with pytest.raises(AssertionError):
        wait_for(lambda: fleet.shippers[0].is_drained, timeout_s=3.0)
    fleet.join = Join(fleet.joined, broker.url, "j2")
    fleet.finish()
    # The rows too: nobody can be asked for them.
    assert not [
        away for copy in fleet.join.copies._runs["run"].copies.values() for away in [copy.num_away(copy.committed())] if away
    ]


@pytest.mark.long
def test_acks_and_commands_of_who_has_the_key_pass_a_worker_and_status_says_who_it_is(
    tmp_path: Path, broker: NatsBroker
) -> None:
    fleet = Relayed(tmp_path, broker, "pp2 dp2", num_steps=8, key=RunKey(b"k" * 32))
    fleet.worker()
    wait_for(fleet.has_all)
    command: Command = RunCommands(fleet.join.run_dir).enable(at_step=100, now=NOW)
    for path in fleet.nodes:
        there = path / "run" / "control" / f"{command.seq:06d}.json"
        wait_for(there.exists)
        assert there.read_bytes() == (fleet.join.run_dir / "control" / there.name).read_bytes()
    folders = [folder for path in fleet.nodes for folder in (path / "run" / "spool").iterdir()]
    # What the worker holds nobody may delete before the join has committed it.
    assert [read_ack(folder) for folder in folders] == [(0, 0)] * 4
    for number, folder in enumerate(folders, 1):
        write_ack(fleet.join.run_dir / "spool" / folder.name, 0, 1000 * number)
    wait_for(lambda: [read_ack(folder) for folder in folders] == [(0, 1000 * number) for number in range(1, 5)])

    reports: dict[str, WorkerReport] = {}

    def said() -> list[NodeStatus]:
        listening = overhear(BrokerConfig(server=broker.url), 2.5, lambda report: reports.update({report.worker: report}))
        return [one for one in asyncio.run(listening) if one.worker and not one.blocked and not one.waiting_bytes]

    wait_for(lambda: len(said()) == 2)
    assert [(one.node, one.join, one.worker, one.partition, one.epoch) for one in said()] == [
        (name, "j1", "w1", partition_of(name), 1) for name in ("node0", "node1")
    ]
    report = reports["w1"]
    assert report.partitions == dict.fromkeys(range(NUM_PARTITIONS), 1) and report.num_workers == 1
    assert report.num_nodes == {partition_of(path.name): 1 for path in fleet.nodes}
    stranger = Shipper(fleet.nodes[1], "node7", broker.url, ways=TO_WORKERS)
    wait_for(lambda: said() and reports["w1"].num_refused)
    stranger.drop()

    fleet.workers[0].drop()
    away = wait_for(lambda: [one for one in asyncio.run(overhear(BrokerConfig(server=broker.url), 1.5)) if not one.worker])
    assert "no worker answers, partition 22" in away[0].blocked
    fleet.worker()
    fleet.goes_on()
    fleet.finish()


@pytest.mark.long
def test_a_process_says_over_http_how_it_is_while_nodes_ship_through_it(tmp_path: Path, broker: NatsBroker) -> None:
    fleet = Relayed(tmp_path, broker, "pp2 dp2", num_steps=8, key=RunKey(b"k" * 32))
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    url = f"http://127.0.0.1:{free_port()}"
    listen = ["--listen", url.removeprefix("http://"), "--open-reads"]
    options = ["--server", broker.url, "--key", str(key), "--takeover-s", "2", *listen]

    def shown() -> dict[str, float]:
        """Each family -> the sum of its samples."""
        families = text_string_to_metric_families(get(f"{url}/metrics").decode())
        return {one.name.removeprefix("sentinel_worker_"): sum(each.value for each in one.samples) for one in families}

    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*cli(), "worker", str(tmp_path / "w1"), *options], stderr=log)
    try:
        wait_for(fleet.has_all)
        assert get_json(f"{url}/readyz") == {"ready": True, "standby_of": []}
        assert (get_json(f"{url}/healthz")["num_nodes"], shown()["refused"]) == (2, 0)
        first = shown()
        assert (first["partitions"], first["partition_epoch"], first["nodes"], first["workers"]) == (64, 64, 2, 1)
        fleet.goes_on()
        wait_for(fleet.has_all)
        wait_for(lambda: shown()["bytes"] == bytes_of(fleet.nodes))
        assert 0 < first["bytes"] < bytes_of(fleet.nodes) and shown()["published_bytes"] > first["published_bytes"] > 0

        stranger = Shipper(fleet.nodes[1], "node7", broker.url, ways=TO_WORKERS)
        wait_for(lambda: any(".node7: " in one for one in get_json(f"{url}/healthz")["problems"]))
        assert shown()["refused"] > 0 and shown()["sentinel_problems"] > 0
        stranger.drop()

        broker.kill()
        wait_for(lambda: shown()["broker_connected"] == shown()["partitions"] == 0)
        assert not is_up(f"{url}/readyz") and "is not reached" in get_json(f"{url}/healthz")["problems"][0]
        assert shown()["bytes"] >= bytes_of(fleet.nodes), "what came of nodes that it has no more still counts"
        broker.start()
        wait_for(lambda: is_up(f"{url}/readyz") and shown()["partition_epoch"] > 64)
        fleet.finish()
        process.terminate()
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_processes_of_workers_that_are_stopped_and_killed_come_to_the_same(tmp_path: Path, broker: NatsBroker) -> None:
    fleet = Relayed(tmp_path, broker, "pp2 dp2", num_steps=14)
    logs = [tmp_path / "log-1", tmp_path / "log-2"]

    def begin(number: int) -> subprocess.Popen[bytes]:
        arguments = ["worker", str(tmp_path / f"w{number}"), "--server", broker.url, "--takeover-s", "5"]
        with logs[number - 1].open("ab") as output:
            return subprocess.Popen([sys.executable, "-m", "sentinel.cli", *arguments], stdout=output, stderr=output)

    running = [begin(1)]
    try:
        wait_for(fleet.has_all, timeout_s=300.0)
        running.append(begin(2))
        wait_for_words(logs[1], "has 32 of 64")
        running[0].send_signal(signal.SIGSTOP)
        fleet.run.write(10)
        go_on(fleet.run, fleet.nodes)
        wait_for_words(logs[1], "has 64 of 64")
        wait_for(fleet.has_all, timeout_s=300.0)
        running[0].send_signal(signal.SIGCONT)
        wait_for_words(logs[0], "begins anew", "has 32 of 64")
        running[1].kill()
        running[1].wait()
        fleet.goes_on()
        wait_for(lambda: logs[0].read_text().count("has 64 of 64") == 2)
        assert run_cli(["worker", str(tmp_path / "w1"), "--server", broker.url]) == BAD_USAGE
        fleet.finish()
        running[0].send_signal(signal.SIGTERM)
        assert running[0].wait(60) == 0, logs[0].read_text()
    finally:
        for one in running:
            one.kill()
            one.wait()
