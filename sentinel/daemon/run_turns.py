"""How the runs of a daemon take turns: to the end of each, or with the others going on while one waits or has much to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from sentinel.errors import ConfigError

SLICE_S = 0.1
"""A turn that has taken so long lets the others go on: as long as the longest pause of the loop that takes them."""


class RunTurns(Protocol):
    """For the thread that judges."""

    @property
    def are_waiting(self) -> bool:
        """Whether turns were begun that are not at their end."""

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Have a run take its turn, or go on with the one that is left; return its answer. Where it waits (again) that is
        False, and True where it gave way.
        """

    def give_way(self) -> None:
        """Have the others go on where this turn has had its share. Called in a turn, between two of its steps."""

    def finish(self, run: str) -> None:
        """Go on with the turn of a run that waits until it is at its end, whatever the others wait for then."""

    def abandon(self, run: str) -> None:
        """Give up the turn of a run that waits: what it opened is closed, and nothing of it goes on."""


class PlainTurns:
    """Each turn is taken to its end: it waits for nothing but its own disk."""

    are_waiting = False

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Take a turn to its end."""
        return turn()

    def give_way(self) -> None:
        """Nobody is given way to."""

    def finish(self, run: str) -> None:
        """Nothing waits."""

    def abandon(self, run: str) -> None:
        """Nothing waits."""


class WaitingTurns:
    """A turn that waits, or has had its share, is left and gone on with when it is due: no run holds up the others.

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
        self._begun = 0.0
        """When the turn that is being taken was begun, or gone on with."""

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

    def give_way(self) -> None:
        """Have the others go on where this turn has had its share. Called in a turn, between two of its steps."""
        if time.monotonic() - self._begun >= SLICE_S and self._greenlets.getcurrent().parent is not None:
            self.wait(0.0)

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Have a run take its turn, or go on with the one that is left; return its answer. Where it waits (again) that is
        False, and True where it gave way.
        """
        begun, due = self._waiting.get(run) or (self._greenlets.greenlet(turn), 0.0)
        self._begun = time.monotonic()
        if self._begun < due:
            return False
        self._waiting.pop(run, None)
        answer = begun.switch()
        if begun.dead:
            return bool(answer)
        self._waiting[run] = begun, time.monotonic() + answer
        return not answer

    def finish(self, run: str) -> None:
        """Go on with the turn of a run that waits until it is at its end, whatever the others wait for then."""
        while run in self._waiting:
            time.sleep(max(0.0, self._waiting[run][1] - time.monotonic()))
            self.take(run, lambda: False)

    def abandon(self, run: str) -> None:
        """Give up the turn of a run that waits: what it opened is closed, and nothing of it goes on."""
        if run in self._waiting:
            self._waiting.pop(run)[0].throw()
