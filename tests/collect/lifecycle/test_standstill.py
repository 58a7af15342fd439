"""The line of the user's code at which a thread stands, read by another thread."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from sentinel.collect.lifecycle.standstill import AFTER, Standstill
from sentinel.collect.probes.call_sites import CallSites


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


@pytest.fixture
def collecting() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_meanwhile_and_afterwards_as_before(
    stuck: threading.Thread, monkeypatch: pytest.MonkeyPatch, collecting: None, is_on: bool
) -> None:
    collects, frames = list[bool](), sys._current_frames

    def seen() -> dict[int, object]:
        collects.append(gc.isenabled())
        if len(collects) > 1:
            raise MemoryError
        return dict(frames())

    monkeypatch.setattr(sys, "_current_frames", seen)
    if not is_on:
        gc.disable()

    site = CallSites().of_thread(stuck.ident or 0)
    assert site is not None and site.function.endswith(".waits_for_nothing") and gc.isenabled() == is_on
    with pytest.raises(MemoryError):
        CallSites().of_thread(stuck.ident or 0)
    assert gc.isenabled() == is_on and collects == [False, False]


# What dies has the others run, and these begin threads: with garbage collected while frames are made, Python 3.11.7 stands
# still within a second.
BEGINS_THREADS = """
import gc, sys, threading, time, weakref
from sentinel.collect.probes.call_sites import CallSites

class Knot:
    def __init__(self):
        self.me = self

def dying(_):
    for _ in range(20000):
        pass

def watch(thread_id, sites, kept):
    while True:
        kept[:] = [weakref.ref(Knot(), dying) for _ in range(3)]
        sites.of_thread(thread_id)

gc.set_threshold(1)
sys.setswitchinterval(1e-5)
threading.Thread(target=watch, args=(threading.get_ident(), CallSites(), []), daemon=True).start()
for _ in range(3000):
    one = threading.Thread(target=int)
    one.start()
    one.join()
print("went on", flush=True)
"""


@pytest.mark.slow
def test_whoever_begins_threads_meanwhile_does_not_stand_still_for_it() -> None:
    ended = subprocess.run([sys.executable, "-c", BEGINS_THREADS], capture_output=True, text=True, timeout=240)

    assert "went on" in ended.stdout, ended.stderr
