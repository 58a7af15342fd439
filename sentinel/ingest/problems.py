"""Problems: what makes a rank unreadable, said once each."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("sentinel.ingest")


class Problems:
    """Remembers what was said."""

    def __init__(self, on_problem: Callable[[str], None] | None = None) -> None:
        """on_problem: is told each in words; None: they are logged."""
        self._on_problem = on_problem or log.warning
        self._said: set[str] = set()

    def say(self, key: str, problem: str) -> None:
        """Say a problem, unless one with this key was said."""
        if key not in self._said:
            self._said.add(key)
            self._on_problem(problem)
