"""What Sentinel's own work costs the training thread in a step, kind by kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Flag, Kind

_BORDER = int(Flag.BORDER)

SAMPLE_EVERY = 4
"""Costs are taken in every fourth step of the trainer's count: two readings of the clock at each site of each step would be
a cost of their own, rarer ones learn costs late. Longer intervals are powers of two: those of four and more are due then."""

OWN = len(Kind)
"""Stands for work of Sentinel that belongs to no kind that could be measured more rarely: the black box, the step's end."""
TRAINER = OWN + 1
"""Stands for the trainer's time."""

PROBE_KINDS: dict[str, tuple[Kind, ...]] = {
    "optimizer_state": (Kind.EXP_AVG, Kind.EXP_AVG_SQ),
    "update": (Kind.UPDATE, Kind.UPDATE_RATIO),
    "histogram": (),
    "structure": (),
    "dump": (),
    "trace": (),
}
"""Name of a probe -> the kinds that it measures, where these are not the one that it is named after."""


class Costs:
    """Divides the time of the running step among kinds: from one `turn_to` to the next it is one kind's.

    Wall time: what a kind makes the training thread wait for counts. The kernels of an accelerator run beside it and are not
    seen.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """clock: nanoseconds that never go back."""
        self.clock = clock
        self.is_on = False
        """The running step is one whose costs are taken."""
        self.spent = [0] * (TRAINER + 1)
        """[kinds, OWN, TRAINER] nanoseconds of the running step."""
        self.is_due: Callable[[Kind], bool] = lambda kind: True
        """Whether the running step measures a kind."""
        self._current = TRAINER
        self._since = 0

    def begin(self, step: int) -> None:
        """A step begins, at the first work of Sentinel in it."""
        self.is_on = step % SAMPLE_EVERY == 0
        if self.is_on:
            self.spent = [0] * (TRAINER + 1)
            self._current, self._since = TRAINER, self.clock()

    def end(self) -> list[int] | None:
        """Return what was spent in the step, all work of Sentinel in it done; None: it is not known."""
        if not self.is_on:
            return None
        self.turn_to(TRAINER)
        self.is_on = False
        return self.spent

    def turn_to(self, kind: int) -> int:
        """Count the time from now on as that of a kind; return whose it was, to turn back to."""
        former = self._current
        if self.is_on:
            now = self.clock()
            self.spent[former] += now - self._since
            self._current, self._since = kind, now
        return former

    def turn_to_probe(self, name: str) -> int:
        """As `turn_to`, of a probe's work: the first of its kinds that the step measures stands for all of them."""
        if not self.is_on:
            return self._current
        return self.turn_to(next((kind for kind in kinds_of_probe(name) if self.is_due(kind)), OWN))

    def first_due(self, kinds: Iterable[Kind]) -> int:
        """Return which of the kinds that a place takes pays for the way there: the first that the step measures."""
        return min((kind for kind in kinds if self.is_due(kind)), default=OWN) if self.is_on else OWN

    def kind_of(self, entry: TensorEntry) -> int:
        """Return who pays for a tensor: its kind, or nobody where it is at a border of the black box."""
        return OWN if entry.flags & _BORDER else entry.kind


def kinds_of_probe(name: str) -> tuple[Kind, ...]:
    """Return the kinds that a probe of this name measures."""
    known = PROBE_KINDS.get(name)
    if known is None:
        known = PROBE_KINDS[name] = (Kind.of(name),) if name.upper() in Kind.__members__ else ()
    return known
