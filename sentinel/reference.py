"""Reference: what sister runs on the same data logged, step by step; a rule carries it as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

SMOOTH = 49
"""Steps over which a sister's own distance from the others is taken off before its unrest is read (chosen)."""
FEW = 3
"""Sisters below which no median stands above a bad one: the larger counts, so that one that drops accuses nobody."""


class ReferenceSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One scalar of all sisters together."""

    steps: bytes
    """[steps] int64, rising."""
    medians: bytes
    """[steps] float64: the median of the sisters that have a number there."""
    unrest: bytes
    """[steps] float32: how far, in logarithms, one sister in ten leaves the others at this step; 0.0 where few have it."""
    num_runs: int
    """Sisters that have the scalar."""

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float32]]:
        """Return steps, medians and unrest."""
        return (
            np.frombuffer(self.steps, np.int64),
            np.frombuffer(self.medians, np.float64),
            np.frombuffer(self.unrest, np.float32),
        )


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Sister runs on the same data, matched by step."""

    paths: tuple[str, ...] = ()
    """As a rule names them; for people."""
    series: dict[str, ReferenceSeries] = {}
    """Scalar -> what the sisters logged."""


def combine(runs: Iterable[Mapping[str, tuple[np.ndarray, np.ndarray]]], paths: Iterable[str] = ()) -> Reference:
    """Return the reference that `runs` make: each a mapping of scalar -> (steps, values), of any order and interval.

    Of a step that a run logged several times (it was resumed) the last number counts; what is not finite is not there.
    """
    by_name: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for run in runs:
        for name, (steps, values) in run.items():
            keep = np.isfinite(values)
            if keep.any():
                # The last of equal steps: unique keeps the first, so it looks from behind.
                found, last = np.unique(np.asarray(steps)[keep][::-1], return_index=True)
                kept = np.asarray(values, np.float64)[keep][::-1][last]
                by_name.setdefault(name, []).append((found.astype(np.int64), kept))
    series = {name: _combine(sisters) for name, sisters in sorted(by_name.items())}
    return Reference(paths=tuple(paths), series=series)


def _combine(sisters: list[tuple[np.ndarray, np.ndarray]]) -> ReferenceSeries:
    steps = np.unique(np.concatenate([own for own, _ in sisters]))
    table = np.full((len(sisters), len(steps)), np.nan)
    for row, (own, values) in enumerate(sisters):
        table[row, np.searchsorted(steps, own)] = values
    count = np.isfinite(table).sum(axis=0)
    medians = np.where(count < FEW, np.nanmax(table, axis=0), np.nanmedian(table, axis=0))
    unrest = np.zeros(len(steps), np.float32)
    if len(sisters) >= FEW:
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.where((table > 0.0) & (medians > 0.0), np.log(table) - np.log(medians), np.nan)
        alone = np.abs(np.array([_without_trend(row) for row in away]))
        ordered, there = np.sort(alone, axis=0), np.isfinite(alone).sum(axis=0)
        enough = there >= FEW
        at = np.minimum(np.ceil(0.9 * (there - 1)).astype(np.int64), len(sisters) - 1)
        unrest[enough] = ordered[at, np.arange(len(steps))][enough]
    return ReferenceSeries(
        steps=steps.astype(np.int64).tobytes(), medians=medians.tobytes(), unrest=unrest.tobytes(), num_runs=len(sisters)
    )


def _without_trend(values: np.ndarray) -> np.ndarray:
    """Return values less their median over the SMOOTH present ones about them; NaN stays."""
    at = np.flatnonzero(np.isfinite(values))
    out = np.full(len(values), np.nan)
    if at.size:
        padded = np.pad(values[at], SMOOTH // 2, mode="edge")
        out[at] = values[at] - np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTH), axis=1)
    return out
