"""`sentinel export`: what a run recorded, as tables or as other tools read it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sentinel.aggregate import Aggregate
from sentinel.cli.export_options import moment_of, steps_of, words_of
from sentinel.cli.main import CLEAN, FOUND, say
from sentinel.cli.places import find_run
from sentinel.errors import ConfigError
from sentinel.exports.text_tables import FORMATS
from sentinel.record import STATISTICS

if TYPE_CHECKING:
    from sentinel.cli.exporting import StepReading, Written
    from sentinel.exports.series import SeriesQuery
    from sentinel.store.run_paths import RunPaths

PARQUET, TENSORBOARD, MSPROBE_CSV, MSPROBE, MEGATRON = "parquet", "tensorboard", "msprobe-csv", "msprobe", "megatron-stats"
TABLES = (*FORMATS, PARQUET)
TENSORS = "tensors"
SKIP_LIST = "skip-list"
DIRECTORIES = (TENSORBOARD, MSPROBE_CSV, MSPROBE, MEGATRON, TENSORS)
"""Formats of several files: -o names a directory."""
MEGATRON_FOLDER = "training_stats"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, beside the query."""

    form: str
    output: str | None
    attempt: int | None
    times: tuple[float, float] | None
    is_ranked: bool
    is_squashed: bool
    steps_per_file: int
    jobs: int
    is_quiet: bool


@click.command()
@click.argument("run", required=False)
@click.option(
    "--aggregate",
    "aggregates",
    multiple=True,
    metavar="[NAME=]GLOB[,GLOB]",
    help="A group of tensors, merged to one series a kind: 'layers.3.*', 'qkv=*.q_proj.*,*.k_proj.*'. {} takes one part of "
    "a name and makes a group for each value: 'layers.{}.*' is one series a layer. Several add up.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="GLOB",
    help="Without --aggregate: tensors by name, each its own series; * crosses dots. Several add up. Default: all.",
)
@click.option(
    "--kind", "kinds", callback=words_of, metavar="KIND,...", help="wgrad, param, ..., scalar. Default: all but scalar."
)
@click.option(
    "--statistic",
    "statistics",
    callback=words_of,
    metavar="NAME,...",
    help=f"Of {', '.join(STATISTICS)}; value for scalars. Default: all of them.",
)
@click.option(
    "--steps", callback=steps_of, metavar="A:B", help="Steps A to B, both included; A: and :B are open. Default: all."
)
@click.option(
    "--start-time",
    callback=moment_of,
    metavar="TIME",
    help="Only steps that ended then or later: 2026-11-21T14:00:00 (UTC unless it says a zone), or seconds since 1970.",
)
@click.option("--end-time", callback=moment_of, metavar="TIME", help="Only steps that ended then or earlier.")
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only what this attempt measured, 0 being the first. Default: the newest attempt of each step.",
)
@click.option(
    "--per-rank/--merged",
    "ranked",
    default=None,
    help="Rows as each rank recorded them, or merged over micro-steps and ranks. Default: merged, but for "
    f"{TENSORBOARD} and {MSPROBE_CSV}.",
)
@click.option(
    "--vectors",
    is_flag=True,
    help="What is no row instead: histograms, values for each head, expert or channel. JSON lines, Parquet or TensorBoard.",
)
@click.option(
    "--squash-names",
    "squash",
    is_flag=True,
    help="Leave out what stands before the last part `layers` of a name (else embedding, final, output, norm), where the "
    "rest still names one tensor: decoder.layers.0.mlp is layers.0.mlp.",
)
@click.option(
    "--steps-per-file",
    type=click.IntRange(1, 10**6),
    default=1,
    show_default=True,
    metavar="N",
    help=f"{MSPROBE_CSV}: steps in one file, as its step_count_per_record.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice([*TABLES, *DIRECTORIES, SKIP_LIST]),
    help="Default: by the name of FILE, else csv. docs/exports.md tells what stands where in each.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help=f"Written whole or not at all; {', '.join(DIRECTORIES)}: an empty directory, or none yet. Default: stdout.",
)
@click.option("-j", "--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes that encode steps.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar. There is none either where stderr is no terminal.")
@click.option("--state-dir", metavar="DIR", help="Where the journal is, if the run does not say so itself.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; with -o FILE, print one JSON object of what it holds.")
def export(
    run: str | None,
    aggregates: tuple[str, ...],
    names: tuple[str, ...],
    kinds: tuple[str, ...] | None,
    statistics: tuple[str, ...] | None,
    steps: tuple[int, int],
    start_time: float | None,
    end_time: float | None,
    attempt: int | None,
    ranked: bool | None,
    vectors: bool,
    squash: bool,
    steps_per_file: int,
    form: str | None,
    output: str | None,
    jobs: int,
    quiet: bool,
    state_dir: str | None,
    as_json: bool,
) -> int:
    """Write what RUN recorded: a run's directory or name; by default the newest. Tables have a row a step and series.

    Shards are merged and replicas taken once, as the daemon does; groups merge exactly, each tensor once. A resumed run is
    joined: each step is the newest attempt's. Reads only: a daemon may be at work, or none.

        sentinel export RUN --kind wgrad --statistic norm --aggregate 'global_grad_norm=*'
        sentinel export RUN --format parquet -o run.parquet --jobs 4
        sentinel export RUN --format tensorboard -o tb
        sentinel export RUN --format tensors --steps 100 -o whole

    Exit 1 when there is nothing to write, 2 when a glob matches no name.
    """
    from sentinel.store.run_paths import RunPaths

    if form is None:
        by_name = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": PARQUET}
        usual = "jsonl" if vectors or (as_json and not output) else "csv"
        form = by_name.get(Path(output or "").suffix, usual)
    elif as_json and form == "csv" and output is None:
        raise click.UsageError("--json prints JSON lines and --format csv a table; give one of them")
    if output is None and form not in (*FORMATS, SKIP_LIST):
        raise click.UsageError(f"--format {form} does not go to stdout; give -o {'FILE' if form == PARQUET else 'DIR'}")
    if None not in (start_time, end_time) and (start_time or 0) > (end_time or 0):
        raise click.UsageError("--start-time: expected a time before --end-time")
    timed = start_time is not None or end_time is not None
    if ranked is None:
        ranked = form == MSPROBE_CSV or (form == TENSORBOARD and not aggregates)
    options = Options(
        form=form, output=output, attempt=attempt, is_ranked=ranked, is_squashed=squash, steps_per_file=steps_per_file,
        times=(start_time or 0.0, float("inf") if end_time is None else end_time) if timed else None,
        jobs=jobs, is_quiet=quiet,
    )  # fmt: skip
    if form == TENSORS:
        from sentinel.cli.export_tensors import export_tensors

        if aggregates or statistics or timed or squash:
            raise click.UsageError(f"--format {TENSORS} joins dumped tensors: --name, --kind, --steps, --attempt choose")
        return export_tensors(find_run(run), Path(output or ""), names, kinds, steps, attempt, as_json)
    paths = RunPaths.of(find_run(run), Path(state_dir) if state_dir else None)
    if vectors:
        from sentinel.cli.export_vectors import export_vectors

        if form not in ("jsonl", PARQUET, TENSORBOARD) or aggregates or statistics or squash:
            raise click.UsageError("--vectors: as jsonl, parquet or tensorboard; --name, --kind and --steps choose them")
        query = _query(options, (), names, kinds, None, steps)
        written = export_vectors(paths, query, form, output, attempt, options.times)
    elif form == SKIP_LIST:
        from sentinel.cli.export_skip_list import export_skip_list

        if aggregates or kinds or statistics or names or timed:
            raise click.UsageError(f"--format {SKIP_LIST} lists suspected batches: --steps and --attempt choose them")
        written = export_skip_list(paths.run_dir, output, steps, attempt)
    elif form == MSPROBE:
        from sentinel.cli.export_anomalies import export_anomalies

        if aggregates or kinds or statistics or squash:
            raise click.UsageError(f"--format {MSPROBE} writes anomalies: --name, --steps and times choose them")
        assert output is not None
        written = export_anomalies(paths, Path(output), names or ("*",), steps, options.times, attempt)
    else:
        query = _query(options, aggregates, names, kinds, statistics, steps)
        written = _write(paths, query, options, statistics is None)
    told: dict[str, Any] = {"num_rows": written.num_rows, "num_series": written.num_series, "num_steps": written.num_steps}
    if form in DIRECTORIES:
        told["num_files"] = written.num_files
    told["num_left_out"], told["left_out"] = sum(written.left_out.values()), written.left_out
    if as_json and output:
        click.echo(json.dumps({"file": output, **told}))
    elif output and written.num_rows:
        say(f"{written.num_rows} rows of {written.num_series} series over {written.num_steps} steps in {output}")
    return CLEAN if written.num_rows else FOUND


def _query(
    options: Options,
    aggregates: tuple[str, ...],
    names: tuple[str, ...],
    kinds: tuple[str, ...] | None,
    statistics: tuple[str, ...] | None,
    steps: tuple[int, int],
) -> SeriesQuery:
    """Return the query; UsageError where the options contradict each other or the format."""
    from sentinel.exports.megatron_stats import KINDS
    from sentinel.exports.msprobe_csv import has_place
    from sentinel.exports.series import TENSOR_KINDS, VALUE, SeriesQuery

    form = options.form
    if aggregates and names:
        raise click.UsageError("--name picks single tensors and --aggregate groups; give one of them")
    if aggregates and (options.is_ranked or options.is_squashed):
        what = "--squash-names" if options.is_squashed else "a rank's own rows" if form == MSPROBE_CSV else "--per-rank"
        raise click.UsageError(f"--aggregate merges tensors under a name of its own; it does not go with {what}")
    if form == MEGATRON and statistics is not None:
        raise click.UsageError(f"--format {MEGATRON} writes raw moments into a directory; give -o DIR and no --statistic")
    if form == MSPROBE_CSV and not options.is_ranked:
        raise click.UsageError(f"--format {MSPROBE_CSV} has a folder for each rank; it does not go with --merged")
    if form == MEGATRON and options.is_ranked:
        raise click.UsageError(f"--format {MEGATRON} has each tensor once; it does not go with --per-rank")
    usual = KINDS if form == MEGATRON else TENSOR_KINDS
    if form == MSPROBE_CSV:
        usual = tuple(kind for kind in TENSOR_KINDS if has_place(kind))
    wanted = kinds if kinds is not None else usual
    if form in (MEGATRON, MSPROBE_CSV) and not set(wanted) <= set(usual):
        raise click.UsageError(f"--format {form} has no place for other kinds than {', '.join(usual)}")
    if "scalar" in wanted and options.is_ranked and form != TENSORBOARD:
        raise click.UsageError("--per-rank: logged values are no rows of a rank; leave scalar out, or give --merged")
    if statistics is None:
        statistics = (VALUE,) if wanted == ("scalar",) else (*STATISTICS, VALUE) if "scalar" in wanted else STATISTICS
    return SeriesQuery(
        names=names or ("*",),
        aggregates=tuple(map(Aggregate.parse, aggregates)),
        kinds=wanted,
        statistics=statistics,
        first_step=steps[0],
        last_step=steps[1],
    )


def _write(paths: RunPaths, query: SeriesQuery, options: Options, is_all: bool) -> Written:
    from sentinel.cli import exporting
    from sentinel.exports import formats
    from sentinel.exports.msprobe_csv import ops_of
    from sentinel.judge.recorded import RecordedRun

    how: Any = {"jobs": options.jobs, "is_quiet": options.is_quiet}
    squashed = options.is_squashed
    with RecordedRun(paths) as recorded:
        reading = exporting.StepReading(recorded, query, options.attempt, options.times)
        if options.form in TABLES:
            table = formats.RankTable if options.is_ranked else formats.MergedTable
            encoder = table(options.form, query, squashed)
            if options.form != PARQUET:
                return exporting.write_text(options.output, reading, encoder, **how)
            assert options.output is not None
            about = {"run": paths.name, "table": "rows" if options.is_ranked else "series"}
            return exporting.write_parquet(options.output, reading, encoder, about, **how)
        assert options.output is not None
        output = Path(options.output)
        if options.form == MEGATRON:
            if (output / MEGATRON_FOLDER).exists():
                raise ConfigError(f"{output}: expected no {MEGATRON_FOLDER} there, got some; give another with -o DIR")
            return exporting.write_directory(output / MEGATRON_FOLDER, reading, formats.MegatronStats(query), **how)
        if options.form == TENSORBOARD:
            from sentinel.exports.tensorboard import load

            load()
            form = formats.TensorBoardRanks if options.is_ranked else formats.TensorBoardMerged
            return exporting.write_directory(output, reading, form(query, squashed), **how)
        ops = ops_of(query.statistics, is_all)
        if not ops:
            raise click.UsageError(f"--format {MSPROBE_CSV} has min, max, mean, norm, nans and zeros; give some of them")
        rows = formats.MsprobeCsv(query, ops, options.steps_per_file, squashed)
        return exporting.write_directory(output, reading, rows, place=_RankFolders(reading), **how)


class _RankFolders:
    """Names msProbe's folders: one a rank, however often it began anew."""

    def __init__(self, reading: StepReading) -> None:
        self._reading = reading
        self._folders: dict[str, str] = {}

    def __call__(self, file: str) -> str:
        """Return where `rank0-d3a1c196/actv_0-0.csv` goes: `Nov21_13-56-02-rank0-d3a1c196/actv_0-0.csv`."""
        from sentinel.exports.msprobe_format import TIME, TIME_OFFSET_S

        folder, _, name = file.partition("/")
        rank = folder.partition("-")[0]
        if rank not in self._folders:
            began = datetime.fromtimestamp(self._reading.began, UTC) + timedelta(seconds=TIME_OFFSET_S)
            self._folders[rank] = f"{began.strftime(TIME)}-{folder}"
        return f"{self._folders[rank]}/{name}"
