"""Which requests want copies of tensors, dumped or traced, and of which steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.schedule.wishes import Dump, Request
from sentinel.target import means
from sentinel.trace import Trace

CopyT = TypeVar("CopyT", Dump, Trace)


class CopyRequests(Generic[CopyT]):
    """What the plan says of copies of one sort."""

    def __init__(self, plan: Plan, sort: type[CopyT]) -> None:
        """sort: what the requests ask for."""
        self._plan = plan
        self._sort: type[CopyT] = sort

    @property
    def standing(self) -> list[CopyT]:
        """What is asked for in this step, or by itself in a later one: tensors must be shown."""
        asked = [wish.request.copy for wish in self._plan.wishes if wish.is_open and wish.request is not None]
        return [copy for copy in asked if isinstance(copy, self._sort)]

    @property
    def due(self) -> Sequence[Request]:
        """The requests that take copies in the running step."""
        return [request for request in self._plan.copying if isinstance(request.copy, self._sort)]

    def of(self, entry: TensorEntry) -> list[tuple[Request, CopyT]]:
        """Return the requests that want a copy of this tensor in the running step, and how."""
        if not self._plan.copying:
            return []
        name, _, path = entry.name.partition(":")
        names = self._plan.names.of(name, entry.chunk)
        return [
            (wish.request, wish.request.copy)
            for wish in self._plan.wishes
            if wish.is_due
            and wish.request is not None
            and isinstance(wish.request.copy, self._sort)
            and entry.kind in wish.kinds
            and means(wish.targets, names, path)
        ]
