"""What a worker of a fleet says of itself, as series: totals over the nodes behind it, and the epoch of each partition."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sentinel.worker_health import WorkerHealth


def families(worker: WorkerHealth) -> Iterator[Metric]:
    """Yield the families of a worker. Those of partitions are as many as there are partitions at most."""
    gauges = (
        ("sentinel_worker_broker_connected", "1 while the broker answers this worker.", worker.is_connected),
        ("sentinel_worker_partitions", "Partitions of the nodes that this worker has, of 64.", len(worker.partitions)),
        ("sentinel_worker_workers", "Workers that share the partitions, as this one saw last.", worker.num_workers),
        ("sentinel_worker_blocked", "1 while nothing goes on to the join.", worker.is_blocked),
        (
            "sentinel_worker_copies_refused",
            "1 while the disk takes no copies of spools.",
            worker.are_copies_refused,
        ),
        ("sentinel_worker_held_bytes", "Bytes that wait until their node has spoken since.", worker.held_bytes),
        ("sentinel_worker_ahead_bytes", "Bytes that are here and not at the join.", worker.ahead_bytes),
        ("sentinel_worker_waiting_bytes", "Bytes in the spools of nodes that are not at the join.", worker.waiting_bytes),
        ("sentinel_worker_lag_bytes", "Bytes in the spools of nodes that are not here.", worker.lag_bytes),
        ("sentinel_worker_lag_seconds", "How long the longest-waiting of them has waited.", worker.lag_s),
    )
    for name, words, value in gauges:
        yield GaugeMetricFamily(name, words, value=value)
    nodes = GaugeMetricFamily(
        "sentinel_worker_nodes", "Nodes that spoke to this worker within the hour; silent: not for 30 s.", labels=["state"]
    )
    nodes.add_metric(["live"], worker.num_nodes - worker.num_silent)
    nodes.add_metric(["silent"], worker.num_silent)
    yield nodes
    epochs = GaugeMetricFamily(
        "sentinel_worker_partition_epoch", "Of a partition that this worker has: one more each time that one is taken.",
        labels=["partition"],
    )  # fmt: skip
    for partition, epoch in sorted(worker.partitions.items()):
        epochs.add_metric([str(partition)], epoch)
    yield epochs
    for what, words in (
        ("chunks", "Chunks of spools that came."),
        ("bytes", "Bytes that were new here."),
        ("repeated", "Chunks that were here already."),
        ("dropped", "Chunks for which there was no room, and which come again."),
        ("refused", "Messages that were not taken from who sent them."),
        ("taken_partitions", "Times that a partition was taken."),
        ("published_messages", "Messages for the join that the broker took."),
        ("published_bytes", "Their bytes."),
    ):
        yield CounterMetricFamily(f"sentinel_worker_{what}", words, value=worker.counts.get(what, 0))
