"""Blindness: counts what was lost, or came after its step was closed, since the last decision that included the counts."""

from __future__ import annotations

from sentinel.decision import Decision


class Blindness:
    """Counts by the keys of `Decision.blindness`. A replay reads a decision's counts before it reads the frames counted."""

    def __init__(self) -> None:
        self.unreported: dict[str, int] = {}
        """Key -> count not yet in a decision; below zero while a replay has not read the frames that it stands for."""
        self.num_late_rows: dict[int, int] = {}
        """Rank -> rows that came after their step was closed."""

    def add(self, what: str, count: int) -> None:
        """Count what was lost."""
        self.unreported[what] = self.unreported.get(what, 0) + count

    def add_late(self, rank: int, num_rows: int, num_frames: int) -> None:
        """Count rows, and frames without rows, that came after their step was closed."""
        if num_rows:
            self.num_late_rows[rank] = self.num_late_rows.get(rank, 0) + num_rows
            self.add("late_rows", num_rows)
        if num_frames:
            self.add("late_frames", num_frames)

    def to_report(self) -> dict[str, int]:
        """Return the counts that the next decision includes."""
        return {what: count for what, count in sorted(self.unreported.items()) if count > 0}

    def mark_reported(self, decision: Decision) -> None:
        """Subtract the counts that a decision includes."""
        for what, count in decision.blindness.items():
            self.add(what, -count)

    def settle(self) -> None:
        """Remove counts below zero: the replay is over, and all frames that are left were read."""
        self.unreported = {what: count for what, count in self.unreported.items() if count > 0}
