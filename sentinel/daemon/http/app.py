"""The application: which path is which endpoint, what a token must allow for it, and which error is which status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from sentinel.daemon.http import endpoints
from sentinel.daemon.http.daemon_api import DaemonApi, Unavailable, UnknownIncident, UnknownRun
from sentinel.daemon.http.event_stream import EventStreams
from sentinel.daemon.http.middleware import AnswersAtOnce, BodyAtHand, FailuresInWords, RequestGuard, SecurityHeaders
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.responses import problem
from sentinel.daemon.http.tokens import Scope
from sentinel.daemon.http.trace_socket import TraceSockets
from sentinel.daemon.series_api import Busy
from sentinel.errors import NotThere, PackageMissing, SentinelError, StoreError, TookTooLong

HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
"""What is answered however much else is asked, in the loop of the server and not in its pool of threads."""

Endpoint = Callable[[Request], Response] | Callable[[Request], Awaitable[Response]]
ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]


def make_app(api: DaemonApi, gate: RequestGate) -> Starlette:
    """Return the ASGI application. api: whom endpoints ask. gate: whom they answer."""

    def get(path: str, endpoint: Endpoint, needed: Scope = Scope.READ, tells_of_data: bool = False) -> Route:
        return Route(path, endpoint, middleware=[Middleware(RequestGuard, gate, needed, tells_of_data)])

    def post(path: str, endpoint: Endpoint, needed: Scope = Scope.CONTROL) -> Route:
        middleware = [Middleware(RequestGuard, gate, needed), Middleware(BodyAtHand)]
        return Route(path, endpoint, methods=["POST"], middleware=middleware)

    app = Starlette(
        routes=[
            get("/", endpoints.page),
            get("/incidents/{incident}", endpoints.incident),
            get("/assets/{name}", endpoints.asset),
            get("/metrics", endpoints.metrics),
            get("/healthz", endpoints.healthz, Scope.NOTHING),
            get("/readyz", endpoints.readyz, Scope.NOTHING),
            get("/api/v1/runs", endpoints.runs),
            get("/api/v1/anomalies", endpoints.anomalies),
            get("/api/v1/incidents", endpoints.incidents),
            get("/api/v1/incidents/{incident}", endpoints.incident_story),
            post("/api/v1/incidents", endpoints.act, Scope.SILENCE),
            get("/api/v1/silences", endpoints.silences),
            post("/api/v1/silences", endpoints.silence, Scope.SILENCE),
            get("/api/v1/series", endpoints.series),
            get("/api/v1/history", endpoints.history),
            get("/api/v1/history/series", endpoints.history_series),
            get("/api/v1/history/heatmap", endpoints.heatmap),
            get("/api/v1/traces", endpoints.traces, tells_of_data=True),
            get("/api/v1/history/vectors", endpoints.vectors),
            get("/api/v1/pipeline", endpoints.pipeline),
            get("/api/v1/report", endpoints.report),
            get("/api/v1/events", endpoints.events),
            get("/api/v1/history/divergence", endpoints.divergence),
            get("/api/v1/marks", endpoints.marks),
            get("/api/v1/rules", endpoints.rules),
            post("/api/v1/rules/what-if", endpoints.what_if, Scope.READ),
            get("/api/v1/control", endpoints.audit),
            post("/api/v1/control", endpoints.control),
            post("/-/reload", endpoints.reload),
            WebSocketRoute("/ws/trace", TraceSockets(api, gate).serve),
        ],
        middleware=[Middleware(SecurityHeaders), Middleware(AnswersAtOnce, HEALTH_PATHS), Middleware(FailuresInWords)],
        exception_handlers=_HANDLERS,
    )
    app.state.api, app.state.streams = api, EventStreams(api)
    app.router.redirect_slashes = False  # It would answer before the gate, with an address made of the Host header.
    return app


def _says(status: int, reason: str = "", retry_after_s: int | None = None) -> ErrorHandler:
    """Return a handler that answers with a status, and in the words of the error unless others are given.

    retry_after_s: seconds after which the same request may be answered; None: nobody knows.
    """

    async def handler(request: Request, error: Exception) -> Response:
        answer = problem(status, reason or str(error))
        if retry_after_s is not None:
            answer.headers["Retry-After"] = str(retry_after_s)
        return answer

    return handler


_HANDLERS: Mapping[Any, ErrorHandler] = {
    404: _says(404, "there is nothing here; GET / shows what there is"),
    405: _says(405, "this path does not take this method"),
    UnknownRun: _says(404),
    UnknownIncident: _says(404),
    NotThere: _says(404),
    Unavailable: _says(503),
    Busy: _says(503, retry_after_s=1),
    TookTooLong: _says(504),
    PackageMissing: _says(501),
    StoreError: _says(500),
    SentinelError: _says(400),
    msgspec.DecodeError: _says(400),
    ValueError: _says(400),
    RecursionError: _says(400),
}
