"""What values looked like before and after: out of the history where the run has one, else out of its spool."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from sentinel.anomaly import Anomaly, is_nonfinite
from sentinel.anomaly_words import short_number
from sentinel.errors import SentinelError
from sentinel.exports.series import SCALAR, VALUE, ExportedPoints, MergedStep, Picker, SeriesQuery
from sentinel.history.config import FOLDER
from sentinel.history.manifest import MANIFEST, read_manifest
from sentinel.history.wanted import Wanted
from sentinel.incident import Incident
from sentinel.judge.recorded import RecordedRun
from sentinel.messages import is_loss
from sentinel.postmortem.report_document import NOTE, Block, Curve, Prose, missing, shown
from sentinel.postmortem.run_material import RunMaterial
from sentinel.postmortem.spool_reading import SpoolReading
from sentinel.store.run_paths import RunPaths

if TYPE_CHECKING:
    from sentinel.history.pictures import Picture

AROUND = 60
"""Steps before and behind that are drawn: as many as the page shows of an incident."""
MOST_CURVES = 3
"""Curves of an incident: a loss, and the tensors or values of the first first causes."""
COLUMNS = 240
MOST_MERGED_BYTES = 48 * 2**20
"""Largest spool whose tensors are merged anew where there is no history (chosen: a second and a half of one core)."""

DRAWN = frozenset({"mean", "std", "min", "max", "rms", "norm", "absmax", "skew", "kurtosis"})
"""Statistics that a history has as well as a spool."""

Point = tuple[float, float, bool]
"""Least and greatest finite value (NaN: none), and whether anything was not finite."""
Points = Mapping[int, Point]
"""Step -> what there is of it."""
Key = tuple[str, str, str]
"""(kind, name, statistic)."""


class ValuesAround:
    """Answers for the curves of some incidents; the spool is merged once for all of them, and only where it must be."""

    def __init__(self, material: RunMaterial, reading: SpoolReading) -> None:
        self._material, self._reading = material, reading
        self._has_history = (material.run_dir / FOLDER / MANIFEST).is_file()
        self._merged: dict[Key, dict[tuple[int, int], Point]] | None = None
        self._why_not = ""
        """Why the tensors of a spool are not to be had."""

    def curves(self, incident: Incident, causes: Sequence[Anomaly], wanted: Sequence[Key]) -> tuple[Block, ...]:
        """Return the curves of an incident, and in a line what there is none of.

        wanted: `keys_of` all incidents that are told.
        """
        end = max(incident.last_step, incident.active_step)
        span = (max(0, incident.opened_step - AROUND), end + AROUND)
        found: list[Block] = []
        for key in keys_of(causes, self._loss_name(incident.attempt)):
            points = self._points(key, span, incident.attempt, wanted)
            if points:
                found.append(_curve(key, points, (incident.opened_step, end)))
            else:
                found.append(missing(f"values of {_title(key)} about these steps{self._why_not and f': {self._why_not}'}."))
        return tuple(found) or (
            missing("a value that could be drawn: no loss was logged, and no first cause is on record."),
        )

    def whole_run(self) -> tuple[Block, ...]:
        """Return the curve of the run's loss, as far as it is known."""
        name = self._loss_name(None)
        if not name:
            return (missing("a loss (monitor.log(loss=loss))."),)
        points = self._points((SCALAR, name, VALUE), (0, 2**62), None, ())
        if not points:
            return (missing(f"values of {shown(name)}."),)
        incidents = self._material.newest.values()
        grave = [one for one in incidents if one.state != "merged" and one.severity.level > 0 and one.nature != "liveness"]
        first = min((one.opened_step for one in grave), default=-1)
        last = max((max(one.last_step, one.active_step) for one in grave), default=-1)
        notes: list[Block] = []
        if self._reading.stride > 1 and not self._has_history:
            notes.append(Prose(f"Of a long run one step in {self._reading.stride} was read.", NOTE))
        if self._reading.is_cut and not self._has_history:
            notes.append(Prose("Drawn of what was read of a spool that is larger than a report reads.", NOTE))
        return (_curve((SCALAR, name, VALUE), points, (first, last)), *notes)

    def _loss_name(self, attempt: int | None) -> str:
        logged = {name for one in self._reading.steps if attempt in (None, one.attempt) for name in one.end.scalars}
        losses = sorted((name for name in logged if is_loss(name)), key=lambda name: (len(name), name))
        return losses[0] if losses else "loss" if not logged and self._has_history else ""

    def _points(self, key: Key, span: tuple[int, int], attempt: int | None, wanted: Sequence[Key]) -> Points:
        if self._has_history and not self._is_repeated(span, attempt) and (points := self._of_history(key, span)):
            return points
        if key[0] == SCALAR:
            return self._logged(key[1], span, attempt)
        if self._merged is None:
            self._merged = self._merge(wanted)
        # Of a step the newest attempt that is not newer than the incident's: rising, so that the last one stays.
        known = sorted(self._merged.get(key, {}).items())
        return {
            step: point
            for (number, step), point in known
            if span[0] <= step <= span[1] and (attempt is None or number <= attempt)
        }

    def _is_repeated(self, span: tuple[int, int], attempt: int | None) -> bool:
        """Return whether a later attempt trained on these steps again: of them a history keeps the later values."""
        if attempt is None:
            return False
        try:
            manifest = read_manifest(self._material.run_dir / FOLDER)
        except SentinelError:
            return False
        return any(number > attempt and first <= span[1] for number, first in manifest.attempts)

    def _of_history(self, key: Key, span: tuple[int, int]) -> Points:
        from sentinel.history.pictures import picture_of

        kind, name, statistic = key
        wanted = Wanted(
            kind=kind, statistic=statistic, names=(name,), first_step=span[0], last_step=span[1], columns=COLUMNS, rows=64
        )
        try:
            picture = picture_of(self._material.run_dir.name, self._material.run_dir, wanted)
        except (SentinelError, OSError) as error:
            self._why_not = shown(str(error), 200)
            return {}
        return _picture_points(picture)

    def _logged(self, name: str, span: tuple[int, int], attempt: int | None) -> Points:
        """Return the mean over the ranks that logged a value, of the newest attempt of each step."""
        found: dict[int, tuple[int, list[float]]] = {}
        for one in self._reading.steps:
            step, value = one.end.step, one.end.scalars.get(name)
            if value is None or not span[0] <= step <= span[1] or (attempt is not None and one.attempt > attempt):
                continue
            if step not in found or found[step][0] < one.attempt:
                found[step] = (one.attempt, [])
            if found[step][0] == one.attempt:
                found[step][1].append(value)
        made = {}
        for step, (_, values) in sorted(found.items()):
            mean = sum(values) / len(values)
            is_bad = not math.isfinite(mean)
            made[step] = (math.nan, math.nan, True) if is_bad else (mean, mean, False)
        return _thinned(made)

    def _merge(self, wanted: Sequence[Key]) -> dict[Key, dict[tuple[int, int], Point]]:
        """Return key -> (attempt, step) -> point, out of the spool."""
        keys = [key for key in dict.fromkeys(wanted) if key[0] != SCALAR]
        found: dict[Key, dict[tuple[int, int], Point]] = {key: {} for key in keys}
        try:
            with RecordedRun(RunPaths.of(self._material.run_dir)) as run:
                if run.num_bytes > MOST_MERGED_BYTES:
                    self._why_not = (
                        "there is no history (the daemon's configuration switches it off), and a spool of "
                        f"{run.num_bytes >> 20} MiB is more than the {MOST_MERGED_BYTES >> 20} MiB that a report merges; "
                        "sentinel export reads it"
                    )
                    return found
                pickers = {key: Picker(_query(key)) for key in keys}
                for view, _ in run.views():
                    step = MergedStep.of(view)
                    for key, picker in pickers.items():
                        points = picker.meet(step.layout).points(step)
                        if (point := _point(points, key)) is not None:
                            found[key][view.attempt, view.step] = point
        except (SentinelError, OSError, ValueError) as error:
            self._why_not = shown(str(error), 200)
        return found


def keys_of(causes: Sequence[Anomaly], loss: str) -> list[Key]:
    """Return what is drawn of an incident: the loss, then what came first."""
    keys: list[Key] = [(SCALAR, loss, VALUE)] if loss else []
    for one in causes:
        if one.kind == SCALAR:
            key = (SCALAR, one.tag_name, VALUE)
        elif one.kind in ("health", "comm") or one.num_members:
            continue
        else:
            is_drawn = one.statistic in DRAWN and not is_nonfinite(one)
            key = (one.kind, one.tag_name, one.statistic if is_drawn else "std")
        if key not in keys:
            keys.append(key)
    return keys[:MOST_CURVES]


def _query(key: Key) -> SeriesQuery:
    kind, name, statistic = key
    return SeriesQuery(names=(glob.escape(name),), kinds=(kind,), statistics=(statistic,))


def _point(points: ExportedPoints, key: Key) -> Point | None:
    """Return what a step has of a tensor: of one that each rank keeps for itself, over all ranks."""
    if not len(points):
        return None
    finite = [value for value in points.values[key[2]].tolist() if math.isfinite(value)]
    stats = points.moments.stats
    is_bad = bool((stats["num_nan"] + stats["num_pos_inf"] + stats["num_neg_inf"]).any())
    return min(finite, default=math.nan), max(finite, default=math.nan), is_bad


def _picture_points(picture: Picture) -> Points:
    found: dict[int, Point] = {}
    for at in range(picture.steps.shape[1]):
        rows = [row for row in range(picture.steps.shape[0]) if picture.steps[row, at] > 0]
        if not rows:
            continue
        least = [float(picture.least[row, at]) for row in rows if math.isfinite(picture.least[row, at])]
        greatest = [float(picture.greatest[row, at]) for row in rows if math.isfinite(picture.greatest[row, at])]
        is_bad = any(picture.nans[row, at] + picture.infs[row, at] > 0 for row in rows)
        step = picture.first_step + picture.width * at
        found[step] = (min(least, default=math.nan), max(greatest, default=math.nan), is_bad)
    return found


def _thinned(points: dict[int, Point]) -> Points:
    """Return at most COLUMNS points: the least and greatest of neighbours are kept, and that something was not finite."""
    steps = sorted(points)
    if len(steps) <= COLUMNS:
        return points
    width = -(-len(steps) // COLUMNS)
    made: dict[int, Point] = {}
    for at in range(0, len(steps), width):
        some = [points[step] for step in steps[at : at + width]]
        least = min((one[0] for one in some if not math.isnan(one[0])), default=math.nan)
        greatest = max((one[1] for one in some if not math.isnan(one[1])), default=math.nan)
        made[steps[at]] = (least, greatest, any(one[2] for one in some))
    return made


def _title(key: Key) -> str:
    kind, name, statistic = key
    return shown(name, 160) if kind == SCALAR else f"{statistic} of {shown(name, 160)} ({shown(kind, 40)})"


def _curve(key: Key, points: Points, marked: tuple[int, int]) -> Curve:
    steps = sorted(points)
    bad = tuple(step for step in steps if points[step][2])
    words = []
    for name, part in (
        ("before", [one for one in steps if one < marked[0]]),
        ("within", [one for one in steps if marked[0] <= one <= marked[1]]),
        ("after", [one for one in steps if one > marked[1]]),
    ):
        if not part or marked[0] < 0:
            continue
        least = [points[one][0] for one in part if not math.isnan(points[one][0])]
        greatest = [points[one][1] for one in part if not math.isnan(points[one][1])]
        said = (
            f"{short_number(min(least))} to {short_number(max(greatest))}, median {short_number(median(least))}"
            if least
            else ""
        )
        num_bad = sum(points[one][2] for one in part)
        not_finite = f"not finite in {num_bad} of {len(part)}" if num_bad else ""
        words.append(f"{name} (steps {part[0]} to {part[-1]}): {'; '.join(filter(None, (said, not_finite)))}")
    if marked[0] < 0:
        finite = [points[one] for one in steps if not math.isnan(points[one][0])]
        if finite:
            low, high = min(one[0] for one in finite), max(one[1] for one in finite)
            words.append(f"steps {steps[0]} to {steps[-1]}: {short_number(low)} to {short_number(high)}")
    return Curve(
        title=_title(key), steps=tuple(steps), bad_steps=bad, marked=marked, caption="; ".join(words),
        least=tuple(None if math.isnan(points[one][0]) else points[one][0] for one in steps),
        greatest=tuple(None if math.isnan(points[one][1]) else points[one][1] for one in steps),
    )  # fmt: skip
