"""RunEnded: a run, or one of its ranks, that ended otherwise than in order."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from sentinel.anomaly import Severity
from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import State
from sentinel.errors import ConfigError
from sentinel.run_end import GOODBYE, RankEnd, RunEnd


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gives the severity of an end. What ended, how, and which rank went first is decided by `EndWatch`."""

    declares: ClassVar[Declaration] = Declaration(
        over="ends",
        summary="a run or one of its ranks that raised, was killed, ran out of memory, crashed or fell silent",
        statistics=("ended",),
    )

    settle_s: float = 2.0
    """Seconds from the first rank's end until it is reported while others live: so long their own ends may still come in."""
    unheard_s: float = 2.5
    """A rank whose connections broke blames one whose newest heartbeat is so many seconds old: they are one second apart."""
    old_after_s: float = 86400.0
    """An end that is found so many seconds later, by a daemon that was not there, is written down and sent to nobody."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    def state(self, num_ranks: int) -> State:
        """Return no arrays: an end is judged without a baseline."""
        return {}

    def severity(self, end: RunEnd | RankEnd, full: Severity, *, late_s: float = 0.0) -> Severity | None:
        """Return how grave an end is, `full` at most; None: nothing to say. late_s: how much later it was found."""
        if end.how == GOODBYE or (end.is_asked and end.detail == "SIGINT"):
            return None
        is_restarted = isinstance(end, RunEnd) and end.is_restarted
        most = Severity.WARNING if end.is_asked or is_restarted else Severity.CRITICAL
        if late_s > self.old_after_s:
            most = Severity.INFO
        return min(full, most, key=lambda one: one.level)
