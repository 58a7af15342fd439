"""Blindness: what was lost, or came after its step was closed, until a decision says so."""

from __future__ import annotations

from sentinel.decision import Decision


class Blindness:
    """Counts by the words of `Decision.blindness`. Replayed decisions say their counts before they are met again."""

    def __init__(self) -> None:
        self.unsaid: dict[str, int] = {}
        """Below zero while a replay has not met yet what its decisions said."""
        self.num_late_rows: dict[int, int] = {}
        """Rank -> rows that came after their step was closed."""

    def add(self, what: str, count: int) -> None:
        """Count what was lost."""
        self.unsaid[what] = self.unsaid.get(what, 0) + count

    def add_late(self, rank: int, num_rows: int, num_frames: int) -> None:
        """Count rows, and frames without rows, that came after their step was closed."""
        if num_rows:
            self.num_late_rows[rank] = self.num_late_rows.get(rank, 0) + num_rows
            self.add("late_rows", num_rows)
        if num_frames:
            self.add("late_frames", num_frames)

    def to_say(self) -> dict[str, int]:
        """Return what the next decision says."""
        return {what: count for what, count in sorted(self.unsaid.items()) if count > 0}

    def said(self, decision: Decision) -> None:
        """Take off what a decision says."""
        for what, count in decision.blindness.items():
            self.add(what, -count)

    def settle(self) -> None:
        """Expect nothing more of a replay: it is over, and all that was there was read."""
        self.unsaid = {what: count for what, count in self.unsaid.items() if count > 0}
