"""LostRows: rows and steps that ranks measured and that never reached the judge."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import State
from sentinel.errors import ConfigError


class LostRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that were lost on the way: a spool that was full, a writer that was late, a disk that took nothing.

    What was lost is counted by the ranks, step by step; no baseline is needed. Losses of neighbouring steps are one episode.
    """

    declares: ClassVar[Declaration] = Declaration(
        over="losses",
        summary="rows or whole steps that ranks measured and that were lost before they could be judged",
        statistics=("rows_lost",),
    )

    least_rows: int = 1
    """Rows lost in an episode, all ranks together, from which they are reported; lost whole steps always are."""

    def __post_init__(self) -> None:
        if self.least_rows < 1:
            raise ConfigError(f"least_rows must be at least 1, got {self.least_rows}")

    def state(self, num_series: int) -> State:
        """Return no arrays: what was lost has no baseline."""
        return {}

    def is_worth_reporting(self, num_rows: int, num_steps_gone: int) -> bool:
        """Return whether so many lost rows, and steps of which nothing is left, are reported."""
        return num_steps_gone > 0 or num_rows >= self.least_rows

    def is_grave(self, num_rows: int, num_finite: int, num_steps_gone: int) -> bool:
        """Whether a NaN may be among what was lost: not where all of it is known to have been finite."""
        return num_steps_gone > 0 or num_rows > num_finite
