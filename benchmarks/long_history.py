"""A history of very many steps, as the daemon's own writer and compaction leave it, of values that nobody trained.

The newest steps go through `HistoryWriter` step by step. Of older ones the buckets of 16 steps are drawn at random and
written by `write_file` as the merges leave them, in files of `STRETCH` steps; those of 256 and 4,096 are made of them by
`merged`, and their files are merged by `compacted`. About each planted anomaly there are single steps, and the buckets over
them are made of these by `buckets_of`. So a question meets the files, levels and row groups that it meets behind a daemon.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.exports.series import MergedStep
from sentinel.history.buckets import buckets_of, merged
from sentinel.history.compaction import KEPT, compacted
from sentinel.history.config import FOLDER, HistoryConfig
from sentinel.history.history_files import write_file
from sentinel.history.manifest import HistoryFile, Manifest, publish
from sentinel.history.step_rows import SeriesIds
from sentinel.history.table_schemas import FOUND, SCHEMAS, STATISTICS, WIDTHS, Columns, in_order, joined
from sentinel.history.writer import HistoryWriter
from sentinel.moments import EMPTY
from sentinel.private_files import make_directory
from sentinel.step_view import LogicalTensor

FULL_STEPS = 10_000
"""Newest steps that are there one by one: the default of `history.full_steps`."""
STRETCH = 6400
"""Steps of a file of buckets of 16, where a step has a thousand tensors: 64 files of 100 steps, merged twice by eights."""
AROUND = 64
"""Steps before and behind an anomaly that stay: the default of `history.around_steps`."""
SCALARS = ("loss", "grad_norm")
ELEMENTS = 10**6
"""Elements of each tensor."""
EPOCH_S = 1.7e9


class FlatLayout:
    """`num` weight gradients, whole on one rank."""

    def __init__(self, num: int) -> None:
        self.tensors = [
            LogicalTensor(
                index=at, name=f"layers.{at}.weight", kind="wgrad", key=str(at), depth=at, site_pos=at, pp_stage=0,
                vpp_stage=0, ranks=(0,), num_elements=ELEMENTS, dtype="bfloat16",
            )
            for at in range(num)
        ]  # fmt: skip


class MeasuredSteps:
    """Steps whose statistics scatter as those of training do: 5 to 20 % from step to step; no value repeats."""

    def __init__(self, num_tensors: int) -> None:
        self.layout = FlatLayout(num_tensors)
        self._index = np.arange(num_tensors, dtype=np.int32)
        self._rng = np.random.default_rng(0)

    def step(self, number: int) -> MergedStep:
        """Return a step; its decision is the next number."""
        num, rng = len(self._index), self._rng
        normal, even = rng.standard_normal((3, num)), rng.random((3, num))
        size = 0.02 * np.exp(0.1 * normal[0])
        stats = np.full(num, EMPTY)
        stats["count"], stats["m2"], stats["mean"] = ELEMENTS, ELEMENTS * size**2, 1e-4 * normal[1]
        stats["m3"], stats["m4"] = 0.1 * ELEMENTS * size**3 * normal[2], 3 * ELEMENTS * size**4 * np.exp(even[0])
        stats["min"], stats["max"] = -5 * size * (1 + even[1]), 5 * size * (1 + even[2])
        logged = {name: 2.0 + 0.1 * rng.standard_normal() for name in SCALARS}
        return MergedStep(
            number + 1, 0, number, EPOCH_S + number, False, self.layout, self._index, stats, None, logged
        )  # fmt: skip


def write_single_steps(run_dir: Path, num_tensors: int, num_steps: int, config: HistoryConfig) -> None:
    """Write a history step by step, every record of it through the daemon's writer."""
    steps = MeasuredSteps(num_tensors)
    _write(run_dir / FOLDER, steps, range(num_steps), config)


def _write(folder: Path, steps: MeasuredSteps, numbers: range, config: HistoryConfig) -> None:
    one = HistoryWriter(folder, config, after=numbers.start)
    for number in numbers:
        one.take(steps.step(number))
    one.flush()
    one.close()
    if one.problem:
        raise SystemExit(one.problem)


class LongHistory:
    """A history of `num_steps` steps of `num_tensors` tensors, with a spike and a NaN of one step among the old ones."""

    def __init__(self, run_dir: Path, num_tensors: int, num_steps: int, *, full_steps: int = FULL_STEPS) -> None:
        self.folder = run_dir / FOLDER
        self.num_tensors, self.num_steps = num_tensors, num_steps
        self.first_full = max(0, (num_steps - full_steps) // STRETCH * STRETCH)
        self.spike_step = self.first_full // 3
        """Where the largest value of the second tensor stands, for one step."""
        self.nan_step = 2 * self.first_full // 3
        """Where the third tensor holds 7 NaN, for one step."""
        self._steps = MeasuredSteps(num_tensors)
        self._rng = np.random.default_rng(1)
        self._series = np.arange(1, num_tensors + len(SCALARS) + 1, dtype=np.int32)

    def write(self) -> None:
        """Write it all."""
        make_directory(self.folder)
        manifest = self._begun()
        for first in range(0, self.first_full, STRETCH):
            manifest = compacted(self.folder, self._with_stretch(manifest, first), time.time())
            for one in manifest.retired:
                (self.folder / one.name).unlink()
            manifest = msgspec.structs.replace(manifest, retired=())
        publish(self.folder, manifest)
        _write(self.folder, self._steps, range(self.first_full, self.num_steps), HistoryConfig(enabled=True, flush_s=3600))

    def _begun(self) -> Manifest:
        """Return the manifest of a history with its series, and the rows of the steps and anomalies before the newest."""
        ids = SeriesIds()
        ids.of_layout(self._steps.layout)
        for name in SCALARS:
            ids.of_scalar(name)
        write_file(self.folder, series := f"series-{self.first_full:012d}.parquet", "series", ids.table())
        number = np.arange(self.first_full)
        steps = {
            "series": np.zeros(len(number), np.int32),
            "attempt": np.zeros(len(number), np.int32),
            "step": number,
            "decision": number + 1,
            "time": EPOCH_S + number,
            "is_skipped": np.zeros(len(number), np.bool_),
        }
        files = [write_file(self.folder, self._name("steps", 0, self.first_full, 5), "steps", steps, level=5)]
        files.append(write_file(self.folder, self._name("anomalies", 1, 1, 0), "anomalies", self._anomalies()))
        return Manifest(
            decision=self.first_full, attempts=((0, 0),), series=series, full_from=self.first_full, files=tuple(files)
        )

    def _anomalies(self) -> Columns:
        rows = [
            {
                "id": f"a{step}",
                "event": "onset",
                "severity": "warning",
                "kind": "wgrad",
                "attempt": 0,
                "step": step,
                "json": "{}",
            }
            for step in (self.spike_step, self.nan_step)
        ]
        return {field.name: np.array([row.get(field.name) for row in rows], object) for field in SCHEMAS["anomalies"]}

    def _with_stretch(self, manifest: Manifest, first: int) -> Manifest:
        last = first + STRETCH
        buckets = self._drawn(np.arange(first, last, WIDTHS[0]))
        made: list[HistoryFile] = []
        for step in (self.spike_step, self.nan_step):
            if first + AROUND <= step < last - AROUND:
                rows = self._single(step)
                is_outside = (buckets["step"] < rows["step"].min()) | (buckets["step"] > rows["step"].max())
                stays = is_outside | (buckets["series"] > self.num_tensors)
                kept = {column: values[stays] for column, values in buckets.items()}
                buckets = in_order("moments_16", joined([kept, merged(buckets_of(rows, WIDTHS[0]), WIDTHS[0])]))
                name = self._name("moments", first, last, KEPT)
                made.append(write_file(self.folder, name, "moments", rows, level=KEPT))
        for width in WIDTHS:
            buckets = merged(buckets, width)
            name = self._name(f"moments_{width}", first, last, 1)
            made.append(write_file(self.folder, name, f"moments_{width}", buckets, level=1))
        return msgspec.structs.replace(manifest, files=(*manifest.files, *made))

    def _drawn(self, begins: npt.NDArray[np.int64]) -> Columns:
        """Return buckets of 16 steps, series by series."""
        num = len(self._series) * len(begins)
        rows: Columns = {
            "series": np.repeat(self._series, len(begins)),
            "attempt": np.zeros(num, np.int32),
            "step": np.tile(begins, len(self._series)),
            "num_steps": np.full(num, WIDTHS[0]),
            **{name: np.zeros(num, np.int64) for name in ("nans", "infs", "bad_steps")},
        }
        rows["last_step"] = rows["step"] + WIDTHS[0] - 1
        has_spread = rows["series"] <= self.num_tensors
        for name, level in zip(STATISTICS, (0.0, 0.02, -0.15, 0.15, 0.0, 4.0), strict=True):
            is_there = has_spread | (name in ("mean", "min", "max"))
            spread = (
                np.sort(self._rng.standard_normal((3, num), np.float32).astype(np.float64), axis=0) * 0.1 * (level or 1e-4)
            )
            least, mean, greatest = np.sort(level + spread, axis=0)
            last = least + (greatest - least) * self._rng.random(num)
            rows[f"{name}_num"] = np.where(is_there, WIDTHS[0], 0)
            for of, values in (("min", least), ("avg", mean), ("max", greatest), ("last", last)):
                rows[f"{name}_{of}"] = np.where(is_there, values, np.nan)
        return rows

    def _single(self, step: int) -> Columns:
        """Return the rows of the steps about an anomaly, as far as whole buckets of 16."""
        first, last = (step - AROUND) // WIDTHS[0] * WIDTHS[0], -(-(step + AROUND + 1) // WIDTHS[0]) * WIDTHS[0]
        num_steps = last - first
        num = self.num_tensors * num_steps
        rows: Columns = {
            "series": np.repeat(self._series[: self.num_tensors], num_steps),
            "attempt": np.zeros(num, np.int32),
            "step": np.tile(np.arange(first, last), self.num_tensors),
            "is_whole": np.ones(num, np.bool_),
            "count": np.full(num, ELEMENTS),
            **{name: np.zeros(num, np.int64) for name in ("nans", "pos_infs", "neg_infs", "zeros")},
        }
        for name, level in zip(STATISTICS, (0.0, 0.02, -0.15, 0.15, 0.0, 4.0), strict=True):
            rows[name] = level + (level or 1e-4) * 0.1 * self._rng.standard_normal(num)
        is_it = rows["step"] == step
        if step == self.spike_step:
            rows["std"][is_it & (rows["series"] == 2)] = 50.0
        else:
            rows["nans"][is_it & (rows["series"] == 3)] = 7
        return rows

    @staticmethod
    def _name(table: str, first: int, last: int, level: int) -> str:
        # What was found is numbered by file, what was measured by decision.
        return f"{table}-{first if table in FOUND else first + 1:012d}-{last:012d}.{level}.parquet"


def bytes_of(manifest: Manifest) -> Iterator[tuple[str, int, int, int]]:
    """Yield (table, files, rows, bytes) of each table of a history."""
    for table in dict.fromkeys(one.table for one in manifest.files):
        files: Any = manifest.of(table)
        yield table, len(files), sum(one.rows for one in files), sum(one.bytes for one in files)
