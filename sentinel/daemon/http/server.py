"""HttpServer: serves the application from a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING

from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.daemon_api import DaemonApi
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.tokens import Tokens
from sentinel.errors import ConfigError

if TYPE_CHECKING:  # Loaded in the thread that serves: it takes as long as judging a step.
    from sentinel.daemon.http.event_loop import EventLoop

log = logging.getLogger("sentinel.http")

MAX_WAITING = 512
"""Most connections that wait to be accepted, also while the libraries are loaded."""


class HttpServer:
    """Serves an application from a thread of its own until stopped. The port is bound, and known, before it serves."""

    def __init__(self, api: DaemonApi, config: HttpConfig, tokens: Tokens) -> None:
        """Bind the address; ConfigError when that cannot be."""
        self._api, self._config, self._tokens = api, config, tokens
        try:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((config.host, config.port))
            self._socket.listen(MAX_WAITING)
        except OSError as error:
            raise ConfigError(f"http.listen {config.host}:{config.port}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._server: EventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="sentinel-http", daemon=True)

    @property
    def url(self) -> str:
        """`http://HOST:PORT` as a client on this machine would write it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

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
        if self._server is not None:
            self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._socket.close()

    def _serve(self) -> None:
        try:
            from sentinel.daemon.http.app import make_app
            from sentinel.daemon.http.event_loop import EventLoop

            self._server = EventLoop(make_app(self._api, RequestGate(self._config, self._tokens)))
            self._server.run(sockets=[self._socket])
        except Exception:
            log.exception("the HTTP server ended")
