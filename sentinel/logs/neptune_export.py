"""Neptune's export as Parquet, `RUN_part_N.parquet`: of all attributes of a run the series of numbers.

Source: the schema that neptune-exporter's README tells of, as of 2025: a row a point, with `run_id`, `attribute_path`,
`attribute_type`, `step` (a decimal), `float_value`; parts of one run are of 50 MB each.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sentinel.errors import LogError
from sentinel.logs.labels import LabelledPoints
from sentinel.logs.rows import Rows

MAGIC = b"PAR1"
_PART = re.compile(r"(?P<run>.+_)?part_(?P<number>\d+)\.parquet", re.DOTALL)
_COLUMNS = ("run_id", "attribute_path", "attribute_type", "step", "float_value")
_OF_MACHINES = ("monitoring/", "sys/")
"""Attributes that count otherwise than the training does: what Neptune's client measures of its machine."""


def first_parts(folder: Path) -> list[Path]:
    """Return the first part of each run that is exported into a folder, sorted."""
    runs: dict[str, tuple[int, Path]] = {}
    for path in folder.glob("*part_*.parquet"):
        if (found := _PART.fullmatch(path.name)) is not None and path.is_file():
            run, number = found["run"] or "", int(found["number"])
            runs[run] = min(runs.get(run, (number, path)), (number, path))
    return sorted(path for _, path in runs.values())


def read_neptune(rows: Rows, path: Path) -> None:
    """Read the run that a file is a part of, with its other parts. LogError for other Parquet, damage, and no series."""
    tags: dict[str, int] = {}
    of, steps, values = array("q"), array("d"), array("d")
    runs: dict[str, None] = {}
    for part in _parts_of(path):
        for run, tag, step, value in _points(part):
            runs[run] = None
            of.append(tags.setdefault(tag, len(tags)))
            steps.append(step)
            values.append(value)
    if len(runs) > 1:
        names = ", ".join(f'"{one}"' for one in list(runs)[:4])
        what = f"expected one run in a file, got {len(runs)} ({names})"
        raise LogError(f"{path}: {what}; write each of them as a file of its own")
    _put(rows, list(tags), np.array(of), np.array(steps), np.array(values))


def _parts_of(path: Path) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    others = (one for one in path.parent.glob("*part_*.parquet") if one.is_file())
    named = [
        (int(part["number"]), one) for one in others if (part := _PART.fullmatch(one.name)) and part["run"] == found["run"]
    ]
    return [one for _, one in sorted(named)]


def _points(path: Path) -> Sequence[tuple[str, str, float, float]]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            known = file.schema_arrow.names
            if lacking := [name for name in _COLUMNS if name not in known]:
                what = f"expected an export of Neptune, with columns {', '.join(_COLUMNS)}; it has no {', '.join(lacking)}"
                raise LogError(f"{path}: {what}; write other Parquet as CSV first")
            found = []
            for batch in file.iter_batches(columns=list(_COLUMNS)):
                series = batch.filter(pc.equal(batch["attribute_type"], "float_series"))
                number = pc.cast(series["step"], pa.float64()), pc.cast(series["float_value"], pa.float64())
                columns = [series["run_id"].to_pylist(), series["attribute_path"].to_pylist()]
                columns += [one.to_numpy(zero_copy_only=False).tolist() for one in number]
                found += [
                    (str(run), str(tag), step, value)
                    for run, tag, step, value, is_known in zip(
                        *columns, pc.is_valid(series["float_value"]).to_pylist(), strict=True
                    )
                    if is_known
                ]
            return found
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise LogError(f"{path}: expected Parquet, got damaged data ({' '.join(str(error).split())[:200]})") from error


def _put(rows: Rows, tags: list[str], of: np.ndarray, steps: np.ndarray, values: np.ndarray) -> None:
    """Make rows of points: in the order of their steps, for the file has one series behind the other."""
    is_counted = np.isfinite(steps) & (np.abs(steps) < 2.0**62)
    is_whole = is_counted & (steps == np.floor(np.where(is_counted, steps, 0.0)))
    is_machine = np.array([tag.startswith(_OF_MACHINES) for tag in tags], np.bool_)[of] if len(of) else is_whole
    for num, what in (
        (int((~is_whole & ~is_machine).sum()), "are at no whole step"),
        (int(is_machine.sum()), f"are of the machine ({', '.join(_OF_MACHINES)})"),
    ):
        if num:
            rows.notes.append(f"{num} values {what} and were left out")
    kept = np.flatnonzero(is_whole & ~is_machine)
    # The later of two of one step is what Neptune shows.
    order = kept[np.lexsort((kept, of[kept], steps[kept]))]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (of[order][1:] != of[order][:-1]) | (steps[order][1:] != steps[order][:-1])
    if num_again := int((~is_last).sum()):
        rows.notes.append(f"{num_again} values are of a step that their series has twice: the last one counts")
    points = LabelledPoints()
    for at in order[is_last].tolist():
        points.add(tags[of[at]], int(steps[at]), float(values[at]))
    if not points:
        raise LogError(f"{rows.path}: expected series of numbers in Neptune's export, found none")
    points.put(rows)
