"""StreamReader: reads what lies in a stream, in order, and has it deleted once it was taken: the stream is a cache."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext

BATCH = 64
FETCH_S = 0.25
PAUSE_S = 0.02
"""Pause between two looks whether there is room again."""
PURGE_S = 1.0
CHECK_S = 2.0
"""A consumer that brought nothing for so long is looked for: a broker that restarted may have forgotten it."""


class StreamReader:
    """Has no durable state: it begins with what is there, and what was taken before is dropped by its place."""

    def __init__(
        self,
        stream: str,
        subject: str,
        *,
        take: Callable[[Msg], None],
        has_room: Callable[[], bool],
        may_act: Callable[[], bool],
        is_shared: bool = False,
        batch: int = BATCH,
    ) -> None:
        """subject: of what is read. take: handed each message. has_room: nothing more is read while it says no. may_act:
        asked before each act. is_shared: others read other subjects of the stream, whose messages stay. batch: most messages
        that are taken at once.
        """
        self.is_connected = False
        """Whether the stream is read."""
        self.is_drained = False
        """Whether nothing waits in it."""
        self._stream, self._subject, self._is_shared, self._batch = stream, subject, is_shared, batch
        self._take, self._has_room, self._may_act = take, has_room, may_act
        self._is_lost = False
        self._newest_seq = 0

    def begin_anew(self) -> None:
        """Have the consumer made anew: the connection was, and the broker may have forgotten it."""
        self._is_lost = True

    async def read(self, jetstream: JetStreamContext, on_begun: Callable[[], None] = lambda: None) -> None:
        """Read with one consumer, until it is to be made anew or `may_act` says no. Errors of the broker: try it again."""
        try:
            await self._read(jetstream, on_begun)
        finally:
            self.is_connected = self.is_drained = False

    async def _read(self, jetstream: JetStreamContext, on_begun: Callable[[], None]) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        self._is_lost, self._newest_seq = False, 0
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE, inactive_threshold=60.0, mem_storage=True
        )
        taking = await jetstream.pull_subscribe(self._subject, stream=self._stream, config=config)
        self.is_connected = True
        on_begun()
        purged, purge_at, check_at = 0, 0.0, time.monotonic() + CHECK_S
        filtered = self._subject if self._is_shared else None
        try:
            while self._may_act() and not self._is_lost:
                now = time.monotonic()
                if self._newest_seq > purged and now >= purge_at:
                    await jetstream.purge_stream(self._stream, seq=self._newest_seq + 1, subject=filtered)
                    purged, purge_at = self._newest_seq, now + PURGE_S
                if not self._has_room():
                    await asyncio.sleep(PAUSE_S)
                    continue
                messages: list[Msg] = []
                with contextlib.suppress(asyncio.TimeoutError):
                    messages = await taking.fetch(self._batch, timeout=FETCH_S)
                for message in messages if self._may_act() else ():
                    self._newest_seq = max(self._newest_seq, message.metadata.sequence.stream)
                    self._take(message)
                if messages:
                    self.is_drained = messages[-1].metadata.num_pending == 0
                    check_at = now + CHECK_S
                elif now >= check_at:
                    check_at = now + CHECK_S
                    self.is_drained = not (await taking.consumer_info()).num_pending
                await asyncio.sleep(0)
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(taking.unsubscribe(), 1.0)
