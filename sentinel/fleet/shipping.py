"""Shipping: publishes spools, and lets whoever takes them say how far. It has no state: the spools last.

What a broker does not take, or lost after it took it, is read from the spool again; a trainer notices nothing of either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sentinel.errors import WireError
from sentinel.fleet import subjects
from sentinel.fleet.broker import LEAVE_S, BrokerConfig, connect, error_words
from sentinel.fleet.ended_tasks import end_all
from sentinel.fleet.node_runs import ASKED_BEAT_S, BEAT_S, UNANSWERED_S
from sentinel.fleet.run_key import RunKey
from sentinel.fleet.sealed import Answer, Beat, Published, in_messages, seal, seal_published, unseal
from sentinel.fleet.subjects import TO_JOIN, Ways

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext

log = logging.getLogger("sentinel.fleet")

DISCOVER_S = 0.5
LOOK_S = 0.02
"""Pause between two looks at the spools while data flows; four times as long while none does."""
WINDOW_BYTES = 8 * 2**20
"""Most bytes that were published and are not acknowledged by the broker."""
ACKNOWLEDGED_S = 5.0
"""A message that the broker does not acknowledge within so long is published again."""
LONGEST_PAUSE_S = 5.0
UNANSWERED = 1.5
"""Times `LEAVE_S` after which a server is left where it brought no answer of a join: one that takes over is waited for."""
LONGEST_STAY_S = 300.0
"""Servers in a row are left each after twice as long, up to this."""


class PublishedRuns(Protocol):
    """What is published: the runs of one machine (`NodeRuns`), or those of the nodes that a worker has (`RelayedNodes`)."""

    directory: Path

    @property
    def who(self) -> str:
        """Who publishes, for people."""
        ...

    @property
    def node(self) -> str | None:
        """The node for which answers are; None: they are for many."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether the join has everything."""
        ...

    def discover(self) -> None:
        """Take in what is new."""
        ...

    @property
    def pause_s(self) -> float:
        """Seconds between two times that anything is said, as it is now."""
        ...

    def next(self, max_bytes: int) -> Iterator[Published]:
        """Yield what is to be published next, up to about so many bytes; it is taken for published."""
        ...

    def take_back(self, published: Published) -> None:
        """Have something that could not be published read again."""
        ...

    def send_rows(self) -> None:
        """Have all sent that cannot be asked for after the end."""
        ...

    def beats(self, *, blocked: str = "", is_ending: bool = False, is_leaving: bool = False) -> Iterator[Beat]:
        """Yield what is to be said."""
        ...

    def take_answer(self, answer: Answer, *, has_signature: bool = False) -> None:
        """Go by what is answered."""
        ...


class Shipping:
    """The work of `sentinel ship`."""

    def __init__(
        self,
        runs: PublishedRuns,
        broker: BrokerConfig,
        *,
        drain_s: float = 10.0,
        key: RunKey | None = None,
        ways: Ways = TO_JOIN,
        says_unanswered: bool = False,
    ) -> None:
        """drain_s: longest time after `stop` until all that the spools hold is held by the join. key: by which beats are
        signed, and answers known, as `runs` wants them; None: they are not. ways: to whom it is published.

        says_unanswered: where nobody answers for `UNANSWERED_S` the log says so; else somebody else does.
        """
        self._key, self._ways = key, ways
        self.blocked = ""
        """Why nothing is published just now; empty: it is."""
        self.num_published = 0
        """Messages that the broker acknowledged."""
        self.num_published_bytes = 0
        """Their bytes."""
        self._runs, self._broker, self._drain_s = runs, broker, drain_s
        self._flying_bytes = 0
        self._flying: set[asyncio.Task[None]] = set()
        self._num_failures = 0
        """In a row."""
        self._paused_until = 0.0
        self._unheard_since: float | None = None
        """When it was seen first that nothing of what is published is answered; None: it is, if only by errors."""
        self._answered_at = 0.0
        """When the join answered last, monotonic seconds, or another server was gone to."""
        self._says_unanswered, self._has_said = says_unanswered, False
        self._heard_at = 0.0
        """When anything was answered last, or nothing was asked, monotonic seconds."""
        self._leave_s = LEAVE_S
        self._heard: set[str] = set()
        """Subjects of answers that are subscribed to."""
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Have `run` end once the join holds everything, or the time for that is over; for any thread."""
        if self._loop is None:
            self._stop.set()
        else:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self) -> bool:
        """Publish until `stop`; return whether the join holds all there is. ConfigError."""
        self._loop = asyncio.get_running_loop()
        connecting = asyncio.ensure_future(connect(self._broker, f"sentinel ship {self._runs.who}"))
        stopping = asyncio.ensure_future(self._stop.wait())
        while not connecting.done() and not stopping.done():
            # What is there is known without a broker, too: it may be judged here meanwhile.
            self._runs.discover()
            await asyncio.wait({connecting, stopping}, timeout=DISCOVER_S, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            await asyncio.wait({connecting}, timeout=self._drain_s)
        if not connecting.done():
            await end_all([connecting, stopping])
            return False
        client = await connecting
        log.info("%s: shipping %s to %s", self._runs.who, self._runs.directory, self._broker.shown)
        try:
            self._answered_at = self._heard_at = time.monotonic()
            if self._runs.node is None:
                await self._hear(client, subjects.ANSWERS)
            beating, publishing = asyncio.ensure_future(self._beat(client)), asyncio.ensure_future(self._ship(client))
            try:
                await asyncio.wait({beating, publishing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                errors = await end_all([beating, publishing])
            if errors:
                raise errors[0]
            is_drained = publishing.result()
            await self._say(client, is_leaving=is_drained)
            return is_drained
        finally:
            await end_all([stopping, *self._flying])
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), 2.0)

    async def _ship(self, client: Client) -> bool:
        jetstream = client.jetstream()
        discover_at = 0.0
        until: float | None = None
        while True:
            now = time.monotonic()
            if now >= discover_at:
                self._runs.discover()
                discover_at = now + DISCOVER_S
            has_moved = await self._publish_next(client, jetstream)
            if self._stop.is_set():
                until = until or now + self._drain_s
                if not self._flying and self._runs.is_held:
                    return True
                self._runs.send_rows()
                if now >= until:
                    log.warning(
                        "%s: ended after %g s, and the join does not hold all of it; %s",
                        self._runs.who, self._drain_s, self.blocked or "what it lacks is sent at the next start",
                    )  # fmt: skip
                    return False
            if not has_moved:
                await asyncio.sleep(LOOK_S if self._flying else 4 * LOOK_S)

    async def _publish_next(self, client: Client, jetstream: JetStreamContext) -> bool:
        """Publish one chunk of each spool, several in a message, as far as the window allows; False: there is none."""
        if not client.is_connected:
            self.blocked = "the broker is away"
            return False
        if not self._has_room(client):
            return False
        if self._num_failures == 0:
            self.blocked = ""
        has_moved = False
        for published in in_messages(self._next(client)):
            if not self._is_open(client):
                # It was read before it was known that the message in front of it is not taken.
                for one in published:
                    self._runs.take_back(one)
                continue
            has_moved = True
            data = seal_published(published)
            self._flying_bytes += len(data)
            task = asyncio.ensure_future(self._publish(jetstream, published, data))
            self._flying.add(task)
            task.add_done_callback(self._flying.discard)
            # Lets it hand over its bytes before the next: messages leave in order.
            await asyncio.sleep(0)
        return has_moved

    def _next(self, client: Client) -> Iterator[Published]:
        """Yield what is to be published next, until there is no room for it or this is to end: what fails is there again."""
        found, is_ending = self._runs.next(WINDOW_BYTES - self._flying_bytes), self._stop.is_set()
        while self._has_room(client) and self._stop.is_set() == is_ending and (one := next(found, None)) is not None:
            yield one

    def _has_room(self, client: Client) -> bool:
        return self._is_open(client) and self._flying_bytes < WINDOW_BYTES

    def _is_open(self, client: Client) -> bool:
        """Return whether the broker is there, and may be tried again where it did not take something."""
        return client.is_connected and time.monotonic() >= self._paused_until

    async def _publish(self, jetstream: JetStreamContext, published: Sequence[Published], data: bytes) -> None:
        from nats.errors import Error
        from nats.js.errors import NoStreamResponseError

        try:
            await jetstream.publish(
                self._ways.chunk(published[0].run, published[0].node),
                data,
                timeout=ACKNOWLEDGED_S,
                headers={"Nats-Expected-Stream": self._ways.stream},
            )
        except (TimeoutError, Error, OSError) as error:
            if not isinstance(error, (TimeoutError, NoStreamResponseError)):
                self._unheard_since = None
            elif self._unheard_since is None:
                self._unheard_since = time.monotonic()
            self._failed(published, error)
        else:
            self.num_published += 1
            self.num_published_bytes += len(data)
            self._num_failures, self._unheard_since = 0, None
        finally:
            self._flying_bytes -= len(data)

    def _failed(self, published: Sequence[Published], error: Exception) -> None:
        for one in published:
            self._runs.take_back(one)
        self._num_failures += 1
        self._paused_until = time.monotonic() + min(LONGEST_PAUSE_S, 0.05 * 2 ** min(self._num_failures, 10))
        blocked = f"the broker does not take what is published: {error_words(error)}"
        if blocked != self.blocked:
            self.blocked = blocked
            log.warning("%s: %s; spools keep it meanwhile", self._runs.who, blocked)

    async def _beat(self, client: Client) -> None:
        while True:
            await self._say(client)
            await self._leave(client)
            said = time.monotonic()
            await asyncio.sleep(ASKED_BEAT_S)
            while time.monotonic() - said < (min(BEAT_S, self._runs.pause_s) if self._stop.is_set() else self._runs.pause_s):
                await asyncio.sleep(LOOK_S)

    async def _leave(self, client: Client) -> None:
        """Go to another server of the broker, if this one does not bring us further."""
        now = time.monotonic()
        if not client.is_connected:
            self._unheard_since, self._answered_at, self._heard_at = None, now, now
            return
        self._say_unanswered(now - self._heard_at)
        is_unheard = self._unheard_since is not None and now - self._unheard_since >= self._leave_s
        if len(client.servers) > 1 and (is_unheard or now - self._answered_at >= UNANSWERED * self._leave_s):
            why = "answers nothing of what is published" if is_unheard else "brings no answer of a join"
            log.warning("%s: this server of the broker %s; another one is tried", self._runs.who, why)
            self._unheard_since, self._answered_at = None, now
            self._leave_s = min(LONGEST_STAY_S, 2 * self._leave_s)
            await client.force_reconnect()

    def _say_unanswered(self, seconds: float) -> None:
        """Say once that nobody answers."""
        if not self._says_unanswered or self._has_said or seconds < UNANSWERED_S:
            return
        self._has_said = True
        log.warning(
            "%s: no %s has answered for %.0f s: is there one, has it our --key, and may our login hear it? spools keep what "
            "is new meanwhile; `sentinel fleet status` says who answers", self._runs.who, self._ways.taker, seconds,
        )  # fmt: skip

    async def _say(self, client: Client, *, is_leaving: bool = False) -> None:
        from nats.errors import Error

        if not client.is_connected:
            return
        beats = list(self._runs.beats(blocked=self.blocked, is_ending=self._stop.is_set(), is_leaving=is_leaving))
        if not beats:
            # Nothing was asked that a join could answer.
            self._answered_at = self._heard_at = time.monotonic()
        for beat in beats:
            with contextlib.suppress(Error, OSError):
                if self._runs.node is not None:
                    # Of each run by itself: a login may be of one run alone.
                    await self._hear(client, self._ways.answer(beat.run, beat.node))
                subject, data = self._ways.beat(beat.run, beat.node), seal(beat)
                headers = self._key.headers(subject, data) if self._key is not None else None
                await client.publish(subject, data, headers=headers)
        if is_leaving:
            with contextlib.suppress(Error, OSError, asyncio.TimeoutError):
                await client.flush(2)

    async def _hear(self, client: Client, answers: str) -> None:
        if answers not in self._heard:
            await client.subscribe(answers, cb=self._take_answer)
            self._heard.add(answers)

    async def _take_answer(self, message: Msg) -> None:
        try:
            answer = unseal(message.data, Answer)
        except WireError as error:
            log.warning("%s: %s: %s", self._runs.who, message.subject, error)
            return
        self._answered_at = self._heard_at = time.monotonic()
        self._leave_s, self._has_said = LEAVE_S, False
        has_signature = self._key is not None and self._key.has_signed(message.subject, message.data, message.headers)
        self._runs.take_answer(answer, has_signature=has_signature)
