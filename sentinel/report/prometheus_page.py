"""The page that Prometheus scrapes: one collector on its own registry, fed by a snapshot, bounded for the whole daemon.

The daemon fills a `MetricsSnapshot` (plain numbers, no client library) whenever it likes; a scrape turns the newest one
into series. Nothing is registered per run or per tensor, so nothing piles up in a process that lives for months.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from sentinel.printable import printable
from sentinel.report import join_series, run_series, worker_series
from sentinel.report.durations import Distribution
from sentinel.report.metrics import (
    CONFIGURED,
    HEARTBEAT_OUTCOMES,
    OUTCOMES,
    RELOAD_OUTCOMES,
    MetricsSnapshot,
    RunMetrics,
)
from sentinel.report.run_series import CORE_SERIES, ShownRun, wanted_by
from sentinel.report.series_room import SeriesRoom, allotted
from sentinel.report.stage_times import STAGES
from sentinel.version import VERSION

MAX_SERIES = 5000
"""Most series of a daemon, a bound on Prometheus's memory whatever is trained: 100 runs of 4,096 ranks fit."""
MAX_RUNS = 100
"""Runs shown at once, those that are live and those with the newest records first."""
MAX_SINKS = 12
"""Sinks shown, in the order of the configuration."""
DAEMON_SERIES = 540
"""Room kept for what is said of the daemon itself, `MAX_SINKS` sinks and `MAX_MIRRORS` mirrors included."""
MAX_MIRRORS = 12
"""Mirrors shown, in the order of their names."""
MAX_LABEL = 128
"""Most characters of a label's value."""


class MetricsCollector(Collector):
    """Turns the newest snapshot into series at each scrape, at most MAX_SERIES of them.

    source: returns the snapshot; called in the scraping thread, so it must return one that nobody changes.
    """

    def __init__(self, source: Callable[[], MetricsSnapshot]) -> None:
        self._source = source
        self._rooms: dict[str, SeriesRoom] = {}
        self._own_process = ProcessCollector(registry=None)
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
            families = [*self._process(snapshot)]
            if snapshot.worker is not None:
                families += worker_series.families(snapshot.worker)
            else:
                families += [*_daemon(snapshot), *run_series.families(self._shown(snapshot.runs))]
        for family in families:
            for sample in family.samples:
                for name, value in sample.labels.items():
                    sample.labels[name] = label_value(value)
            yield family

    def _shown(self, runs: tuple[RunMetrics, ...]) -> list[ShownRun]:
        newest = sorted(runs, key=lambda run: (not run.is_live, -(run.last_record_time or 0.0), run.run))[:MAX_RUNS]
        self._rooms = {run.run: self._rooms.get(run.run) or SeriesRoom() for run in newest}
        wanted = [wanted_by(run) for run in newest]
        rooms = allotted(
            [sum(one.values()) for one in wanted],
            [run.is_live for run in newest],
            MAX_SERIES - DAEMON_SERIES - CORE_SERIES * len(newest),
        )
        for run, want, room in zip(newest, wanted, rooms, strict=True):
            self._rooms[run.run].fit(want, room)
        return [ShownRun(run, self._rooms[run.run]) for run in newest]

    def _process(self, snapshot: MetricsSnapshot) -> Iterator[Metric]:
        build = GaugeMetricFamily("sentinel_build_info", "1; the label says which version runs.", labels=["version"])
        build.add_metric([VERSION], 1)
        yield build
        yield from self._own_process.collect()
        yield from _gauge("sentinel_start_timestamp_seconds", "When the process started.", snapshot.start_time)
        yield from _gauge("sentinel_problems", "Problems that /healthz lists.", snapshot.num_problems)
        yield from _gauge(
            "sentinel_tls_certificate_expiry_timestamp_seconds",
            "When the certificate ends that HTTP is served with.",
            snapshot.certificate_expiry_time,
        )
        yield from _disks(snapshot)


def _daemon(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    yield from _gauge("sentinel_runs", "Runs that the daemon follows.", len(snapshot.runs))
    num_hidden = max(len(snapshot.runs) - MAX_RUNS, 0)
    yield from _gauge("sentinel_runs_hidden", "Runs left out of the metrics for want of room.", num_hidden)
    yield from _gauge("sentinel_standby", "1 while another daemon serves these runs.", snapshot.is_standby)
    yield from _configured(snapshot)
    yield from _notifications(snapshot)
    yield from _mirrors(snapshot)
    yield from _stages(snapshot)
    yield from _heartbeats(snapshot)
    yield from join_series.families(snapshot.join)


def label_value(value: str) -> str:
    """Return what may stand in a label: visible characters alone, the others escaped; a long one ends with its hash."""
    shown = printable(value[: 2 * MAX_LABEL])
    if len(value) <= 2 * MAX_LABEL and len(shown) <= MAX_LABEL:
        return shown
    digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{shown[: MAX_LABEL - 9]}~{digest}"


def _configured(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    reloads = CounterMetricFamily("sentinel_reloads", "Reloads from files, by outcome.", labels=["what", "outcome"])
    successful = GaugeMetricFamily(
        "sentinel_last_reload_successful", "0 while the files are broken and the former ones are in use.", labels=["what"]
    )
    loaded = GaugeMetricFamily(
        "sentinel_last_reload_success_timestamp_seconds", "When files were last loaded without an error.", labels=["what"]
    )
    hashes = GaugeMetricFamily(
        "sentinel_config_hash", "First 48 bits of the hash of what is in use: equal on daemons that are configured alike.",
        labels=["what"],
    )  # fmt: skip
    for what in CONFIGURED:
        for outcome in RELOAD_OUTCOMES:
            reloads.add_metric([what, outcome], snapshot.reloads.get((what, outcome), 0))
        successful.add_metric([what], what not in snapshot.reload_failures)
        if what in snapshot.reload_times:
            loaded.add_metric([what], snapshot.reload_times[what])
        if what in snapshot.config_hashes:
            hashes.add_metric([what], int(snapshot.config_hashes[what][:12], 16))
    yield from (reloads, successful, loaded, hashes)


def _notifications(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    sent = CounterMetricFamily(
        "sentinel_notifications", "What became of notifications, by sink and outcome.", labels=["sink", "outcome"]
    )
    pending = GaugeMetricFamily("sentinel_notifications_pending", "Alerts in the outbox.", labels=["sink"])
    withheld = GaugeMetricFamily(
        "sentinel_notifications_withheld", "Of them those that wait for people or for the calendar.", labels=["sink"]
    )
    keep_alives = CounterMetricFamily(
        "sentinel_keep_alives", "Times that open incidents were sent again to a sink that forgets them.", labels=["sink"]
    )
    latency = HistogramMetricFamily(
        "sentinel_delivery_latency_seconds", "From the judgement of an alert to the sink's answer that it has it.",
        labels=["sink"],
    )  # fmt: skip
    names = [*snapshot.sinks, *(sink for sink, _ in snapshot.notifications)]
    for sink in list(dict.fromkeys(names))[:MAX_SINKS]:
        for outcome in OUTCOMES:
            sent.add_metric([sink, outcome], snapshot.notifications.get((sink, outcome), 0))
        pending.add_metric([sink], snapshot.notifications_pending.get(sink, 0))
        withheld.add_metric([sink], snapshot.notifications_withheld.get(sink, 0))
        keep_alives.add_metric([sink], snapshot.keep_alives.get(sink, 0))
        if sink in snapshot.delivery_latency:
            _add_distribution(latency, [sink], snapshot.delivery_latency[sink])
    yield from (sent, pending, withheld, keep_alives, latency)


def _mirrors(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    steps = CounterMetricFamily(
        "sentinel_mirror_steps", "Judged steps that a mirror has, and those that it lacks.", labels=["mirror", "outcome"]
    )
    failures = CounterMetricFamily("sentinel_mirror_failures", "Writes of a mirror that failed.", labels=["mirror"])
    waiting = GaugeMetricFamily("sentinel_mirror_steps_waiting", "Judged steps that wait for a mirror.", labels=["mirror"])
    left_out = GaugeMetricFamily(
        "sentinel_mirror_series_left_out", "Most series of a step for which a mirror has no room (max_series).",
        labels=["mirror"],
    )  # fmt: skip
    for name, counts in sorted(snapshot.mirrors.items())[:MAX_MIRRORS]:
        steps.add_metric([name, "written"], counts.num_steps)
        steps.add_metric([name, "dropped"], counts.num_dropped)
        failures.add_metric([name], counts.num_failures)
        waiting.add_metric([name], counts.num_waiting)
        left_out.add_metric([name], counts.num_series_left_out)
    yield from (steps, failures, waiting, left_out)


def _stages(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    seconds = CounterMetricFamily("sentinel_stage_seconds", "Time that each stage of the daemon took.", labels=["stage"])
    items = CounterMetricFamily(
        "sentinel_stage_items", "Frames followed, steps assembled, steps and moments judged and committed, requests sent.",
        labels=["stage"],
    )  # fmt: skip
    for stage in STAGES:
        spent, count = snapshot.stages.get(stage, (0.0, 0))
        seconds.add_metric([stage], spent)
        items.add_metric([stage], count)
    yield from (seconds, items)
    lag = HistogramMetricFamily(
        "sentinel_judge_lag_seconds",
        "From the end of a step, by the clock of its last rank, to its judgement in the journal.",
    )
    if snapshot.judge_lag is not None:
        _add_distribution(lag, [], snapshot.judge_lag)
    yield lag


def _disks(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    free = GaugeMetricFamily("sentinel_disk_free_bytes", "Left on the file system of a directory.", labels=["directory"])
    size = GaugeMetricFamily("sentinel_disk_size_bytes", "Of the file system of a directory.", labels=["directory"])
    for directory, (num_free, num_bytes) in snapshot.disks.items():
        free.add_metric([directory], num_free)
        size.add_metric([directory], num_bytes)
    yield from (free, size)


def _heartbeats(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    sent = CounterMetricFamily("sentinel_heartbeats", "Heartbeats pushed, by outcome.", labels=["outcome"])
    if snapshot.heartbeats is not None:
        for outcome in HEARTBEAT_OUTCOMES:
            sent.add_metric([outcome], snapshot.heartbeats.get(outcome, 0))
    yield sent
    yield from _gauge(
        "sentinel_heartbeat_success_timestamp_seconds", "When the last heartbeat was taken.", snapshot.heartbeat_time
    )


def _add_distribution(family: HistogramMetricFamily, labels: list[str], found: Distribution) -> None:
    bounds = [*map(repr, found.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, found.cumulative, strict=True)), found.sum_s)


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, text, value=float(value))
