"""RunPicture: what is known of a run at one moment, for `sentinel watch`; its JSON is what `--json` prints."""

from __future__ import annotations

from collections import Counter

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.cli.course import Course
from sentinel.cli.recent_findings import HotLayer
from sentinel.cli.recent_scalars import RecentScalar
from sentinel.incident import Incident

WAITING, RUNNING, ENDED = "waiting", "running", "ended"
"""States of a run: nothing of it is there yet; it is not known to be over; it is over."""
ALIVE, LATE, SILENT, GONE = "alive", "late", "silent", "ended"
"""Health of a rank: it writes; it writes and is steps behind the others; it writes nothing; it said goodbye, or its process
is gone."""


class RankPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as its spool shows it."""

    rank: int
    health: str
    """`alive`, `late`, `silent` or `ended`."""
    words: str = ""
    """Why, where it is not alive."""
    step: int | None = None
    """The newest that it is in or has ended; null: not known."""
    step_time_s: float | None = None
    """Median of its newest steps; null: not known."""
    busy_s: float | None = None
    """The same, without what it waited for other ranks; null: not known."""
    silent_s: float = 0.0
    """Seconds since it wrote last."""


class RunPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    run: str
    directory: str
    time: float
    """Seconds since the epoch when it was looked at."""
    state: str
    """`waiting`, `running` or `ended`."""
    note: str = ""
    """Of a run that is not there yet: what is waited for."""
    attempt: int = 0
    step: int | None = None
    """The newest that a rank has ended; null: none yet, or its spool is gone."""
    steps_per_s: float | None = None
    """Of the newest steps; 0: none was ended for a while; null: not known."""
    quiet_s: float = 0.0
    """Seconds since a step was ended last."""
    judged_step: int | None = None
    daemon: str | None = None
    """The process that judges the run: `4711 on node7`; null: none does."""
    course: Course = Course()
    loss: RecentScalar | None = None
    grad_norm: RecentScalar | None = None
    lr: RecentScalar | None = None
    incidents: tuple[Incident, ...] = ()
    """The open ones, the gravest and newest first."""
    ranks: tuple[RankPicture, ...] = ()
    num_ranks_unread: int = 0
    """Further ranks whose spools are not read, for they are too many."""
    num_ranks_missing: int = 0
    """Ranks of the run that have not begun."""
    slowest: tuple[RankPicture, ...] = ()
    """The ranks whose own work takes longest, the slowest first; where waits are not known, whose steps do."""
    hottest: tuple[HotLayer, ...] = ()
    anomalies: tuple[Anomaly, ...] = ()
    """The newest onsets, the newest first."""
    problems: tuple[str, ...] = ()
    """What is wrong with watching itself."""

    @property
    def is_clean(self) -> bool:
        """Whether no incident that is a warning or worse is open, and the run did not end otherwise than in order."""
        return not self.course.is_bad and not any(one.severity.level for one in self.incidents)

    @property
    def health(self) -> dict[str, int]:
        """Health -> ranks, of those that are read."""
        return dict(Counter(one.health for one in self.ranks))

    def without_clocks(self) -> RunPicture:
        """Return it without what changes while nothing happens."""
        ranks = [msgspec.structs.replace(one, silent_s=0.0, words="") for one in self.ranks]
        return msgspec.structs.replace(self, time=0.0, quiet_s=0.0, ranks=tuple(ranks), slowest=())
