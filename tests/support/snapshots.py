"""What a daemon shows at a scrape, with everything that there may be."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from sentinel.join_health import JoinHealth, NodeHealth
from sentinel.report.durations import DurationCounts
from sentinel.report.metrics import MetricsSnapshot, MirrorCounts, NormAggregate, RunMetrics
from sentinel.report.pipeline import LATENCY_BOUNDS_S
from sentinel.worker_health import WorkerHealth


def full_run(name: str = "run", **changes: Any) -> RunMetrics:
    """Return a run of which everything is known. changes: fields that are otherwise."""
    full = RunMetrics(
        run=name, host="node7", pod="trainer-0", job_id="4711", torch="2.9",
        attempt=2, newest_step=12, judged_step=11, last_record_time=1e9, last_judged_time=1e9 + 1,
        quietest_received_time=1e9, step_time_s=0.5, scalars={"loss": 2.5, "grad_norm": 1.0, "lr": 1e-4, "tokens": 4096.0},
        num_ranks_expected=4, ranks={"live": 4}, is_monitoring=True, monitoring_acked_step=10, rules=("loss-spike",),
        norms=(NormAggregate(pp_stage=0, kind="wgrad", min=0.1, mean=0.2, max=math.inf, num_nan_total=3),),
        top_scores=(2.0, 0.5), anomalies={("loss-spike", "critical"): 2}, health={"disk_full": 1, "unsupported": 7},
        commands={"issued": 1}, spool_seconds_left=9.0,
    )  # fmt: skip
    return msgspec.structs.replace(full, **changes)


def a_join(num_nodes: int = 2000) -> JoinHealth:
    """Return what a join says of a fleet in which node-0 is the furthest behind."""
    nodes = [
        NodeHealth(node=f"node-{number}", silent_s=1.0, lag_bytes=10, lag_s=5000.0 - number) for number in range(num_nodes)
    ]
    return JoinHealth(
        is_active=True,
        epoch=2,
        is_connected=True,
        nodes=tuple(nodes),
        num_silent=1,
        held_bytes=7,
        counts={"refused": 4, "digested_steps": 5},
    )


def a_worker(num_partitions: int = 64) -> WorkerHealth:
    """Return what a worker of a fleet says."""
    return WorkerHealth(
        is_connected=True, is_renewed=True, partitions=dict.fromkeys(range(num_partitions), 3), num_workers=2, num_nodes=5,
        num_silent=1, held_bytes=1, ahead_bytes=2, waiting_bytes=30, lag_bytes=20, lag_s=4.0,
        counts={"chunks": 6, "bytes": 1000, "refused": 2, "taken_partitions": 65},
    )  # fmt: skip


def full_snapshot(runs: tuple[RunMetrics, ...], num_sinks: int = 1, **changes: Any) -> MetricsSnapshot:
    """Return what a daemon says of which everything is configured."""
    sinks = tuple(f"sink-{number}" for number in range(num_sinks))
    latency = DurationCounts(LATENCY_BOUNDS_S)
    latency.observe(0.3)
    full = MetricsSnapshot(
        runs=runs, sinks=sinks, start_time=1.0, reload_times={"rules": 1.0, "config": 2.0},
        config_hashes={"rules": "f" * 16, "config": "0" * 15 + "1"}, judge_lag=latency.read(),
        delivery_latency=dict.fromkeys(sinks, latency.read()), disks={"state": (1, 10), "runs": (2, 20)},
        heartbeats={"sent": 3, "failed": 1}, heartbeat_time=5.0, certificate_expiry_time=6.0,
        join=a_join(), stages={"judge": (1.5, 3)},
        mirrors=dict.fromkeys(map(str, range(num_sinks)), MirrorCounts(num_dropped=1)),
    )  # fmt: skip
    return msgspec.structs.replace(full, **changes)
