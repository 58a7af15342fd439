"""What the daemon says of itself and of its runs, as plain numbers: `prometheus_page` turns it into series at a scrape."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sentinel.anomaly import Severity
from sentinel.join_health import JoinHealth
from sentinel.report.durations import Distribution
from sentinel.worker_health import WorkerHealth

SEVERITIES: tuple[str, ...] = tuple(severity.value for severity in Severity)
RANK_STATES: tuple[str, ...] = ("live", "late", "stale", "missing")
WEIGHT_STATES: tuple[str, ...] = ("compared", "unchecked")
COMMAND_STATES: tuple[str, ...] = (
    "issued", "armed", "applied", "partial", "ended", "withdrawn", "refused", "expired", "dry_run",
)  # fmt: skip
EDIT_OUTCOMES: tuple[str, ...] = ("ordered", "broken", "given_up", "unreadable")
OUTCOMES: tuple[str, ...] = (
    "sent", "repeated", "digested", "correlated", "retried", "failed", "expired", "superseded", "dropped", "brief",
    "silenced", "maintenance", "off_hours", "inhibited",
)  # fmt: skip
"""What became of a notification; `report.pipeline` says what each means."""
FRAME_FAULTS: tuple[str, ...] = ("torn", "corrupt", "foreign")
CONFIGURED: tuple[str, ...] = ("rules", "config")
"""What is read from files, and may be read again: the rule packs, and the daemon's own configuration."""
RELOAD_OUTCOMES: tuple[str, ...] = ("ok", "failed")
HEARTBEAT_OUTCOMES: tuple[str, ...] = ("sent", "failed")
BLIND_CODES: frozenset[str] = frozenset(
    ("hook_failed", "blind_probe", "writer_failed", "rows_dropped", "steps_dropped", "vectors_dropped", "spool_full",
     "disk_full", "structure_failed")
)  # fmt: skip
"""Codes of health records after which an absence of anomalies proves less."""
AGGREGATES: tuple[str, ...] = ("min", "mean", "max")


class NormAggregate(msgspec.Struct, kw_only=True):
    """Norms (l2) of all tensors of one kind on one pipeline stage, in the newest judged step."""

    pp_stage: int
    kind: str
    min: float = 0.0
    mean: float = 0.0
    max: float = 0.0
    num_nan_total: int = 0
    """NaN elements since the daemon first saw the run; never goes down."""
    num_inf_total: int = 0


class RunMetrics(msgspec.Struct, kw_only=True):
    """One run as the gauges show it. What is None is not shown; counters begin at zero and never go down."""

    run: str
    host: str = ""
    """Machine of the lowest rank, as it says itself; so are the three below."""
    pod: str = ""
    job_id: str = ""
    torch: str = ""
    attempt: int = 0
    newest_step: int | None = None
    """Newest step that any rank reported."""
    judged_step: int | None = None
    last_record_time: float | None = None
    """Seconds since the epoch of the newest record, by its own clock. A time, not an age: it cannot go stale unseen."""
    quietest_received_time: float | None = None
    """Seconds since the epoch, by the daemon's clock, of the newest frame of the running rank that is silent the longest."""
    last_judged_time: float | None = None
    step_time_s: float | None = None
    scalars: Mapping[str, float] = {}
    """Means over ranks of the newest judged step, NaN and infinite ones too: loss, grad_norm, lr and what else is logged."""
    open_incidents: Mapping[str, int] = {}
    """Severity -> number."""
    num_ranks_expected: int = 0
    """Ranks of the run, as they say themselves."""
    ranks: Mapping[str, int] = {}
    """State -> number of ranks; each rank is in one: `live`; `late` (the newest judged step was closed without it); `stale`
    (it is heard, and a rule says that it stands still in its step); `missing` (not heard for half a minute, or gone)."""
    weights: Mapping[str, int] = {}
    """`compared`: weights of which several ranks hold copies, which must be the same; `unchecked`: those with one copy."""
    is_monitoring: bool = False
    """Module monitoring is on (the black box does not count)."""
    monitoring_acked_step: int | None = None
    """at_step of the last command that every meant rank acknowledged."""
    norms: tuple[NormAggregate, ...] = ()
    top_scores: tuple[float, ...] = ()
    """The largest scores of the newest judged step, largest first."""
    rules: tuple[str, ...] = ()
    """Names of all rules of the pack: their counters exist before they fire."""

    num_records: int = 0
    num_steps_judged: int = 0
    num_steps_late: int = 0
    """Steps closed without a live rank."""
    anomalies: Mapping[tuple[str, str], int] = {}
    """(rule, severity) -> onsets."""
    num_rows_dropped: int = 0
    num_steps_dropped: int = 0
    spool_waiting_bytes: int = 0
    """Of the spool that is nearest to its cap: bytes that wait to be judged."""
    spool_seconds_left: float | None = None
    """Until that spool reaches its cap at the rate it fills; None: not known."""
    num_rows_folded: int = 0
    num_rows_late: int = 0
    num_frames: int = 0
    num_frames_duplicate: int = 0
    num_frames_missing: int = 0
    """Gaps in an incarnation's sequence."""
    frame_faults: Mapping[str, int] = {}
    """`torn`, `corrupt`, `foreign` -> number."""
    health: Mapping[str, int] = {}
    """Code of a health record -> number."""
    commands: Mapping[str, int] = {}
    """State (`COMMAND_STATES`) -> commands that ever entered it."""
    config_edits: Mapping[str, int] = {}
    """Outcome (`EDIT_OUTCOMES`) -> edits of the trainer's config file."""
    judging_s: float = 0.0
    """Seconds spent judging."""
    num_file_failures: int = 0
    num_history_missing: int = 0
    """Judged steps that a history has not, for want of disk."""
    """Writes to anomaly and incident files that the disk refused."""
    num_file_lines_pending: int = 0

    @property
    def is_live(self) -> bool:
        """Whether any rank of it is heard."""
        return any(count for state, count in self.ranks.items() if state != "missing")

    @property
    def num_blind(self) -> int:
        """Health records that say that less is measured than should be."""
        return sum(count for code, count in self.health.items() if code in BLIND_CODES)


class MirrorCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of what a mirror was given; of several runs the sums."""

    num_steps: int = 0
    """Steps that were written."""
    num_dropped: int = 0
    """Steps that it lacks: there was no room for them to wait, or the daemon that had them was killed."""
    num_failures: int = 0
    """Writes that failed; each is tried again."""
    num_waiting: int = 0
    num_series_left_out: int = 0
    """Most series of a step for which there was no room."""

    def plus(self, other: MirrorCounts) -> MirrorCounts:
        """Return the sums of both."""
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return MirrorCounts(**dict(zip(self.__struct_fields__, map(sum, zip(mine, others, strict=True)), strict=True)))


class MetricsSnapshot(msgspec.Struct, kw_only=True):
    """All that a scrape shows."""

    runs: tuple[RunMetrics, ...] = ()
    start_time: float | None = None
    is_standby: bool = False
    """Another daemon serves these runs."""
    num_problems: int = 0
    """Problems that `/healthz` lists."""

    sinks: tuple[str, ...] = ()
    """Names of all sinks: their counters exist before they are used."""
    notifications: Mapping[tuple[str, str], int] = {}
    """(sink, outcome) -> number."""
    notifications_pending: Mapping[str, int] = {}
    """Sink -> alerts in the outbox."""
    notifications_withheld: Mapping[str, int] = {}
    """Sink -> those of them that wait for people or for the calendar."""
    keep_alives: Mapping[str, int] = {}
    """Sink -> times that open incidents were sent again to a sink that forgets them."""
    delivery_latency: Mapping[str, Distribution] = {}
    """Sink -> from the judgement of an alert to the sink's answer that it has it."""

    reloads: Mapping[tuple[str, str], int] = {}
    """(what of `CONFIGURED`, `ok` or `failed`) -> reloads."""
    reload_times: Mapping[str, float] = {}
    """What of `CONFIGURED` -> seconds since the epoch of the last load that worked."""
    reload_failures: frozenset[str] = frozenset()
    """What of `CONFIGURED` is not in use as it stands in its files, because those are broken."""
    config_hashes: Mapping[str, str] = {}
    """What of `CONFIGURED` is in use: 12 hexadecimal digits or more of its hash."""

    mirrors: Mapping[str, MirrorCounts] = {}
    """Name of a mirror -> what became of what it was given, of all runs."""

    stages: Mapping[str, tuple[float, int]] = {}
    """Stage of `stage_times.STAGES` -> (seconds, items) since the start."""
    judge_lag: Distribution | None = None
    """From the end of a step, by the clock of its last rank, to its judgement in the journal."""
    disks: Mapping[str, tuple[int, int]] = {}
    """Directory (`state`, `runs`) -> (free bytes, bytes) of its file system."""
    heartbeats: Mapping[str, int] | None = None
    """Outcome of `HEARTBEAT_OUTCOMES` -> heartbeats; None: none are configured."""
    heartbeat_time: float | None = None
    """Seconds since the epoch of the last heartbeat that was taken."""
    certificate_expiry_time: float | None = None
    """Seconds since the epoch at which the certificate ends that HTTP is served with; None: without TLS."""
    join: JoinHealth | None = None
    """How the join of a fleet is; None: this daemon is no join's."""
    worker: WorkerHealth | None = None
    """How the worker of a fleet is, which is no daemon: all that only a daemon has is left out. None: this is a daemon."""
