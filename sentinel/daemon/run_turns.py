"""How the runs of a daemon take turns: to the end of each, or with the others going on while one waits for rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from sentinel.errors import ConfigError


class RunTurns(Protocol):
    """For the thread that judges."""

    @property
    def are_waiting(self) -> bool:
        """Whether turns were begun that are not at their end."""

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Have a run take its turn, or go on with the one that waits; return its answer, False where it waits (again)."""

    def finish(self, run: str) -> None:
        """Go on with the turn of a run that waits until it is at its end, whatever the others wait for then."""

    def abandon(self, run: str) -> None:
        """Give up the turn of a run that waits: what it opened is closed, and nothing of it goes on."""


class PlainTurns:
    """No turn waits for anything but its own disk."""

    are_waiting = False

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Take a turn to its end."""
        return turn()

    def finish(self, run: str) -> None:
        """Nothing waits."""

    def abandon(self, run: str) -> None:
        """Nothing waits."""


class WaitingTurns:
    """A turn that waits is left, and gone on with when it is due: a run whose node sends no rows holds up itself alone.

    All is one thread, in which each turn has a stack of its own (a greenlet): no two turns touch anything at once.
    """

    def __init__(self) -> None:
        """ConfigError: greenlet is not installed."""
        try:
            import greenlet
        except ImportError as error:
            raise ConfigError('a join needs greenlet: pip install "sentinel[fleet]"') from error
        self._greenlets = greenlet
        self._waiting: dict[str, tuple[greenlet.greenlet, float]] = {}
        """Run -> (its turn, when it is due on the monotonic clock)."""

    @property
    def are_waiting(self) -> bool:
        """Whether turns were begun that are not at their end."""
        return bool(self._waiting)

    def wait(self, seconds: float) -> None:
        """Have the others go on for so long, at least. Called in a turn; elsewhere nothing happens meanwhile."""
        parent = self._greenlets.getcurrent().parent
        if parent is None:
            time.sleep(seconds)
        else:
            parent.switch(seconds)

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Have a run take its turn, or go on with the one that waits; return its answer, False where it waits (again)."""
        begun, due = self._waiting.get(run) or (self._greenlets.greenlet(turn), 0.0)
        if time.monotonic() < due:
            return False
        self._waiting.pop(run, None)
        answer = begun.switch()
        if begun.dead:
            return bool(answer)
        self._waiting[run] = begun, time.monotonic() + answer
        return False

    def finish(self, run: str) -> None:
        """Go on with the turn of a run that waits until it is at its end, whatever the others wait for then."""
        while run in self._waiting:
            time.sleep(max(0.0, self._waiting[run][1] - time.monotonic()))
            self.take(run, lambda: False)

    def abandon(self, run: str) -> None:
        """Give up the turn of a run that waits: what it opened is closed, and nothing of it goes on."""
        if run in self._waiting:
            self._waiting.pop(run)[0].throw()
