"""Recurring: excursions of a logged value that came and went, so that one more of their kind is no news."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

OFTEN = 3
"""Excursions as high that a series must have had before one counts as recurring: the first and the second are reported.
More: noise with a long tail is reported more often; fewer: a second fault passes for noise."""
RECALL_STEPS = 100
"""Measured steps for which an excursion is remembered. Fewer: what recurs rarely is reported each time; more: an old trouble
hides a new one."""
SPREAD_STEPS = 10
"""Measured steps over which they must be spread: a burst of fewer steps is one event, and what comes after it is news. More:
noise that recurs quickly is reported; fewer: a burst makes the next fault look usual."""
ALIKE = 0.25
"""Share of an excursion's height that another must reach to count as its like: a quarter. Smaller: little noise hides a high
spike; larger: recurring spikes of uneven height are reported each time."""
MAX_KEPT = 64
"""Newest excursions that a series remembers: a bound on memory, of two numbers each."""
BY_CHANCE = 1e-5
"""Chance that a streak of the length asked for is nothing but recurring excursions that follow each other. Larger: such
streaks are reported as a level that stays; smaller: a true one is reported later."""


class Excursion(msgspec.Struct, frozen=True):
    """One that began at `step`, and stood `height` above the baseline."""

    step: int
    height: float


class Recurring:
    """The newest excursions of each series, by slot."""

    def __init__(self) -> None:
        self._known: dict[int, list[Excursion]] = {}

    def see(self, slot: int, step: int, height: float) -> None:
        """Remember an excursion that begins."""
        self._known[slot] = [*self._known.get(slot, [])[-MAX_KEPT + 1 :], Excursion(step, height)]

    def forget(self, slot: int) -> None:
        """Forget the newest: it goes on, and is no excursion."""
        self._known.get(slot, [])[-1:] = []

    def is_known(self, slot: int, step: int, height: float, stride: int) -> bool:
        """Return whether a series had excursions of this height lately, `OFTEN` and more, and no burst of them."""
        alike = [one.step for one in self._lately(slot, step, stride) if one.height >= ALIKE * height]
        return len(alike) >= OFTEN and alike[-1] - alike[0] >= SPREAD_STEPS * stride

    def lasting_steps(self, slot: int, step: int, stride: int, least: int) -> int:
        """Return the points in a row that say more than that excursions recur: `least`, more where they are frequent."""
        known = self._lately(slot, step, stride)
        if len(known) < OFTEN:
            return least
        begin = min(len(known) * stride / max(step - known[0].step, stride), 0.25)
        # Of points that are high with chance p, each for itself, a share of p (1 - p) begins an excursion.
        share = 0.5 * (1.0 - math.sqrt(1.0 - 4.0 * begin))
        needed, chance = 1, share
        while chance > BY_CHANCE:
            needed, chance = needed + 1, chance * share
        return max(needed, least)

    def _lately(self, slot: int, step: int, stride: int) -> list[Excursion]:
        return [one for one in self._known.get(slot, []) if 0 < step - one.step <= RECALL_STEPS * stride]

    def to_dict(self) -> dict[str, object]:
        """Return everything, for a snapshot."""
        return {str(slot): msgspec.to_builtins(known) for slot, known in self._known.items()}

    def take_dict(self, data: Mapping[str, Any]) -> None:
        """Take back what `to_dict` gave."""
        self._known = {int(slot): msgspec.convert(known, list[Excursion]) for slot, known in data.items()}
