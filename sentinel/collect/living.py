"""What lives in this process and belongs to it alone: a forked child is disarmed, a child that ends says so."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Armed(Protocol):
    """Something with hooks on a model."""

    is_alive: bool


class Ending:
    """Calls `close` when the process ends, however that happens short of a signal."""

    def __init__(self, owner: Armed, close: Callable[[], None]) -> None:
        self._close = close
        _living.add(owner)
        atexit.register(close)
        # A process made by multiprocessing's fork never runs atexit.
        self._finalizer = multiprocessing.util.Finalize(None, close, exitpriority=100)

    def cancel(self) -> None:
        """It was closed before."""
        atexit.unregister(self._close)
        self._finalizer.cancel()


_living: weakref.WeakSet[Any] = weakref.WeakSet()


def _disarm_child() -> None:
    # A forked data-loader worker or trainer helper: the spool, the steps and the hooks belong to the parent.
    for one in list(_living):
        one.is_alive = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disarm_child)
