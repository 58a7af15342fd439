"""HttpServer on a unix socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.server import HttpServer
from sentinel.errors import ConfigError

from .test_endpoints import FakeApi


def unix_server(path: Path) -> HttpServer:
    config = HttpConfig.parse(f"unix:{path}")
    return HttpServer(FakeApi(), config, Credentials(path.parent, config))


def test_a_unix_socket_is_ours_alone_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = unix_server(path)
    server.start()
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        assert server.address == {"url": f"unix:{path}", "socket": str(path)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.settimeout(30.0)
            one.connect(str(path))
            one.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConfigError, match="in use"):
            unix_server(path)
    finally:
        server.stop()

    assert not path.exists()


def test_a_socket_that_a_killed_daemon_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.bind(str(path))
        one.listen()

    unix_server(path).stop()


def test_nothing_but_a_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")

    with pytest.raises(ConfigError, match=r"http\.listen unix:"):
        unix_server(path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="too long"):
        unix_server(tmp_path / ("s" * 200))
