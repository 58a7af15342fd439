"""What every process of ours that listens answers: metrics and health, behind the same gate and with the same headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sentinel.daemon.http.middleware import AnswersAtOnce, FailuresInWords, RequestGuard, SecurityHeaders
from sentinel.daemon.http.process_api import ProcessApi
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.responses import plain, problem
from sentinel.daemon.http.tokens import Scope

HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
"""What is answered however much else is asked, in the loop of the server and not in its pool of threads."""

Endpoint = Callable[[Request], Response] | Callable[[Request], Awaitable[Response]]
ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]


def make_process_app(api: ProcessApi, gate: RequestGate) -> Starlette:
    """Return the ASGI application of a process that has no page. api: whom endpoints ask. gate: whom they answer."""
    return framed(api, process_routes(gate))


def framed(api: ProcessApi, routes: Sequence[BaseRoute], handlers: Mapping[Any, ErrorHandler] | None = None) -> Starlette:
    """Return an application whose answers all have our headers. handlers: further ones of errors."""
    app = Starlette(
        routes=routes,
        middleware=[Middleware(SecurityHeaders), Middleware(AnswersAtOnce, HEALTH_PATHS), Middleware(FailuresInWords)],
        exception_handlers={**_HANDLERS, **(handlers or {})},
    )
    app.state.api = api
    app.router.redirect_slashes = False  # It would answer before the gate, with an address made of the Host header.
    return app


def process_routes(gate: RequestGate) -> list[BaseRoute]:
    """Return the routes of metrics and health."""
    return [
        guarded("/metrics", metrics, gate),
        guarded("/healthz", healthz, gate, Scope.NOTHING),
        guarded("/readyz", readyz, gate, Scope.NOTHING),
    ]


def guarded(
    path: str, endpoint: Endpoint, gate: RequestGate, needed: Scope = Scope.READ, tells_of_data: bool = False
) -> Route:
    """Return a route that the gate guards. needed and tells_of_data: as of `RequestGuard`."""
    return Route(path, endpoint, middleware=[Middleware(RequestGuard, gate, needed, tells_of_data)])


def says(status: int, reason: str = "", retry_after_s: int | None = None) -> ErrorHandler:
    """Return a handler that answers with a status, and in the words of the error unless others are given.

    retry_after_s: seconds after which the same request may be answered; None: nobody knows.
    """

    async def handler(request: Request, error: Exception) -> Response:
        answer = problem(status, reason or str(error))
        if retry_after_s is not None:
            answer.headers["Retry-After"] = str(retry_after_s)
        return answer

    return handler


def metrics(request: Request) -> Response:
    """Return a scrape, in the format that was asked for."""
    body, content_type = _asked(request).metrics(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


async def healthz(request: Request) -> Response:
    """Return the health; 503 where the loop does not come round. Who may not read gets the status alone."""
    health = _asked(request).health()
    told = health if request.state.may_read else {"status": health["status"]}
    return plain(told, 503 if health["status"] == "stuck" else 200)


async def readyz(request: Request) -> Response:
    """Return whether the process is ready, and why it may not be; 503 until it is."""
    api = _asked(request)
    is_ready = api.is_ready()
    told = {"standby_of": api.health()["standby_of"]} if request.state.may_read else {}
    return plain({"ready": is_ready, **told}, 200 if is_ready else 503)


def _asked(request: Request) -> ProcessApi:
    api: ProcessApi = request.app.state.api
    return api


_HANDLERS: Mapping[Any, ErrorHandler] = {
    404: says(404, "there is nothing here; /metrics, /healthz and /readyz are"),
    405: says(405, "this path does not take this method"),
}
