"""What the join of a fleet says of itself, as series: totals over nodes, and the nodes that are furthest behind by name."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sentinel.join_health import JoinHealth

MAX_NODES = 10
"""Nodes shown by name, those furthest behind first: a bound on series, whatever the fleet."""


def families(join: JoinHealth | None) -> Iterator[Metric]:
    """Yield the families of a join; of a daemon that is none, nothing."""
    if join is None:
        return
    lag_bytes = sum(one.lag_bytes for one in join.nodes)
    gauges = (
        ("sentinel_join_active", "1 while this join holds the lease and judges, 0 while it stands by.", join.is_active),
        ("sentinel_join_lease_epoch", "Of the lease, as known here: one more with each take-over.", join.epoch),
        ("sentinel_join_broker_connected", "1 while the broker answers this join.", join.is_connected),
        ("sentinel_join_copies_refused", "1 while the disk does not take the copies of spools.", join.are_copies_refused),
        ("sentinel_join_held_bytes", "Bytes that wait until every node has spoken since.", join.held_bytes),
        ("sentinel_join_lag_bytes", "Bytes in the spools of all nodes that are not here.", lag_bytes),
        (
            "sentinel_join_lag_seconds", "How long the longest-waiting of them has waited.",
            max((one.lag_s for one in join.nodes), default=0.0),
        ),
    )  # fmt: skip
    for name, words, value in gauges:
        yield GaugeMetricFamily(name, words, value=value)
    nodes = GaugeMetricFamily(
        "sentinel_join_nodes", "Nodes that spoke to this join within the hour; silent: not for 30 s.", labels=["state"]
    )
    nodes.add_metric(["live"], len(join.nodes) - join.num_silent)
    nodes.add_metric(["silent"], join.num_silent)
    yield nodes
    for what, words in (
        ("chunks", "Chunks of spools that came."),
        ("bytes", "Bytes that were new here."),
        ("repeated", "Chunks that were here already."),
        (
            "dropped",
            "Chunks for which there was no room, and which come again: too early, or of a run that waits for a node.",
        ),
        ("refused", "Chunks and beats that were not taken from who sent them."),
        ("digested_steps", "Steps of runs of which digests of nodes were used."),
        ("fetched_steps", "Steps whose rows were asked for, for something in them was looked at row by row."),
        ("gone_frames", "Frames of rows that no node has any more, so that their steps were judged without them."),
        ("shared_names", "Beats that show that several machines speak as one node."),
    ):
        yield CounterMetricFamily(f"sentinel_join_{what}", words, value=join.counts.get(what, 0))
    worst = sorted(join.nodes, key=lambda one: (-one.lag_s, -one.lag_bytes, -one.silent_s, one.node))[:MAX_NODES]
    behind = GaugeMetricFamily(
        "sentinel_join_node_lag_bytes", "Of the nodes furthest behind: bytes that are not here.", labels=["node"]
    )
    waited = GaugeMetricFamily("sentinel_join_node_lag_seconds", "The same: how long they have waited.", labels=["node"])
    heard = GaugeMetricFamily(
        "sentinel_join_node_heard_timestamp_seconds", "The same: when their newest beat came.", labels=["node"]
    )
    for one in worst:
        behind.add_metric([one.node], one.lag_bytes)
        waited.add_metric([one.node], one.lag_s)
        heard.add_metric([one.node], time.time() - one.silent_s)
    yield from (behind, waited, heard)
