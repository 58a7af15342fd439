"""Gauges and counters for Prometheus: one collector on its own registry, fed by a snapshot, bounded per run.

The daemon fills a `MetricsSnapshot` (plain numbers, no client library) whenever it likes; a scrape turns the newest one
into series. Nothing is registered per run or per tensor, so nothing piles up in a process that lives for months.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from sentinel.anomaly import Severity
from sentinel.version import VERSION

MAX_SERIES_PER_RUN = 5000
"""Most series of one run, a bound on Prometheus's memory whatever the run's size. The slots below fill at most 4,500."""
MAX_RUNS = 100
"""Runs shown at once, those with the newest records first; a bound on memory: at most 500,000 series."""
SCALAR_SLOTS = 64
RULE_SLOTS = 300
NORM_SLOTS = 600
HEALTH_SLOTS = 64
SCORE_SLOTS = 16
PROCESS_SLOTS = 64
OTHER = "_other"
"""Label value that sums the counters which found no slot."""

SEVERITIES: tuple[str, ...] = tuple(severity.value for severity in Severity)
RANK_STATES: tuple[str, ...] = ("live", "late", "stale", "missing")
WEIGHT_STATES: tuple[str, ...] = ("compared", "unchecked")
COMMAND_STATES: tuple[str, ...] = (
    "issued", "armed", "applied", "partial", "ended", "withdrawn", "refused", "expired", "dry_run",
)  # fmt: skip
EDIT_OUTCOMES: tuple[str, ...] = ("ordered", "broken", "given_up", "unreadable")
OUTCOMES: tuple[str, ...] = (
    "sent", "repeated", "digested", "retried", "failed", "expired", "superseded", "dropped",
)  # fmt: skip
"""What became of a notification; `report.pipeline` says what each means."""
FRAME_FAULTS: tuple[str, ...] = ("torn", "corrupt", "foreign")
RELOAD_OUTCOMES: tuple[str, ...] = ("ok", "failed")
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
    """Writes to anomaly and incident files that the disk refused."""
    num_file_lines_pending: int = 0


class MetricsSnapshot(msgspec.Struct, kw_only=True):
    """All that a scrape shows."""

    runs: tuple[RunMetrics, ...] = ()
    sinks: tuple[str, ...] = ()
    """Names of all sinks: their counters exist before they are used."""
    notifications: Mapping[tuple[str, str], int] = {}
    """(sink, outcome) -> number."""
    notifications_pending: Mapping[str, int] = {}
    """Sink -> alerts in the outbox."""
    reloads: Mapping[str, int] = {}
    """`ok`, `failed` -> reloads of rules or configuration."""
    last_reload_time: float | None = None
    """Seconds since the epoch of the last reload that worked."""
    is_last_reload_ok: bool = True
    start_time: float | None = None


class _Slots:
    """Admits the first `size` keys it meets, for ever, and counts the others once each."""

    MAX_REMEMBERED = 10_000

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_dropped = 0
        self._admitted: set[Hashable] = set()
        self._dropped: set[int] = set()

    def admits(self, key: Hashable, num_series: int = 1) -> bool:
        if key in self._admitted:
            return True
        if len(self._admitted) < self.size:
            self._admitted.add(key)
            return True
        if len(self._dropped) < self.MAX_REMEMBERED and hash(key) not in self._dropped:
            self._dropped.add(hash(key))
            self.num_dropped += num_series
        return False


class _RunSlots:
    def __init__(self) -> None:
        self.scalars = _Slots(SCALAR_SLOTS)
        self.rules = _Slots(RULE_SLOTS)
        self.norms = _Slots(NORM_SLOTS)
        self.health = _Slots(HEALTH_SLOTS)

    @property
    def num_dropped(self) -> int:
        return sum(slots.num_dropped for slots in (self.scalars, self.rules, self.norms, self.health))


_RUN_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("attempt", "sentinel_attempt", "Attempt of the run that is training, from 0."),
    ("newest_step", "sentinel_newest_step", "Newest step that any rank reported."),
    ("judged_step", "sentinel_judged_step", "Newest step that was judged."),
    ("last_record_time", "sentinel_last_record_timestamp_seconds", "When the newest record was made, its own clock."),
    ("quietest_received_time", "sentinel_quietest_rank_heard_timestamp_seconds",
     "When the newest frame came of the running rank that is silent the longest."),
    ("last_judged_time", "sentinel_last_judged_timestamp_seconds", "When the newest judgement was given."),
    ("step_time_s", "sentinel_step_duration_seconds", "Duration of a training step, median of the last 9."),
    ("is_monitoring", "sentinel_monitoring_enabled", "1 while module monitoring is on, 0 while only the black box is."),
    ("monitoring_acked_step", "sentinel_monitoring_acknowledged_step",
     "First step of the last command that every rank it meant acknowledged."),
    ("spool_waiting_bytes", "sentinel_spool_waiting_bytes",
     "Bytes that wait to be judged, of the rank whose spool is nearest to its cap."),
    ("spool_seconds_left", "sentinel_spool_seconds_left", "Until that spool reaches its cap at the rate it fills."),
    ("num_file_lines_pending", "sentinel_file_lines_pending", "Lines of anomaly files that wait for the disk."),
)  # fmt: skip
_RUN_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("num_records", "sentinel_records_total", "Rows taken in."),
    ("num_steps_judged", "sentinel_steps_judged_total", "Steps judged."),
    ("num_steps_late", "sentinel_steps_late_total", "Steps closed without a live rank."),
    ("num_rows_dropped", "sentinel_rows_dropped_total", "Rows that were measured and lost before they were judged."),
    ("num_steps_dropped", "sentinel_steps_dropped_total", "Steps of a rank that were lost whole, their end included."),
    ("num_rows_folded", "sentinel_rows_folded_total", "Rows folded for want of room."),
    ("num_rows_late", "sentinel_rows_late_total", "Rows that came after their step was closed."),
    ("num_frames", "sentinel_frames_total", "Frames taken in."),
    ("num_frames_duplicate", "sentinel_frames_duplicate_total", "Frames seen before, left out."),
    ("num_frames_missing", "sentinel_frames_missing_total", "Frames that a gap in a rank's numbering shows as lost."),
    ("judging_s", "sentinel_judging_seconds_total", "Time spent judging."),
    ("num_file_failures", "sentinel_file_write_failures_total", "Writes of anomaly files that the disk refused."),
)  # fmt: skip


class MetricsCollector(Collector):
    """Turns the newest snapshot into series at each scrape, at most MAX_SERIES_PER_RUN of them per run.

    source: returns the snapshot; called in the scraping thread, so it must return one that nobody changes.
    """

    def __init__(self, source: Callable[[], MetricsSnapshot]) -> None:
        self._source = source
        self._slots: dict[str, _RunSlots] = {}
        self._sinks = _Slots(PROCESS_SLOTS)
        self._mutex = threading.Lock()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return (body, content type) of a scrape; accept: the request's Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are not checked against other collectors, there are none."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every family once, whether or not there is a run."""
        snapshot = self._source()
        with self._mutex:
            yield from self._process(snapshot)
            yield from self._runs(self._shown(snapshot.runs))

    def _shown(self, runs: tuple[RunMetrics, ...]) -> list[tuple[RunMetrics, _RunSlots]]:
        newest = sorted(runs, key=lambda run: (-(run.last_record_time or 0.0), run.run))
        known = {run.run for run in runs}
        self._slots = {name: slots for name, slots in self._slots.items() if name in known}
        return [(run, self._slots.setdefault(run.run, _RunSlots())) for run in newest[:MAX_RUNS]]

    def _process(self, snapshot: MetricsSnapshot) -> Iterator[Metric]:
        build = GaugeMetricFamily("sentinel_build_info", "1; the label says which version runs.", labels=["version"])
        build.add_metric([VERSION], 1)
        yield build
        if snapshot.start_time is not None:
            yield _gauge("sentinel_start_timestamp_seconds", "When the daemon started.", snapshot.start_time)
        yield _gauge("sentinel_runs", "Runs that the daemon follows.", len(snapshot.runs))
        num_hidden = max(len(snapshot.runs) - MAX_RUNS, 0)
        yield _gauge("sentinel_runs_hidden", "Runs left out of the metrics for want of room.", num_hidden)
        reloads = CounterMetricFamily(
            "sentinel_reloads", "Reloads of rules or configuration, by outcome.", labels=["outcome"]
        )
        for outcome in RELOAD_OUTCOMES:
            reloads.add_metric([outcome], snapshot.reloads.get(outcome, 0))
        yield reloads
        yield _gauge(
            "sentinel_last_reload_successful", "1 unless the last reload failed.", float(snapshot.is_last_reload_ok)
        )
        if snapshot.last_reload_time is not None:
            yield _gauge(
                "sentinel_last_reload_success_timestamp_seconds",
                "When rules were last loaded without an error.",
                snapshot.last_reload_time,
            )
        yield from self._notifications(snapshot)

    def _notifications(self, snapshot: MetricsSnapshot) -> Iterator[Metric]:
        sent = CounterMetricFamily(
            "sentinel_notifications", "What became of notifications, by sink and outcome.", labels=["sink", "outcome"]
        )
        pending = GaugeMetricFamily("sentinel_notifications_pending", "Alerts in the outbox.", labels=["sink"])
        names = [*snapshot.sinks, *(sink for sink, _ in snapshot.notifications)]
        for sink in dict.fromkeys(names):
            if not self._sinks.admits(sink):
                continue
            for outcome in OUTCOMES:
                sent.add_metric([sink, outcome], snapshot.notifications.get((sink, outcome), 0))
            pending.add_metric([sink], snapshot.notifications_pending.get(sink, 0))
        yield sent
        yield pending

    def _runs(self, runs: list[tuple[RunMetrics, _RunSlots]]) -> Iterator[Metric]:
        for field, name, text in _RUN_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["run"])
            for run, _ in runs:
                value = getattr(run, field)
                if value is not None:
                    gauge.add_metric([run.run], float(value))
            yield gauge
        for field, name, text in _RUN_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["run"])
            for run, _ in runs:
                counter.add_metric([run.run], float(getattr(run, field)))
            yield counter
        yield from self._scalars(runs)
        yield from self._by_label(runs)
        yield from self._norms(runs)
        yield self._anomalies(runs)
        yield self._health(runs)
        # Last, so that it counts what this very scrape left out.
        dropped = CounterMetricFamily(
            "sentinel_series_dropped", "Series left out to keep a run within bounds; each once.", labels=["run"]
        )
        for run, slots in runs:
            dropped.add_metric([run.run], slots.num_dropped)
        yield dropped

    def _scalars(self, runs: list[tuple[RunMetrics, _RunSlots]]) -> Iterator[Metric]:
        own = {
            "loss": GaugeMetricFamily("sentinel_loss", "Loss, newest judged step, mean over ranks.", labels=["run"]),
            "grad_norm": GaugeMetricFamily(
                "sentinel_grad_norm", "Gradient norm of the newest judged step, before clipping.", labels=["run"]
            ),
            "lr": GaugeMetricFamily("sentinel_learning_rate", "Learning rate, newest judged step.", labels=["run"]),
        }
        others = GaugeMetricFamily(
            "sentinel_scalar", "Any other scalar of the newest judged step, mean over ranks.", labels=["run", "name"]
        )
        for run, slots in runs:
            for name, value in sorted(run.scalars.items()):
                if name in own:
                    own[name].add_metric([run.run], value)
                elif slots.scalars.admits(name):
                    others.add_metric([run.run, name], value)
        yield from own.values()
        yield others

    def _by_label(self, runs: list[tuple[RunMetrics, _RunSlots]]) -> Iterator[Metric]:
        incidents = GaugeMetricFamily(
            "sentinel_open_incidents", "Incidents that are open, by severity.", labels=["run", "severity"]
        )
        expected = GaugeMetricFamily("sentinel_expected_ranks", "Ranks of the run, as they say themselves.", labels=["run"])
        ranks = GaugeMetricFamily(
            "sentinel_ranks", "Ranks, each in one state: live, late, stale, missing.", labels=["run", "state"]
        )
        weights = GaugeMetricFamily(
            "sentinel_weights", "Weights whose copies are compared, and weights that cannot be checked.",
            labels=["run", "state"],
        )  # fmt: skip
        faults = CounterMetricFamily(
            "sentinel_frame_faults", "Frames that could not be read, by reason.", labels=["run", "reason"]
        )
        commands = CounterMetricFamily(
            "sentinel_commands", "Commands to the trainer, by each state they entered.", labels=["run", "state"]
        )
        edits = CounterMetricFamily(
            "sentinel_config_edits", "Edits of the trainer's config file, by what became of them.", labels=["run", "outcome"]
        )
        scores = GaugeMetricFamily(
            "sentinel_top_score", "Largest scores of the newest judged step; 1 and more is anomalous.",
            labels=["run", "slot"],
        )  # fmt: skip
        for run, _ in runs:
            for severity in SEVERITIES:
                incidents.add_metric([run.run, severity], run.open_incidents.get(severity, 0))
            expected.add_metric([run.run], run.num_ranks_expected)
            for state in RANK_STATES:
                ranks.add_metric([run.run, state], run.ranks.get(state, 0))
            for state in WEIGHT_STATES:
                weights.add_metric([run.run, state], run.weights.get(state, 0))
            for reason in FRAME_FAULTS:
                faults.add_metric([run.run, reason], run.frame_faults.get(reason, 0))
            for state in COMMAND_STATES:
                commands.add_metric([run.run, state], run.commands.get(state, 0))
            for outcome in EDIT_OUTCOMES:
                edits.add_metric([run.run, outcome], run.config_edits.get(outcome, 0))
            for slot, score in enumerate(run.top_scores[:SCORE_SLOTS]):
                scores.add_metric([run.run, str(slot)], score)
        yield from (incidents, expected, ranks, weights, faults, commands, edits, scores)

    def _norms(self, runs: list[tuple[RunMetrics, _RunSlots]]) -> Iterator[Metric]:
        norms = GaugeMetricFamily(
            "sentinel_norm",
            "Norms of the tensors of one kind on one pipeline stage, newest judged step.",
            labels=["run", "pp_stage", "kind", "aggregate"],
        )
        bad = CounterMetricFamily(
            "sentinel_nonfinite_elements",
            "NaN and infinite elements seen, by kind and pipeline stage.",
            labels=["run", "pp_stage", "kind", "value"],
        )
        for run, slots in runs:
            for group in run.norms:
                stage = str(group.pp_stage)
                if not slots.norms.admits((stage, group.kind), num_series=len(AGGREGATES) + 2):
                    continue
                for aggregate in AGGREGATES:
                    norms.add_metric([run.run, stage, group.kind, aggregate], getattr(group, aggregate))
                bad.add_metric([run.run, stage, group.kind, "nan"], group.num_nan_total)
                bad.add_metric([run.run, stage, group.kind, "inf"], group.num_inf_total)
        yield norms
        yield bad

    def _anomalies(self, runs: list[tuple[RunMetrics, _RunSlots]]) -> Metric:
        anomalies = CounterMetricFamily(
            "sentinel_anomalies", "Onsets of anomalies, by rule and severity.", labels=["run", "rule", "severity"]
        )
        for run, slots in runs:
            others = dict.fromkeys(SEVERITIES, 0)
            for rule in dict.fromkeys([*run.rules, *sorted(name for name, _ in run.anomalies)]):
                counts = {severity: run.anomalies.get((rule, severity), 0) for severity in SEVERITIES}
                if slots.rules.admits(rule, num_series=len(SEVERITIES)):
                    for severity, count in counts.items():
                        anomalies.add_metric([run.run, rule, severity], count)
                else:
                    others = {severity: others[severity] + count for severity, count in counts.items()}
            for severity, count in others.items():
                anomalies.add_metric([run.run, OTHER, severity], count)
        return anomalies

    def _health(self, runs: list[tuple[RunMetrics, _RunSlots]]) -> Metric:
        health = CounterMetricFamily(
            "sentinel_health_records", "Reports of blindness from the ranks, by code.", labels=["run", "code"]
        )
        for run, slots in runs:
            other = 0
            for code, count in sorted(run.health.items()):
                if slots.health.admits(code):
                    health.add_metric([run.run, code], count)
                else:
                    other += count
            health.add_metric([run.run, OTHER], other)
        return health


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
