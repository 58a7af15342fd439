"""How often a kind is measured so that its share of a step stays within `max_overhead`."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from sentinel.collect.schedule.costs import OWN, TRAINER, Costs
from sentinel.collect.schedule.plan import Plan
from sentinel.record import Kind

WARM_STEPS = 200
"""Steps of a process in which every kind is measured as scheduled, whatever it costs. Too small: short runs lose rows, and
first steps (compilation, caches) set the intervals; too large: `max_overhead` is exceeded for longer."""
WARM_S = 30.0
"""Seconds of the same, for runs whose 200 steps are over sooner than their start-up."""
DECIDE_EVERY = 16
"""Steps of the trainer's count between two decisions: four steps whose costs are taken, one more than `LEAST`."""
WINDOW = 9
"""Newest steps whose median cost counts: up to four odd ones in a row change nothing; more react later."""
LEAST = 3
"""Steps of which costs must be known before they count: the fewest whose median leaves an odd one out."""
BACK = 0.7
"""Share of its bound within which a kind's cost must be at half its interval before that is taken. Too near 1: a cost near
the bound changes the interval at every decision; too small: a kind that became cheap stays rare."""
MAX_INTERVAL = 1024
"""Longest interval of a kind, in steps. Too small: dear kinds exceed the bound; too large: a kind is hardly measured."""
DEFAULT_SHARE = 0.5
"""Part of `max_overhead` that all of Sentinel's work may take while `kinds` is left at its default: 5 % of a step."""
MAX_DEFAULT_INTERVAL = 8
"""Longest interval of the default kinds: at 8, half of what remained was not theirs (1.3 of 2.7 ms of a GPT's step,
benchmarks/results/2026-11-22-small_steps-bound.md); a longer one costs rows and saves little."""
FRESH_STEPS = 32
"""Steps for which every kind is measured as scheduled after a non-finite value was seen here. Too small: its spread is not
recorded; too large: a run that stays NaN exceeds its bound for long."""


class Pacing:
    """Lengthens the intervals of kinds that cost too much, and shortens them again when steps get longer.

    Each rank decides for itself, of its own costs. Intervals are powers of two and count in the trainer's steps, so what a
    rank with a longer interval measures is measured by all: the daemon merges and compares those steps.
    """

    def __init__(self, plan: Plan, report: Callable[[str, str, str, int], None]) -> None:
        """tell: (code, message, site, step), for the log and the daemon."""
        self._plan = plan
        self._report = report
        self._costs: dict[int, deque[int]] = {}
        """Kind -> nanoseconds of the last steps that measured it; OWN: of all of them."""
        self._steps: deque[int] = deque(maxlen=WINDOW)
        """Nanoseconds of the last steps without what was spent."""
        self._num_steps = 0
        self._began_ns = -1
        self._generation = -1
        self._fresh_until = -1

    @property
    def _limit(self) -> float:
        return self._plan.config.measurement.max_overhead or 0.0

    def note(self, costs: Costs) -> None:
        """Take in a step that has ended."""
        self._num_steps += 1
        spent = costs.end()
        if spent is None:
            return
        if self._generation != self._plan.generation:
            # Other kinds, other targets: other costs.
            self._generation = self._plan.generation
            self._costs.clear()
        self._steps.append(max(1, spent[TRAINER]))
        for kind in (*(kind for kind in self._plan.config.adjustable if self._plan.takes(kind)), OWN):
            self._costs.setdefault(kind, deque(maxlen=WINDOW)).append(spent[kind])

    def saw_nonfinite(self, step: int) -> None:
        """A value that is not finite was seen on this rank: what comes next is measured as the schedules say."""
        self._fresh_until = step + FRESH_STEPS

    def begin(self, step: int, now_ns: int) -> None:
        """Set the intervals of the plan for the step that begins."""
        plan = self._plan
        if self._began_ns < 0:
            self._began_ns = now_ns
        if not self._limit or not plan.config.adjustable:
            plan.intervals = {}
            return
        plan.is_fresh = step <= self._fresh_until
        if plan.is_fresh or step % DECIDE_EVERY:
            return
        if self._num_steps < WARM_STEPS or now_ns - self._began_ns < WARM_S * 1e9 or len(self._steps) < LEAST:
            return
        self._decide(step)

    def _decide(self, step: int) -> None:
        plan, length = self._plan, statistics.median(self._steps)
        costs = {
            kind: statistics.median(known)
            for kind in plan.config.adjustable
            if len(known := self._costs.get(kind, ())) >= LEAST
        }
        most, fewer = self._wanted(costs, length, 1.0), self._wanted(costs, length, BACK)
        for kind, cost in costs.items():
            now = plan.intervals.get(kind, 1)
            if most[kind] > now:
                plan.intervals[kind] = most[kind]
                self._report_interval(step, kind, now, cost, length)
            elif fewer[kind] < now:
                plan.intervals[kind] = max(now // 2, fewer[kind])

    def _wanted(self, costs: dict[Kind, float], length: float, part: float) -> dict[Kind, int]:
        """Return the interval at which each kind stays within this part of its bound."""
        found = {kind: _interval(cost, part * self._limit * length) for kind, cost in costs.items()}
        if self._plan.config.is_default:
            left = part * self._limit * DEFAULT_SHARE * length - statistics.median(self._costs.get(OWN) or (0,))
            # Of weights and gradients the weights change least from step to step.
            for kind in sorted(found):
                while sum(costs[one] / found[one] for one in found) > left and found[kind] < MAX_DEFAULT_INTERVAL:
                    found[kind] *= 2
        return found

    def _report_interval(self, step: int, kind: Kind, former: int, cost: float, length: float) -> None:
        share, ms = 100 * cost / (former * length), length / 1e6
        if cost > former * self._limit * length:
            why = f"more than max_overhead ({100 * self._limit:.3g} %)"
        else:
            why = f"and all that is measured by default more than half of max_overhead ({50 * self._limit:.3g} %)"
        was = "every step" if former == 1 else f"every {former} steps"
        self._report(
            "interval_lengthened",
            f"{kind.label} costs {share:.2g} % of a step of {ms:.3g} ms, {why}: from step {step} on it is "
            f"measured every {self._plan.intervals[kind]} steps instead of {was}. To measure it more often set "
            f"max_overhead higher (null: no bound), or a step_interval of its own: probes: {{{kind.label}: "
            f"{{step_interval: 1}}}}",
            kind.label,
            step,
        )


def _interval(cost: float, bound: float) -> int:
    """Return the least power of two by which a cost has to be divided to be within a bound."""
    interval = 1
    while cost > interval * bound and interval < MAX_INTERVAL:
        interval *= 2
    return interval
