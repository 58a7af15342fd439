"""end_all: ends tasks that go on beside each other, and waits until they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 5.0
"""A task that goes on after it was cancelled is cancelled again after so long. Before Python 3.12 `asyncio.wait_for` drops a
cancellation that comes together with what it waits for, and the broker's client waits by it for each answer. Too small: who
says its last words is interrupted; too large: a process that is to end goes on for so long."""


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> list[BaseException]:
    """Cancel tasks until all have ended; return the errors with which some did."""
    every = list(tasks)
    waiting = {one for one in every if not one.done()}
    while waiting:
        for one in waiting:
            one.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=AGAIN_S)
    return [error for one in every if not one.cancelled() and (error := one.exception()) is not None]
