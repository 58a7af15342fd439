"""Recurring: excursions of a logged value that came and went, so that one more of their kind is no news."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

OFTEN = 3
"""Excursions as high that a series must have had (chosen): the first is told, and so is the second."""
RECALL_STEPS = 100
"""Steps for which an excursion is remembered (chosen)."""
SPREAD_STEPS = 10
"""Steps over which they must be spread (chosen): a burst of a few steps is one event, and what comes after it is news."""
ALIKE = 0.25
"""Share of an excursion's height that another must reach to be of its kind (chosen)."""
MAX_KEPT = 64
"""Newest excursions that a series remembers (chosen)."""
BY_CHANCE = 1e-5
"""Chance that the streak that is asked for is nothing but recurring excursions that follow each other (chosen)."""


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
