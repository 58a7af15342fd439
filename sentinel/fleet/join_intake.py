"""JoinIntake: takes what nodes publish, and answers them, in a thread beside the daemon that judges the copies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from sentinel.errors import WireError
from sentinel.fleet import subjects
from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, connect, ensure_stream
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.sealed import Beat, SpoolChunk, seal, unseal

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext

log = logging.getLogger("sentinel.fleet")

BATCH = 64
FETCH_S = 0.25
RELEASE_S = 0.02
PURGE_S = 1.0
CHECK_S = 2.0
"""A consumer that brought nothing for so long is looked for: a broker that restarted may have forgotten it."""


class JoinIntake:
    """The work of `sentinel join` that is not the daemon's. `close` ends it."""

    def __init__(self, copies: CopiedRuns, broker: BrokerConfig, *, stream_bytes: int = STREAM_BYTES) -> None:
        self.problem = ""
        """Why nothing is taken just now; empty: it is."""
        self.is_connected = False
        """Whether there is a broker, and its stream is read."""
        self._copies, self._broker, self._stream_bytes = copies, broker, stream_bytes
        self._is_drained = False
        self._has_reconnected = False
        self._newest_seq = 0
        """Newest message of the stream that was taken by this consumer."""
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sentinel-join", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """End, and wait for the end."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            log.exception("join: nothing is taken any more")

    async def _serve(self) -> None:
        connecting = asyncio.ensure_future(connect(self._broker, "sentinel join", self._reconnected))
        while not connecting.done():
            if self._is_closing.is_set():
                connecting.cancel()
                return
            await asyncio.wait({connecting}, timeout=0.1)
        client = await connecting
        log.info("join: copies in %s are written from %s", self._copies.directory, self._broker.shown)
        try:

            async def take_beat(message: Msg) -> None:
                await self._take_beat(client, message)

            await client.subscribe(subjects.BEATS, cb=take_beat)
            tasks = [asyncio.ensure_future(one) for one in (self._take(client), self._release())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            for one in ended:
                if isinstance(one, Exception):
                    raise one
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), 2.0)

    async def _reconnected(self) -> None:
        self._has_reconnected = True

    async def _release(self) -> None:
        while not self._is_closing.is_set():
            self._copies.release()
            await asyncio.sleep(RELEASE_S)

    async def _take(self, client: Client) -> None:
        """Read the stream, with a new consumer whenever the former may not be trusted."""
        from nats.errors import Error

        jetstream = client.jetstream()
        while not self._is_closing.is_set():
            try:
                await ensure_stream(jetstream, self._stream_bytes)
                await self._take_all(jetstream)
            except (TimeoutError, Error, OSError) as error:
                self.is_connected = self._is_drained = False
                words = getattr(error, "description", None) or str(error) or type(error).__name__
                problem = f"the stream cannot be read: {words}"
                if problem != self.problem:
                    self.problem = problem
                    log.warning("join: %s; it is tried again", problem)
                await asyncio.sleep(0.5)

    async def _take_all(self, jetstream: JetStreamContext) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        # From the beginning of what is there, by no durable state: what was taken before is dropped by its place.
        self._has_reconnected, self._newest_seq, self._is_drained = False, 0, False
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE, inactive_threshold=60.0, mem_storage=True
        )
        taking = await jetstream.pull_subscribe(subjects.RAW, stream=subjects.STREAM, config=config)
        self.is_connected, self.problem = True, ""
        purged, purge_at, check_at = 0, 0.0, time.monotonic() + CHECK_S
        try:
            while not self._is_closing.is_set() and not self._has_reconnected:
                now = time.monotonic()
                if self._newest_seq > purged and now >= purge_at:
                    await jetstream.purge_stream(subjects.STREAM, seq=self._newest_seq + 1)
                    purged, purge_at = self._newest_seq, now + PURGE_S
                if self._copies.is_full:
                    await asyncio.sleep(RELEASE_S)
                    continue
                messages: list[Msg] = []
                with contextlib.suppress(asyncio.TimeoutError):
                    messages = await taking.fetch(BATCH, timeout=FETCH_S)
                for message in messages:
                    self._take_message(message)
                if messages:
                    self._is_drained = messages[-1].metadata.num_pending == 0
                    check_at = now + CHECK_S
                elif now >= check_at:
                    check_at = now + CHECK_S
                    self._is_drained = not (await taking.consumer_info()).num_pending
                await asyncio.sleep(0)
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(taking.unsubscribe(), 1.0)

    def _take_message(self, message: Msg) -> None:
        self._newest_seq = max(self._newest_seq, message.metadata.sequence.stream)
        try:
            chunk = unseal(message.data, SpoolChunk)
        except WireError as error:
            self._copies.refuse(message.subject, f"{message.subject}: {error}")
            return
        self._copies.take_chunk(chunk)

    async def _take_beat(self, client: Client, message: Msg) -> None:
        from nats.errors import Error

        try:
            beat = unseal(message.data, Beat)
        except WireError as error:
            self._copies.refuse(message.subject, f"{message.subject}: {error}")
            return
        answer = self._copies.take_beat(beat, is_drained=self._is_drained)
        if answer is not None and client.is_connected:
            with contextlib.suppress(Error, OSError):
                await client.publish(subjects.answer(answer.run, answer.node), seal(answer))
