"""A run of two nodes on a cluster of brokers, with its shippers and its joins, and what came of it beside one daemon's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sentinel.fleet.broker import BrokerConfig, connect
from sentinel.fleet.join_lease import JoinLease
from sentinel.fleet.subjects import LEASES, STREAM
from sentinel.testing import LossJump

from .fleet_faults import CONFIG, STEPS, TOPIC, outbox
from .fleet_parts import Join, Shipper, assert_same_results, bytes_of, go_on, nan_on, split
from .nats_broker import NatsCluster
from .partitions import SERVERS, PartedCluster
from .serving import NOW, judge_run, small_run
from .waiting import wait_for

PATIENCE = 10.0
"""Times by which a node may be silent for longer than by default, for a machine that does much else."""
LARGE: dict[str, Any] = {"layers": 24, "elements": 4, "file_bytes": 2**22}
"""Options of a run that has some megabytes a few steps."""


def stream_of(url: str) -> tuple[str, dict[str, int]]:
    """Return (the server that leads the stream of chunks, stream -> servers that hold it)."""

    async def ask() -> tuple[str, dict[str, int]]:
        client = await connect(BrokerConfig(server=url), "test")
        try:
            found = {name: await client.jetstream().stream_info(name) for name in (STREAM, LEASES)}
        finally:
            await client.close()
        cluster = found[STREAM].cluster
        return (cluster.leader or "") if cluster else "", {name: one.config.num_replicas or 1 for name, one in found.items()}

    return asyncio.run(ask())


class WatchedRun:
    """Its nodes are at the places `node0` and `node1` of a cluster. Nobody ships or judges before it is told to."""

    def __init__(self, where: Path, cluster: NatsCluster | PartedCluster, **options: Any) -> None:
        """options: of the run, those of `SyntheticRun`."""
        self.cluster = cluster
        self.run = small_run(where / "whole" / "run", **{"file_bytes": 40_000, **options})
        self.run.plant(nan_on(self.run, 3), LossJump(step=15, factor=50.0))
        self.run.write(8)
        self.nodes = split(self.run.directory, where, 2)
        self.joined = where / "joined"
        self.joins: list[Join] = []
        self.shippers: list[Shipper] = []
        self.told: list[str] = []
        """Keys of what was sent, each as often as it was."""

    def __enter__(self) -> WatchedRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nobody, also where a test failed: their threads would keep the namespaces that they are in."""
        for shipper in self.shippers:
            shipper.drop()
        for join in self.joins:
            join.drop()

    def join(self, place: str = "join", servers: tuple[str, ...] = SERVERS, lease: JoinLease | None = None) -> Join:
        """Start a join. servers: those that it speaks to."""
        with self.cluster.at(place):
            found = Join(
                self.joined, self.cluster.url_at(place, servers), f"{place}-{len(self.joins)}", lease=lease,
                replicas=len(self.cluster.servers), config=CONFIG, patience=PATIENCE,
            )  # fmt: skip
        self.joins.append(found)
        return found

    def ship(self, *servers: tuple[str, ...]) -> None:
        """Start the shippers of nodes that have none yet, as many as there are. servers: those that each speaks to."""
        for number, its in enumerate(servers, start=len(self.shippers)):
            node = self.nodes[number]
            with self.cluster.at(node.name):
                self.shippers.append(Shipper(node, node.name, self.cluster.url_at(node.name, its)))

    def leader(self, servers: tuple[str, ...] = SERVERS) -> str:
        """Return the server that leads the stream of chunks, as others say. servers: those that are asked."""
        with self.cluster.at("watcher"):
            return stream_of(self.cluster.url_at("watcher", servers))[0]

    def goes_on(self, steps: int) -> None:
        """Train, whatever happens to who watches."""
        self.run.write(steps)
        go_on(self.run, self.nodes)

    def all_is_here(self) -> bool:
        """Have the joins judge, and tell; return whether nothing is on the way."""
        for one in self.joins:
            one.turn()
            self._tell(one)
        # The newest is looked at first: whoever it took over from had stopped by then.
        assert sum(not one.intake.standby_of for one in reversed(self.joins)) <= 1
        return bytes_of([self.joined]) >= bytes_of(self.nodes)

    def ends(self) -> None:
        """End it, and compare what was judged, and told, with what one daemon does."""
        self.run.write(STEPS - self.run.step)
        self.run.end()
        go_on(self.run, self.nodes)
        wait_for(self.all_is_here)
        assert [one.end() for one in self.shippers] == [True, True]
        working = [one for one in self.joins if not one.intake.standby_of]
        assert len(working) == 1, [(one.intake.standby_of, one.intake.lost) for one in self.joins]
        working[0].turn()
        assert working[0].run is not None
        working[0].run.finish(NOW, is_over=True, deadline=float("inf"))
        self._tell(working[0])
        for one in self.joins:
            one.drop()
        judge_run(self.run.directory, CONFIG, is_over=True)
        assert_same_results(self.run.directory, self.joined / "run")
        assert [key for key, _ in outbox(self.run.directory)] == [key for key, _ in outbox(self.joined / "run")] == self.told
        assert not any(one.problems for one in (*self.joins, *self.shippers))

    def _tell(self, join: Join) -> None:
        if join.run is None or join.intake.standby_of:
            return
        for row in join.run.journal.outbox.waiting(TOPIC, NOW + 1e9):
            join.run.journal.outbox.begin_delivery({row.position: row.key})
            self.told.append(row.key)
            join.run.journal.outbox.finish_delivery([row.position], "sent")
