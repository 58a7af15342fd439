"""ExitWatch: how this process ends, as far as Python sees it; each monitor that is alive is called.

Seen are exceptions that nobody caught (in the main thread, or in the thread that trains), and the codes that are handed to
`sys.exit` and `os._exit`. What was there before is called as before, with the same arguments, and is put back when the last
monitor has ended. At a prompt, where an exception ends nothing, no monitor is notified.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import msgspec

from sentinel.collect.lifecycle.farewell import exit_code, farewell, raised_now
from sentinel.collect.lifecycle.signal_handlers import signal_of_frame
from sentinel.messages import Bye

EXIT_WRITE_S = 5.0
"""Longest time that a trainer which raised waits for its last words to be on disk."""
HURRY_S = 1.0
"""The same before `os._exit`, which somebody calls who cannot wait."""


class WatchedMonitor(Protocol):
    """A monitor, as this module knows it."""

    @property
    def thread_id(self) -> int:
        """The thread that trains."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether there is anything left to say."""
        ...

    @property
    def ended_steps(self) -> int:
        """Steps ended so far."""
        ...

    def leave(self, said: Bye, timeout_s: float) -> None:
        """End this incarnation with these words; wait for the disk so long."""
        ...

    def has_left(self, timeout_s: float) -> bool:
        """Wait until the words are on disk; False: it took longer."""
        ...


class ExitWatch:
    """One for the process: what it wraps belongs to the process."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []
        self._noted: tuple[Bye, int] | None = None
        """What `sys.exit` was called with, and the steps that all monitors had ended by then."""

    def add(self, one: WatchedMonitor) -> None:
        """Tell this monitor too."""
        if not self._watched:
            self._install()
        self._watched.add(one)

    def discard(self, one: WatchedMonitor) -> None:
        """Tell this monitor no more; with the last everything is put back."""
        self._watched.discard(one)
        if not any(other.is_alive for other in self._watched):
            self._remove()

    def exit_bye(self) -> Bye:
        """Return what is to be said at exit: the exception on its way, what `sys.exit` was given, or a plain exit."""
        error = raised_now()
        if error is not None:
            return farewell("exit", error)
        # Whoever caught the SystemExit and trained on did not mean it.
        return self._noted[0] if self._noted is not None and self._noted[1] == self._num_steps() else farewell("exit")

    def _install(self) -> None:
        former_hook, former_thread_hook = sys.excepthook, threading.excepthook
        former_exit, former_hard_exit = sys.exit, os._exit

        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            reported = [] if _is_prompt() else self._leave(farewell("exception", error), 0.0)
            former_hook(kind, error, trace)
            _wait(reported, EXIT_WRITE_S)

        def thread_excepthook(args: Any) -> None:
            ident = args.thread.ident if args.thread is not None else None
            reported = []
            if args.exc_value is not None and ident is not None and not isinstance(args.exc_value, SystemExit):
                reported = self._leave(farewell("exception", args.exc_value), 0.0, thread_id=ident)
            former_thread_hook(args)
            _wait(reported, EXIT_WRITE_S)

        def sys_exit(status: Any = None, /) -> NoReturn:
            code, error = exit_code(status), raised_now()
            is_why = code != 0 and error is not None and not isinstance(error, SystemExit)
            self._noted = _handled(farewell("exit", error if is_why else None, code)), self._num_steps()
            former_exit(status)

        def hard_exit(status: int) -> NoReturn:
            self._leave(_handled(farewell("exit", code=exit_code(status))), HURRY_S)
            former_hard_exit(status)

        for owner, name, mine, former in (
            (sys, "excepthook", excepthook, former_hook),
            (threading, "excepthook", thread_excepthook, former_thread_hook),
            (sys, "exit", sys_exit, former_exit),
            (os, "_exit", hard_exit, former_hard_exit),
        ):
            setattr(owner, name, mine)
            self._undo.append(lambda owner=owner, name=name, mine=mine, former=former: _put_back(owner, name, mine, former))  # type: ignore[misc]

    def _remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _num_steps(self) -> int:
        return sum(one.ended_steps for one in self._watched)

    def _leave(self, said: Bye, timeout_s: float, *, thread_id: int | None = None) -> list[WatchedMonitor]:
        """Have the monitors say their last words; thread_id: only those that train in this thread."""
        reported = [one for one in list(self._watched) if one.is_alive and thread_id in (None, one.thread_id)]
        for one in reported:
            one.leave(said, timeout_s)
        return reported


def _handled(said: Bye) -> Bye:
    """Return last words with the signal whose handler ends the process just now, if one does."""
    return said if said.signal else msgspec.structs.replace(said, signal=signal_of_frame(sys._getframe(2)))


def _wait(reported: list[WatchedMonitor], timeout_s: float) -> None:
    for one in reported:
        one.has_left(timeout_s)


def _put_back(owner: Any, name: str, mine: object, former: object) -> None:
    # Somebody who wrapped ours in turn calls it still: it tells nobody any more.
    if getattr(owner, name) is mine:
        setattr(owner, name, former)


def _is_prompt() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


EXITS = ExitWatch()
"""The one of this process."""
