"""A broker of three servers of which one, then two are killed: what is judged is the same."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from sentinel.fleet.broker import BrokerConfig, connect, ensure_streams
from sentinel.fleet.subjects import LEASES, STREAM
from sentinel.testing import LossJump

from ..support.fleet_parts import CONFIG, STEPS, Join, Shipper, assert_same_results, bytes_of, go_on, nan_on, split
from ..support.nats_broker import NatsBroker, NatsCluster
from ..support.serving import judge_run, small_run
from ..support.waiting import wait_for

pytestmark = [pytest.mark.server, pytest.mark.slow]


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
    """A run of two nodes on a cluster, with its shippers and its join."""

    def __init__(self, where: Path, cluster: NatsCluster) -> None:
        self.run = small_run(where / "whole" / "run", file_bytes=40_000)
        self.run.plant(nan_on(self.run, 3), LossJump(step=15, factor=50.0))
        self.run.write(8)
        self.nodes = split(self.run, where, 2)
        self.join = Join(where / "joined", cluster.url, replicas=3)
        self.shippers = [Shipper(path, path.name, cluster.url) for path in self.nodes]

    def goes_on(self, steps: int) -> None:
        self.run.write(steps)
        go_on(self.run, self.nodes)

    def all_is_here(self) -> bool:
        self.join.turn()
        return self.join.copies.counts["bytes"] >= bytes_of(self.nodes)

    def ends(self) -> None:
        """End it, and compare what was judged."""
        self.run.write(STEPS - self.run.step)
        self.run.end()
        go_on(self.run, self.nodes)
        wait_for(self.all_is_here)
        assert [one.end() for one in self.shippers] == [True, True]
        self.join.finish()
        judge_run(self.run.directory, CONFIG, is_over=True)
        assert_same_results(self.run.directory, self.join.run_dir)
        assert not self.join.problems


def test_a_cluster_that_loses_servers_loses_nothing(tmp_path: Path) -> None:
    with NatsCluster(tmp_path / "cluster") as cluster:
        watched = WatchedRun(tmp_path, cluster)
        wait_for(watched.all_is_here)
        leader, replicas = stream_of(cluster.url)
        assert replicas == {STREAM: 3, LEASES: 3}
        # One of three: the others elect another leader, and all goes on.
        lost = cluster.servers[int(leader[1:])]
        lost.kill()
        watched.goes_on(8)
        wait_for(watched.all_is_here)
        assert stream_of(cluster.url_without(lost))[0] != leader
        # Two of three hold nothing together: it waits in the spools until one is back.
        other = next(one for one in cluster.servers if one is not lost)
        other.kill()
        watched.goes_on(2)
        wait_for(lambda: any(one.shipping.blocked for one in watched.shippers))
        assert not watched.all_is_here()
        other.start()
        watched.ends()


@pytest.mark.long
def test_a_leader_that_stands_still_is_left_and_what_it_says_later_harms_nothing(tmp_path: Path) -> None:
    with NatsCluster(tmp_path / "cluster") as cluster:
        watched = WatchedRun(tmp_path, cluster)
        wait_for(watched.all_is_here)
        still = cluster.servers[int(stream_of(cluster.url)[0][1:])]
        # Its connections stay open: nobody is told of anything.
        still.signal(signal.SIGSTOP)
        try:
            watched.goes_on(8)
            wait_for(watched.all_is_here)
        finally:
            still.signal(signal.SIGCONT)
        watched.ends()


def test_streams_of_one_server_are_put_on_more_and_on_fewer_never(tmp_path: Path) -> None:
    async def ensure(url: str, replicas: int) -> None:
        client = await connect(BrokerConfig(server=url), "test")
        try:
            await ensure_streams(client.jetstream(), 2**20, replicas)
        finally:
            await client.close()

    with NatsCluster(tmp_path / "cluster") as cluster:
        wait_for(lambda: asyncio.run(_is_ready(cluster)))
        for wanted, got in ((1, 1), (3, 3), (1, 3)):
            asyncio.run(ensure(cluster.url, wanted))
            assert set(stream_of(cluster.url)[1].values()) == {got}


async def _is_ready(cluster: NatsCluster) -> bool:
    """Return whether the servers have a leader by now."""
    from nats.errors import Error

    client = await connect(BrokerConfig(server=cluster.url), "test")
    try:
        await client.jetstream().account_info()
    except (Error, TimeoutError):
        return False
    finally:
        await client.close()
    return True


def test_more_servers_than_there_are_is_said(tmp_path: Path, broker: NatsBroker) -> None:
    join = Join(tmp_path / "joined", broker.url, replicas=3)
    wait_for(lambda: "replicas > 1 not supported in non-clustered mode" in join.intake.problem, join.intake.problem)
    join.drop()
