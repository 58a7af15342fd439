"""Problems: reports each reason why a rank cannot be read once."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("sentinel.ingest")


class Problems:
    """The keys of the problems that were reported."""

    def __init__(self, on_problem: Callable[[str], None] | None = None) -> None:
        """on_problem: called with the words of each problem; None: they are logged."""
        self._on_problem = on_problem or log.warning
        self._reported: set[str] = set()

    def report(self, key: str, problem: str) -> None:
        """Report a problem, unless one with this key was reported."""
        if key not in self._reported:
            self._reported.add(key)
            self._on_problem(problem)
