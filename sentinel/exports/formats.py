"""The table of export formats: what each takes, and how it is written. Other packages add theirs by entry point."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from sentinel.aggregate import Aggregate
from sentinel.entry_points import outside_parts
from sentinel.errors import ConfigError
from sentinel.exports import encoders
from sentinel.exports.anomaly_export import export_anomalies
from sentinel.exports.megatron_stats import KINDS as MEGATRON_KINDS
from sentinel.exports.msprobe_csv import has_place, ops_of
from sentinel.exports.msprobe_format import TIME, TIME_OFFSET_S
from sentinel.exports.outside import ENTRY_POINTS, OutsideFormat
from sentinel.exports.request import ExportFormat, ExportRequest, ExportSetting, Option, UnfitOptions, Written
from sentinel.exports.series import SCALAR, TENSOR_KINDS, VALUE, SeriesQuery
from sentinel.exports.skip_list_export import export_skip_list
from sentinel.exports.step_reading import StepReading
from sentinel.exports.tensor_export import export_tensors
from sentinel.exports.vector_export import export_vectors
from sentinel.exports.writing import write_directory, write_parquet, write_text
from sentinel.record import STATISTICS

MEGATRON_FOLDER = "training_stats"
_SERIES: frozenset[Option] = frozenset({"aggregate", "name", "kind", "statistic", "times", "squash-names"})
_OF_SERIES = "writes series: --aggregate or --name, --kind, --statistic, --steps, times and --attempt choose them"
VECTORS = "--vectors: as jsonl, parquet or tensorboard; --name, --kind and --steps choose them"


class TextTable(msgspec.Struct, frozen=True):
    """A row a step and series, as lines of text."""

    name: str
    goes_to: Literal["text"] = "text"
    options: frozenset[Option] = _SERIES
    takes: str = _OF_SERIES

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write a table to stdout or a file."""
        is_ranked = bool(request.is_ranked)
        query = query_of(request, is_ranked)
        with setting.open_run(request.paths) as recorded:
            reading = StepReading(recorded, query, request.attempt, request.times, setting.to_stderr)
            encoder = _table(request, query, is_ranked)
            return write_text(request.output, reading, encoder, request.jobs, setting)


class JsonLines(msgspec.Struct, frozen=True):
    """A row a step and series, or a vector, as JSON lines."""

    name: str = "jsonl"
    goes_to: Literal["text"] = "text"
    options: frozenset[Option] = _SERIES | {"vectors"}
    takes: str = _OF_SERIES

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write a table, or the vectors, to stdout or a file."""
        if request.is_vectors:
            return export_vectors(request, vector_query_of(request), setting)
        return TextTable(self.name).write(request, setting)


class Parquet(msgspec.Struct, frozen=True):
    """A row a step and series, or a vector, as one Parquet file."""

    name: str = "parquet"
    goes_to: Literal["file"] = "file"
    options: frozenset[Option] = _SERIES | {"vectors"}
    takes: str = _OF_SERIES

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write a table, or the vectors, to a file."""
        if request.is_vectors:
            return export_vectors(request, vector_query_of(request), setting)
        is_ranked = bool(request.is_ranked)
        query = query_of(request, is_ranked)
        about = {"run": request.paths.name, "table": "rows" if is_ranked else "series"}
        with setting.open_run(request.paths) as recorded:
            reading = StepReading(recorded, query, request.attempt, request.times, setting.to_stderr)
            encoder = _table(request, query, is_ranked)
            return write_parquet(_output_of(request), reading, encoder, about, request.jobs, setting)


class TensorBoard(msgspec.Struct, frozen=True):
    """TensorBoard's event files: a folder for each rank, or for each kind of merged series; vectors as histograms."""

    name: str = "tensorboard"
    goes_to: Literal["directory"] = "directory"
    options: frozenset[Option] = _SERIES | {"vectors"}
    takes: str = _OF_SERIES

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write a directory of event files."""
        from sentinel.exports.tensorboard import load

        if request.is_vectors:
            return export_vectors(request, vector_query_of(request), setting)
        is_ranked = not request.aggregates if request.is_ranked is None else request.is_ranked
        query = query_of(request, is_ranked, has_scalars=True)
        with setting.open_run(request.paths) as recorded:
            reading = StepReading(recorded, query, request.attempt, request.times, setting.to_stderr)
            load()
            form = encoders.TensorBoardRanks if is_ranked else encoders.TensorBoardMerged
            encoder = form(query, request.is_squashed)
            return write_directory(_output_of(request), reading, encoder, request.jobs, setting)


class MsprobeCsv(msgspec.Struct, frozen=True):
    """The CSV files of msProbe's monitor, a folder for each rank."""

    name: str = "msprobe-csv"
    goes_to: Literal["directory"] = "directory"
    options: frozenset[Option] = _SERIES
    takes: str = _OF_SERIES

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write a directory of folders."""
        if request.aggregates and not request.names:
            what = "--squash-names" if request.is_squashed else "a rank's own rows"
            raise UnfitOptions(f"--aggregate merges tensors under a name of its own; it does not go with {what}")
        if request.is_ranked is False:
            raise UnfitOptions(f"--format {self.name} has a folder for each rank; it does not go with --merged")
        kinds = tuple(kind for kind in TENSOR_KINDS if has_place(kind))
        query = query_of(request, True, kinds=kinds)
        with setting.open_run(request.paths) as recorded:
            reading = StepReading(recorded, query, request.attempt, request.times, setting.to_stderr)
            ops = ops_of(query.statistics, request.statistics is None)
            if not ops:
                raise UnfitOptions(f"--format {self.name} has min, max, mean, norm, nans and zeros; give some of them")
            rows = encoders.MsprobeCsvEncoder(query, ops, request.steps_per_file, request.is_squashed)
            return write_directory(_output_of(request), reading, rows, request.jobs, setting, _RankFolders(reading))


class MegatronStats(msgspec.Struct, frozen=True):
    """The raw moments that Megatron's training statistics hold."""

    name: str = "megatron-stats"
    goes_to: Literal["directory"] = "directory"
    options: frozenset[Option] = _SERIES
    takes: str = _OF_SERIES

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write a directory that holds `training_stats`."""
        output = _output_of(request)
        if request.statistics is not None:
            what = "writes raw moments into a directory; give -o DIR and no --statistic"
            raise UnfitOptions(f"--format {self.name} {what}")
        if request.is_ranked:
            raise UnfitOptions(f"--format {self.name} has each tensor once; it does not go with --per-rank")
        query = query_of(request, False, kinds=MEGATRON_KINDS)
        if (output / MEGATRON_FOLDER).exists():
            raise ConfigError(f"{output}: expected no {MEGATRON_FOLDER} there, got some; give another with -o DIR")
        with setting.open_run(request.paths) as recorded:
            reading = StepReading(recorded, query, request.attempt, request.times, setting.to_stderr)
            encoder = encoders.MegatronStatsEncoder(query)
            return write_directory(output / MEGATRON_FOLDER, reading, encoder, request.jobs, setting)


class Msprobe(msgspec.Struct, frozen=True):
    """The anomalies of a run as msProbe's analyser reads them."""

    name: str = "msprobe"
    goes_to: Literal["directory"] = "directory"
    options: frozenset[Option] = frozenset({"name", "times"})
    takes: str = "writes anomalies: --name, --steps and times choose them"

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write a directory that holds `anomaly_detected`."""
        return export_anomalies(request, _output_of(request), setting)


class Tensors(msgspec.Struct, frozen=True):
    """Dumped tensors, the shards of all ranks joined, as safetensors."""

    name: str = "tensors"
    goes_to: Literal["directory"] = "directory"
    options: frozenset[Option] = frozenset({"name", "kind"})
    takes: str = "joins dumped tensors: --name, --kind, --steps, --attempt choose"

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write one file a step."""
        return export_tensors(request, _output_of(request), setting)


class SkipListFormat(msgspec.Struct, frozen=True):
    """The batches that diagnoses suspect, as JSON lines."""

    name: str = "skip-list"
    goes_to: Literal["text"] = "text"
    options: frozenset[Option] = frozenset()
    takes: str = "lists suspected batches: --steps and --attempt choose them"

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write a line a step."""
        return export_skip_list(request, setting)


FORMATS: dict[str, ExportFormat] = {
    one.name: one
    for one in (
        TextTable("csv"), JsonLines(), Parquet(), TensorBoard(), MsprobeCsv(), Msprobe(), MegatronStats(), Tensors(),
        SkipListFormat(),
    )
}  # fmt: skip
"""Name -> format, of those that come with Sentinel."""


class KnownFormats(Mapping[str, ExportFormat]):
    """FORMATS and those of other packages. A package is imported when its format is asked for; ConfigError if that fails."""

    def __init__(self) -> None:
        self._outside = {part.name: part for part in outside_parts(ENTRY_POINTS, FORMATS)}

    def __getitem__(self, name: str) -> ExportFormat:
        return FORMATS[name] if name in FORMATS else OutsideFormat(self._outside[name])

    def __iter__(self) -> Iterator[str]:
        return iter([*FORMATS, *self._outside])

    def __len__(self) -> int:
        return len(FORMATS) + len(self._outside)


def export(request: ExportRequest, setting: ExportSetting) -> Written:
    """Write an export. UnfitOptions where the format does not take an option; ConfigError where it cannot be written."""
    form = KnownFormats()[request.form]
    given = request.given()
    if "vectors" in given and ("vectors" not in form.options or given & {"aggregate", "statistic", "squash-names"}):
        raise UnfitOptions(VECTORS)
    if unfit := given - form.options:
        raise UnfitOptions(f"--format {form.name} {form.takes}; it does not take {_words(unfit)}")
    return form.write(request, setting)


def _words(options: Collection[Option]) -> str:
    return ", ".join(sorted(option if option == "times" else f"--{option}" for option in options))


def query_of(
    request: ExportRequest, is_ranked: bool, *, kinds: tuple[str, ...] = (), has_scalars: bool = False
) -> SeriesQuery:
    """Return the query for series; UnfitOptions where the options contradict each other or the format.

    kinds: those that the format has a place for; empty: all. has_scalars: ranks' own rows have logged values beside them.
    """
    if request.aggregates and request.names:
        raise UnfitOptions("--name picks single tensors and --aggregate groups; give one of them")
    if request.aggregates and (is_ranked or request.is_squashed):
        what = "--squash-names" if request.is_squashed else "--per-rank"
        raise UnfitOptions(f"--aggregate merges tensors under a name of its own; it does not go with {what}")
    usual = kinds or TENSOR_KINDS
    wanted = request.kinds if request.kinds is not None else usual
    if kinds and not set(wanted) <= set(kinds):
        raise UnfitOptions(f"--format {request.form} has no place for other kinds than {', '.join(usual)}")
    if SCALAR in wanted and is_ranked and not has_scalars:
        raise UnfitOptions("--per-rank: logged values are no rows of a rank; leave scalar out, or give --merged")
    statistics = request.statistics
    if statistics is None:
        statistics = (VALUE,) if wanted == (SCALAR,) else (*STATISTICS, VALUE) if SCALAR in wanted else STATISTICS
    return SeriesQuery(
        names=request.names or ("*",),
        aggregates=tuple(map(Aggregate.parse, request.aggregates)),
        kinds=wanted,
        statistics=statistics,
        first_step=request.steps[0],
        last_step=request.steps[1],
    )


def vector_query_of(request: ExportRequest) -> SeriesQuery:
    """Return the query for vectors: by name, kind and step."""
    return query_of(request, False)


def _table(request: ExportRequest, query: SeriesQuery, is_ranked: bool) -> encoders.MergedTable | encoders.RankTable:
    table: Callable[..., encoders.MergedTable | encoders.RankTable]
    table = encoders.RankTable if is_ranked else encoders.MergedTable
    return table(request.form, query, request.is_squashed)


def _output_of(request: ExportRequest) -> Path:
    assert request.output is not None
    return request.output


class _RankFolders:
    """Names msProbe's folders: one a rank, however often it began anew."""

    def __init__(self, reading: StepReading) -> None:
        self._reading = reading
        self._folders: dict[str, str] = {}

    def __call__(self, file: str) -> str:
        """Return where `rank0-d3a1c196/actv_0-0.csv` goes: `Nov21_13-56-02-rank0-d3a1c196/actv_0-0.csv`."""
        folder, _, name = file.partition("/")
        rank = folder.partition("-")[0]
        if rank not in self._folders:
            began = datetime.fromtimestamp(self._reading.began, UTC) + timedelta(seconds=TIME_OFFSET_S)
            self._folders[rank] = f"{began.strftime(TIME)}-{folder}"
        return f"{self._folders[rank]}/{name}"
