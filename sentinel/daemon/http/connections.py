"""Connections: how long each may take to ask, to be answered and to idle, and which one goes when there are too many.

A connection that has not sent a whole request costs its sender nothing, so however many of them stand, a new one is let in:
the one that has kept us waiting longest goes. No cap stands between a connection and the health endpoints.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("sentinel.http")

ASK_S = 10.0
"""Longest time from the first byte of a request to its last, body included. Chosen: a request of ours is below 100 KB."""
IDLE_S = 30.0
"""Longest time between an answer and the next request. Prometheus scrapes every 15 s and keeps its connection."""
ANSWER_S = 60.0
"""Longest time from a whole request to the last byte of its answer. Series may take 20 s to find."""
MAX_CONNECTIONS = 512
"""Most connections at once: half of the files that a process may have open where nobody changed that."""
MAX_PER_PEER = 480
"""Most connections of one address at once; every process of this machine is one address."""

Phase = Literal["asking", "answering", "idle"]
DEADLINES: dict[Phase, float] = {"asking": ASK_S, "answering": ANSWER_S, "idle": IDLE_S}


class Connection(H11Protocol):
    """A connection of uvicorn's with deadlines; it may be told to go while nothing of it is being answered."""

    def __init__(self, door: Door, **others: Any) -> None:
        super().__init__(**others)
        self._door = door
        self._deadline: asyncio.TimerHandle | None = None
        self._entered: tuple[Phase, int] | None = None
        self.phase: Phase = "asking"
        self.since = 0.0
        self._is_handed_over = False
        """When the phase began, by the clock of the loop."""

    @property
    def peer(self) -> str:
        """The address at the other end; empty on a unix socket, which only we can open."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._note()
        self._door.enter(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._note()

    def resume_writing(self) -> None:
        """Go on after the other end has taken what waited to be sent."""
        super().resume_writing()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave."""
        self._door.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to another protocol, which has bounds of its own."""
        self._door.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._is_handed_over = True
        super().handle_websocket_upgrade(event)

    def shut(self) -> None:
        """Close, with 408 where nothing was answered yet. What the other end does not take is thrown away."""
        is_unanswered = self.phase == "asking" and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if is_unanswered and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()
        else:
            self.transport.abort()

    def _note(self) -> None:
        """Begin the time of a phase when it begins. More bytes of the same request give it no more time."""
        if self._is_handed_over:
            return
        phase = self._phase_now()
        entered = (phase, id(self.cycle))
        if entered == self._entered:
            return
        self._entered, self.phase, self.since = entered, phase, self.loop.time()
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(DEADLINES[phase], self.shut)

    def _phase_now(self) -> Phase:
        if self.conn.their_state is h11.SEND_BODY:
            return "asking"
        if self.cycle is not None and (not self.cycle.response_complete or self.flow.write_paused):
            return "answering"
        return "asking" if self.cycle is None or self.conn.trailing_data[0] else "idle"


class Door:
    """Which connections stand. A new one always comes in unless all of them are being answered."""

    def __init__(self) -> None:
        self._peers: dict[str, set[Connection]] = {}
        self._num_connections = 0
        self.num_shut = 0
        """Connections that had to go for others, ever."""

    def enter(self, one: Connection) -> None:
        """Let a connection in, and one go for it when there are too many."""
        own = self._peers.setdefault(one.peer, set())
        own.add(one)
        self._num_connections += 1
        if len(own) > MAX_PER_PEER:
            self._shut_one(own)
        elif self._num_connections > MAX_CONNECTIONS:
            self._shut_one({other for peer in self._peers.values() for other in peer})

    def leave(self, one: Connection) -> None:
        """Forget a connection that ended."""
        own = self._peers.get(one.peer, set())
        if one in own:
            own.remove(one)
            self._num_connections -= 1
            if not own:
                del self._peers[one.peer]

    def _shut_one(self, among: set[Connection]) -> None:
        waiting = [one for one in among if one.phase != "answering"]
        longest = min(waiting, key=lambda one: one.since)  # The newest of them is waiting, so there is one.
        self.num_shut += 1
        if self.num_shut.bit_count() == 1:  # 1, 2, 4, ...: a siege must not fill the log
            log.warning("%d connections kept too many waiting without a whole request and were closed", self.num_shut)
        self.leave(longest)
        longest.shut()
