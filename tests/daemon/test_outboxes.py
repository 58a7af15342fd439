"""The outboxes of several runs as one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.daemon.outboxes import Outboxes
from sentinel.daemon.systemd import Systemd
from sentinel.store.journal import Commit, Journal
from sentinel.store.outbox_table import Outgoing


@pytest.fixture
def journals(tmp_path: Path):
    opened = [Journal(tmp_path / name / "journal.sqlite") for name in ("a", "b")]
    for journal, name in zip(opened, "ab", strict=True):
        messages = [Outgoing(key=f"{name}{number}", topic="alert:x", body=name.encode()) for number in range(3)]
        journal.commit(Commit(judged=1, outbox=messages))
    yield opened
    for journal in opened:
        journal.close()


def test_rows_of_all_runs_are_one_queue(journals: list[Journal]) -> None:
    outboxes = Outboxes()
    for journal in journals:
        outboxes.join(journal.outbox)

    rows = outboxes.waiting("alert:x", 0.0)
    outboxes.begin_delivery({row.position: f"m{number}" for number, row in enumerate(rows[:4])})
    outboxes.finish_delivery([rows[0].position, rows[5].position], "sent")
    outboxes.postpone_delivery([rows[1].position], 50.0)

    assert [row.key for row in rows] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert len({row.position for row in rows}) == 6
    assert outboxes.num_waiting("alert:x") == 4
    assert [(row.key, row.tries, row.delivery) for row in outboxes.waiting("alert:x", 0.0)] == [
        ("a2", 1, "m2"), ("b0", 1, "m3"), ("b1", 0, "")
    ]  # fmt: skip
    assert [row.key for row in outboxes.waiting("alert:x", 50.0, limit=1)] == ["a1"]
    assert [row.key for row in journals[1].outbox.waiting("alert:x", 0.0)] == ["b0", "b1"]


def test_a_run_that_left_keeps_its_rows(journals: list[Journal]) -> None:
    outboxes = Outboxes()
    for journal in journals:
        outboxes.join(journal.outbox)
    rows = outboxes.waiting("alert:x", 0.0)

    outboxes.leave(journals[0].outbox)
    outboxes.finish_delivery([row.position for row in rows], "sent")

    assert journals[0].outbox.num_waiting("alert:x") == 3
    assert journals[1].outbox.num_waiting("alert:x") == 0


def test_systemd_hears_ready_and_alive(tmp_path: Path) -> None:
    import socket

    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(path)
        received.settimeout(5)
        systemd = Systemd(path, watchdog_us=60_000_000)

        systemd.ready()
        systemd.alive()
        systemd.alive()
        systemd.reloading()
        systemd.stopping()

        assert received.recv(100) == b"READY=1"
        assert received.recv(100) == b"WATCHDOG=1"
        assert received.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert received.recv(100) == b"STOPPING=1"


def test_a_watchdog_of_another_process_is_not_ours() -> None:
    ours = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}
    of = {name: Systemd.of(environ)._interval_s for name, environ in {
        "ours": ours, "nobody's": {**ours, "WATCHDOG_PID": "1"}, "any": {"WATCHDOG_USEC": "2000000"},
        "none": {}, "no number": {"WATCHDOG_USEC": "soon"},
    }.items()}  # fmt: skip
    assert of == {"ours": 30.0, "nobody's": 0.0, "any": 1.0, "none": 0.0, "no number": 0.0}


def test_without_systemd_nothing_is_said() -> None:
    Systemd().ready()
    Systemd("/no/such/socket").stopping()
