"""A broker of three servers that is parted, one way or wholly, or slow: what is judged and told is the same, once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sentinel.fleet import join_intake, shipping
from sentinel.fleet.join_lease import JoinLease, LeaseTimes

from ..support.fleet_faults import frozen_time
from ..support.partitions import SERVERS, NamespacedCluster, PartedCluster, ProxiedCluster
from ..support.waiting import wait_for
from ..support.watched_run import LARGE, WatchedRun

pytestmark = [pytest.mark.server, pytest.mark.slow]
FIRST = LeaseTimes(renew_s=0.2, stop_s=6.0, takeover_s=0.2)
SECOND = LeaseTimes(renew_s=0.2, stop_s=60.0, takeover_s=9.0)
"""Takes over behind the time at which the first one stops, and is ended by no pause of a busy machine."""


@pytest.fixture(
    params=[ProxiedCluster, pytest.param(NamespacedCluster, marks=pytest.mark.long)], ids=["proxies", "namespaces"]
)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PartedCluster]:
    with frozen_time(), request.param(tmp_path / "cluster") as running:
        yield running


@pytest.fixture
def watch(tmp_path: Path, cluster: PartedCluster) -> Iterator[Callable[..., WatchedRun]]:
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(WatchedRun(tmp_path, cluster, **options))


def others_than(server: str) -> tuple[str, ...]:
    return tuple(one for one in SERVERS if one != server)


def test_a_leader_that_is_parted_from_the_other_servers_is_left_by_all(
    cluster: PartedCluster, watch: Callable[..., WatchedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "LEAVE_S", 4.0)
    watched = watch()
    watched.join()
    wait_for(lambda: not watched.joins[0].intake.standby_of)
    leader = watched.leader()
    # One of the nodes has its connection to the leader, and may go anywhere.
    cluster.part("node0", *others_than(leader))
    watched.ship(SERVERS, others_than(leader))
    wait_for(watched.all_is_here)
    cluster.heal()
    cluster.part(leader, *others_than(leader), "join")
    watched.goes_on(8)
    wait_for(watched.all_is_here)
    assert watched.leader(others_than(leader)) != leader
    cluster.heal()
    watched.ends()


def test_a_join_with_the_minority_stops_and_one_with_the_majority_goes_on(
    cluster: PartedCluster, watch: Callable[..., WatchedRun]
) -> None:
    watched = watch()
    first = watched.join("join", ("n0",), JoinLease("first", FIRST))
    watched.ship(others_than("n0"), others_than("n0"))
    wait_for(watched.all_is_here)
    second = watched.join("standby", others_than("n0"), JoinLease("second", SECOND))
    wait_for(lambda: second.intake.standby_of == "first")
    cluster.part("n0", *others_than("n0"))
    watched.goes_on(8)
    wait_for(lambda: watched.all_is_here() and not second.intake.standby_of)
    wait_for(first.ended.is_set)
    assert "not renewed" in first.intake.lost
    cluster.heal()
    # As whatever started it starts it again.
    third = watched.join("join", ("n0",), JoinLease("third", SECOND))
    wait_for(lambda: third.intake.standby_of == "second")
    watched.ends()


def test_a_join_that_begins_with_a_server_that_is_parted_from_the_others_goes_to_another(
    cluster: PartedCluster, watch: Callable[..., WatchedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_intake, "LEAVE_S", 2.0)
    watched = watch()
    first = watched.join()
    wait_for(lambda: not first.intake.standby_of)
    first.drop()
    cluster.part("n0", *others_than("n0"))
    cluster.part("join", *others_than("n0"))
    join = watched.join()
    wait_for(lambda: "the lease cannot be had" in join.intake.problem)
    cluster.heal()
    cluster.part("n0", *others_than("n0"))
    wait_for(lambda: not join.intake.standby_of)


def test_a_node_that_hears_nothing_and_one_that_is_not_heard_go_on_later(
    cluster: PartedCluster, watch: Callable[..., WatchedRun]
) -> None:
    watched = watch()
    watched.join()
    watched.ship(SERVERS, SERVERS)
    wait_for(watched.all_is_here)
    for server in SERVERS:
        cluster.cut(server, "node0")
        cluster.cut("node1", server)
    watched.goes_on(8)
    wait_for(lambda: all(one.shipping.blocked for one in watched.shippers))
    watched.all_is_here()
    cluster.heal()
    wait_for(watched.all_is_here)
    watched.ends()


@pytest.mark.long
def test_a_node_behind_a_slow_link_is_waited_for(cluster: PartedCluster, watch: Callable[..., WatchedRun]) -> None:
    watched = watch()
    watched.join()
    watched.ship(SERVERS, SERVERS)
    wait_for(watched.all_is_here)
    cluster.slow("node0", 200_000, 0.1)
    watched.goes_on(8)
    wait_for(watched.all_is_here)
    watched.ends()


@pytest.mark.long
def test_a_node_whose_server_vanishes_amid_what_it_sends_goes_to_another(
    cluster: PartedCluster, watch: Callable[..., WatchedRun]
) -> None:
    watched = watch(**LARGE)
    watched.join(servers=others_than("n0"))
    cluster.part("node0", *others_than("n0"))
    watched.ship(SERVERS, others_than("n0"))
    wait_for(watched.all_is_here)
    cluster.heal()
    cluster.part("node0", "n0")
    # More than the buffers of a connection hold: its end would wait for them.
    watched.goes_on(12)
    wait_for(watched.all_is_here)
    watched.ends()
