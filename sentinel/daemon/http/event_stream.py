"""`/api/v1/events`: says which runs have changed, as server-sent events, so that a page asks for what is new and no more.

An event is no data: whoever is told asks the API as always. So what is sent is small and bounded, changes that come faster
than `LEAST_S` are one event, and to a connection that takes nothing no event is made until it does. A stream counts as an
answer that is being given: its connection has the deadlines of all others, and it ends before them; the browser then
connects anew. One that has not taken what was sent to it by then is cut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sentinel.daemon.http.connections import ANSWER_S
from sentinel.daemon.http.daemon_api import DaemonApi
from sentinel.daemon.http.responses import problem
from sentinel.daemon.run_status import RunChanges

MAX_STREAMS = 64
"""Most streams at once: a seventh of the requests that are answered at once, so that pages leave room for all others."""
LEAST_S = 1.0
"""Least seconds between two events of a stream."""
LOOK_S = 0.25
"""Seconds between two looks at what has changed, which all streams share."""
SILENCE_S = 15.0
"""Seconds without an event after which a line without meaning is sent: proxies close what is silent."""
LONGEST_S = ANSWER_S - 10.0
"""Seconds after which a stream ends in order, and is begun anew by the browser."""
MAX_RUNS = 200
"""Runs that one event names; of more it says that all may have changed."""


class Changed(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event: names of runs."""

    progress: list[str] = []
    """That went on."""
    found: list[str] = []
    """In which something was found, or of which an incident moved."""
    is_all: bool = False
    """Anything may have changed, also which runs there are."""


class EventStreams:
    """Which streams stand, and what they look at: once for all of them. Only the server's loop calls it."""

    def __init__(self, api: DaemonApi) -> None:
        self.num_open = 0
        self.is_ending = False
        """Set once the server ends; by any thread."""
        self._api = api
        self._seen: Mapping[str, RunChanges] = {}
        self._looked = -LOOK_S

    def begun(self) -> Response:
        """Return a stream; 503 where too many are open."""
        if self.is_ending or self.num_open >= MAX_STREAMS:
            refused = problem(503, f"{MAX_STREAMS} pages are told of changes; ask for what is wanted every few seconds")
            refused.headers["Retry-After"] = "60"
            return refused
        return EventStream(self)

    def now(self) -> Mapping[str, RunChanges]:
        """Return run -> what tells its states apart; the same object until something has changed."""
        moment = time.monotonic()
        if moment - self._looked >= LOOK_S:
            self._looked = moment
            found = dict(self._api.changes())
            if found != self._seen:
                self._seen = found
        return self._seen


class EventStream(Response):
    """One stream, until the other end leaves, the server ends or its time is over."""

    def __init__(self, streams: EventStreams) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what changes."""
        streams = self._streams
        streams.num_open += 1
        left = asyncio.ensure_future(_left(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                await self._tell(send, left)
            if not left.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            streams.num_open -= 1
            left.cancel()

    async def _tell(self, send: Send, left: asyncio.Future[None]) -> None:
        streams, begun = self._streams, time.monotonic()
        known, told = streams.now(), begun
        await _send(send, b"retry: 1000\n" + event_of(Changed(is_all=True)))
        while not left.done() and not streams.is_ending and time.monotonic() - begun < LONGEST_S:
            await asyncio.wait({left}, timeout=LOOK_S)
            now, moment = streams.now(), time.monotonic()
            if now is not known and moment - told >= LEAST_S:
                event, known, told = event_of(changed(known, now)), now, moment
                await _send(send, event)
            elif moment - told >= SILENCE_S:
                told = moment
                await _send(send, b":\n\n")


def changed(before: Mapping[str, RunChanges], now: Mapping[str, RunChanges]) -> Changed:
    """Return what of two states differs."""
    if before.keys() != now.keys():
        return Changed(is_all=True)
    progress = [run for run, one in now.items() if one.progress != before[run].progress]
    found = [run for run, one in now.items() if one.found != before[run].found]
    return Changed(is_all=True) if len(progress) + len(found) > MAX_RUNS else Changed(progress, found)


def event_of(one: Changed) -> bytes:
    """Return an event as it travels. JSON has no line break in it, whatever a run is called."""
    return b"event: changed\ndata: " + msgspec.json.encode(one) + b"\n\n"


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _left(receive: Receive) -> None:
    """Return when the other end has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
