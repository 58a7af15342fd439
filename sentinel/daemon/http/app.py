"""The application: which path is which endpoint, what a token must allow for it, and which error is which status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route, WebSocketRoute

from sentinel.daemon.http import endpoints
from sentinel.daemon.http.daemon_api import DaemonApi, Unavailable, UnknownIncident, UnknownRun
from sentinel.daemon.http.event_stream import EventStreams
from sentinel.daemon.http.middleware import BodyAtHand, RequestGuard
from sentinel.daemon.http.process_app import Endpoint, ErrorHandler, framed, guarded, process_routes, says
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.tokens import Scope
from sentinel.daemon.http.trace_socket import TraceSockets
from sentinel.daemon.series_api import Busy
from sentinel.errors import NotThere, PackageMissing, SentinelError, StoreError, TookTooLong


def make_app(api: DaemonApi, gate: RequestGate) -> Starlette:
    """Return the ASGI application. api: whom endpoints ask. gate: whom they answer."""

    def get(path: str, endpoint: Endpoint, needed: Scope = Scope.READ, tells_of_data: bool = False) -> Route:
        return guarded(path, endpoint, gate, needed, tells_of_data)

    def post(path: str, endpoint: Endpoint, needed: Scope = Scope.CONTROL) -> Route:
        middleware = [Middleware(RequestGuard, gate, needed), Middleware(BodyAtHand)]
        return Route(path, endpoint, methods=["POST"], middleware=middleware)

    app = framed(
        api,
        [
            get("/", endpoints.page),
            get("/incidents/{incident}", endpoints.incident),
            get("/assets/{name}", endpoints.asset),
            *process_routes(gate),
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
        _HANDLERS,
    )
    app.state.streams = EventStreams(api)
    return app


_HANDLERS: Mapping[Any, ErrorHandler] = {
    404: says(404, "there is nothing here; GET / shows what there is"),
    UnknownRun: says(404),
    UnknownIncident: says(404),
    NotThere: says(404),
    Unavailable: says(503),
    Busy: says(503, retry_after_s=1),
    TookTooLong: says(504),
    PackageMissing: says(501),
    StoreError: says(500),
    SentinelError: says(400),
    msgspec.DecodeError: says(400),
    ValueError: says(400),
    RecursionError: says(400),
}
