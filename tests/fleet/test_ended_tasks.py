"""Tasks that are to end do, also one that loses a cancellation to a result that comes at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from sentinel.fleet import ended_tasks
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.ended_tasks import end_all, within
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.shipping import Shipping

from ..support.nats_broker import NatsBroker


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_tasks, "AGAIN_S", 0.01)


def test_a_task_that_loses_its_cancellation_ends() -> None:
    async def work() -> tuple[int, list[BaseException]]:
        answered, num_waits = asyncio.Event(), 0

        async def waits() -> None:
            nonlocal num_waits
            while True:
                num_waits += 1
                await asyncio.wait_for(answered.wait(), 60.0)
                answered.clear()

        async def is_stubborn() -> None:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                await asyncio.sleep(60.0)

        tasks = [asyncio.ensure_future(waits()), asyncio.ensure_future(is_stubborn())]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answered.set()
        await asyncio.sleep(0)
        errors = await end_all(tasks)
        assert all(one.cancelled() for one in tasks)
        return num_waits, errors

    num_waits, errors = asyncio.run(asyncio.wait_for(work(), 10.0))
    assert num_waits >= 1 and errors == []


def test_work_that_takes_too_long_is_ended_also_where_it_loses_a_cancellation() -> None:
    num_begun = 0

    async def tries_for_ever() -> None:
        nonlocal num_begun
        while True:
            num_begun += 1
            with contextlib.suppress(asyncio.CancelledError if num_begun < 3 else ValueError):
                await asyncio.sleep(60.0)

    async def answers() -> int:
        return 7

    async def fails() -> int:
        raise OSError("no")

    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        asyncio.run(asyncio.wait_for(within(0.01, tries_for_ever()), 20.0))
    assert num_begun == 3
    assert asyncio.run(within(5.0, answers())) == 7
    with pytest.raises(OSError, match="no"):
        asyncio.run(within(5.0, fails()))


def test_the_errors_of_those_that_failed_are_returned() -> None:
    async def work() -> list[BaseException]:
        async def fails() -> None:
            raise ValueError("no")

        async def ends() -> int:
            return 1

        tasks = [asyncio.ensure_future(one) for one in (fails(), ends(), asyncio.sleep(60.0))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await end_all(tasks)

    (error,) = asyncio.run(work())
    assert isinstance(error, ValueError)
    assert asyncio.run(end_all([])) == []


@pytest.mark.server
def test_a_node_whose_beats_fail_ends_with_that_error(
    tmp_path: Path, broker: NatsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Shipping, client: object) -> None:
        raise RuntimeError("no beat can be made")

    monkeypatch.setattr(Shipping, "_beat", fails)
    shipping = Shipping(NodeRuns(tmp_path, "node1"), BrokerConfig(server=broker.url), drain_s=1.0)
    with pytest.raises(RuntimeError, match="no beat can be made"):
        asyncio.run(asyncio.wait_for(shipping.run(), 30.0))
