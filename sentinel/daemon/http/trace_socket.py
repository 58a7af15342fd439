"""`/ws/trace`: traces of a run as they come, in MegaScope's messages, for whoever says a token first.

The client's first message carries the token; `run_training_step` says what it wants to see, at any time again. No step waits
for it: what a client wants is ordered of the ranks for a bounded number of steps, ordered anew while it is there, and
withdrawn when it leaves. A client that does not take what is sent is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocket, WebSocketDisconnect

from sentinel.daemon.http.daemon_api import DaemonApi
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.tokens import Scope
from sentinel.daemon.trace_api import MOST_SHOWN, NOTHING_TRACED, TraceRequest, numbers_of
from sentinel.daemon.trace_flags import Asked, asked_of, layer_of, update_type_of
from sentinel.errors import SentinelError

log = logging.getLogger("sentinel.http")

MAX_SOCKETS = 16
"""Most clients at once; each looks at the disk a few times a second."""
HELLO_S = 10.0
"""Longest time from the connection to the first message."""
SEND_S = 10.0
"""Longest time for a client to take one message."""
LOOK_S = 0.25
BEHIND_STEPS = 8
"""Steps by which one rank's traces may come behind another's and are still shown."""
QUIET_S = 60.0
"""Seconds without anything to show after which it is ordered anew, and said."""
LEASE_STEPS = 200
"""Steps for which the ranks are asked at a time; after a daemon that died they go on so long, and no longer."""
MAX_MESSAGE_BYTES = 64 * 1024
REFUSED, BUSY = 4401, 4503
"""Close codes: without a valid token; too many clients."""


class TraceSockets:
    """Which clients stand. Only the server's loop calls it."""

    def __init__(self, api: DaemonApi, gate: RequestGate) -> None:
        self._api, self._gate = api, gate
        self.num_open = 0

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one client until it leaves."""
        why = self._gate.refuse_socket(websocket.headers)
        if why:
            await websocket.close(1008, why)
            return
        await websocket.accept()
        if self.num_open >= MAX_SOCKETS:
            await websocket.close(BUSY, f"{MAX_SOCKETS} clients are shown traces")
            return
        self.num_open += 1
        try:
            await self._converse(websocket)
        except (TimeoutError, WebSocketDisconnect):
            log.debug("a client of traces left")
        finally:
            self.num_open -= 1
            with contextlib.suppress(Exception):
                await websocket.close()

    async def _converse(self, websocket: WebSocket) -> None:
        first = await asyncio.wait_for(_message(websocket), HELLO_S)
        scope = self._gate.tokens.scope(f"Bearer {first.get('token', '')}")
        if scope < Scope.READ:
            await websocket.close(REFUSED, 'the first message must be {"token": TOKEN, "run": NAME}')
            return
        client = _Client(websocket, self._api, scope, str(first.get("run", "")))
        listening = asyncio.ensure_future(_message(websocket))
        try:
            await client.take(first)
            while True:
                await asyncio.wait({listening}, timeout=LOOK_S)
                if listening.done():
                    await client.take(listening.result())
                    listening = asyncio.ensure_future(_message(websocket))
                await client.show()
        finally:
            listening.cancel()
            await client.leave()


class _Client:
    """One client: what it asked for, what was ordered for it, and how far it has been shown."""

    def __init__(self, websocket: WebSocket, api: DaemonApi, scope: Scope, run: str) -> None:
        self._websocket, self._api, self._scope, self._run = websocket, api, scope, run
        self._asked: Asked | None = None
        self._command: dict[str, Any] | None = None
        self._attempt = -1
        self._shown: dict[int, int] = {}
        """Rank -> the newest step of its that was shown."""
        self._come = asyncio.get_running_loop().time()
        """When something came last, by the clock of the loop."""
        self._has_started = False
        self._told = ""
        self._num_not_shown = 0
        """Ranks that trace and are not shown, as the client was told last."""

    async def take(self, message: dict[str, Any]) -> None:
        """Take a message of the client's; what is wrong in it is told, and changes nothing."""
        if message.get("type", message.get("event")) != "run_training_step":
            return
        try:
            asked = asked_of(message)
            if self._scope >= Scope.CONTROL:
                await self.leave()
                await self._order(asked)
            self._asked = asked
            if self._scope < Scope.CONTROL:
                await self._tell("this token reads only: shown is what others have ordered")
        except SentinelError as error:
            await self._tell(str(error))

    async def _order(self, asked: Asked) -> None:
        order = {
            "kinds": list(asked.kinds), "targets": list(asked.targets), "for_steps": LEASE_STEPS, "reason": "asked for live",
            "trace": {"compressor": _builtins(asked), "tokens": asked.tokens}, "ranks": list(asked.ranks or ()),
        }  # fmt: skip
        done = await run_in_threadpool(self._api.control, self._run, "trace", order)
        self._command = done["command"]

    async def leave(self) -> None:
        """Withdraw what was ordered."""
        command, self._command = self._command, None
        if command is not None:
            with contextlib.suppress(SentinelError):
                request = {"command": command["id"], "reason": "nobody looks any more"}
                await run_in_threadpool(self._api.control, self._run, "withdraw", request)

    async def show(self) -> None:
        """Send what is new."""
        if self._asked is None:
            return
        # Ranks write a step one after the other: of one that nothing is known of yet, a few steps back are shown.
        newest = max(self._shown.values(), default=-1)
        after = max(-1, newest - BEHIND_STEPS) if self._shown else None
        request = TraceRequest(run=self._run, ranks=self._asked.ranks, after=after, shown=self._shown)
        try:
            found = await run_in_threadpool(self._api.questions.traces, request)
            await self._renew(bool(found["steps"]), found["hint"])
        except SentinelError as error:
            await self._tell(str(error))
            return
        if found["attempt"] != self._attempt:
            self._attempt, self._shown = found["attempt"], {}
        await self._tell_ranks(found["ranks"], found["num_ranks_not_shown"])
        for step in found["steps"]:
            if step["step"] > self._shown.get(step["rank"], -1):
                await self._show_step(step)
                self._shown[step["rank"]] = step["step"]

    async def _tell_ranks(self, ranks: list[int], num_not_shown: int) -> None:
        """Say how many ranks trace and are not shown, whenever that is another number."""
        if num_not_shown == self._num_not_shown:
            return
        self._num_not_shown = num_not_shown
        how = f'at most {MOST_SHOWN} are shown: choose by "ranks": "0,8-15" in run_training_step'
        await self._send({"type": "ranks", "num_ranks": len(ranks), "num_not_shown": num_not_shown, "message": how})

    async def _renew(self, has_come: bool, hint: str) -> None:
        """Order anew what will be over soon, and what nobody obeys: it was missed, or meant for an attempt that ended."""
        now = asyncio.get_running_loop().time()
        if has_come:
            self._come = now
        command = self._command
        if command is None or self._asked is None:
            return
        newest = max(self._shown.values(), default=-1)
        if now - self._come > QUIET_S:
            self._come = now
            await self._tell(f"nothing came for {QUIET_S:g} s, it is ordered anew: {hint or NOTHING_TRACED}")
            await self.leave()
            await self._order(self._asked)
        elif newest >= command["at_step"] + command["for_steps"] * 3 // 4:
            # The former one ends by itself: both ask for the same, of which one picture is made.
            await self._order(self._asked)

    async def _show_step(self, step: dict[str, Any]) -> None:
        assert self._asked is not None
        for tensor in step["tensors"]:
            update_type = update_type_of(tensor["kind"], tensor["name"], self._asked.flags)
            if not update_type:
                continue
            if not self._has_started:
                shape = [*tensor["shape"], 0, 0]
                start = {"type": "start", "micro_batch_size": shape[0], "seq_length": shape[1],
                         "num_layers": 1 + max(layer_of(one["name"]) for one in step["tensors"])}  # fmt: skip
                self._has_started = True
                await self._send(start)
            await self._send({
                "type": "update", "update_type": update_type, "layer_id": layer_of(tensor["name"]),
                "args": tensor["shape"], "result": _plain(numbers_of(tensor["pictures"][""])), "step": step["step"],
                "micro_step": tensor["micro_step"], "rank": step["rank"], "kind": tensor["kind"], "name": tensor["name"],
                "num_dropped": step["num_dropped"],
            })  # fmt: skip

    async def _tell(self, problem: str) -> None:
        if problem != self._told:
            self._told = problem
            await self._send({"type": "error", "message": problem})

    async def _send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message, allow_nan=False)
        await asyncio.wait_for(self._websocket.send_text(text), SEND_S)


async def _message(websocket: WebSocket) -> dict[str, Any]:
    """Return the next message; an empty one for what is no JSON object."""
    text = await websocket.receive_text()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _builtins(asked: Asked) -> dict[str, Any]:
    one = asked.compressor
    return {"name": one.name, "size": one.size, "reduce": one.reduce, "softmax": one.softmax, "seed": one.seed,
            "vectors": one.vectors}  # fmt: skip


def _plain(values: np.ndarray) -> list[Any]:
    """Return numbers as lists; NaN and infinities as words, for JSON has none."""
    found: list[Any] = values.astype(object).tolist() if not np.isfinite(values).all() else values.tolist()
    return found if np.isfinite(values).all() else _in_words(found)


def _in_words(values: Any) -> Any:
    if isinstance(values, list):
        return [_in_words(one) for one in values]
    return values if abs(values) < float("inf") else str(float(values))
