"""Compaction: many small files of a history become few large ones, and old steps become buckets.

Each function takes a manifest and returns another one; files are written beside those that are there, and nothing is
deleted here. Killed at any point, a writer leaves the former manifest with all its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.history.buckets import buckets_of, merged
from sentinel.history.config import HistoryConfig
from sentinel.history.history_files import read_file, read_files, write_file
from sentinel.history.manifest import HistoryFile, Manifest, Retired
from sentinel.history.table_schemas import FOUND, WIDTHS, Columns, in_order

FAN = 8
"""Files of one level that are merged into one of the next."""
MOST_ROWS = 2**21
"""Rows of a file that is merged no more: some 40 MB, read in one go where a whole table is."""
MOST_BYTES = 2**28
"""Bytes of files that are merged: vectors are long."""
KEPT = 99
"""Level of files that hold what stays of old steps; they are merged with nothing."""
SAMPLE_EVERY = 256
"""Steps of which the vectors of one stay when they are old (chosen): as many as a bucket of the middle width has."""


def compacted(folder: Path, manifest: Manifest, now: float) -> Manifest:
    """Merge files until no level has too many; moments that are merged for the first time have their buckets made too."""
    tables = ("moments", "steps", "vectors", *(f"moments_{width}" for width in WIDTHS), *FOUND)
    while True:
        before = manifest
        for table in tables:
            manifest = _merged_once(folder, manifest, table, now)
        if manifest is before:
            return manifest


def _merged_once(folder: Path, manifest: Manifest, table: str, now: float) -> Manifest:
    files = manifest.of(table)
    for level in sorted({one.level for one in files} - {KEPT}):
        several = [one for one in files if one.level == level][:FAN]
        num_rows, num_bytes = sum(one.rows for one in several), sum(one.bytes for one in several)
        if len(several) == FAN and num_rows <= MOST_ROWS * (1 if level else FAN) and num_bytes <= MOST_BYTES:
            rows = in_order(table, read_files(folder, several))
            made = [_written(folder, table, rows, several, level + 1)]
            if table == "moments" and level == 0:
                made += _coarser(folder, rows, several)
            elif table.startswith("moments_"):
                made = [_written(folder, table, merged(rows, int(table.rpartition("_")[2])), several, level + 1)]
            return replaced(manifest, several, made, now)
    return manifest


def _coarser(folder: Path, rows: Columns, sources: Sequence[HistoryFile]) -> list[HistoryFile]:
    made = []
    parts = buckets_of(rows, WIDTHS[0])
    for width in WIDTHS:
        parts = merged(parts, width)
        made.append(_written(folder, f"moments_{width}", parts, sources, 0))
    return made


def _written(folder: Path, table: str, rows: Columns, sources: Sequence[HistoryFile], level: int) -> HistoryFile:
    first, last = sources[0].name.split("-")[1], sources[-1].name.split("-")[2].partition(".")[0]
    return write_file(folder, f"{table}-{first}-{last}.{level}.parquet", table, rows, level=level)


def expired(folder: Path, manifest: Manifest, config: HistoryConfig, now: float) -> Manifest:
    """Let go of single steps that are too old, and of what there is no room for."""
    newest = max((one.last_step for one in manifest.of("steps")), default=-1)
    if config.full_steps:
        for one in (*manifest.of("moments"), *manifest.of("vectors")):
            if 0 < one.level < KEPT and one.last_step <= newest - config.full_steps:
                manifest = _thinned(folder, manifest, one, config.around_steps, now)
    if config.bytes:
        for table in ("vectors", "moments", *(f"moments_{width}" for width in WIDTHS[:-1]), "anomalies"):
            for one in manifest.of(table):
                # What was just written has no buckets yet.
                if manifest.num_bytes > config.bytes and (table not in ("moments", "vectors", "anomalies") or one.level > 0):
                    manifest = replaced(manifest, [one], [], now)
                    if table == "moments":
                        manifest = _cut(manifest, one)
    return manifest


def _thinned(folder: Path, manifest: Manifest, one: HistoryFile, around: int, now: float) -> Manifest:
    onsets = _onsets(folder, manifest, one.first_step - around, one.last_step + around) if around else np.empty(0, np.int64)
    kept: list[HistoryFile] = []
    if len(onsets) or one.table == "vectors":
        rows = read_files(folder, [one])
        stays = _is_near(rows["step"], onsets, around)
        if one.table == "vectors":
            stays |= _is_sample(rows["step"])
        if stays.any():
            kept.append(_written(folder, one.table, {name: values[stays] for name, values in rows.items()}, [one], KEPT))
    manifest = replaced(manifest, [one], kept, now)
    return _cut(manifest, one) if one.table == "moments" else manifest


def _is_near(steps: npt.NDArray[np.int64], onsets: npt.NDArray[np.int64], around: int) -> npt.NDArray[np.bool_]:
    """Return which steps lie about an onset. onsets: rising."""
    if not len(onsets):
        return np.zeros(len(steps), np.bool_)
    at = np.searchsorted(onsets, steps - around)
    found: npt.NDArray[np.bool_] = (at < len(onsets)) & (onsets[np.minimum(at, len(onsets) - 1)] <= steps + around)
    return found


def _is_sample(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which steps stand for those about them: of each SAMPLE_EVERY the first that is there."""
    met = np.unique(steps)
    _, first = np.unique(met // SAMPLE_EVERY, return_index=True)
    return np.isin(steps, met[first])


def _onsets(folder: Path, manifest: Manifest, first: int, last: int) -> npt.NDArray[np.int64]:
    """Return the steps from first to last in which anomalies began, rising."""
    found = [np.empty(0, np.int64)]
    for one in manifest.of("anomalies"):
        if one.first_step <= last and first <= one.last_step:
            rows = read_file(folder / one.name, "anomalies", ("step", "event"))
            steps = rows["step"][rows["event"] == "onset"].astype(np.int64)
            found.append(steps[(first <= steps) & (steps <= last)])
    return np.unique(np.concatenate(found))


def _cut(manifest: Manifest, one: HistoryFile) -> Manifest:
    return msgspec.structs.replace(manifest, full_from=max(manifest.full_from, one.last_step + 1))


def replaced(manifest: Manifest, gone: Sequence[HistoryFile], made: Sequence[HistoryFile], now: float) -> Manifest:
    """Return the manifest with some files in the place of others. now: seconds since the epoch."""
    left = {one.name for one in gone}
    # New ones stand where the former did, so that the files of a table stay in the order of their steps.
    at = min((place for place, one in enumerate(manifest.files) if one.name in left), default=len(manifest.files))
    before = [one for one in manifest.files[:at] if one.name not in left]
    behind = [one for one in manifest.files[at:] if one.name not in left]
    retired = (*manifest.retired, *(Retired(one.name, now) for one in gone))
    return msgspec.structs.replace(manifest, files=(*before, *made, *behind), retired=retired)
