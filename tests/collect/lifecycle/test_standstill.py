"""The line of the user's code at which a thread stands, read by another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sentinel.collect.lifecycle.standstill import AFTER, Standstill


@pytest.fixture
def stuck() -> Iterator[threading.Thread]:
    """A thread that waits, in `waits_for_nothing`."""
    release, is_there = threading.Event(), threading.Event()

    def waits_for_nothing() -> None:
        is_there.set()
        release.wait()

    thread = threading.Thread(target=waits_for_nothing)
    thread.start()
    is_there.wait()
    yield thread
    release.set()
    thread.join()


def test_who_makes_no_progress_is_seen_at_the_line_where_it_stands(stuck: threading.Thread) -> None:
    standstill = Standstill()
    reported = [standstill.site((3, 17), stuck.ident or 0) for _ in range(AFTER + 2)]

    assert reported[:AFTER] == [""] * AFTER
    assert reported[-1].startswith("lifecycle/test_standstill.py:")
    assert reported[-1].endswith(".waits_for_nothing)")


def test_who_makes_progress_is_not_looked_at(stuck: threading.Thread) -> None:
    standstill = Standstill()

    assert {standstill.site((3, call), stuck.ident or 0) for call in range(20)} == {""}


def test_a_thread_that_is_gone_stands_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    standstill = Standstill()

    assert {standstill.site((3, 17), thread.ident or 0) for _ in range(AFTER + 2)} == {""}
