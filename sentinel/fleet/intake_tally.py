"""IntakeTally: what a join took in, counted, and what it could not take, with the reason, each said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

REFUSED_S = 300.0
"""What was refused within so long is a problem."""
MAX_REFUSED_SAID = 8
MAX_REFUSED_KNOWN = 1000
"""Things that were refused of which it is known that they were said; a bound on memory."""


class IntakeTally:
    """Shared by the copies of all runs, under their lock."""

    def __init__(self, clock: Callable[[], float], on_problem: Callable[[str], None]) -> None:
        """clock: monotonic seconds. on_problem: told of each thing that is refused, once."""
        self.counts: Counter[str] = Counter()
        """chunks, bytes, repeated, dropped, refused, digest_bytes, rows_bytes, shared_names: since the beginning."""
        self.disk_problem = ""
        """Why the newest bytes could not be written; empty: they were."""
        self._clock, self._on_problem = clock, on_problem
        self._refused: dict[str, str] = {}
        """What is refused -> why."""
        self._refused_at: dict[str, float] = {}

    def refuse(self, what: str, why: str) -> None:
        """Count what cannot be taken in, and say once why. what: of which there may be more; why: in words."""
        self.counts["refused"] += 1
        self.say(what, why)

    def say(self, what: str, why: str) -> None:
        """Say once why something is refused, which may be no message that counts."""
        if what not in self._refused and len(self._refused) < MAX_REFUSED_KNOWN:
            self._refused[what] = why
            self._on_problem(why)
        if what in self._refused:
            self._refused_at[what] = self._clock()

    def note_disk(self, problem: str) -> None:
        """Take down why bytes could not be written; empty: they were."""
        if problem and problem != self.disk_problem:
            self._on_problem(problem)
        self.disk_problem = problem

    def problems(self) -> list[str]:
        """Return what is wrong just now, in words: the disk, and what was refused of late."""
        found = [f"the copies cannot be written: {self.disk_problem}"] if self.disk_problem else []
        recent = [self._refused[what] for what, at in self._refused_at.items() if self._clock() - at < REFUSED_S]
        found += recent[:MAX_REFUSED_SAID]
        if len(recent) > MAX_REFUSED_SAID:
            found.append(f"and {len(recent) - MAX_REFUSED_SAID} further refusals")
        return found
