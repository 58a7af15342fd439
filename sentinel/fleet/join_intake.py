"""JoinIntake: takes what nodes publish, and answers them, in a thread beside the daemon that judges the copies.

It does so while it holds the lease of the broker, and waits for it before; once the lease is lost it does nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from sentinel.errors import WireError
from sentinel.fleet import subjects
from sentinel.fleet.broker import LEAVE_S, STREAM_BYTES, BrokerConfig, connect, ensure_streams, error_words
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.ended_tasks import end_all, until_one_ends
from sentinel.fleet.join_lease import REQUEST_S, JoinLease
from sentinel.fleet.run_key import UNSIGNED, RunKey
from sentinel.fleet.sealed import Beat, Published, seal, unseal, unseal_published
from sentinel.fleet.stream_reader import StreamReader
from sentinel.join_health import JoinHealth
from sentinel.printable import printable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext

log = logging.getLogger("sentinel.fleet")

RELEASE_S = 0.02


class JoinIntake:
    """The work of `sentinel join` that is not the daemon's. `close` ends it."""

    def __init__(
        self,
        copies: CopiedRuns,
        broker: BrokerConfig,
        lease: JoinLease,
        *,
        stream_bytes: int = STREAM_BYTES,
        replicas: int = 1,
        key: RunKey | None = None,
    ) -> None:
        """lease: of this process alone. stream_bytes: most that the stream of chunks holds, where it is made here.

        key: by which answers are signed, and beats known; None: they are not.
        """
        self._key = key
        self.problem = "no broker is reached yet"
        """Why nothing is taken just now; empty: it is."""
        self.lost = ""
        """Why this process is no join any more, nor will be; empty: it is, or stands by."""
        self.num_taken_bytes = 0
        """Bytes of the messages that were taken from the stream."""
        self._copies, self._broker, self._lease, self._streams = copies, broker, lease, (stream_bytes, replicas)
        self._has_begun = False
        """The lease is, or was, held, and what lies in the directory is known."""
        self._on_lost: Callable[[], None] = lambda: None
        self._reader = StreamReader(
            subjects.STREAM, subjects.RAW, take=self._take_message, has_room=copies.has_room, may_act=lambda: self._may_act
        )
        self._has_streams = False
        """They were there when the lease was last looked after."""
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sentinel-join", daemon=True)

    @property
    def is_connected(self) -> bool:
        """Whether there is a broker, and its stream is read. For any thread."""
        return self._reader.is_connected

    @property
    def standby_of(self) -> str:
        """Who is to judge in our place, for people; empty: this process is. For any thread."""
        if self._has_begun and self._lease.is_held:
            return ""
        if self._lease.holder not in ("", self._lease.owner):
            return self._lease.holder
        return f"unknown ({self.problem or 'the lease is waited for'})"

    def health(self) -> JoinHealth:
        """Return what is known of this join, its broker and its nodes. For any thread."""
        is_active, known = not self.standby_of, self._copies.health()
        away = (f"broker {self._broker.shown}: {self.problem}",) if self.problem else ()
        if not is_active:
            # What nodes say goes to another.
            return JoinHealth(epoch=self._lease.epoch, is_connected=not away, problems=away)
        return msgspec.structs.replace(
            known, is_active=True, epoch=self._lease.epoch, is_connected=not away, problems=away + known.problems
        )

    @property
    def epoch(self) -> int:
        """The epoch under which this process has, or had, the lease. For any thread."""
        return self._lease.held_epoch

    def start(self, on_lost: Callable[[], None] = lambda: None) -> None:
        """Begin; returns at once. on_lost: called, in another thread, once `lost` says why."""
        self._on_lost = on_lost
        self._thread.start()

    def close(self) -> None:
        """End, and wait for the end."""
        self._copies.end("the join ends")
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._copies.end(f"{type(error).__name__}: {error}")
            self.lost = f"{type(error).__name__}: {error}"
            log.exception("join: nothing is taken any more")
            self._on_lost()

    async def _serve(self) -> None:
        connecting = asyncio.ensure_future(connect(self._broker, "sentinel join", self._reconnected))
        while not connecting.done():
            if self._is_closing.is_set():
                await end_all([connecting])
                return
            await asyncio.wait({connecting}, timeout=0.1)
        client = await connecting
        try:
            jetstream = client.jetstream(timeout=REQUEST_S)
            await self._stand_by(client, jetstream)
            if self._is_closing.is_set():
                await self._give_back(jetstream)
                return
            await until_one_ends(self._work(client), self._keep(client, jetstream))
            await self._give_back(jetstream)
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), 2.0)
        if not self._is_closing.is_set():
            self._copies.end("the lease was lost")
            holder = self._lease.holder
            taken = f", and {holder} has it now" if holder not in ("", self._lease.owner) else ""
            why = self._lease.why_lost or f"it was not renewed for {self._lease.times.stop_s:g} s{taken}"
            self.lost = f"the lease of epoch {self.epoch} was lost: {why}"
            log.error("join: %s; this process does nothing more and ends", self.lost)
            self._on_lost()

    async def _work(self, client: Client) -> None:
        """Read what lies in the directory, then take what nodes say. Of a long backlog the former outlasts a lease."""
        await asyncio.to_thread(self._copies.recall)
        self._has_begun = True
        log.info("join: copies in %s are written from %s", self._copies.directory, self._broker.shown)

        async def take_beat(message: Msg) -> None:
            await self._take_beat(client, message)

        await client.subscribe(subjects.BEATS, cb=take_beat)
        await until_one_ends(self._take(client), self._release())

    @property
    def _may_act(self) -> bool:
        return not self._is_closing.is_set() and self._lease.is_held

    async def _reconnected(self) -> None:
        self._reader.begin_anew()

    async def _stand_by(self, client: Client, jetstream: JetStreamContext) -> None:
        """Wait for the lease."""
        said, answered_at = "", time.monotonic()
        while not self._is_closing.is_set() and not self._lease.is_held:
            has_answered = client.is_connected and await self._step(jetstream)
            if has_answered and not self._lease.is_held:
                self._told("")
                if self.standby_of != said:
                    said = self.standby_of
                    log.info("join: standby of %s; taken over when that ends", said)
            now = time.monotonic()
            if has_answered or not client.is_connected:
                answered_at = now
            elif now - answered_at >= LEAVE_S and len(client.servers) > 1:
                answered_at = now
                log.warning("join: this server of the broker says nothing of the lease; another one is tried")
                await client.force_reconnect()
            if not self._lease.is_held:
                await asyncio.sleep(self._lease.times.renew_s / 4)
        if said and self._lease.is_held:
            log.info("join: taken over, epoch %d", self._lease.held_epoch)

    async def _keep(self, client: Client, jetstream: JetStreamContext) -> None:
        """Renew the lease until it is lost."""
        renew_at = 0.0
        while self._may_act:
            now = time.monotonic()
            if now >= renew_at and client.is_connected and await self._step(jetstream):
                renew_at = now + self._lease.times.renew_s
                if self.is_connected:
                    self._told("")
            await asyncio.sleep(self._lease.times.renew_s / 4)

    async def _step(self, jetstream: JetStreamContext) -> bool:
        """Have the lease looked after; return whether the broker answered."""
        from nats.errors import Error

        try:
            if not self._has_streams:
                await ensure_streams(jetstream, *self._streams)
            self._has_streams = False
            await self._lease.step(jetstream)
        except (TimeoutError, Error, OSError) as error:
            self._told(f"the lease cannot be had: {error_words(error)}")
            return False
        self._has_streams = True
        return True

    async def _give_back(self, jetstream: JetStreamContext) -> None:
        from nats.errors import Error

        with contextlib.suppress(TimeoutError, Error, OSError):
            await self._lease.give_back(jetstream)

    def _told(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("join: %s; it is tried again", problem)
        self.problem = problem

    async def _release(self) -> None:
        while self._may_act:
            self._copies.release(lambda: self._may_act)
            await asyncio.sleep(RELEASE_S)

    async def _take(self, client: Client) -> None:
        """Read the stream, with a new consumer whenever the former may not be trusted."""
        from nats.errors import Error

        jetstream = client.jetstream()
        while self._may_act:
            try:
                await ensure_streams(jetstream, *self._streams)
                await self._reader.read(jetstream, lambda: self._told(""))
            except (TimeoutError, Error, OSError) as error:
                self._told(f"the stream cannot be read: {error_words(error)}")
                await asyncio.sleep(0.5)

    def _take_message(self, message: Msg) -> None:
        try:
            published = unseal_published(message.data)
        except WireError as error:
            self._copies.refuse(message.subject, f"{message.subject}: {error}")
            return
        self.num_taken_bytes += len(message.data)
        if not self._is_its_own(message, published[0]):
            return
        try:
            for one in published:
                self._copies.take(one)
        except Exception as error:
            # A join that ended with one message would be followed by others that end with it.
            log.exception("join: %s: a message could not be taken", message.subject)
            self._copies.refuse(f"{message.subject}/{type(error).__name__}", f"{message.subject}: {error!r}")

    def _is_its_own(self, message: Msg, said: Published | Beat) -> bool:
        """Return whether a message came under the name that it has: a broker with permissions vouches for the subject."""
        if subjects.is_of(message.subject, said.run, said.node):
            return True
        why = f"{message.subject}: a message there says that it is node {printable(said.node[:64])}'s: it is refused"
        self._copies.refuse(f"{message.subject}/{said.node[:64]}", why)
        return False

    async def _take_beat(self, client: Client, message: Msg) -> None:
        from nats.errors import Error

        if not self._may_act:
            return
        try:
            beat = unseal(message.data, Beat)
        except WireError as error:
            self._copies.refuse(message.subject, f"{message.subject}: {error}")
            return
        if self._key is not None and not self._key.has_signed(message.subject, message.data, message.headers):
            self._copies.refuse(message.subject, f"{message.subject}: {UNSIGNED}")
            return
        if not self._is_its_own(message, beat):
            return
        answer = self._copies.take_beat(beat, is_drained=self._reader.is_drained)
        if answer is not None and client.is_connected:
            with contextlib.suppress(Error, OSError):
                subject, data = subjects.answer(answer.run, answer.node), seal(answer)
                headers = self._key.headers(subject, data) if self._key is not None else None
                await client.publish(subject, data, headers=headers)
