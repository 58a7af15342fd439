"""ScalarStep: all rules on logged values at one step. Those that are well cost one call of C together, and no numpy."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sentinel.anomaly import Anomaly
from sentinel.detect import State
from sentinel.native import fast_rules as native
from sentinel.rules.watches.scalar_watch import ScalarWatch, WatchedScalars

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sentinel.rules.watches.watch import Watch
    from sentinel.step_view import StepView

_RATE = re.compile(r"(^|[._/ -])(lr|learning[._ -]?rate)([._/ -]|$)", re.IGNORECASE)
MAX_KNOWN = 64
"""Sets of names that are remembered, a bound on memory: a run has a few, what it logs at every step and what now and
then."""


class ScalarStep:
    """Judges the logged values of a step by all watches of an engine, each in the engine's order."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        """watches: of an engine; those of logged values judge."""
        self._watches = [watch for watch in watches if isinstance(watch, ScalarWatch)]
        self._known: dict[tuple[str, ...], _WatchedNames] = {}
        self._num_slow = 0
        """Times that numpy had the word: a detector may have put other arrays into its state."""

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the records of one step."""
        scalars = view.scalars
        names = tuple(scalars)
        step = self._known.get(names)
        if step is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            step = self._known[names] = _WatchedNames(names, self._watches)
        means = [one.mean for one in scalars.values()]
        rate = max((means[at] for at in step.rates if math.isfinite(means[at])), default=None)
        for watch in step.noticing:
            watch.notice((view.attempt, view.step), rate)
        found: list[Anomaly] = []
        for watch in step.idle:
            if watch.episodes.onset:
                found += watch.quiet(view)
        if step.fast:
            step.take(means, self._num_slow)
            for watch, named, is_taken in zip(step.fast, step.fast_named, step.taken, strict=True):
                if not is_taken:
                    self._num_slow += 1
                    found += watch.judge(view, named)
                    continue
                watch.num_points += named.num
                if watch.episodes.onset:
                    found += watch.judge_healthy(view, named)
        for watch, named in step.slow:
            found += watch.judge(view, named)
        return found


class _WatchedNames:
    """What the watches look at in the steps that log one set of names."""

    def __init__(self, names: tuple[str, ...], watches: Sequence[ScalarWatch]) -> None:
        self.rates = [at for at, name in enumerate(names) if _RATE.search(name)]
        """Which of them are learning rates."""
        self.idle: list[ScalarWatch] = []
        """Watches that match none of them."""
        self.slow: list[tuple[ScalarWatch, WatchedScalars]] = []
        """Watches that have no fast path."""
        self.fast: list[ScalarWatch] = []
        self.fast_named: list[WatchedScalars] = []
        self.noticing: list[ScalarWatch] = []
        """Watches that are notified of resumes and restarted schedules."""
        for watch in watches:
            named = watch.find(names)
            if not named.num:
                self.idle.append(watch)
                continue
            if watch.declared.rearms:
                self.noticing.append(watch)
            if watch.fast_path is None:
                self.slow.append((watch, named))
            else:
                self.fast.append(watch)
                self.fast_named.append(named)
        self.taken = bytearray(len(self.fast))
        """[fast] whether each took its points in at the newest step."""
        self._rules = (native.FastRule * len(self.fast))()
        self._means = (ctypes.c_double * len(names))()
        self._states: list[State] = []
        self._as_of = -1
        self._kept: list[tuple[object, ...]] = []
        if self.fast:
            taken = (ctypes.c_char * len(self.taken)).from_buffer(self.taken)
            self._addresses = ctypes.addressof(self._rules), ctypes.addressof(self._means), ctypes.addressof(taken)
            self._taken = taken

    def take(self, means: list[float], num_slow: int) -> None:
        """Have all watches with a fast path take their points in, those that can."""
        if num_slow != self._as_of or not all(map(_is_same, self.fast, self._states)):
            self._describe()
            self._as_of = num_slow
        self._means[:] = means  # type: ignore[assignment]
        rules, values, taken = self._addresses
        assert native.step is not None
        native.step(rules, len(self.fast), values, taken)

    def _describe(self) -> None:
        """Look up where parameters and states lie: as long as the arrays are the same, they lie there."""
        self._states = [watch.state for watch in self.fast]
        self._kept = []
        for rule, watch, named in zip(self._rules, self.fast, self.fast_named, strict=True):
            assert watch.fast_path is not None
            self._kept.append(watch.fast_path.describe(rule, watch.state))
            rule.values, rule.series, rule.num = named.at.ctypes.data, named.series.ctypes.data, named.num


def _is_same(watch: ScalarWatch, state: State) -> bool:
    return watch.state is state
