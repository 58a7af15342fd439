"""Raw moments as Megatron's training stats write them: `training_stats/{stat}/rank{R}.jsonl`, one line a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from sentinel.moments import Moments

STAT_OF_KIND = {
    "param": "param_raw_moments_by_param",
    "wgrad": "grad_raw_moments_by_param",
    "activation": "activation_raw_moments_by_layer",
    "dgrad": "dgrad_raw_moments_by_layer",
    "residual": "residual_raw_moments_by_layer",
}
"""Kinds that have a place in the format."""
STAT_OF_STREAM = {"activation": "residual_raw_moments_by_layer", "dgrad": "residual_dgrad_raw_moments_by_layer"}
"""What goes from block to block is the residual stream: written there besides."""
STREAM_BORDERS = frozenset({"block_input", "block_output"})
SAMPLES = ("consumed_train_samples", "consumed_samples")
"""Logged values that say how many samples were trained on."""


class RawMoments(msgspec.Struct, frozen=True):
    """The values of one tensor or group: sums over finite elements, the other elements counted."""

    count: int
    sum_1: float
    sum_2: float
    sum_3: float
    sum_4: float
    nan: int
    inf: int
    zero: int | None
    min: float | None
    max: float | None


class _Line(msgspec.Struct, frozen=True):
    iter: int
    consumed_train_samples: float | None
    stat: str
    values: dict[str, RawMoments]


def raw_moments(moments: Moments) -> list[RawMoments]:
    """Return the values of each row. A sum too large for a float64 is null in JSON.

    Source: S2 = M2 + n mu^2 and so on (`Moments.raw_moments`).
    """
    sums = moments.raw_moments()
    stats = moments.stats
    lows, highs = moments.min(), moments.max()
    return [
        RawMoments(
            int(stats["count"][at]),
            float(sums["s1"][at]),
            float(sums["s2"][at]),
            float(sums["s3"][at]),
            float(sums["s4"][at]),
            int(stats["num_nan"][at]),
            int(stats["num_pos_inf"][at] + stats["num_neg_inf"][at]),
            int(stats["num_zero"][at]) if stats["num_zero"][at] >= 0 else None,
            None if np.isnan(lows[at]) else float(lows[at]),
            None if np.isnan(highs[at]) else float(highs[at]),
        )
        for at in range(len(stats))
    ]


def stats_of(kind: str, border: str) -> Iterator[str]:
    """Yield the stats that a tensor of this kind, at this border of the black box or at none, is written under."""
    if kind in STAT_OF_KIND:
        yield STAT_OF_KIND[kind]
    if border in STREAM_BORDERS and kind in STAT_OF_STREAM:
        yield STAT_OF_STREAM[kind]


def file_name(stat: str, rank: int) -> str:
    """Return where a rank's lines of a stat are, below the directory of the stats."""
    return f"{stat}/rank{rank}.jsonl"


def lines_of(
    step: int, samples: float | None, rows: Iterable[tuple[str, str, str, int, RawMoments]]
) -> tuple[list[tuple[str, bytes]], int]:
    """Return (file, line) for each file that a step has values in, and how many values those are.

    A tensor is in the file of the lowest rank that holds it, nowhere else. rows: (name, kind, border, that rank, values).
    """
    lines: dict[tuple[str, int], dict[str, RawMoments]] = {}
    for name, kind, border, rank, values in rows:
        for stat in stats_of(kind, border):
            lines.setdefault((stat, rank), {})[name] = values
    chunks = [
        (file_name(stat, rank), msgspec.json.encode(_Line(step, samples, stat, found)) + b"\n")
        for (stat, rank), found in lines.items()
    ]
    return chunks, sum(len(found) for found in lines.values())
