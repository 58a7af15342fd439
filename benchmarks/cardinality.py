"""Series and bytes of a daemon's metrics, by the number of runs of 4,096 ranks that it follows.

    python benchmarks/cardinality.py

Each run has the rules of the default pack, norms of eight kinds on sixteen pipeline stages, twenty scalars of its own and
twelve codes of health records. The daemon has twelve sinks and everything else that can be configured.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sentinel.report.durations import DurationCounts
from sentinel.report.metrics import MetricsSnapshot, NormAggregate, RunMetrics
from sentinel.report.pipeline import LATENCY_BOUNDS_S
from sentinel.report.prometheus_page import MAX_SERIES, MetricsCollector
from sentinel.rules.language.loader import load_pack

NUM_RANKS = 4096
NUM_SINKS = 12
KINDS = ("param", "wgrad", "activation", "dgrad", "residual", "exp_avg", "exp_avg_sq", "update")


def a_run(number: int) -> RunMetrics:
    """Return a run that trains."""
    return RunMetrics(
        run=f"pretraining-of-a-large-model-{number:03}", host=f"node{number:04}", job_id=str(10_000 + number), torch="2.9",
        newest_step=1000, judged_step=999, last_record_time=1e9 + number, quietest_received_time=1e9, last_judged_time=1e9,
        step_time_s=10.0, spool_seconds_left=1e5, num_ranks_expected=NUM_RANKS, ranks={"live": NUM_RANKS},
        scalars={"loss": 2.0, "grad_norm": 1.0, "lr": 1e-4, **{f"train/metric_{one}": 1.0 for one in range(20)}},
        norms=tuple(NormAggregate(pp_stage=stage, kind=kind) for stage in range(16) for kind in KINDS),
        rules=tuple(rule.name for rule in load_pack().rules), health={f"code_{one}": 1 for one in range(12)},
        top_scores=(0.5,) * 16, monitoring_acked_step=900, is_monitoring=True,
    )  # fmt: skip


def a_snapshot(num_runs: int) -> MetricsSnapshot:
    """Return what a daemon says that follows so many runs."""
    sinks = tuple(f"sink-{number}" for number in range(NUM_SINKS))
    counts = DurationCounts(LATENCY_BOUNDS_S)
    return MetricsSnapshot(
        runs=tuple(map(a_run, range(num_runs))), sinks=sinks, start_time=1e9,
        delivery_latency=dict.fromkeys(sinks, counts.read()), judge_lag=counts.read(),
        reload_times={"rules": 1e9, "config": 1e9}, config_hashes={"rules": "0" * 16, "config": "1" * 16},
        disks={"state": (1, 2), "runs": (1, 2)}, heartbeats={}, heartbeat_time=1e9, certificate_expiry_time=2e9,
    )  # fmt: skip


HEAD = ("runs", "series", "of the daemon", "a run, least", "most", "left out", "bytes")


def figures(num_runs: int) -> tuple[int, ...]:
    """Return the columns of `HEAD`."""
    snapshot = a_snapshot(num_runs)
    body, _ = MetricsCollector(lambda: snapshot).render()
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    of_runs = [sum(f'run="{run.run}"' in line for line in lines) for run in snapshot.runs]
    shown = [number for number in of_runs if number] or [0]
    num_left_out = sum(float(line.split()[-1]) for line in lines if line.startswith("sentinel_series_dropped_total"))
    return num_runs, len(lines), len(lines) - sum(of_runs), min(shown), max(shown), int(num_left_out), len(body)


def main() -> None:
    """Print the table."""
    print(f"{datetime.now(UTC):%Y-%m-%d} series of one daemon, runs of {NUM_RANKS} ranks; bound {MAX_SERIES}")
    print("  ".join(f"{name:>{max(len(name), 7)}}" for name in HEAD))
    for num_runs in (0, 1, 2, 8, 16, 32, 64, 100, 200):
        print("  ".join(f"{one:>{max(len(name), 7)}}" for name, one in zip(HEAD, figures(num_runs), strict=True)))


if __name__ == "__main__":
    main()
