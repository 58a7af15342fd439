"""Requests that another thread can cut off: a receiver that sends a byte a second keeps within every time-out of a read."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import requests
import requests.adapters
import urllib3


class OpenRequest:
    """What one request has opened: the thread that makes it enters this, any other may cut it."""

    def __init__(self) -> None:
        self.was_connected = False
        """Whether there was a connection: the other side may have received something."""
        self.was_answered = False
        """Whether a status came."""
        self._connections: list[urllib3.connection.HTTPConnection] = []
        self._is_cut = False
        self._mutex = threading.Lock()

    def __enter__(self) -> OpenRequest:
        _OF_THREAD.request = self
        return self

    def __exit__(self, *_: object) -> None:
        _OF_THREAD.request = None

    def cut(self) -> None:
        """Shut its connections down, which ends whatever waits for them, and let it open no other."""
        with self._mutex:
            self._is_cut = True
            for one in self._connections:
                # While TLS shakes hands there is no socket to be had; that has a time-out of its own, over all it reads.
                with contextlib.suppress(OSError, AttributeError):
                    one.sock.shutdown(socket.SHUT_RDWR)

    def uses(self, connection: urllib3.connection.HTTPConnection, *, is_connected: bool) -> None:
        """Take note of a connection. OSError when the request was cut meanwhile: nothing may be sent any more."""
        with self._mutex:
            if self._is_cut:
                raise OSError("the request was cut off")
            self.was_connected |= is_connected
            self._connections.append(connection)


_OF_THREAD = threading.local()
"""`request`: the OpenRequest of this thread, or None."""


def _note(connection: urllib3.connection.HTTPConnection, *, is_connected: bool) -> None:
    request: OpenRequest | None = getattr(_OF_THREAD, "request", None)
    if request is not None:
        request.uses(connection, is_connected=is_connected)


class _PlainConnection(urllib3.connection.HTTPConnection):
    def connect(self) -> None:
        _note(self, is_connected=False)
        super().connect()
        _note(self, is_connected=True)

    def request(self, *args: Any, **kwargs: Any) -> None:
        # One that was kept from the request before does not connect again.
        _note(self, is_connected=self.sock is not None)
        super().request(*args, **kwargs)


class _TlsConnection(_PlainConnection, urllib3.connection.HTTPSConnection):
    """Connects as HTTPSConnection does, noted as a plain one is."""


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": _PlainPool, "https": _TlsPool}


class _Adapter(requests.adapters.HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager


def session() -> requests.Session:
    """Return a session of which an OpenRequest can cut every request. It reads nothing of the environment."""
    made = requests.Session()
    made.trust_env = False
    for scheme in _POOLS:
        made.mount(f"{scheme}://", _Adapter())
    return made
