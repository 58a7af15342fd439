"""Raw moments as Megatron's training stats write them: `training_stats/{stat}/rank{R}.jsonl`, one line a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

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
    zero: int
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
            int(stats["num_zero"][at]),
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


class MegatronStatsFiles:
    """Writes `DIR/training_stats`; a tensor is in the file of the lowest rank that holds it, and nowhere else."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "training_stats"
        self._files: dict[tuple[str, int], IO[bytes]] = {}

    @property
    def num_files(self) -> int:
        """Files written to."""
        return len(self._files)

    def write(self, step: int, samples: float | None, rows: Iterable[tuple[str, str, str, int, RawMoments]]) -> int:
        """Write one step and return how many values that were. rows: (name, kind, border, lowest rank, values)."""
        lines: dict[tuple[str, int], dict[str, RawMoments]] = {}
        for name, kind, border, rank, values in rows:
            for stat in stats_of(kind, border):
                lines.setdefault((stat, rank), {})[name] = values
        for (stat, rank), found in lines.items():
            self._file(stat, rank).write(msgspec.json.encode(_Line(step, samples, stat, found)) + b"\n")
        return sum(len(found) for found in lines.values())

    def _file(self, stat: str, rank: int) -> IO[bytes]:
        file = self._files.get((stat, rank))
        if file is None:
            path = self._directory / stat / f"rank{rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._files[stat, rank] = path.open("xb")
        return file

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
