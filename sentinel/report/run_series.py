"""What a scrape shows of one run: a core that every run has, and details for which there may be no room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sentinel.report.metrics import (
    AGGREGATES,
    COMMAND_STATES,
    EDIT_OUTCOMES,
    FRAME_FAULTS,
    RANK_STATES,
    SEVERITIES,
    WEIGHT_STATES,
    RunMetrics,
)
from sentinel.report.series_room import Key, SeriesRoom

CORE_SERIES = 44
"""Series that every run has, however many runs there are."""
OTHER = "_other"
"""Label value that sums the counters which found no room."""
MAX_SCORES = 16


class ShownRun(NamedTuple):
    """A run, and the details of it that are shown."""

    metrics: RunMetrics
    room: SeriesRoom


_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("attempt", "sentinel_attempt", "Attempt of the run that is training, from 0."),
    ("newest_step", "sentinel_newest_step", "Newest step that any rank reported."),
    ("judged_step", "sentinel_judged_step", "Newest step that was judged."),
    ("last_record_time", "sentinel_last_record_timestamp_seconds", "When the newest record was made, its own clock."),
    ("quietest_received_time", "sentinel_quietest_rank_heard_timestamp_seconds",
     "When the newest frame came of the running rank that is silent the longest."),
    ("last_judged_time", "sentinel_last_judged_timestamp_seconds", "When the newest judgement was given."),
    ("step_time_s", "sentinel_step_duration_seconds", "Duration of a training step, median of the last 9."),
    ("is_monitoring", "sentinel_monitoring_enabled", "1 while module monitoring is on, 0 while only the black box is."),
    ("spool_waiting_bytes", "sentinel_spool_waiting_bytes",
     "Bytes that wait to be judged, of the rank whose spool is nearest to its cap."),
    ("spool_seconds_left", "sentinel_spool_seconds_left", "Until that spool reaches its cap at the rate it fills."),
    ("num_file_lines_pending", "sentinel_file_lines_pending", "Lines of anomaly files that wait for the disk."),
    ("num_ranks_expected", "sentinel_expected_ranks", "Ranks of the run, as they say themselves."),
)  # fmt: skip
_COUNTERS: tuple[tuple[str, str, str], ...] = (
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
    ("num_blind", "sentinel_blind_records_total",
     "Reports of ranks that they measure less than they should: hooks that failed, a full disk."),
    ("num_file_failures", "sentinel_file_write_failures_total", "Writes of anomaly files that the disk refused."),
    ("num_history_missing", "sentinel_history_steps_missing_total", "Steps that the history lacks for want of disk."),
)  # fmt: skip
_OWN_SCALARS: dict[str, tuple[str, str]] = {
    "loss": ("sentinel_loss", "Loss, newest judged step, mean over ranks."),
    "grad_norm": ("sentinel_grad_norm", "Gradient norm of the newest judged step, before clipping."),
    "lr": ("sentinel_learning_rate", "Learning rate, newest judged step."),
}
"""Scalar -> the metric that is its own."""


def wanted_by(run: RunMetrics) -> dict[Key, int]:
    """Return the details that a run has, the dearest first: key -> number of series."""
    rules = dict.fromkeys([*run.rules, *sorted(name for name, _ in run.anomalies)])
    return {
        **{("rule", rule): len(SEVERITIES) for rule in rules},
        **{("health", code): 1 for code in sorted(run.health)},
        ("lr",): 1,
        ("weights",): len(WEIGHT_STATES),
        ("commands",): len(COMMAND_STATES) + 1,
        ("config_edits",): len(EDIT_OUTCOMES),
        **{("norm", str(group.pp_stage), group.kind): len(AGGREGATES) + 2 for group in run.norms},
        **{("scalar", name): 1 for name in sorted(run.scalars) if name not in _OWN_SCALARS},
        **{("score", str(slot)): 1 for slot in range(min(len(run.top_scores), MAX_SCORES))},
    }


def families(runs: Sequence[ShownRun]) -> Iterator[Metric]:
    """Yield every family of runs once, whether or not there is a run."""
    info = GaugeMetricFamily(
        "sentinel_run_info", "1; the labels say where the run trains: of its lowest rank.",
        labels=["run", "host", "pod", "job_id", "torch"],
    )  # fmt: skip
    for run, _ in runs:
        info.add_metric([run.run, run.host, run.pod, run.job_id, run.torch], 1)
    yield info
    yield from _plain(runs)
    yield from _scalars(runs)
    yield from _by_label(runs)
    yield from _norms(runs)
    yield _anomalies(runs)
    yield _health(runs)
    dropped = CounterMetricFamily(
        "sentinel_series_dropped", "Most series of a run left out at once to keep the daemon within bounds.", labels=["run"]
    )
    for run, room in runs:
        dropped.add_metric([run.run], room.num_dropped)
    yield dropped


def _plain(runs: Sequence[ShownRun]) -> Iterator[Metric]:
    for field, name, text in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["run"])
        for run, _ in runs:
            value = getattr(run, field)
            if value is not None:
                gauge.add_metric([run.run], float(value))
        yield gauge
    for field, name, text in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["run"])
        for run, _ in runs:
            counter.add_metric([run.run], float(getattr(run, field)))
        yield counter


def _scalars(runs: Sequence[ShownRun]) -> Iterator[Metric]:
    own = {name: GaugeMetricFamily(metric, text, labels=["run"]) for name, (metric, text) in _OWN_SCALARS.items()}
    others = GaugeMetricFamily(
        "sentinel_scalar", "Any other scalar of the newest judged step, mean over ranks.", labels=["run", "name"]
    )
    for run, room in runs:
        for name, value in sorted(run.scalars.items()):
            if name in own and (name != "lr" or ("lr",) in room):
                own[name].add_metric([run.run], value)
            elif ("scalar", name) in room:
                others.add_metric([run.run, name], value)
    yield from own.values()
    yield others


def _by_label(runs: Sequence[ShownRun]) -> Iterator[Metric]:
    incidents = GaugeMetricFamily(
        "sentinel_open_incidents", "Incidents that are open, by severity.", labels=["run", "severity"]
    )
    ranks = GaugeMetricFamily(
        "sentinel_ranks", "Ranks, each in one state: live, late, stale, missing.", labels=["run", "state"]
    )
    weights = GaugeMetricFamily(
        "sentinel_weights", "Weights whose copies are compared, and weights that cannot be checked.", labels=["run", "state"]
    )
    faults = CounterMetricFamily(
        "sentinel_frame_faults", "Frames that could not be read, by reason.", labels=["run", "reason"]
    )
    commands = CounterMetricFamily(
        "sentinel_commands", "Commands to the trainer, by each state they entered.", labels=["run", "state"]
    )
    acknowledged = GaugeMetricFamily(
        "sentinel_monitoring_acknowledged_step", "First step of the last command that every rank it meant acknowledged.",
        labels=["run"],
    )  # fmt: skip
    edits = CounterMetricFamily(
        "sentinel_config_edits", "Edits of the trainer's config file, by what became of them.", labels=["run", "outcome"]
    )
    scores = GaugeMetricFamily(
        "sentinel_top_score", "Largest scores of the newest judged step; 1 and more is anomalous.", labels=["run", "slot"]
    )
    for run, room in runs:
        _add(incidents, run.run, SEVERITIES, run.open_incidents)
        _add(ranks, run.run, RANK_STATES, run.ranks)
        _add(faults, run.run, FRAME_FAULTS, run.frame_faults)
        if ("weights",) in room:
            _add(weights, run.run, WEIGHT_STATES, run.weights)
        if ("commands",) in room:
            _add(commands, run.run, COMMAND_STATES, run.commands)
            if run.monitoring_acked_step is not None:
                acknowledged.add_metric([run.run], run.monitoring_acked_step)
        if ("config_edits",) in room:
            _add(edits, run.run, EDIT_OUTCOMES, run.config_edits)
        for slot, score in enumerate(run.top_scores[:MAX_SCORES]):
            if ("score", str(slot)) in room:
                scores.add_metric([run.run, str(slot)], score)
    yield from (incidents, ranks, weights, faults, commands, acknowledged, edits, scores)


def _add(
    family: GaugeMetricFamily | CounterMetricFamily, run: str, values: Sequence[str], counts: Mapping[str, int]
) -> None:
    """Add one sample for each value of the second label, zeros included."""
    for value in values:
        family.add_metric([run, value], counts.get(value, 0))


def _norms(runs: Sequence[ShownRun]) -> Iterator[Metric]:
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
    for run, room in runs:
        for group in run.norms:
            stage = str(group.pp_stage)
            if ("norm", stage, group.kind) not in room:
                continue
            for aggregate in AGGREGATES:
                norms.add_metric([run.run, stage, group.kind, aggregate], getattr(group, aggregate))
            bad.add_metric([run.run, stage, group.kind, "nan"], group.num_nan_total)
            bad.add_metric([run.run, stage, group.kind, "inf"], group.num_inf_total)
    yield norms
    yield bad


def _anomalies(runs: Sequence[ShownRun]) -> Metric:
    anomalies = CounterMetricFamily(
        "sentinel_anomalies", "Onsets of anomalies, by rule and severity.", labels=["run", "rule", "severity"]
    )
    for run, room in runs:
        others = dict.fromkeys(SEVERITIES, 0)
        for rule in dict.fromkeys([*run.rules, *sorted(name for name, _ in run.anomalies)]):
            for severity in SEVERITIES:
                count = run.anomalies.get((rule, severity), 0)
                if ("rule", rule) in room:
                    anomalies.add_metric([run.run, rule, severity], count)
                else:
                    others[severity] += count
        for severity, count in others.items():
            anomalies.add_metric([run.run, OTHER, severity], count)
    return anomalies


def _health(runs: Sequence[ShownRun]) -> Metric:
    health = CounterMetricFamily(
        "sentinel_health_records", "Reports of blindness from the ranks, by code.", labels=["run", "code"]
    )
    for run, room in runs:
        other = 0
        for code, count in sorted(run.health.items()):
            if ("health", code) in room:
                health.add_metric([run.run, code], count)
            else:
                other += count
        health.add_metric([run.run, OTHER], other)
    return health
