"""Acts at a broker as one of its users, who is told what the server refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nats.aio.client import Client

from sentinel.fleet.broker import BrokerConfig, connect
from sentinel.fleet.ended_tasks import within

Act = Callable[[Client, list[str]], Awaitable[None]]
"""Given a connection, and the list to which the server's refusals come."""


def act_as(access: BrokerConfig, act: Act, *, within_s: float = 60.0) -> list[str]:
    """Act as a user of a broker; returns what the server refused, in its own words.

    within_s: TimeoutError where the server has not let the user in after so long.
    """
    refused: list[str] = []

    async def run() -> None:
        client = await within(within_s, connect(access, "test"))

        async def note(error: Exception) -> None:
            refused.append(str(error))

        client._error_cb = note
        try:
            await act(client, refused)
        finally:
            await client.close()

    asyncio.run(run())
    return refused


async def until_refused(refused: list[str], subject: str) -> None:
    """Wait for the server's refusal: it says so after the client thinks that all is done."""
    async with asyncio.timeout(60.0):
        while not any(subject.lower() in one.lower() for one in refused):
            await asyncio.sleep(0.01)
