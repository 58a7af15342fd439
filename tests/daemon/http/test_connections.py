"""Connections over real sockets: who sends half a request holds up nobody, and who asks in good faith is answered."""

from __future__ import annotations

import http.client
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from sentinel.daemon.http import connections, middleware
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.server import HttpServer

from ...support.waiting import wait_for
from .test_endpoints import CONTROL, TOKENS, FakeApi

HALVES = {
    "nothing": b"",
    "half a request line": b"GET /metr",
    "half a header": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-",
    "half a body": b"POST /api/v1/control HTTP/1.1\r\nHost: localhost\r\nAuthorization: "
    + CONTROL["Authorization"].encode()
    + b'\r\nContent-Length: 100\r\n\r\n{"run": ',
    "half a body without a token": b"POST /-/reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    "half a chunk": b"POST /-/reload HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{",
}


@contextmanager
def answering_server() -> Iterator[HttpServer]:
    with tempfile.TemporaryDirectory() as state:
        credentials = Credentials(Path(state), HttpConfig())
    credentials.tokens = TOKENS
    server = HttpServer(FakeApi(), HttpConfig(), credentials)
    server.start()
    try:
        wait_for(lambda: server.is_answering)
        yield server
    finally:
        server.stop()


def connection_to(server: HttpServer, sent: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", server.port), timeout=30.0)
    one.sendall(sent)
    return one


def received(one: socket.socket) -> bytes:
    """Everything until the other end closes."""
    found = b""
    with suppress(ConnectionResetError):
        while more := one.recv(65536):
            found += more
    return found


def status_of(server: HttpServer, path: str = "/healthz", headers: bytes = b"") -> int:
    with connection_to(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode() + headers) as one:
        one.sendall(b"\r\n")
        return int(received(one).split(b" ", 2)[1])


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES.keys())
def test_who_sends_half_a_request_is_cut_off_in_time(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.DEADLINES, "asking", 0.2)
    with answering_server() as server, connection_to(server, half) as one:
        assert received(one).count(b"HTTP/1.1 ") == 1  # 408, or what a body is not needed for
        monkeypatch.undo()
        assert status_of(server) == 200


def test_bytes_one_by_one_give_a_request_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.DEADLINES, "asking", 0.3)
    with answering_server() as server, connection_to(server, b"GET /metrics HTTP/1.1\r\nX: ") as one:
        one.settimeout(0.01)

        def drip() -> bool:
            try:
                one.sendall(b"a")
                return one.recv(1000).startswith(b"HTTP/1.1 408")
            except TimeoutError:
                return False

        wait_for(drip, "408")


def test_a_connection_that_idles_is_closed_and_one_that_asks_again_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering_server() as server:
        one = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30.0)
        for _ in range(3):
            one.request("GET", "/healthz")
            with one.getresponse() as answer:
                assert answer.status == 200 and answer.read()
        assert server.num_connections == 1
        monkeypatch.setitem(connections.DEADLINES, "idle", 0.2)
        one.request("GET", "/healthz")
        with one.getresponse() as answer:
            answer.read()
        wait_for(lambda: not server.num_connections, "the end of the connection")


def test_an_answer_that_nobody_reads_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.DEADLINES, "answering", 0.2)
    monkeypatch.setattr(FakeApi, "metrics", lambda self, accept: (b"x" * 50_000_000, "text/plain"))
    with answering_server() as server, connection_to(server, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n") as one:
        wait_for(lambda: not server.num_connections, "the end of the connection")

        assert len(received(one)) < 50_000_000


@contextmanager
def besieged(server: HttpServer, num_half_sent: int) -> Iterator[None]:
    with ExitStack() as stack:
        for half in list(HALVES.values()) * (num_half_sent // len(HALVES) + 1):
            stack.enter_context(connection_to(server, half))
        yield


def all_statuses(server: HttpServer, paths: list[str]) -> set[int]:
    with ThreadPoolExecutor(len(paths)) as pool:
        return set(pool.map(lambda path: status_of(server, path), paths))


def test_half_sent_requests_keep_nobody_from_health_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_PER_PEER", 16)
    with answering_server() as server, besieged(server, 40):
        assert {status_of(server, path) for path in ("/healthz", "/readyz", "/metrics") * 3} == {200}
        assert all_statuses(server, ["/metrics"] * 12) == {200}
        assert server.num_connections <= 16


@pytest.mark.long
def test_hundreds_of_half_sent_requests_keep_nobody_from_health_and_metrics() -> None:
    with answering_server() as server, besieged(server, 205):
        assert {status_of(server, path) for path in ("/healthz", "/readyz", "/metrics") * 3} == {200}
        assert all_statuses(server, ["/metrics"] * 400) == {200}
    with answering_server() as server, besieged(server, 900):
        assert all_statuses(server, ["/healthz", "/metrics"] * 50) == {200}


def test_past_the_answers_at_once_health_is_answered_and_the_rest_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_end = threading.Event(), threading.Event()

    def slow(self: FakeApi, accept: str) -> tuple[bytes, str]:
        asked.set()
        assert may_end.wait(30.0)
        return b"up 1\n", "text/plain"

    monkeypatch.setattr(FakeApi, "metrics", slow)
    monkeypatch.setattr(middleware, "MAX_ANSWERS_AT_ONCE", 1)
    with answering_server() as server, connection_to(server, b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n") as first:
        assert asked.wait(30.0)
        with connection_to(server, b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n") as second:
            refused = received(second)
        healths = [status_of(server, path) for path in ("/healthz", "/readyz")]
        may_end.set()
        answered = received(first)

    assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in refused
    assert healths == [200, 200]
    assert answered.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("headers", [b"X: " + b"a" * 40_000, b"X: a\r\n" * 60_000])
def test_headers_without_end_are_refused(headers: bytes) -> None:
    with answering_server() as server, connection_to(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n") as one:
        with suppress(ConnectionError):
            one.sendall(headers)
        assert received(one)[:13] in (b"HTTP/1.1 400 ", b"")  # or cut off while more was coming
        assert status_of(server) == 200


def test_a_client_that_leaves_in_the_midst_of_a_body_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    with answering_server() as server:
        for _ in range(3):
            connection_to(server, HALVES["half a body"]).close()
        wait_for(lambda: not server.num_connections, "the end of the connections")
        assert status_of(server) == 200

    assert not [record for record in caplog.records if record.levelname == "ERROR"]
