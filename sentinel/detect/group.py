"""GroupDetector: the methods that the engine calls on a detector that compares the members of groups with one another."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State

Points = dict[str, np.ndarray]
"""Named columns, one value a member; the members of all groups lie one behind the other."""


class StepPoints(Points):
    """The points of one step on their way through `score` and `learn`, which begin with the same arithmetic."""

    made: Any = None
    """What `score` made of them, for `learn`; None: nothing yet."""


@runtime_checkable
class GroupDetector(Protocol):
    """Judges one point of each group over its members, ranks or copies of a tensor: no clock, no I/O. Score first.

    A detector is built from the `args` of its rule. What it says of a member depends on that member's group and state alone,
    never on the order of members or groups, nor on other groups. The member of a group of one scores 0.0.
    """

    declares: ClassVar[Declaration]
    """Of which `over` says what its groups and columns are."""

    def state(self, num_members: int) -> State:
        """Return the state of members before their first point; no arrays where it needs none."""
        ...

    def score(self, points: Points, group: np.ndarray, state: State) -> Scores:
        """Return the score of each member, [members]; changes nothing. group: [members] the number of its group.

        Evidence `is_sure`, bool: False where the member is only one of several that may be wrong. Where one step may be
        written down as `info` before it lasts: `alone`, the score of this step by itself, and `is_out`, bool: it goes on.
        """
        ...

    def learn(self, points: Points, group: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Take one point into the state, in place; `anomalous` marks the members that must not move a baseline."""
        ...


def members_of(group: np.ndarray) -> list[np.ndarray]:
    """Return the positions of the members of each group, groups rising."""
    order = np.argsort(group, kind="stable")
    numbers, starts = np.unique(group[order], return_index=True)
    return np.split(order, starts[1:]) if len(numbers) else []
