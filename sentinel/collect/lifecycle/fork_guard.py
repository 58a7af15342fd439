"""What lives in this process and belongs to it alone: a forked child is disarmed, a child that ends says so."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sentinel.collect.hooks.weak import weakly
from sentinel.collect.lifecycle.exit_watch import EXITS
from sentinel.messages import Bye

AT_EXIT_S = 5.0
"""Longest wait for the disk at the end of the process."""


class Armed(Protocol):
    """Something with hooks on a model."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def ended_steps(self) -> int: ...

    @property
    def thread_id(self) -> int:
        """The thread that trains: when another ends the process, what the step that runs writes just now is not touched."""
        ...

    @property
    def directory(self) -> Path:
        """The run's."""
        ...

    def disarm(self) -> None:
        """Measure nothing from now on: this is a forked child."""


class Ending:
    """Has a monitor say its last words when the process ends, or nobody catches what it raised, short of a signal."""

    def __init__(self, owner: Armed, close: Callable[[Bye, float], None], has_left: Callable[[float], bool]) -> None:
        """close: a method of the owner that ends the incarnation with these words and waits so many seconds for the disk.
        has_left:
        waits on. The owner is not kept alive.
        """
        self._owner = weakref.ref(owner)
        self.leave = weakly(close)
        self.has_left = has_left
        _armed.add(owner)
        atexit.register(self._at_exit)
        # A process made by multiprocessing's fork never runs atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        EXITS.add(self)

    @property
    def is_alive(self) -> bool:
        """Whether there is anything left to say."""
        owner = self._owner()
        return owner is not None and owner.is_alive

    @property
    def ended_steps(self) -> int:
        """Steps ended so far."""
        owner = self._owner()
        return 0 if owner is None else owner.ended_steps

    @property
    def thread_id(self) -> int:
        """The thread that trains."""
        owner = self._owner()
        return 0 if owner is None else owner.thread_id

    def cancel(self) -> None:
        """It was closed before."""
        atexit.unregister(self._at_exit)
        self._finalizer.cancel()
        EXITS.discard(self)

    def _at_exit(self) -> None:
        if self.is_alive:
            self.leave(EXITS.exit_bye(), AT_EXIT_S)


_armed: weakref.WeakSet[Any] = weakref.WeakSet()


def is_alive_in(directory: Path, run: str) -> bool:
    """Tell whether a monitor of this process is alive in a run, a folder of `directory`."""
    wanted = (directory / run).absolute()
    return any(one.is_alive and one.directory.absolute() == wanted for one in list(_armed))


def _disarm_child() -> None:
    # A forked data-loader worker or trainer helper: the spool, the steps and the hooks belong to the parent.
    for one in list(_armed):
        one.disarm()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disarm_child)
