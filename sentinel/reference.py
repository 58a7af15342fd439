"""Reference: what reference runs on the same data logged, step by step; a rule carries it as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

MOST_RUNS = 32
"""Reference runs of a scalar that are kept, those with the most steps: past a dozen one more adds hardly anything."""


class ReferenceSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One scalar of each reference run."""

    steps: bytes
    """[steps] int64, rising: those that any of them has."""
    values: bytes
    """[steps, reference runs] float32, NaN where a reference run has no number."""
    num_runs: int
    """Reference runs that have the scalar."""

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return steps and values, [steps] and [steps, reference runs]."""
        steps = np.frombuffer(self.steps, np.int64)
        return steps, np.frombuffer(self.values, np.float32).reshape(len(steps), -1)


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Reference runs on the same data, matched by step."""

    paths: tuple[str, ...] = ()
    """As a rule names them; for people."""
    series: dict[str, ReferenceSeries] = {}
    """Scalar -> what the reference runs logged."""


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
    series = {name: _combine(references) for name, references in sorted(by_name.items())}
    return Reference(paths=tuple(paths), series=series)


def _combine(references: list[tuple[np.ndarray, np.ndarray]]) -> ReferenceSeries:
    longest = sorted(range(len(references)), key=lambda at: -len(references[at][0]))[:MOST_RUNS]
    kept = [references[at] for at in sorted(longest)]
    steps = np.unique(np.concatenate([own for own, _ in kept]))
    table = np.full((len(steps), len(kept)), np.nan, np.float32)
    for column, (own, values) in enumerate(kept):
        with np.errstate(over="ignore"):
            table[np.searchsorted(steps, own), column] = values
    return ReferenceSeries(steps=steps.astype(np.int64).tobytes(), values=table.tobytes(), num_runs=len(references))
