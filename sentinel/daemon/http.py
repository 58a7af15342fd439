"""The daemon over HTTP: the page, metrics, health, and the JSON API. Reads in memory and journal, decides nothing.

What guards it: loopback by default; the Host header must be a name of ours (a page elsewhere that rebinds its own name to
127.0.0.1 is refused); Origin and Sec-Fetch-Site on every POST; bearer tokens for control always, for reads everywhere but on
loopback. Names of runs are looked up among the runs served, never turned into paths.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sentinel.control.acts import ActRequest
from sentinel.daemon.commanding import ACTIONS
from sentinel.daemon.series_api import Busy, SeriesRequest
from sentinel.daemon.tokens import Scope, Tokens
from sentinel.errors import ConfigError, SentinelError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("sentinel.http")

MAX_BODY_BYTES = 64 * 1024
MAX_ITEMS = 1000
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


class UnknownRun(SentinelError):
    """A request for a run that is not served here."""


class Unavailable(SentinelError):
    """A request that is right and cannot be done now: the journal or the control folder cannot be written."""


class Console(Protocol):
    """What can be asked of a daemon. Every method may be called from any thread and returns at once."""

    def health(self) -> dict[str, Any]:
        """Return {"status": "ok" | "degraded" | "stopping" | "stuck", "problems": [...], "version": ...}."""
        ...

    def is_ready(self) -> bool:
        """Return whether rules are loaded and every run there was at the start has been read to its end once."""
        ...

    def runs(self) -> list[dict[str, Any]]:
        """Return one object per run: name, attempt, newest and judged step, ranks, open incidents, scalars."""
        ...

    def anomalies(self, run: str | None, *, limit: int, before: int | None, step: int | None) -> list[bytes]:
        """Return lines of JSON, newest first. UnknownRun for a run not served."""
        ...

    def incidents(self, run: str | None, *, limit: int, is_open: bool) -> list[bytes]:
        """Return the newest revision of each incident as lines of JSON, the last changed first."""
        ...

    def series(self, request: SeriesRequest) -> dict[str, Any]:
        """Return {"series": [{"run", "name", "kind", "statistic", "points": [[attempt, step, value], ...]}, ...], ...}.

        The one method that may take seconds, when steps are asked for that only the spool has; Busy when it cannot now.
        """
        ...

    def audit(self, run: str | None, *, limit: int) -> list[dict[str, Any]]:
        """Return the newest entries of the audit, newest first."""
        ...

    def control(self, run: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do one of `commanding.ACTIONS`; SentinelError when it cannot be, Unavailable when not now."""
        ...

    def act(self, run: str, request: ActRequest) -> dict[str, Any]:
        """Take what a person does about an incident; SentinelError when it cannot be, Unavailable when not now."""
        ...

    def reload(self) -> dict[str, Any]:
        """Read the rule packs again: {"outcome": "ok" | "failed", "problem": ..., "pack_hash": ...}."""
        ...

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return (body, content type) of a scrape."""
        ...


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the daemon listens and what it answers without a token."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """TCP port; 0: a free one, written to `<state-dir>/http.json`."""
    has_open_reads: bool = False
    """Answer reads without a token on any address, not only on loopback."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that a Host header may carry: a service's name, a proxy's."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"http.port must be in [0, 65535], got {self.port}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, listen: str, **others: Any) -> HttpConfig:
        """Return the configuration for `HOST:PORT` (`127.0.0.1:9464`, `[::1]:0`, `:9464` for loopback)."""
        host, colon, port = listen.rpartition(":")
        if not colon or not (port.isascii() and port.isdigit()):
            raise ConfigError(f'http.listen must be HOST:PORT, got "{listen}"; for a free port write 127.0.0.1:0')
        return cls(host=host.strip("[]") or "127.0.0.1", port=int(port), **others)


class RequestGate:
    """Lets a request in or says why not: Host, then Origin, then the token."""

    def __init__(self, config: HttpConfig, tokens: Tokens) -> None:
        self._config = config
        self._tokens = tokens
        self._names = LOOPBACK_NAMES | {config.host.lower()} | {name.lower() for name in config.allowed_hosts}
        self._is_wildcard = config.host in ("0.0.0.0", "::")
        if self._is_wildcard:
            self._names = self._names | {socket.gethostname().lower()}

    def refuse(self, method: str, headers: Mapping[str, str], needed: Scope) -> tuple[int, str] | None:
        """Return (status, reason) to refuse with, or None to let it in. headers: lower-case names."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            return 421, "the Host header names another server; start the daemon with --allow-host NAME if it is yours"
        if method not in ("GET", "HEAD"):
            origin = headers.get("origin")
            is_same = origin is None or origin.partition("://")[2].lower() == host.lower()
            if not is_same or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                return 403, "requests from other pages are refused"
        scope = self._tokens.scope(headers.get("authorization", ""))
        if needed is Scope.READ and (self._config.is_loopback or self._config.has_open_reads):
            return None
        if scope < needed:
            what = "control" if needed is Scope.CONTROL else "read"
            if scope is Scope.NOTHING:
                return (
                    401,
                    f"a bearer token with the {what} scope is needed; it is in tokens.json of the state directory",
                )
            return 403, f"this token has no {what} scope"
        return None

    def _is_ours(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") <= 1:
            name = name.partition(":")[0]
        if name.rstrip(".") in self._names:
            return True
        if not self._is_wildcard:
            return False
        # An address cannot be rebound to another one, a name can.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def make_app(console: Console, gate: RequestGate) -> Starlette:
    """Return the ASGI application."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from sentinel.daemon.page import PAGE_POLICY, render_page

    def problem(status: int, reason: str) -> Response:
        extra = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return JSONResponse({"error": reason}, status, headers={**HEADERS, **extra})

    def plain(value: Any, status: int = 200) -> Response:
        return Response(msgspec.json.encode(value), status, HEADERS, "application/json")

    def lines(name: str, items: list[bytes]) -> Response:
        body = b'{"' + name.encode() + b'":[' + b",".join(items) + b"]}"
        return Response(body, 200, HEADERS, "application/json")

    Answer = Callable[[Request], Response]

    def route(path: str, scope: Scope, answer: Answer, methods: tuple[str, ...] = ("GET",)) -> Route:
        async def endpoint(request: Request) -> Response:
            refusal = gate.refuse(request.method, request.headers, scope)
            if refusal is not None:
                return problem(*refusal)
            if request.method == "POST":
                body = await read_body(request)
                if body is None:
                    return problem(413, f"the body must have at most {MAX_BODY_BYTES} bytes")
            try:
                return await run_in_threadpool(answer, request)
            except UnknownRun as error:
                return problem(404, str(error))
            except (Unavailable, Busy) as error:
                return problem(503, str(error))
            except (SentinelError, msgspec.DecodeError, ValueError, RecursionError) as error:
                return problem(400, str(error))
            except Exception:
                log.exception("a request failed: %s %s", request.method, path)
                return problem(500, "the daemon failed to answer; its log says why")

        endpoint.__name__ = path
        return Route(path, endpoint, methods=list(methods))

    async def read_body(request: Request) -> bytes | None:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                return None
            chunks.append(chunk)
        request.state.body = b"".join(chunks)
        return b""

    def page(request: Request) -> Response:
        body = render_page(
            console.runs(),
            [msgspec.json.decode(line) for line in console.incidents(None, limit=50, is_open=True)],
            console.health(),
        )
        return Response(body, 200, {**HEADERS, "Content-Security-Policy": PAGE_POLICY}, "text/html")

    def metrics(request: Request) -> Response:
        body, content_type = console.metrics(request.headers.get("accept", ""))
        return Response(body, 200, {**HEADERS, "Content-Type": content_type})

    def healthz(request: Request) -> Response:
        health = console.health()
        return plain(health, 503 if health["status"] == "stuck" else 200)

    def readyz(request: Request) -> Response:
        is_ready = console.is_ready()
        return plain({"ready": is_ready}, 200 if is_ready else 503)

    def runs(request: Request) -> Response:
        return plain({"runs": console.runs()})

    def anomalies(request: Request) -> Response:
        found = console.anomalies(
            request.query_params.get("run"),
            limit=number(request, "limit", 100, MAX_ITEMS) or 0,
            before=number(request, "before", None),
            step=number(request, "step", None),
        )
        return lines("anomalies", found)

    def incidents(request: Request) -> Response:
        state = request.query_params.get("state", "all")
        if state not in ("all", "open"):
            raise ValueError(f'state must be "all" or "open", got "{state}"')
        found = console.incidents(
            request.query_params.get("run"),
            limit=number(request, "limit", 100, MAX_ITEMS) or 0,
            is_open=state == "open",
        )
        return lines("incidents", found)

    def series(request: Request) -> Response:
        return plain(console.series(SeriesRequest.parse(request.query_params.multi_items())))

    def audit(request: Request) -> Response:
        limit = number(request, "limit", 100, MAX_ITEMS) or 0
        return plain({"audit": console.audit(request.query_params.get("run"), limit=limit)})

    def control(request: Request) -> Response:
        order = msgspec.json.decode(request.state.body, type=dict[str, Any])
        run, action = order.pop("run", None), order.pop("action", None)
        if not isinstance(run, str) or action not in ACTIONS:
            raise ValueError(f'expected {{"run": NAME, "action": {" or ".join(map(repr, ACTIONS))}, ...}}')
        return plain(console.control(run, action, order))

    def act(request: Request) -> Response:
        asked = msgspec.json.decode(request.state.body, type=dict[str, Any])
        run = asked.pop("run", None)
        if not isinstance(run, str):
            raise ValueError('expected {"run": NAME, "incident": ID, "act": "ack", "resolve" or "reopen", "who": NAME, ...}')
        return plain(console.act(run, msgspec.convert(asked, ActRequest)), 202)

    def reload(request: Request) -> Response:
        result = console.reload()
        return plain(result, 200 if result.get("outcome") == "ok" else 422)

    def number(request: Request, name: str, otherwise: int | None, most: int = 2**62) -> int | None:
        text = request.query_params.get(name)
        if text is None:
            return otherwise
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise ValueError(f'{name} must be a whole number, got "{text[:40]}"')
        return min(int(text), most)

    def nothing_there(request: Request, _: Exception) -> Response:
        return problem(404, "there is nothing here; GET / lists what there is")

    async def wrong_method(request: Request, _: Exception) -> Response:
        return problem(405, "this path does not take this method")

    routes = [
        route("/", Scope.READ, page),
        route("/metrics", Scope.READ, metrics),
        route("/healthz", Scope.NOTHING, healthz),
        route("/readyz", Scope.NOTHING, readyz),
        route("/api/v1/runs", Scope.READ, runs),
        route("/api/v1/anomalies", Scope.READ, anomalies),
        route("/api/v1/incidents", Scope.READ, incidents),
        route("/api/v1/incidents", Scope.CONTROL, act, ("POST",)),
        route("/api/v1/series", Scope.READ, series),
        route("/api/v1/control", Scope.READ, audit),
        route("/api/v1/control", Scope.CONTROL, control, ("POST",)),
        route("/-/reload", Scope.CONTROL, reload, ("POST",)),
    ]
    handlers: dict[Any, Callable[[Request, Exception], Response | Awaitable[Response]]] = {
        404: nothing_there,
        405: wrong_method,
    }
    return Starlette(routes=_merged(routes), exception_handlers=handlers)


def _merged(routes: list[Any]) -> list[Any]:
    # Starlette answers 405 from the first route whose path matches; two routes of one path become one that picks.
    from starlette.routing import Route

    by_path: dict[str, list[Any]] = {}
    for one in routes:
        by_path.setdefault(one.path, []).append(one)
    merged = []
    for path, same in by_path.items():
        if len(same) == 1:
            merged.append(same[0])
            continue

        def pick(candidates: list[Any]) -> Callable[[Request], Awaitable[Response]]:
            async def endpoint(request: Request) -> Response:
                chosen = next(one for one in candidates if request.method in one.methods)
                answer: Response = await chosen.endpoint(request)
                return answer

            return endpoint

        methods = sorted({method for one in same for method in one.methods})
        merged.append(Route(path, pick(same), methods=methods))
    return merged


class HttpServer:
    """Serves an application from a thread of its own until stopped. The port is bound, and known, before it serves."""

    def __init__(self, console: Console, config: HttpConfig, tokens: Tokens) -> None:
        """Bind the address; ConfigError when that cannot be."""
        self._console, self._config, self._tokens = console, config, tokens
        try:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((config.host, config.port))
            self._socket.listen(128)
        except OSError as error:
            raise ConfigError(f"http.listen {config.host}:{config.port}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._server: Any = None
        self._thread = threading.Thread(target=self._serve, name="sentinel-http", daemon=True)

    @property
    def url(self) -> str:
        """`http://HOST:PORT` as a client on this machine would write it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        """Begin to answer. Until the libraries are loaded, connections wait in the socket's queue."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop answering; bounded."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._socket.close()

    def _serve(self) -> None:
        try:
            import uvicorn

            app = make_app(self._console, RequestGate(self._config, self._tokens))
            config = uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=1,
                limit_concurrency=200,
                ws="none",
                log_config=None,
            )
            self._server = uvicorn.Server(config)
            self._server.run(sockets=[self._socket])
        except Exception:
            log.exception("the HTTP server ended")
