"""HttpServer: serves the application from a thread of its own."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.process_api import ProcessApi
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.errors import ConfigError

if TYPE_CHECKING:  # Loaded in the thread that serves: it takes as long as judging a step.
    from starlette.applications import Starlette

    from sentinel.daemon.http.daemon_api import DaemonApi
    from sentinel.daemon.http.event_loop import EventLoop
    from sentinel.daemon.http.event_stream import EventStreams

log = logging.getLogger("sentinel.http")

MAX_WAITING = 512
"""Most connections that wait to be accepted, also while the libraries are loaded."""


class HttpServer:
    """Serves an application from a thread of its own until stopped. The port is bound, and known, before it serves."""

    def __init__(
        self, api: DaemonApi | ProcessApi, config: HttpConfig, credentials: Credentials, *, has_page: bool = True
    ) -> None:
        """Bind the address; ConfigError when that cannot be.

        has_page: the api is a `DaemonApi`, and all that it answers is served; else metrics and health alone.
        """
        self._has_page = has_page
        self._api, self._config, self._credentials = api, config, credentials
        self._gate = RequestGate(config, credentials.tokens)
        self._socket = listening_socket(config)
        self.port: int = 0 if config.socket else self._socket.getsockname()[1]
        self._server: EventLoop | None = None
        self._streams: EventStreams | None = None
        self._thread = threading.Thread(target=self._serve, name="sentinel-http", daemon=True)

    @property
    def url(self) -> str:
        """`http://HOST:PORT` as a client on this machine would write it; `unix:/PATH` of a unix socket."""
        if self._config.socket:
            return f"unix:{self._config.socket}"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        scheme = "https" if self._config.has_tls else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def address(self) -> dict[str, Any]:
        """What `<state-dir>/http.json` says."""
        if self._config.socket:
            return {"url": self.url, "socket": self._config.socket}
        return {"url": self.url, "host": self._config.host, "port": self.port}

    def refresh(self) -> list[str]:
        """Take in tokens and certificates that changed; return in words what cannot be. Called once a second."""
        self._credentials.refresh()
        self._gate.tokens = self._credentials.tokens
        return self._credentials.problems()

    @property
    def certificate_expires(self) -> float | None:
        """Seconds since the epoch at which the certificate ends to be valid; None without TLS."""
        certificate = self._credentials.certificate
        return None if certificate is None else certificate.expires

    @property
    def is_answering(self) -> bool:
        """Whether the libraries are loaded and connections are accepted."""
        return self._server is not None and self._server.started

    @property
    def num_connections(self) -> int:
        """Connections that stand now."""
        return 0 if self._server is None else len(self._server.server_state.connections)

    def start(self) -> None:
        """Begin to answer. Until the libraries are loaded, connections wait in the socket's queue."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop answering; bounded."""
        if self._streams is not None:
            self._streams.is_ending = True
        if self._server is not None:
            self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._socket.close()
        if self._config.socket:
            Path(self._config.socket).unlink(missing_ok=True)

    def _serve(self) -> None:
        try:
            from sentinel.daemon.http.event_loop import EventLoop

            certificate = self._credentials.certificate
            tls = None if certificate is None else certificate.context
            self._server = EventLoop(self._app(), tls)
            self._server.run(sockets=[self._socket])
        except Exception:
            log.exception("the HTTP server ended")

    def _app(self) -> Starlette:
        if not self._has_page:
            from sentinel.daemon.http.process_app import make_process_app

            return make_process_app(self._api, self._gate)
        from sentinel.daemon.http.app import make_app

        app = make_app(cast("DaemonApi", self._api), self._gate)
        self._streams = app.state.streams
        return app


def listening_socket(config: HttpConfig) -> socket.socket:
    """Return a socket that listens where the configuration says; ConfigError when it cannot."""
    if config.socket:
        return _unix_socket(Path(config.socket))
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((config.host, config.port))
        one.listen(MAX_WAITING)
    except OSError as error:
        one.close()
        raise ConfigError(f"http.listen {config.host}:{config.port}: {error.strerror or error}") from error
    return one


def _unix_socket(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            path.unlink()
        one.bind(str(path))
        path.chmod(0o600)  # Nobody can connect before it listens.
        one.listen(MAX_WAITING)
    except OSError as error:
        one.close()
        raise ConfigError(f"http.listen unix:{path}: {error.strerror or error}") from error
    return one


def _is_left_over(path: Path) -> bool:
    """Return whether a socket of ours lies there at which nobody listens any more."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        return one.connect_ex(str(path)) == errno.ECONNREFUSED
