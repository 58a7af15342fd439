"""Workers share the partitions: each has one owner, by a real broker's sequence and by each worker's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from nats.js.client import JetStreamContext

from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, connect, ensure_worker_streams
from sentinel.fleet.join_lease import LeaseTimes
from sentinel.fleet.partition_leases import MAX_FLOOR, PartitionLeases
from sentinel.fleet.subjects import NUM_PARTITIONS, PARTITIONS_STREAM

from ..support.nats_broker import NatsBroker

pytestmark = [pytest.mark.server, pytest.mark.slow]
ALL = set(range(NUM_PARTITIONS))


class Workers:
    """Leases of processes that share a clock, which the test moves."""

    def __init__(self, jetstream: JetStreamContext) -> None:
        self.jetstream = jetstream
        self.now = 1000.0
        self.all: list[PartitionLeases] = []

    def another(self) -> PartitionLeases:
        self.all.append(PartitionLeases(f"host/{len(self.all)}", LeaseTimes(), clock=lambda: self.now))
        return self.all[-1]

    async def steps(self, number: int = 1, *, of: list[PartitionLeases] | None = None) -> None:
        """Let so many heartbeats pass."""
        for _ in range(number):
            for one in self.all if of is None else of:
                await one.step(self.jetstream)
                self.assert_each_has_one_owner()
            self.now += 2.0

    def assert_each_has_one_owner(self) -> None:
        held = [partition for one in self.all for partition in one.held()]
        assert len(held) == len(set(held))


def with_workers(broker: NatsBroker, act: Callable[[Workers], Awaitable[None]]) -> None:
    """Act on an empty stream of tables."""

    async def run() -> None:
        client = await connect(BrokerConfig(server=broker.url), "test")
        jetstream = client.jetstream()
        await ensure_worker_streams(jetstream, STREAM_BYTES)
        await lose_table(jetstream)
        try:
            await act(Workers(jetstream))
        finally:
            await client.close()

    asyncio.run(run())


async def lose_table(jetstream: JetStreamContext) -> None:
    await jetstream.delete_stream(PARTITIONS_STREAM)
    await ensure_worker_streams(jetstream, STREAM_BYTES)


def test_workers_that_come_and_go_in_order_share_evenly(broker: NatsBroker) -> None:
    async def act(workers: Workers) -> None:
        first = workers.another()
        await workers.steps(5)
        assert not first.held()
        await workers.steps()
        assert first.held() == dict.fromkeys(ALL, 1)

        second, third = workers.another(), workers.another()
        await workers.steps(4)
        assert sorted(map(len, (first.held(), second.held(), third.held()))) == [20, 22, 22]
        assert {*first.held(), *second.held(), *third.held()} == ALL
        assert set(second.held().values()) | set(third.held().values()) == {2}

        taken = first.held()
        await first.give_back(workers.jetstream)
        workers.all.remove(first)
        assert not first.held()
        await workers.steps(2)
        assert {*second.held(), *third.held()} == ALL and workers.all[0].num_workers == 2
        assert all({**second.held(), **third.held()}[one] == epoch + 1 for one, epoch in taken.items())

    with_workers(broker, act)


def test_what_a_worker_had_that_fell_silent_is_taken_when_it_has_stopped(broker: NatsBroker) -> None:
    async def act(workers: Workers) -> None:
        first, second = workers.another(), workers.another()
        await workers.steps(9)
        assert (len(first.held()), len(second.held())) == (32, 32)
        epochs = first.held()

        # The last renewal of the first one was two seconds ago.
        workers.now += 3.9
        assert first.held()
        await second.step(workers.jetstream)
        workers.now += 0.1
        assert not first.held() and not any(first.is_held(*one) for one in epochs.items())
        await workers.steps(2, of=[second])
        assert len(second.held()) == 32
        await workers.steps(1, of=[second])
        assert {one: second.held()[one] for one in epochs} == {one: epoch + 1 for one, epoch in epochs.items()}

        # It goes on as a new one, and gets its share.
        await workers.steps(3)
        assert (len(first.held()), len(second.held())) == (32, 32)
        assert first.held().keys() | second.held().keys() == ALL

    with_workers(broker, act)


def test_a_worker_that_was_stopped_alone_begins_anew_at_once(broker: NatsBroker) -> None:
    async def act(workers: Workers) -> None:
        only = workers.another()
        await workers.steps(7)
        workers.now += 100.0
        assert not only.held()
        await workers.steps()
        assert only.held() == dict.fromkeys(ALL, 2)

    with_workers(broker, act)


def test_of_two_that_append_at_once_one_looks_again(broker: NatsBroker) -> None:
    async def act(workers: Workers) -> None:
        first, second = workers.another(), workers.another()
        await workers.steps(6)

        async def until_appended(one: PartitionLeases) -> None:
            while not await one.step(workers.jetstream):
                pass

        for _ in range(20):
            await asyncio.gather(until_appended(first), until_appended(second))
            workers.assert_each_has_one_owner()
            workers.now += 1.0
        assert (len(first.held()), len(second.held())) == (32, 32)

    with_workers(broker, act)


def test_a_broker_that_lost_its_records_gets_them_again(broker: NatsBroker) -> None:
    async def act(workers: Workers) -> None:
        first, second = workers.another(), workers.another()
        await workers.steps(9)
        held = [first.held(), second.held()]
        await lose_table(workers.jetstream)
        await workers.steps(8)
        assert [first.held(), second.held()] == held

    with_workers(broker, act)


def test_a_partition_of_which_a_newer_epoch_is_known_is_taken_above_it(broker: NatsBroker) -> None:
    async def act(workers: Workers) -> None:
        only = workers.another()
        await workers.steps(6)
        only.raise_floor(3, 1)
        assert only.is_held(3, 1)
        only.raise_floor(3, 7)
        assert 3 not in only.held() and len(only.held()) == NUM_PARTITIONS - 1
        await workers.steps()
        assert only.is_held(3, 8) and only.is_held(4, 1)
        only.raise_floor(3, MAX_FLOOR + 1)
        only.raise_floor(3, 2**64)
        await workers.steps()
        assert only.is_held(3, 8), "what no worker can have"

    with_workers(broker, act)


def test_a_partition_that_was_let_go_of_is_taken_by_whoever_has_less(broker: NatsBroker) -> None:
    async def act(workers: Workers) -> None:
        first, second = workers.another(), workers.another()
        await workers.steps(9)
        lost = sorted(first.held())[:2]
        for one in lost:
            first.raise_floor(one, 7)
        second.raise_floor(sorted(second.held())[0], 7)
        await workers.steps(3)
        assert {*first.held(), *second.held()} == ALL
        assert {({**first.held(), **second.held()})[one] for one in lost} == {8}

    with_workers(broker, act)


def test_a_worker_gives_back_what_a_broker_has_no_record_of(broker: NatsBroker) -> None:
    async def act(workers: Workers) -> None:
        first, second = workers.another(), PartitionLeases("late", clock=lambda: workers.now)
        await workers.steps(6)
        assert len(first.held()) == NUM_PARTITIONS
        await lose_table(workers.jetstream)
        # One that begins with an empty table, and another that comes to it later with all that it has.
        second._empty_since = workers.now - second.times.takeover_s
        await second.step(workers.jetstream)
        workers.all.append(second)
        await workers.steps(12)
        assert (len(first.held()), len(second.held())) == (32, 32)

    with_workers(broker, act)
