"""Server-sent events: pages are told what changed, no more than once a second, and cannot keep others from the API."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from sentinel.daemon.http import connections, event_stream
from sentinel.daemon.http.event_stream import MAX_RUNS, changed, event_of
from sentinel.daemon.http.middleware import MAX_ANSWERS_AT_ONCE
from sentinel.daemon.http.server import HttpServer
from sentinel.daemon.run_status import RunChanges

from ...support.waiting import wait_for
from .test_connections import answering_server, connection_to, received, status_of
from .test_endpoints import TOKENS

ASK = b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n"


class Listener:
    """One end of a stream, which takes what is sent event by event."""

    def __init__(self, server: HttpServer) -> None:
        self.socket = connection_to(server, ASK + b"\r\n")
        self._text = ""

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def event(self) -> dict[str, Any]:
        """The next event that has data."""
        while "data: " not in self._text or "\n\n" not in self._text.partition("data: ")[2]:
            more = self.socket.recv(65536)
            assert more, f"the stream ended: {self._text}"
            self._text += more.decode()
        _, _, rest = self._text.partition("data: ")
        data, _, self._text = rest.partition("\n\n")
        found: dict[str, Any] = json.loads(data)
        return found


def num_open(server: HttpServer) -> int:
    return 0 if server._streams is None else server._streams.num_open


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(event_stream, "LEAST_S", 0.0)
    monkeypatch.setattr(event_stream, "LOOK_S", 0.01)
    with answering_server() as one:
        yield one


def test_a_page_is_told_that_all_may_have_changed_and_then_what_has(server: HttpServer) -> None:
    api: Any = server._api
    with Listener(server) as one:
        assert one.event() == {"is_all": True}
        api.changed = {"a": RunChanges((2,), (0,))}
        assert one.event() == {"progress": ["a"]}
        api.changed = {"a": RunChanges((2,), (1,))}
        assert one.event() == {"found": ["a"]}
        api.changed = {"a": RunChanges((2,), (1,)), "b": RunChanges((0,), (0,))}
        assert one.event() == {"is_all": True}


def test_what_changes_faster_than_it_is_told_is_one_event(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "LEAST_S", 1000.0)
    api: Any = server._api
    with Listener(server) as one:
        one.event()
        for at in range(2, 6):
            api.changed = {"a": RunChanges((at,), (at,))}
            looked_at = server._streams.now if server._streams is not None else dict
            wait_for(lambda at=at, now=looked_at: now()["a"].progress == (at,), "a look at it")
        one.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.event()
        one.socket.settimeout(30.0)

        monkeypatch.setattr(event_stream, "LEAST_S", 0.0)
        assert one.event() == {"progress": ["a"], "found": ["a"]}
        api.changed = {"b": RunChanges((0,), (0,))}
        assert one.event() == {"is_all": True}, "and of all those before nothing more"


def test_an_event_is_bounded_and_no_name_ends_it(server: HttpServer) -> None:
    evil = 'x\n\ndata: {"is_all":true}\r\n\x00'
    many = {f"run-{at}": RunChanges((at,), ()) for at in range(MAX_RUNS + 1)}

    event = event_of(changed({evil: RunChanges((0,), ())}, {evil: RunChanges((1,), ())}))

    assert event.count(b"\n") == 3 and json.loads(event.partition(b"data: ")[2]) == {"progress": [evil]}
    assert changed(many, {name: RunChanges((-1,), ()) for name in many}).is_all


def test_a_stream_ends_with_the_tab_and_with_its_time(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener(server) as one:
        one.event()
        wait_for(lambda: num_open(server) == 1)
    wait_for(lambda: num_open(server) == 0, "the end of the stream")

    monkeypatch.setattr(event_stream, "LONGEST_S", 0.1)
    with connection_to(server, ASK + b"Connection: close\r\n\r\n") as short:
        answer = received(short)
    assert b"text/event-stream" in answer and b"no-store" in answer and answer.endswith(b"0\r\n\r\n"), "in order"
    assert event_stream.LONGEST_S < connections.ANSWER_S


def test_streams_leave_room_for_all_else(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_stream.MAX_STREAMS < MAX_ANSWERS_AT_ONCE // 4
    monkeypatch.setattr(event_stream, "MAX_STREAMS", 3)
    listeners = [Listener(server) for _ in range(3)]
    for one in listeners:
        one.event()

    assert status_of(server, "/api/v1/events") == 503
    assert {status_of(server, path) for path in ("/api/v1/runs", "/healthz", "/")} == {200}

    listeners.pop().socket.close()
    wait_for(lambda: num_open(server) == 2)
    with Listener(server) as again:
        assert again.event() == {"is_all": True}
    for one in listeners:
        one.socket.close()


def test_who_takes_nothing_is_cut_with_the_deadline_of_every_answer(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.DEADLINES, "answering", 0.5)
    api: Any = server._api
    # Events of 2 MB each: what the sockets hold between the two ends is soon full.
    api.changed = {f"{at}{'x' * 10_000}": RunChanges((0,), ()) for at in range(MAX_RUNS)}
    with Listener(server) as slow:
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_for(lambda: num_open(server) == 1)
        api.changed = {name: RunChanges((1,), ()) for name in api.changed}
        wait_for(lambda: num_open(server) == 0 and not server.num_connections, "the end of the connection")


def test_a_stream_does_not_hold_up_the_end_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with answering_server() as one, Listener(one) as listener:
        listener.event()
        one.stop()
        assert not one._thread.is_alive()

    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /api/v1/events HTTP/1.1\r\nHost: evil.example\r\n", 421),
        (b"POST /api/v1/events HTTP/1.1\r\nHost: localhost\r\n", 405),
        (b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n", 403),
        (b"HEAD /api/v1/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n", 200),
    ],
)
def test_the_gate_stands_before_streams_too(server: HttpServer, request_line: bytes, status: int) -> None:
    with connection_to(server, request_line + b"Connection: close\r\n\r\n") as one:
        assert int(received(one).split(b" ", 2)[1]) == status


def test_where_reads_need_a_token_a_stream_needs_it(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(server._config), "are_reads_open", property(lambda self: False))
    token = b"Authorization: Bearer " + TOKENS.read.encode() + b"\r\n"

    assert status_of(server, "/api/v1/events") == 401
    with connection_to(server, ASK + token + b"\r\n") as one:
        assert one.recv(1000).startswith(b"HTTP/1.1 200")
