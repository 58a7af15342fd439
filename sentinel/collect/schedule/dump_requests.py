"""Which requests want tensors as they are, and of which steps."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.schedule.wishes import Request
from sentinel.target import means


class DumpRequests:
    """What the plan says of dumps."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def may_come(self) -> bool:
        """Whether a dump is asked for, in this step or by itself in a later one: tensors must be shown."""
        return any(wish.is_open and wish.request is not None and wish.request.dump is not None for wish in self._plan.wishes)

    @property
    def due(self) -> Sequence[Request]:
        """The requests that dump in the running step."""
        return self._plan.dumping

    def of(self, entry: TensorEntry) -> list[Request]:
        """Return the requests that want this tensor as it is, in the running step."""
        if not self._plan.dumping:
            return []
        name, _, path = entry.name.partition(":")
        names = self._plan.names.of(name, entry.chunk)
        return [
            wish.request
            for wish in self._plan.wishes
            if wish.is_due
            and wish.request is not None
            and wish.request.dump is not None
            and entry.kind in wish.kinds
            and means(wish.targets, names, path)
        ]
