"""What every request goes through on its way to an endpoint, and every answer on its way back."""

from __future__ import annotations

import logging
from collections.abc import Collection

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sentinel.daemon.http import tokens
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.responses import problem

log = logging.getLogger("sentinel.http")

MAX_BODY_BYTES = 64 * 1024
MAX_ANSWERS_AT_ONCE = 448
"""Most requests that are being answered; below the connections of one peer, so that another one always comes in."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


class SecurityHeaders:
    """Puts `HEADERS` on every answer that does not say otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class AnswersAtOnce:
    """Answers 503 where `MAX_ANSWERS_AT_ONCE` are being answered; the paths `always` are answered all the same."""

    def __init__(self, app: ASGIApp, always: Collection[str]) -> None:
        self._app, self._always = app, always
        self._num_answering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._always:
            await self._app(scope, receive, send)
            return
        if self._num_answering >= MAX_ANSWERS_AT_ONCE:
            busy = problem(503, f"{MAX_ANSWERS_AT_ONCE} requests are being answered; try again in a second")
            busy.headers["Retry-After"] = "1"
            await busy(scope, receive, send)
            return
        self._num_answering += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_answering -= 1


class FailuresInWords:
    """Answers 500 where an endpoint failed as it never should; the log has where. Nobody is told who left meanwhile."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            log.debug("the other end left: %s %s", scope.get("method", "WS"), scope["path"])
        except Exception:
            log.exception("a request failed: %s %s", scope.get("method", "WS"), scope["path"])
            if scope["type"] == "http":
                await problem(500, "the daemon failed to answer; its log says why")(scope, receive, send)


class RequestGuard:
    """Lets in the requests to one endpoint that the gate lets in."""

    def __init__(self, app: ASGIApp, gate: RequestGate, needed: tokens.Scope, tells_of_data: bool = False) -> None:
        """needed: what a token must allow for this endpoint. tells_of_data: it shows what tensors hold."""
        self._app, self._gate, self._needed, self._tells_of_data = app, gate, needed, tells_of_data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        refusal = self._gate.refuse(scope["method"], request.headers, self._needed, tells_of_data=self._tells_of_data)
        request.state.may_read = self._gate.may_read(request.headers)
        answer = self._app if refusal is None else problem(*refusal)
        await answer(scope, receive, send)


class BodyAtHand:
    """Reads the body of a request into `request.state.body`; refuses one of more than `MAX_BODY_BYTES`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        chunks, num_bytes = [], 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > MAX_BODY_BYTES:
                await problem(413, f"the body must have at most {MAX_BODY_BYTES} bytes")(scope, receive, send)
                return
            chunks.append(chunk)
        request.state.body = b"".join(chunks)
        await self._app(scope, receive, send)
