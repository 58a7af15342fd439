"""end_all, until_one_ends, within: end tasks that go on beside each other, or for too long, and wait until they have ended.

Before Python 3.12 `asyncio.wait_for` drops a cancellation that comes together with what it waits for, and the client of the
broker waits by it for each answer, and each time that it connects: a task that is cancelled once may go on for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

AGAIN_S = 5.0
"""A task that goes on after it was cancelled is cancelled again after so long. Too small: who says its last words is
interrupted; too large: a process that is to end goes on for so long."""
NO_WORDS_S = 0.2
"""The same of one that has no last words."""

Result = TypeVar("Result")


async def end_all(tasks: Iterable[asyncio.Future[Any]], again_s: float | None = None) -> list[BaseException]:
    """Cancel tasks until all have ended; return the errors with which some did. again_s: in place of `AGAIN_S`."""
    every = list(tasks)
    waiting = {one for one in every if not one.done()}
    while waiting:
        for one in waiting:
            one.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=AGAIN_S if again_s is None else again_s)
    return [error for one in every if not one.cancelled() and (error := one.exception()) is not None]


async def until_one_ends(*works: Coroutine[Any, Any, object]) -> None:
    """Have works go on beside each other until the first ends, and end the others; the first error of any is raised."""
    tasks = [asyncio.ensure_future(one) for one in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        errors = await end_all(tasks)
    if errors:
        raise errors[0]


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what some work comes to; TimeoutError: it took longer, and was ended."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        has_ended = task.done()
        await end_all([task], NO_WORDS_S)
    if not has_ended:
        raise TimeoutError(f"not done after {seconds:g} s")
    return task.result()
