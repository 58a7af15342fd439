"""A daemon does not go through all its objects but when there is time, and leaves none that nobody holds for good."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import weakref
from pathlib import Path

import pytest

from sentinel.daemon.garbage import EVERY_S, FIRST_S, LATEST_S, NEVER, Garbage


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_memory_that_is_free_is_given_back() -> None:
    blocks = [bytearray(4000) for _ in range(30_000)]
    with contextlib.closing(Garbage(100.0)) as garbage:
        # One in 50 stays, so that the heap cannot simply end.
        blocks = blocks[::50]
        before = resident_bytes()
        assert garbage.turn(100.0 + FIRST_S, is_idle=True)
        assert before - resident_bytes() > 50 * 2**20
    assert len(blocks) == 600


class Ring:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


def test_all_objects_are_looked_through_seldom_and_where_there_is_time() -> None:
    former = gc.get_threshold()
    with contextlib.closing(Garbage(100.0)) as garbage:
        assert gc.get_threshold() == (*former[:2], NEVER)
        ring = Ring()
        gc.collect(1)
        gc.collect(1)
        seen = weakref.ref(ring)
        del ring
        assert not garbage.turn(100.0 + FIRST_S - 1, is_idle=True)
        assert not garbage.turn(100.0 + FIRST_S, is_idle=False)
        gc.collect(1)
        assert seen() is not None
        assert garbage.turn(100.0 + FIRST_S, is_idle=True)
        assert seen() is None
        assert not garbage.turn(100.0 + FIRST_S + EVERY_S - 1, is_idle=True)
        assert not garbage.turn(100.0 + FIRST_S + LATEST_S - 1, is_idle=False)
        assert garbage.turn(100.0 + FIRST_S + LATEST_S, is_idle=False)
    assert gc.get_threshold() == former
