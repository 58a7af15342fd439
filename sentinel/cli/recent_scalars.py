"""RecentScalars: the loss, the gradient norm and the learning rate of the newest steps, by whatever name they are logged."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sentinel.logs.columns import channels
from sentinel.messages import EndStep

ROLES = ("loss", "grad_norm", "lr")
MAX_STEPS = 240
"""Newest steps that are kept; a bound on memory and on the length of a picture, more than most terminals have columns."""
MAX_NAMES = 4096
"""Names among which a loss is looked for; a bound on memory and time: a run logs some dozens."""


class RecentScalar(msgspec.Struct, frozen=True, kw_only=True):
    """What one logged value was over the newest steps: at each the mean over the ranks that logged it."""

    name: str
    """As the trainer logs it."""
    points: tuple[tuple[int, float], ...] = ()
    """(step, value), steps rising; NaN and infinite ones too."""

    @property
    def value(self) -> float:
        """The newest value."""
        return self.points[-1][1] if self.points else float("nan")


class RecentScalars:
    """Of one attempt of a run."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """Role -> the name under which it is logged."""
        self._seen: frozenset[str] = frozenset()
        self._values: dict[str, dict[int, dict[int, float]]] = {role: {} for role in ROLES}
        """Role -> step -> rank -> value."""
        self._newest: dict[int, int] = {}
        """Rank -> the step that it ended last."""

    def take(self, rank: int, ended: Sequence[EndStep]) -> None:
        """Take in what a rank logged in steps that it ended."""
        for step in ended:
            if step.step <= self._newest.get(rank, -1):
                self._go_back(rank, step.step)
            self._newest[rank] = step.step
            self._learn_names(step)
            for role, name in self._names.items():
                if name in step.scalars:
                    self._values[role].setdefault(step.step, {})[rank] = step.scalars[name]

    def of(self, role: str) -> RecentScalar | None:
        """Return the newest values of `loss`, `grad_norm` or `lr`; None: none is logged that looks like it."""
        values = self._values[role]
        if not values:
            return None
        for step in sorted(values)[:-MAX_STEPS]:
            del values[step]
        points = tuple((step, sum(ranks.values()) / len(ranks)) for step, ranks in sorted(values.items()))
        return RecentScalar(name=self._names[role], points=points)

    def _learn_names(self, step: EndStep) -> None:
        if self._seen.issuperset(step.scalars) or len(self._seen) >= MAX_NAMES:
            return
        self._seen |= step.scalars.keys()
        found = {role: name for name, role in channels(sorted(self._seen)).items() if role in ROLES}
        for role, name in found.items():
            if self._names.get(role) != name:
                self._names[role], self._values[role] = name, {}

    def _go_back(self, rank: int, step: int) -> None:
        """Forget what a rank said of a step, and of those behind it: it trains them again."""
        for values in self._values.values():
            for later in [one for one in values if one >= step]:
                values[later].pop(rank, None)
                if not values[later]:
                    del values[later]
