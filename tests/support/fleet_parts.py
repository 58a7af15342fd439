"""Nodes and a join in one process, with a real broker between them, driven by hand; and the run that they share out."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.serving import ServedRun
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.join_intake import JoinIntake
from sentinel.fleet.join_lease import JoinLease, LeaseTimes
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.partition_leases import PartitionLeases
from sentinel.fleet.partition_worker import PartitionWorker
from sentinel.fleet.run_key import RunKey
from sentinel.fleet.shipping import Shipping
from sentinel.fleet.subjects import TO_JOIN, Ways
from sentinel.judge.packs import RulePacks
from sentinel.store.run_paths import RunPaths
from sentinel.testing import LossJump, Nan, SyntheticRun

from .results import anomalies, decisions, result_bytes
from .serving import NOW, judge_run, loaded_packs, small_run
from .waiting import wait_for

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {"pp": 1, "dp": 4, "layers": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "tp2 dp2": {"pp": 1, "dp": 2, "tp": 2, "layers": 2},
    "pp4": {"pp": 4, "dp": 1},
    "pp2 tp2": {"pp": 2, "dp": 1, "tp": 2},
    "pp2 dp2 tp2": {"pp": 2, "dp": 2, "tp": 2},
    "dp2 tp4": {"pp": 1, "dp": 2, "tp": 4, "layers": 2},
    "pp2 vpp2": {"pp": 2, "dp": 1, "vpp": 2, "schedule": "interleaved1f1b"},
    "pp2 dp2, micro-steps": {"pp": 2, "dp": 2, "per_micro_step": True},
    "dp2, numbered otherwise": {"pp": 1, "dp": 2, "layers": 2, "shuffle": True},
}
CONFIG = DaemonConfig()
STEPS = 24
ALONE = LeaseTimes(renew_s=0.2, stop_s=60.0, takeover_s=0.2)
"""For a join that no other competes with: no pause of a busy machine ends it, and none is waited for."""


def reached(broker: str | BrokerConfig) -> BrokerConfig:
    """Return how a broker is reached of which the address may be all there is to know."""
    return broker if isinstance(broker, BrokerConfig) else BrokerConfig(server=broker)


class Shipper:
    """One shipper in a thread, which can be left in the lurch."""

    def __init__(
        self,
        directory: Path,
        node: str,
        broker: str | BrokerConfig,
        kinds: frozenset[str] | None = None,
        key: RunKey | None = None,
        ways: Ways = TO_JOIN,
    ) -> None:
        """kinds: it ships digests that carry these; None: spools as they are."""
        self.problems: list[str] = []
        runs = NodeRuns(directory, node, digested_kinds=kinds, on_problem=self.problems.append, is_signed=key is not None)
        self.shipping = Shipping(runs, reached(broker), drain_s=60.0, key=key, ways=ways)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[bool] | None = None
        self.is_drained = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.shipping.run())
        with contextlib.suppress(asyncio.CancelledError):
            self.is_drained = self._loop.run_until_complete(self._task)

    def drop(self) -> None:
        """End it as a kill does: it says nothing to anybody."""
        wait_for(lambda: self._task is not None)
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(200)

    def pause(self) -> Callable[[], None]:
        """Have it do nothing, beats neither, until what this returns is called: SIGSTOP and SIGCONT."""
        goes_on = threading.Event()
        self._loop.call_soon_threadsafe(goes_on.wait, 60.0)
        return goes_on.set

    def end(self) -> bool:
        """Have it end in order; returns whether the join holds everything."""
        self.shipping.stop()
        self._thread.join(90)
        return self.is_drained


class StoppablePartitions(PartitionLeases):
    """Of a worker that may be stopped, or killed: the broker hears nothing of it any more."""

    is_stopped = False

    async def step(self, jetstream: Any) -> bool:
        return False if self.is_stopped else await super().step(jetstream)

    async def give_back(self, jetstream: Any) -> None:
        if not self.is_stopped:
            await super().give_back(jetstream)


class Worker:
    """One worker in a thread, which can be left in the lurch."""

    def __init__(
        self,
        directory: Path,
        broker: str | BrokerConfig,
        kinds: frozenset[str],
        name: str = "w1",
        leases: StoppablePartitions | None = None,
        key: RunKey | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.leases = leases or StoppablePartitions(name, ALONE)
        self.worker = PartitionWorker(directory, reached(broker), self.leases, kinds=kinds, key=key)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended_well = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        async def work() -> None:
            self._loop = asyncio.get_running_loop()
            await self.worker.run()
            self._ended_well = True

        asyncio.run(work())

    def held(self) -> int:
        """Return how many partitions it has."""
        return len(self.leases.held())

    def pause(self) -> Callable[[], None]:
        """Have it do nothing until what this returns is called: SIGSTOP and SIGCONT."""
        goes_on = threading.Event()
        wait_for(lambda: self._loop is not None)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(goes_on.wait, 120.0)
        return goes_on.set

    def drop(self) -> None:
        """End it as a kill does: it says nothing to anybody."""
        self.leases.is_stopped = True
        self.end()

    def end(self) -> None:
        """Have it end in order."""
        self.worker.stop()
        self._thread.join(90)
        assert self._ended_well


class Clock:
    """Monotonic seconds of one process, which stand still until the test moves them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class StoppableLease(JoinLease):
    """Of a process that may be stopped, or killed: the broker hears nothing of it any more."""

    is_stopped = False

    async def step(self, jetstream: Any) -> None:
        if not self.is_stopped:
            await super().step(jetstream)

    async def give_back(self, jetstream: Any) -> None:
        if not self.is_stopped:
            await super().give_back(jetstream)


class Join:
    """A join and the part of the daemon that serves its run, driven by hand."""

    def __init__(
        self,
        directory: Path,
        broker: str | BrokerConfig,
        name: str = "j1",
        begin_s: float = 0.6,
        num_nodes: int = 2,
        lease: JoinLease | None = None,
        key: RunKey | None = None,
        replicas: int = 1,
        config: DaemonConfig = CONFIG,
        patience: float = 1.0,
        packs: RulePacks | None = None,
    ) -> None:
        """num_nodes: nothing is judged before so many have spoken, for on a busy machine one begins late. patience: times
        by which it waits longer for nodes. packs: None: the default rules.
        """
        directory.mkdir(exist_ok=True)
        self.run_dir = directory / "run"
        self.problems: list[str] = []
        self.copies = CopiedRuns(
            directory, name, begin_s=begin_s / patience, clock=lambda: time.monotonic() / patience,
            on_problem=self.problems.append,
        )  # fmt: skip
        self.intake = JoinIntake(self.copies, reached(broker), lease or JoinLease(name, ALONE), replicas=replicas, key=key)
        self.ended = threading.Event()
        self.intake.start(self.ended.set)
        self.run: ServedRun | None = None
        self._num_nodes, self._config = num_nodes, config
        self._packs = packs or loaded_packs()

    def turn(self) -> None:
        has_all = len(self.copies.nodes().get("run", {})) == self._num_nodes
        if not self.intake.standby_of and self.run is None and has_all:
            self.run = ServedRun(
                RunPaths.of(self.run_dir), self._config, self._packs, arrivals=lambda: self.copies.arrivals("run"),
                rows_from=self.copies.rows_of("run"), epoch=self.intake.epoch,
            )  # fmt: skip
        if not self.intake.standby_of and self.run is not None:
            while self.run.turn(NOW):
                pass

    def drop(self) -> None:
        """End it with nothing kept that is not on the disk."""
        self.intake.close()
        if self.run is not None:
            self.run.close()

    def finish(self) -> None:
        self.turn()
        assert self.run is not None
        self.run.finish(NOW, is_over=True, deadline=float("inf"))
        self.drop()


def recorded_run(directory: Path, layout: str, num_steps: int = STEPS, **options: Any) -> SyntheticRun:
    """Write a run with faults on two ranks, and return it, judged by the daemon of one disk."""
    run = small_run(directory / "run", **{**LAYOUTS[layout], **options})
    run.plant(nan_on(run, run.num_ranks - 1), LossJump(step=15, factor=50.0))
    run.write(num_steps)
    run.end()
    judge_run(run.directory, CONFIG, is_over=True)
    return run


def nan_on(run: SyntheticRun, rank: int) -> Nan:
    """Return a NaN in a module that a rank holds."""
    return Nan(step=5, module=[one for one in run.modules() if one in run.modules_of(rank)][-2], rank=rank, micro_step=1)


def split(run_dir: Path, where: Path, num_nodes: int) -> list[Path]:
    """Give each node the spools of its ranks, as its own disk has them; returns the nodes' directories of runs."""
    found = [where / f"node{number}" for number in range(num_nodes)]
    folders = sorted((run_dir / "spool").iterdir())
    num_ranks = 1 + max(int(folder.name[1:6]) for folder in folders)
    for folder in folders:
        rank = int(folder.name[1:6])
        there = found[rank * num_nodes // num_ranks] / "run" / "spool" / folder.name
        shutil.copytree(folder, there, ignore=shutil.ignore_patterns("ack"))
    return found


def go_on(run: SyntheticRun, nodes: list[Path]) -> None:
    """Append to the spools of nodes what the run has written since."""
    for node in nodes:
        for folder in (node / "run" / "spool").iterdir():
            for path in sorted((run.directory / "spool" / folder.name).glob("*.spool")):
                there = folder / path.name
                with there.open("ab") as file:
                    file.write(path.read_bytes()[file.tell() :])


def bytes_of(directories: list[Path]) -> int:
    return sum(path.stat().st_size for one in directories for path in one.rglob("*.spool"))


def assert_same_results(one: Path, other: Path) -> None:
    assert anomalies(one), "nothing was found, so nothing was compared"
    assert result_bytes(one) == result_bytes(other)
    assert decisions(one) == decisions(other)
