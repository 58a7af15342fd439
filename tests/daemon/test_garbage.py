"""A daemon does not go through all its objects but when there is time, and leaves none that nobody holds for good."""

from __future__ import annotations

import contextlib
import gc
import weakref

from sentinel.daemon.garbage import EVERY_S, LATEST_S, NEVER, Garbage


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
        assert not garbage.turn(100.0 + EVERY_S - 1, is_idle=True)
        assert not garbage.turn(100.0 + EVERY_S, is_idle=False)
        gc.collect(1)
        assert seen() is not None
        assert garbage.turn(100.0 + EVERY_S, is_idle=True)
        assert seen() is None
        assert not garbage.turn(100.0 + EVERY_S + LATEST_S - 1, is_idle=False)
        assert garbage.turn(100.0 + EVERY_S + LATEST_S, is_idle=False)
    assert gc.get_threshold() == former
