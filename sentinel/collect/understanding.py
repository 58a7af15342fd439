"""How a trainer's steps were read, logged once where the reading may not be what the trainer means.

Looks at each step as it ends. Says after the first whether a loss was logged with it; after the first rounds of several
optimizers how often each stepped in one; and when so many steps look skipped that they are hardly the trainer's own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection

from sentinel.collect.step import MAX_TURNS, Boundary
from sentinel.messages import is_loss

log = logging.getLogger("sentinel")

NUM_ROUNDS = 3
"""Rounds of several optimizers after which it is logged how often each steps. Too small: a first round that was cut short
counts; too large: a wrong reading of the loop is noticed late."""
WINDOW = 16
"""Newest steps of which 40 % must look skipped to warn. Too small: a few real skips warn; too large: the warning is late."""
SCALED_WINDOW = 64
"""The same with a loss scale, which skips steps one after the other while it looks for its size: from 2**16 down to 1 are
16 skips, which stay below 40 % of 64 steps."""
SKIPPED_SHARE = 0.4


class Understanding:
    """Called at the end of every step; logs each finding at most once."""

    def __init__(self, boundary: Boundary, report: Callable[[str, str], None], *, logs_loss: Callable[[], bool]) -> None:
        """logs_loss: whether this rank is one that would log the loss; others say nothing of it."""
        self._boundary = boundary
        self._report = report
        self._logs_loss = logs_loss
        self._num_steps = 0
        self._logged: set[str] = set()
        self._turns: deque[tuple[int, ...]] = deque(maxlen=NUM_ROUNDS)
        self._skipped: deque[bool] = deque(maxlen=SCALED_WINDOW)
        self._has_reported_turns = self._has_reported_skipped = False

    def step_ends(self, *, logged: Collection[str], is_skipped: bool, is_scaled: bool) -> None:
        """A whole step ends, before the boundary forgets it. logged: names of its scalars; is_scaled: its loss was."""
        self._num_steps += 1
        # A loop that calls monitor.step() may log behind it, which belongs to the next step.
        last = 2 if self._boundary.is_explicit else 1
        if self._num_steps <= last:
            self._logged.update(logged)
            if self._num_steps == last:
                self._see_loss()
        if self._boundary.is_explicit:
            return
        if not self._has_reported_turns:
            self._see_turns()
        if not self._has_reported_skipped:
            self._skipped.append(is_skipped)
            self._see_skipped(SCALED_WINDOW if is_scaled else WINDOW)

    def _see_loss(self) -> None:
        if not self._logs_loss() or any(is_loss(name) for name in self._logged):
            return
        named = [name for name in sorted(self._logged) if "loss" in name.lower()]
        hint = f" (they do not look for {_listed(named[:4])})" if named else ""
        # To the log alone: the daemon, which reads all ranks, knows whether any of them logs one later.
        log.warning(
            "sentinel: no loss was logged with the first step: until one is, rules about the loss are blind%s. Behind each "
            "step, or every few: monitor.log(loss=loss); a tensor is not waited for", hint,
        )  # fmt: skip

    def _see_turns(self) -> None:
        watched = self._boundary.watched
        if len(watched) < 2:
            return
        idle = [one.name for one in watched if one.is_idle]
        if idle:
            self._has_reported_turns = True
            self._report(
                "uneven_optimizers",
                f"{_listed(idle)} did not step while another optimizer stepped {MAX_TURNS} times: until it does, a step is "
                "one of the others. Where your step is another: monitor.step() at its end",
            )
            return
        self._turns.append(tuple(one.num_steps for one in watched))
        if len(self._turns) < NUM_ROUNDS:
            return
        self._has_reported_turns = True
        turns = self._turns[-1]
        if len(set(turns)) > 1 and list(self._turns).count(turns) > 1:
            said = [f"{one.name} steps {_times(times)}" for one, times in zip(watched, turns, strict=True)]
            self._report(
                "uneven_optimizers",
                f"a step is one round of all optimizers, in which {_listed(said)}. Where your step is another: "
                "monitor.step() at its end",
            )
        else:
            log.info("sentinel: a step is one round of %s", _listed([one.name for one in watched]))

    def _see_skipped(self, window: int) -> None:
        newest = list(self._skipped)[-window:]
        if len(newest) < window or sum(newest) < SKIPPED_SHARE * window:
            return
        self._has_reported_skipped = True
        self._report(
            "steps_look_skipped",
            f"{sum(newest)} of the last {window} steps look skipped: no watched optimizer stepped in them. "
            "If the trainer did not skip them (its optimizer evaluates several times for one step, or was not given to "
            "attach), call monitor.step() at the end of each of its steps: what ends there is then a step",
        )


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
