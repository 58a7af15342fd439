"""Of all joins one has the lease: by the sequence of a real broker's stream, and by each one's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from nats.js.client import JetStreamContext

from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, connect, ensure_streams
from sentinel.fleet.join_lease import JoinLease, LeaseTimes
from sentinel.fleet.subjects import LEASES

from ..support.nats_broker import NatsBroker

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsBroker]:
    with NatsBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


class Joins:
    """Leases of processes that share a clock, which the test moves."""

    def __init__(self, jetstream: JetStreamContext) -> None:
        self.jetstream = jetstream
        self.now = 1000.0

    def another(self, name: str = "host/1", takeover_s: float = 10.0, floor: int = 0) -> JoinLease:
        return JoinLease(name, LeaseTimes.of(takeover_s), clock=lambda: self.now, floor=lambda: floor)

    async def held(self, name: str = "host/1") -> JoinLease:
        """Return a lease that is held."""
        lease = self.another(name)
        await lease.step(self.jetstream)
        self.now += lease.times.takeover_s
        await lease.step(self.jetstream)
        assert lease.is_held
        return lease


def with_joins(broker: NatsBroker, act: Callable[[Joins], Awaitable[None]]) -> None:
    """Act on an empty stream of leases."""

    async def run() -> None:
        client = await connect(BrokerConfig(server=broker.url), "test")
        jetstream = client.jetstream()
        await ensure_streams(jetstream, STREAM_BYTES)
        await jetstream.delete_stream(LEASES)
        await ensure_streams(jetstream, STREAM_BYTES)
        try:
            await act(Joins(jetstream))
        finally:
            await client.close()

    asyncio.run(run())


def test_who_waits_takes_over_when_nothing_changed_for_its_time_and_who_had_it_stopped_before(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        first, second = await joins.held("first"), joins.another("second")
        for _ in range(20):
            joins.now += 2.0
            await first.step(joins.jetstream)
            await second.step(joins.jetstream)
        assert (first.is_held, second.is_held, second.holder) == (True, False, "first")

        joins.now += 5.9
        assert first.is_held
        joins.now += 0.1
        assert not first.is_held
        joins.now += 3.9
        await second.step(joins.jetstream)
        assert not second.is_held
        joins.now += 0.1
        await second.step(joins.jetstream)
        assert (second.is_held, second.epoch) == (True, first.epoch + 1)

        await first.step(joins.jetstream)
        assert first.is_lost and not first.is_held

    with_joins(broker, act)


def test_who_could_not_renew_for_its_time_does_not_come_back_though_nobody_took_over(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        first = await joins.held()
        joins.now += first.times.stop_s
        await first.step(joins.jetstream)
        assert first.is_lost and not first.is_held

    with_joins(broker, act)


def test_a_lease_that_is_given_back_is_taken_at_once_and_epochs_grow(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        lease = await joins.held()
        epochs = [lease.epoch]
        for _ in range(3):
            await lease.give_back(joins.jetstream)
            assert not lease.is_held
            lease = joins.another()
            await lease.step(joins.jetstream)
            assert lease.is_held
            epochs.append(lease.epoch)
        assert epochs == [1, 2, 3, 4]

    with_joins(broker, act)


@pytest.mark.parametrize("is_expected", [True, False], ids=["by sequence", "control: by nothing"])
def test_of_many_that_take_over_at_once_one_does(broker: NatsBroker, is_expected: bool) -> None:
    async def act(joins: Joins) -> None:
        publish = joins.jetstream.publish

        async def publish_anything(subject: str, payload: bytes, **options: Any) -> Any:
            return await publish(subject, payload, timeout=options["timeout"])

        if not is_expected:
            joins.jetstream.publish = publish_anything  # type: ignore[method-assign]
        leases = [joins.another(f"host/{number}") for number in range(8)]
        for _ in range(2):
            await asyncio.gather(*(one.step(joins.jetstream) for one in leases))
            joins.now += 10.0 if not any(one.is_held for one in leases) else 0.0
        assert sum(one.is_held for one in leases) == (1 if is_expected else 8)

    with_joins(broker, act)


def test_a_renewal_of_which_the_answer_was_lost_counts_from_the_next_one_on(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        publish = joins.jetstream.publish

        async def publish_unanswered(*arguments: Any, **options: Any) -> Any:
            await publish(*arguments, **options)
            raise TimeoutError

        lease = joins.another()
        await lease.step(joins.jetstream)
        joins.now += 10.0
        joins.jetstream.publish = publish_unanswered  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            await lease.step(joins.jetstream)
        assert not lease.is_held
        joins.jetstream.publish = publish  # type: ignore[method-assign]
        await lease.step(joins.jetstream)
        assert (lease.is_held, lease.epoch) == (True, 1)

    with_joins(broker, act)


def test_a_broker_that_lost_its_records_gets_them_again_from_who_has_the_lease(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        first = await joins.held("first")
        await first.give_back(joins.jetstream)
        second, third = joins.another("second"), joins.another("third")
        await second.step(joins.jetstream)
        await joins.jetstream.delete_stream(LEASES)
        await ensure_streams(joins.jetstream, STREAM_BYTES)
        await third.step(joins.jetstream)
        assert not third.is_held
        joins.now += 2.0
        await second.step(joins.jetstream)
        joins.now += 5.0
        await third.step(joins.jetstream)
        assert (second.is_held, second.epoch, third.is_held, third.epoch, third.holder) == (True, 2, False, 2, "second")

    with_joins(broker, act)


def test_who_waits_goes_by_the_longer_time_of_who_has_it(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        first, second = joins.another("first", takeover_s=40.0), joins.another("second", takeover_s=1.0)
        for _ in range(2):
            await first.step(joins.jetstream)
            joins.now += 40.0 if not first.is_held else 0.0
        await second.step(joins.jetstream)
        joins.now += 39.0
        await second.step(joins.jetstream)
        assert not second.is_held
        joins.now += 1.0
        await second.step(joins.jetstream)
        assert second.is_held

    with_joins(broker, act)


def test_a_broker_that_lost_everything_has_no_say_in_epochs(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        lease = joins.another(floor=7)
        await lease.step(joins.jetstream)
        joins.now += 10.0
        await lease.step(joins.jetstream)
        assert (lease.is_held, lease.held_epoch) == (True, 8)

    with_joins(broker, act)


def test_who_is_told_that_it_has_the_lease_though_another_had_it_since_ends(broker: NatsBroker) -> None:
    """The other one's record is lost, and the journals of the runs know its epoch: under ours nothing can be written."""

    async def act(joins: Joins) -> None:
        known = [0]
        lease = JoinLease("first", LeaseTimes.of(10.0), clock=lambda: joins.now, floor=lambda: known[0])
        lease.take_fence()
        assert not lease.is_lost, "it has none yet"
        await lease.step(joins.jetstream)
        joins.now += lease.times.takeover_s
        await lease.step(joins.jetstream)
        lease.take_fence()
        assert lease.is_held, "what a run says is looked after in the journals"
        known[0] = lease.held_epoch + 1
        await lease.step(joins.jetstream)
        assert lease.is_held, "journals are not read with each renewal"
        lease.take_fence()
        assert not lease.is_held and lease.is_lost and f"epoch {known[0]}" in lease.why_lost
        following = joins.another(floor=known[0])
        await following.step(joins.jetstream)
        joins.now += following.times.takeover_s
        await following.step(joins.jetstream)
        assert following.is_held and following.held_epoch > known[0]

    with_joins(broker, act)


def test_what_is_no_record_is_waited_out(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        await joins.jetstream.publish("sn.lease", b"\xc1 no record")
        lease = joins.another()
        await lease.step(joins.jetstream)
        assert not lease.is_held
        joins.now += 10.0
        await lease.step(joins.jetstream)
        assert lease.is_held

    with_joins(broker, act)


def test_the_stream_is_bounded(broker: NatsBroker) -> None:
    async def act(joins: Joins) -> None:
        config = (await joins.jetstream.stream_info(LEASES)).config
        assert (config.max_msgs, config.num_replicas) == (256, 1)

    with_joins(broker, act)
