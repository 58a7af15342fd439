"""Encoders: one step as each export format has it, bytes for its files or columns of its table. Picklable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.exports import megatron_stats, msprobe_csv, tensorboard
from sentinel.exports.msprobe_format import OTHER_FILE, squashed
from sentinel.exports.rank_series import RANK_COLUMNS, RankPicker, RankPoints, RankStepRows, rank_rows_of
from sentinel.exports.series import COLUMNS, VALUE, ExportedPoints, MergedStep, Picker, Series, SeriesQuery, rows_of
from sentinel.exports.text_tables import TableText
from sentinel.moments import raw_statistic
from sentinel.record import NONE_ID, Kind

if TYPE_CHECKING:
    from sentinel.step_view import Layout

NO_PLACE = "this format has no place for them"
BEFORE_ALL = "they are weights of step 0, before the first iteration"
"""Why weights of the first step are left out of formats that write them after the update."""
MAIN = ""
"""Name of the file of a format that has only one."""
Before = Mapping[str, float] | None
"""Logged value -> its value in the step before; None: that step is not in the export."""


class Encoded(msgspec.Struct):
    """One encoded step."""

    chunks: list[tuple[str, bytes, bytes]] = []
    """(file, bytes that the file begins with, bytes to append)"""
    columns: dict[str, Any] = {}
    """Of a table that is not text: column -> values, or one value for all rows."""
    num_rows: int = 0
    series: list[tuple[str, str, str]] = []
    """Series that this encoder had not met before: kind, name, place."""
    is_whole: bool = True
    left_out: dict[str, list[tuple[str, str, str]]] = {}
    """Why -> series that were asked for and are not written: kind, name, place."""


class Encoder(Protocol):
    """Encodes the steps of an export in one format."""

    is_ranked: bool
    """Whether it encodes the ranks' own rows (`RankStepRows`) and not merged ones (`MergedStep`)."""

    def encode(self, step: Any, before: Before) -> Encoded:
        """Return a step, `RankStepRows` or `MergedStep`, as this format has it. before: logged values of the step before."""
        ...


class _WrittenNames:
    """Names of a layout as they are written."""

    def __init__(self, is_squashed: bool) -> None:
        self._is_squashed = is_squashed
        self._layout: Layout | None = None
        self._short: dict[str, str] = {}

    def of(self, layout: Layout, names: Iterable[str]) -> list[str]:
        if not self._is_squashed:
            return list(names)
        if layout is not self._layout:
            self._layout, self._short = layout, squashed(list(dict.fromkeys(one.name for one in layout.tensors)))
        return [self._short.get(name, name) for name in names]


class MergedTable:
    """One row a step and series, shards and micro-steps merged: CSV, JSON lines, Parquet."""

    is_ranked = False

    def __init__(self, form: str, query: SeriesQuery, is_squashed: bool = False) -> None:
        self.form = form
        self.columns = (*COLUMNS, *query.statistics)
        self._picker = Picker(query)
        self._names = _WrittenNames(is_squashed)
        self._met: set[tuple[str, str, str]] = set()

    def encode(self, step: MergedStep, before: Before) -> Encoded:
        """Return the step's rows."""
        points = self._picker.points(step)
        names = self._names.of(step.layout, [one.name for one in points.series])
        found = Encoded(num_rows=len(points), is_whole=bool(points.is_whole.all()))
        keys = [(one.kind, name, one.place) for one, name in zip(points.series, names, strict=True)]
        found.series = [key for key in keys if key not in self._met]
        self._met.update(found.series)
        if self.form == "parquet":
            found.columns = self._columns(points, names)
        else:
            text = TableText(self.form, self.columns)
            at = COLUMNS.index("name")
            rows = rows_of(points, self._picker.query.statistics)
            lines = text.rows((*row[:at], name, *row[at + 1 :]) for row, name in zip(rows, names, strict=True))
            found.chunks = [(MAIN, text.head().encode(), lines.encode())] if lines else []
        return found

    def _columns(self, points: ExportedPoints, names: list[str]) -> dict[str, Any]:
        return {
            "attempt": points.attempt, "step": points.step, "time": points.time, "is_skipped": points.is_skipped,
            "kind": [one.kind for one in points.series], "name": names, "place": [one.place for one in points.series],
            "num_tensors": points.num_tensors, "num_excluded": [one.num_excluded for one in points.series],
            "num_elements": points.num_elements, "is_whole": points.is_whole, **points.values,
        }  # fmt: skip


class RankTable:
    """One row for each row that a rank recorded: CSV, JSON lines, Parquet."""

    is_ranked = True

    def __init__(self, form: str, query: SeriesQuery, is_squashed: bool = False) -> None:
        self.form = form
        self._statistics = tuple(name for name in query.statistics if name != VALUE)
        self.columns = (*RANK_COLUMNS, *self._statistics)
        self._picker = RankPicker(query)
        self._names = _WrittenNames(is_squashed)
        self._met: set[tuple[str, str, str]] = set()

    def encode(self, step: RankStepRows, before: Before) -> Encoded:
        """Return the step's rows, rank by rank."""
        found = Encoded()
        at = RANK_COLUMNS.index("name")
        lines: list[str] = []
        parts: list[tuple[RankPoints, list[str]]] = []
        text = TableText(self.form, self.columns)
        for points in self._picker.points(step):
            names = self._names.of(step.layout, [one.name for one in points.series])
            found.num_rows += len(names)
            pairs = zip(points.series, names, strict=True)
            fresh = {(one.info.kind, name, str(points.rank)) for one, name in pairs} - self._met
            self._met |= fresh
            found.series += sorted(fresh)
            if self.form == "parquet":
                parts.append((points, names))
            else:
                rows = rank_rows_of(step, points, self._statistics)
                lines.append(text.rows((*row[:at], name, *row[at + 1 :]) for row, name in zip(rows, names, strict=True)))
        if self.form == "parquet":
            found.columns = self._columns(step, parts)
        found.chunks = [(MAIN, text.head().encode(), "".join(lines).encode())] if lines else []
        return found

    def _columns(self, step: RankStepRows, parts: list[tuple[RankPoints, list[str]]]) -> dict[str, Any]:
        if not parts:
            return {}
        rows = np.concatenate([points.rows for points, _ in parts])
        moments = [points.moments for points, _ in parts]
        series = [one for points, _ in parts for one in points.series]
        return {
            "attempt": step.attempt, "step": step.step, "time": step.time, "is_skipped": step.is_skipped,
            "rank": np.repeat([points.rank for points, _ in parts], [len(names) for _, names in parts]),
            "kind": [one.info.kind for one in series], "name": [name for _, names in parts for name in names],
            "vpp_stage": [one.info.chunk for one in series], "micro_step": rows["micro_step"],
            "num_folded": rows["num_folded"].astype(np.int32),
            "call_id": [None if call == NONE_ID else call for call in rows["call_id"].tolist()],
            "num_elements": np.concatenate([one.num_elements() for one in moments]),
            **{name: np.concatenate([one.statistic(name) for one in moments]) for name in self._statistics},
        }  # fmt: skip


class MegatronStatsEncoder:
    """Megatron's training stats: raw moments, a line an iteration in the file of the lowest rank that holds a tensor.

    Weights are written after the update there: those that a step began with belong to the iteration before it.
    """

    is_ranked = False

    def __init__(self, query: SeriesQuery) -> None:
        self._picker = Picker(query)
        self._met: set[tuple[str, str, str]] = set()

    def encode(self, step: MergedStep, before: Before) -> Encoded:
        """Return the step's lines."""
        points = self._picker.points(step)
        weights: list[tuple[str, str, int, megatron_stats.RawMoments]] = []
        others: list[tuple[str, str, int, megatron_stats.RawMoments]] = []
        found = Encoded(is_whole=bool(points.is_whole.all()))
        for one, values in zip(points.series, megatron_stats.raw_moments(points.moments), strict=True):
            key = (one.kind, one.name, one.place)
            places = self._places(one)
            is_too_early = one.kind == "param" and step.step == 0
            if is_too_early or not places:
                found.left_out.setdefault(BEFORE_ALL if is_too_early else NO_PLACE, []).append(key)
                continue
            # What each rank keeps for itself stands in its own file, under the one name.
            (weights if one.kind == "param" else others).extend((stat, name, one.rank, values) for stat, name in places)
            if key not in self._met:
                self._met.add(key)
                found.series.append(key)
        for number, logged, rows in ((step.step, step.scalars, others), (step.step - 1, before or {}, weights)):
            samples = next((logged[name] for name in megatron_stats.SAMPLES if name in logged), None)
            chunks, num_rows = megatron_stats.lines_of(number, samples, rows)
            found.chunks += [(file, b"", line) for file, line in chunks]
            found.num_rows += num_rows
        return found

    def _places(self, one: Series) -> list[tuple[str, str]]:
        """Return (stat, name) of where a series stands; a group keeps the name that it was given."""
        kinds = self._picker.query.kinds
        if self._picker.query.aggregates:
            border = "" if one.kind in kinds else megatron_stats.OUTPUT
            return [(stat, one.name) for stat, _ in megatron_stats.places_of(one.name, one.kind, border)[-1:]]
        places = megatron_stats.places_of(one.name, one.kind, one.border, one.also, one.consumers)
        # Of the residual stream alone nothing else was asked for.
        return places if one.kind in kinds else [place for place in places if place[0] in megatron_stats.STREAM_STATS]


class _MsprobeRows:
    """The ranks' rows under msProbe's names."""

    def __init__(self, query: SeriesQuery, is_squashed: bool) -> None:
        self.picker = RankPicker(query)
        self._is_squashed = is_squashed
        self._layout: Layout | None = None
        self._spots: dict[int, dict[int, tuple[msprobe_csv.Spot, ...]]] = {}
        self.met: set[tuple[str, str, str]] = set()

    def spots(self, step: RankStepRows, rank: int) -> dict[int, tuple[msprobe_csv.Spot, ...]]:
        """Return id -> where a rank's tensors stand."""
        if step.layout is not self._layout:
            self._layout, self._spots = step.layout, {}
        if rank not in self._spots:
            self._spots[rank] = msprobe_csv.spots_of(step.layout.descriptors[rank].tensors, self._is_squashed)
        return self._spots[rank]

    def fresh(self, points: RankPoints) -> list[tuple[str, str, str]]:
        """Return the series of these rows that were not met before."""
        found = {(one.info.kind, one.name, str(points.rank)) for one in points.series} - self.met
        self.met |= found
        return sorted(found)


def _has_several(rows: npt.NDArray[np.void]) -> bool:
    """Return whether there are gradients of more than one micro-batch."""
    return bool(((rows["kind"] == Kind.WGRAD_UNREDUCED) & (rows["micro_step"] > 0)).any())


class MsprobeCsvEncoder:
    """msProbe's CSV files, a folder a rank."""

    is_ranked = True

    def __init__(self, query: SeriesQuery, ops: Sequence[str], steps_per_file: int = 1, is_squashed: bool = False) -> None:
        self._ops = tuple(ops)
        self._steps_per_file = steps_per_file
        self._rows = _MsprobeRows(query, is_squashed)

    def encode(self, step: RankStepRows, before: Before) -> Encoded:
        """Return the step's lines. Its weights are those after the step before, if that one was written too."""
        found = Encoded()
        for points in self._rows.picker.points(step):
            spots = self._rows.spots(step, points.rank)
            rows = points.rows
            columns = [msprobe_csv.value_column(op, raw_statistic(rows, op).tolist()) for op in self._ops]
            values = list(zip(*columns, strict=True))
            sizes, means = points.moments.num_elements().tolist(), raw_statistic(rows, "mean")
            micro_steps, has_several = rows["micro_step"].tolist(), _has_several(rows)
            lines: dict[tuple[str, str], list[str]] = {}
            features: dict[tuple[str, int, str, int], dict[str, float]] = {}
            num_rows = 0
            nowhere: list[tuple[str, str, str]] = []
            for at, one in enumerate(points.series):
                info = one.info
                shape = msprobe_csv.shape_text(info.shape, sizes[at])
                num_rows += info.id in spots
                if info.id not in spots:
                    nowhere.append((info.kind, one.name, str(points.rank)))
                for spot in spots.get(info.id, ()):
                    if spot.column:
                        key = (spot.file, info.chunk, spot.name, micro_steps[at])
                        features.setdefault(key, {})[spot.column] = float(means[at])
                        continue
                    micro = msprobe_csv.micro_step_of(spot.file, micro_steps[at], has_several)
                    places = [(spot.file, step.step + spot.shift)]
                    if spot.file == "param_origin" and before is not None:
                        places.append(("param_updated", step.step - 1))
                    for file, number in places:
                        name = self._name(points, file, number)
                        own: Sequence[float | int] = values[at]
                        if file == OTHER_FILE:
                            own, shape = msprobe_csv.share_values(self._ops, float(means[at])), "[]"
                        text = msprobe_csv.line(info.chunk, spot.name, number, micro, own, shape, info.dtype)
                        head = msprobe_csv.header(self._ops, micro is not None)
                        lines.setdefault((name, head), []).append(text)
            for (file, vpp_stage, module, micro_step), several in features.items():
                head, text = msprobe_csv.feature_line(file, vpp_stage, module, step.step, micro_step, several)
                lines.setdefault((self._name(points, file, step.step), head), []).append(text)
            found.chunks += [(name, head.encode(), "".join(some).encode()) for (name, head), some in lines.items()]
            found.num_rows += num_rows
            found.series += sorted(set(self._rows.fresh(points)) - set(nowhere))
            if nowhere:
                found.left_out.setdefault(NO_PLACE, []).extend(nowhere)
        return found

    def _name(self, points: RankPoints, file: str, step: int) -> str:
        return f"rank{points.rank}-{points.incarnation}/{msprobe_csv.file_name(file, step, self._steps_per_file)}"


class TensorBoardRanks:
    """TensorBoard events, a folder for each rank and msProbe file: the tags are those of its own conversion."""

    is_ranked = True

    def __init__(self, query: SeriesQuery, is_squashed: bool = False) -> None:
        self._statistics = tuple(name for name in query.statistics if name != VALUE)
        self._rows = _MsprobeRows(query, is_squashed)

    def encode(self, step: RankStepRows, before: Before) -> Encoded:
        """Return the step's events."""
        found = Encoded()
        for points in self._rows.picker.points(step):
            spots = self._rows.spots(step, points.rank)
            micro_steps, has_several = points.rows["micro_step"].tolist(), _has_several(points.rows)
            is_bad = (points.rows["num_nan"] + points.rows["num_pos_inf"] + points.rows["num_neg_inf"] > 0).tolist()
            columns = [(name, raw_statistic(points.rows, name).tolist()) for name in self._statistics]
            events: dict[tuple[str, int], list[tuple[str, float]]] = {}
            for at, one in enumerate(points.series):
                places = [spot for spot in spots.get(one.info.id, ()) if not spot.column]
                places = places or [msprobe_csv.Spot(one.info.kind, one.name)]
                for spot in places:
                    micro = msprobe_csv.micro_step_of(spot.file, micro_steps[at], has_several)
                    tag = f"vp{one.info.chunk}:{spot.name}" + (f":micro{micro}" if micro is not None else "")
                    # What is undefined is left out; a NaN that was measured is one here.
                    values = [
                        (f"{tag}/{name}", column[at]) for name, column in columns if is_bad[at] or not math.isnan(column[at])
                    ]
                    events.setdefault((spot.file, step.step + spot.shift), []).extend(values)
                    if spot.file == "param_origin" and before is not None:
                        events.setdefault(("param_updated", step.step - 1), []).extend(values)
            found.chunks += [
                _events(f"rank{points.rank}/{file}", number, step.time, values) for (file, number), values in events.items()
            ]
            found.num_rows += len(points.series)
            found.series += self._rows.fresh(points)
        scalars = self._rows.picker.scalars(step)
        if scalars:
            found.chunks.append(_events("scalars", step.step, step.time, scalars.items()))
            found.num_rows += len(scalars)
        return found


def _events(folder: str, step: int, time: float, values: Iterable[tuple[str, float]]) -> tuple[str, bytes, bytes]:
    return f"{folder}/{tensorboard.FILE_NAME}", tensorboard.head(), tensorboard.events(step, time, values)


class TensorBoardMerged:
    """TensorBoard events of merged series, a folder for each kind; a tag is the name and the statistic."""

    is_ranked = False

    def __init__(self, query: SeriesQuery, is_squashed: bool = False) -> None:
        self._picker = Picker(query)
        self._names = _WrittenNames(is_squashed)
        self._met: set[tuple[str, str, str]] = set()

    def encode(self, step: MergedStep, before: Before) -> Encoded:
        """Return the step's events."""
        points = self._picker.points(step)
        names = self._names.of(step.layout, [one.name for one in points.series])
        events: dict[str, list[tuple[str, float]]] = {}
        for at, (one, name) in enumerate(zip(points.series, names, strict=True)):
            where = f"{name}@{one.place}" if one.place else name
            for statistic, column in points.values.items():
                if not math.isnan(column[at]):
                    tag = where if statistic == VALUE else f"{where}/{statistic}"
                    events.setdefault(one.kind, []).append((tag, float(column[at])))
        keys = [(one.kind, one.name, one.place) for one in points.series]
        series = [key for key in keys if key not in self._met]
        self._met.update(series)
        chunks = [_events(f"merged/{kind}", step.step, step.time, values) for kind, values in events.items()]
        return Encoded(chunks=chunks, num_rows=len(points), series=series, is_whole=bool(points.is_whole.all()))
