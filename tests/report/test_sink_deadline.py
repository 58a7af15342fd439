"""A request to a sink is over by its deadline, whatever its receiver does: real sockets, a receiver for each fault."""

import contextlib
import socket
import threading
import time

import pytest

from sentinel.report.sinks import cutting
from sentinel.report.sinks.delivery import HttpPoster

# Most wait for a deadline of two seconds, long enough for a busy machine to come so far.
pytestmark = pytest.mark.slow

TIMEOUT_S = 2.0
DRIP_S = 0.05


@contextlib.contextmanager
def receiver(serve):
    """A server of one connection at a time; serve: what it does with each."""
    server = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    serve(connection, is_over)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/hook"
    finally:
        is_over.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)


def posting():
    """Return the threads that make a request: those of other tests may still wait for an answer."""
    return {one for one in threading.enumerate() if one.name == "sentinel-post"}


def dripping(data, at_once=0, every_s=DRIP_S):
    def serve(connection, is_over):
        connection.recv(65536)
        connection.sendall(data[:at_once])
        for byte in data[at_once:]:
            if is_over.wait(every_s):
                return
            connection.sendall(bytes([byte]))

    return serve


def deaf(connection, is_over):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    is_over.wait(30)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 5000


@pytest.mark.parametrize(
    ("serve", "outcome", "detail"),
    [
        pytest.param(
            dripping(ENDLESS, every_s=0.5), "retry", "no whole answer within 2 s", id="a status line byte by byte"
        ),
        pytest.param(dripping(ENDLESS, 20), "sent", "HTTP 200", id="a header byte by byte, behind the status"),
        pytest.param(dripping(HEAD + b"x" * 500, len(HEAD)), "sent", "HTTP 200", id="a body byte by byte"),
        pytest.param(
            dripping(b"HTTP/1.1 503 No\r\nRetry-After: 7\r\nContent-Length: 500\r\n\r\n" + b"x" * 500, 57),
            "retry", "HTTP 503", id="the body of a refusal byte by byte",
        ),
    ],
)  # fmt: skip
def test_a_request_is_over_by_its_deadline_and_says_what_became_of_it(serve, outcome, detail):
    with receiver(serve) as url:
        poster, before = HttpPoster(timeout_s=TIMEOUT_S), posting()
        start = time.monotonic()
        delivery = poster.post(url, b"{}", {}, time.time())
        lasted_s = time.monotonic() - start

    assert (delivery.outcome, detail in delivery.detail) == (outcome, True), delivery
    assert lasted_s < TIMEOUT_S + 10.0
    assert delivery.is_unknown == ("whole answer" in delivery.detail)
    assert delivery.retry_after_s == (7.0 if "503" in detail else None)
    assert posting() <= before, "its thread is gone"


def test_a_receiver_that_reads_nothing_is_cut():
    with receiver(deaf) as url:
        start = time.monotonic()
        delivery = HttpPoster(timeout_s=TIMEOUT_S).post(url, b"x" * 30_000_000, {}, time.time())

    assert time.monotonic() - start < TIMEOUT_S + 10.0
    assert (delivery.outcome, delivery.is_unknown) == ("retry", True)
    assert "took nothing of the request" in delivery.detail or "no whole answer" in delivery.detail


def test_a_tls_handshake_that_never_ends_is_cut_and_nobody_heard_anything():
    with receiver(dripping(b"\x16\x03\x01\x40\x00" + b"a" * 500)) as url:
        start = time.monotonic()
        delivery = HttpPoster(timeout_s=TIMEOUT_S).post(url.replace("http:", "https:"), b"{}", {}, time.time())

    assert time.monotonic() - start < TIMEOUT_S + 10.0
    assert (delivery.outcome, delivery.is_unknown) == ("retry", False)


def test_a_proxy_that_drips_its_consent_is_cut():
    with receiver(dripping(ENDLESS)) as url:
        start = time.monotonic()
        poster = HttpPoster(timeout_s=TIMEOUT_S, proxy=url)
        delivery = poster.post("https://hooks.example/secret", b"{}", {}, time.time())

    assert time.monotonic() - start < TIMEOUT_S + 10.0
    assert (delivery.outcome, delivery.detail) == ("retry", "https://hooks.example: no connection within 2 s")


def test_a_name_that_is_looked_up_for_ever_leaves_one_thread_and_sends_nothing_late(monkeypatch):
    received = []

    def serve(connection, is_over):
        received.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    is_found = threading.Event()
    look_up = socket.getaddrinfo

    def slow(*args, **kwargs):
        is_found.wait(60)
        return look_up(*args, **kwargs)

    with receiver(serve) as url:
        poster, before = HttpPoster(timeout_s=1.0), posting()
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        first = poster.post(url, b"{}", {}, time.time())
        second = poster.post(url, b"{}", {}, time.time())
        (late,) = posting() - before
        is_found.set()
        late.join(60)
        silent = list(received)
        third = poster.post(url, b"{}", {}, time.time())

    assert first.detail.endswith("no connection within 1 s") and not first.is_unknown
    assert "the request before has not ended" in second.detail and not second.is_unknown
    assert [one for one in silent if one] == []
    assert third.outcome == "sent"


def test_connections_are_kept_from_one_request_to_the_next():
    connections = []

    def serve(connection, is_over):
        connections.append(connection)
        while data := connection.recv(65536):
            if data.endswith(b"{}"):  # Headers and body may come one by one.
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with receiver(serve) as url:
        poster = HttpPoster(timeout_s=2.0)
        outcomes = [poster.post(url, b"{}", {}, time.time()).outcome for _ in range(3)]
        with cutting.OpenRequest():
            poster._session.close()

    assert outcomes == ["sent"] * 3 and len(connections) == 1
