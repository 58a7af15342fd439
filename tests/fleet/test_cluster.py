"""A broker of three servers that are killed, stand still, are upgraded or have a full disk: what is judged is the same."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import sentinel.fleet.broker
from sentinel.fleet import shipping
from sentinel.fleet.broker import BrokerConfig, connect, ensure_streams
from sentinel.fleet.ended_tasks import within
from sentinel.fleet.subjects import LEASES, STREAM

from ..support.fleet_faults import STEPS, frozen_time
from ..support.fleet_parts import Join, Shipper, bytes_of, split
from ..support.nats_broker import NatsBroker, NatsCluster
from ..support.partitions import SERVERS
from ..support.ports import free_port
from ..support.serving import small_run
from ..support.small_disk import SmallDisk
from ..support.waiting import wait_for
from ..support.watched_run import LARGE, WatchedRun, stream_of

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_rank_falls_silent() -> Iterator[None]:
    with frozen_time():
        yield


def begun(where: Path, cluster: NatsCluster, **options: Any) -> WatchedRun:
    """Return a run of which all is judged that was written until now. options: as of `WatchedRun`."""
    watched = WatchedRun(where, cluster, **options)
    watched.join()
    watched.ship(SERVERS, SERVERS)
    wait_for(watched.all_is_here)
    return watched


def test_a_cluster_that_loses_servers_loses_nothing(tmp_path: Path) -> None:
    with NatsCluster(tmp_path / "cluster") as cluster:
        watched = begun(tmp_path, cluster)
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
        watched = begun(tmp_path, cluster)
        still = cluster.servers[int(stream_of(cluster.url)[0][1:])]
        # Its connections stay open: nobody is told of anything.
        still.signal(signal.SIGSTOP)
        try:
            watched.goes_on(8)
            wait_for(watched.all_is_here)
        finally:
            still.signal(signal.SIGCONT)
        watched.ends()


@pytest.mark.long
def test_servers_that_are_upgraded_one_after_another_lose_nothing(tmp_path: Path) -> None:
    # Clients are asked to leave for that long before the server ends.
    with NatsCluster(tmp_path / "cluster", "lame_duck_grace_period: 1s\nlame_duck_duration: 30s") as cluster:
        watched = begun(tmp_path, cluster)
        for server in cluster.servers:
            server.kill(signal.SIGUSR2)
            watched.goes_on(2)
            server.start()
            watched.goes_on(2)
            wait_for(watched.all_is_here)
        watched.ends()


def is_refused(watched: WatchedRun, disk: SmallDisk) -> bool:
    """Train on, with no room on a disk; return whether the broker has stopped to take what is published."""
    # What the server deletes makes room again.
    disk.fill()
    if watched.run.step < STEPS - 2:
        watched.goes_on(1)
    watched.all_is_here()
    return any("does not take" in one.shipping.blocked for one in watched.shippers)


@pytest.mark.long
def test_a_broker_whose_disk_is_full_says_so_and_takes_all_once_it_has_room(tmp_path: Path) -> None:
    with (
        SmallDisk(tmp_path, 16 * 2**20) as disk,
        NatsCluster(tmp_path / "broker", stores={0: disk.path}, num_servers=1) as cluster,
    ):
        watched = WatchedRun(tmp_path, cluster, **LARGE)
        watched.join(servers=("n0",))
        watched.ship(("n0",), ("n0",))
        wait_for(watched.all_is_here)
        wait_for(lambda: is_refused(watched, disk), interval_s=0.2)
        disk.free()
        # It may hang until it is started again: 2.9.10 did so in two of three times.
        cluster.servers[0].kill()
        cluster.servers[0].start()
        wait_for(watched.all_is_here)
        watched.ends()


@pytest.mark.long
def test_a_leader_whose_disk_is_full_costs_time_alone(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(SmallDisk(tmp_path, 32 * 2**20)) for _ in SERVERS]
        stores = {number: one.path for number, one in enumerate(disks)}
        cluster = stack.enter_context(NatsCluster(tmp_path / "cluster", stores=stores))
        watched = begun(tmp_path, cluster, **LARGE)
        number = SERVERS.index(watched.leader())
        wait_for(lambda: is_refused(watched, disks[number]) or watched.run.step == STEPS - 2, interval_s=0.2)
        # It may still lead, and hang: 2.9.10 was left by the others after a minute, or not before it was started again.
        disks[number].free()
        cluster.servers[number].kill()
        cluster.servers[number].start()
        wait_for(watched.all_is_here)
        watched.ends()


def test_what_cannot_be_sent_keeps_no_client_from_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel.fleet.broker, "UNSENT_S", 1.0)

    async def publish(first: NatsBroker, second: NatsBroker) -> None:
        client = await connect(BrokerConfig(server=f"{first.url},{second.url}"), "test")
        both = {urlsplit(one.url).port: one for one in (first, second)}
        still = both[client.connected_url.port]
        still.signal(signal.SIGSTOP)
        try:
            # More than the connection's buffers hold.
            for _ in range(64):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.publish("somewhere", bytes(2**19)), 0.2)
            async with asyncio.timeout(60.0):
                while not client.is_connected or both[client.connected_url.port] is still:
                    await asyncio.sleep(0.05)
        finally:
            still.signal(signal.SIGCONT)
            await client.close()

    with NatsBroker(tmp_path / "one") as first, NatsBroker(tmp_path / "other") as second:
        asyncio.run(publish(first, second))


def test_a_server_through_which_no_join_answers_is_left_for_another(
    tmp_path: Path, broker: NatsBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shipping, "LEAVE_S", 1.0)
    run = small_run(tmp_path / "whole" / "run")
    run.write(4)
    run.end()
    nodes = split(run.directory, tmp_path, 2)
    # Two that know nothing of each other, as two servers between which nothing passes.
    with NatsBroker(tmp_path / "other") as other:
        join = Join(tmp_path / "joined", broker.url)
        wait_for(lambda: not join.intake.standby_of)
        broker.signal(signal.SIGSTOP)
        try:
            shippers = [Shipper(path, path.name, f"{broker.url},{other.url}") for path in nodes]
            wait_for(lambda: "brings no answer of a join" in caplog.text)
        finally:
            broker.signal(signal.SIGCONT)
        wait_for(lambda: join.turn() or bytes_of([tmp_path / "joined"]) >= bytes_of(nodes))
        assert [one.end() for one in shippers] == [True, True]
        join.drop()


def test_servers_that_are_away_are_said_once_each(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sentinel.fleet.broker, "RECONNECT_S", 0.01)
    servers = [f"nats://127.0.0.1:{free_port()}" for _ in range(3)]

    async def try_for_a_while() -> None:
        with contextlib.suppress(TimeoutError):
            await within(1.0, connect(BrokerConfig(server=",".join(servers)), "test"))

    asyncio.run(try_for_a_while())

    assert caplog.text.count("it is tried again") == len(servers)


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
