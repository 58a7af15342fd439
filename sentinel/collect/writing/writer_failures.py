"""WriterFailures: what went wrong in the writer thread and must not end it: logged once, counted, said with a heartbeat."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sentinel.messages import Health

log = logging.getLogger("sentinel")

MAX_CODES = 256
"""Different failures that are logged; a bound on the log: further ones are only counted."""


class WriterFailures:
    """Failure -> how often it happened since it was last said."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._counts: dict[str, int] = {}

    def guard(self, where: str, work: Callable[[], object]) -> None:
        """Run work of the writer thread; what it raises is logged once and counted."""
        try:
            work()
        except Exception as error:
            code = f"{where}: {type(error).__name__}: {error}"[:300]
            if code not in self._counts and len(self._counts) < MAX_CODES:
                log.warning("sentinel: writer thread: %s", code)
            self.count(code)

    def count(self, code: str) -> None:
        """Count a failure that is only said."""
        self._counts[code] = self._counts.get(code, 0) + 1

    def report(self, write: Callable[[Health], bool]) -> None:
        """Write each with its count; what the disk does not take is said the next time."""
        for code, count in list(self._counts.items()):
            if write(Health(code="writer_failed", message=f"rank {self._rank}: {code}", count=count)):
                self._counts[code] -= count
                if not self._counts[code]:
                    del self._counts[code]
