"""How the runs of a daemon take turns: to the end of each, or with the others going on while one waits or has much to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from sentinel.errors import ConfigError

SLICE_S = 0.1
"""A turn that has taken so long lets the others go on: as long as the longest pause of the loop that takes them."""


class RunTurns(Protocol):
    """For the thread that judges. A turn is left when it waits or gives way, and gone on with later."""

    @property
    def left_s(self) -> float:
        """Seconds for which the turn that is being taken was left since it began: others had them."""

    @property
    def is_share_over(self) -> bool:
        """Whether the turn that is being taken has had its share, and may be left for others."""

    def is_left(self, run: str) -> bool:
        """Return whether a turn of this run is left, and not at its end."""

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Have a run take its turn, or go on with the one that is left; return its answer. Where it waits (again) that is
        False, and True where it gave way.
        """

    def give_way(self) -> None:
        """Have the others go on. Called in a turn, between two of its steps."""

    def finish(self, run: str, until: float) -> bool:
        """Go on with the turn of a run that was left, whatever the others wait for then; return whether it is at its end.

        until: when that is given up, on the monotonic clock.
        """

    def abandon(self, run: str) -> None:
        """Give up the turn of a run that was left: what it opened is closed, and nothing of it goes on."""


class PlainTurns:
    """Each turn is taken to its end: it waits for nothing but its own disk."""

    left_s = 0.0
    is_share_over = False

    def is_left(self, run: str) -> bool:
        """None ever is."""
        return False

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Take a turn to its end."""
        return turn()

    def give_way(self) -> None:
        """Nobody is given way to."""

    def finish(self, run: str, until: float) -> bool:
        """It is at its end."""
        return True

    def abandon(self, run: str) -> None:
        """Nothing is left."""


class SharedTurns:
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
        self._left: dict[str, _LeftTurn] = {}
        self._resumed = 0.0
        """When the turn that is being taken was begun, or gone on with."""
        self.left_s = 0.0

    @property
    def is_share_over(self) -> bool:
        """Whether the turn that is being taken has had its share, and may be left for others."""
        return self._greenlets.getcurrent().parent is not None and time.monotonic() - self._resumed >= SLICE_S

    def is_left(self, run: str) -> bool:
        """Return whether a turn of this run is left, and not at its end."""
        return run in self._left

    def wait(self, seconds: float) -> None:
        """Have the others go on for so long, at least. Called in a turn; elsewhere nothing happens meanwhile."""
        parent = self._greenlets.getcurrent().parent
        if parent is None:
            time.sleep(seconds)
        else:
            parent.switch(seconds)

    def give_way(self) -> None:
        """Have the others go on. Called in a turn, between two of its steps."""
        self.wait(0.0)

    def take(self, run: str, turn: Callable[[], bool]) -> bool:
        """Have a run take its turn, or go on with the one that is left; return its answer. Where it waits (again) that is
        False, and True where it gave way.
        """
        now = time.monotonic()
        one = self._left.get(run)
        if one is None:
            one = _LeftTurn(self._greenlets.greenlet(turn), at=now, due=now)
        elif now < one.due:
            return False
        self._left.pop(run, None)
        self._resumed, self.left_s = now, one.left_s + now - one.at
        answer = one.stack.switch()
        if one.stack.dead:
            return bool(answer)
        now = time.monotonic()
        self._left[run] = _LeftTurn(one.stack, at=now, due=now + answer, left_s=self.left_s)
        return not answer

    def finish(self, run: str, until: float) -> bool:
        """Go on with the turn of a run that was left, whatever the others wait for then; return whether it is at its end.

        until: when that is given up, on the monotonic clock.
        """
        while run in self._left:
            if time.monotonic() >= until:
                return False
            time.sleep(max(0.0, self._left[run].due - time.monotonic()))
            self.take(run, lambda: False)
        return True

    def abandon(self, run: str) -> None:
        """Give up the turn of a run that was left: what it opened is closed, and nothing of it goes on."""
        if run in self._left:
            self._left.pop(run).stack.throw()


class _LeftTurn:
    def __init__(self, stack: Any, *, at: float, due: float, left_s: float = 0.0) -> None:
        """stack: the greenlet. at: when it was left. due: when it is gone on with. left_s: seconds of earlier times."""
        self.stack, self.at, self.due, self.left_s = stack, at, due, left_s
