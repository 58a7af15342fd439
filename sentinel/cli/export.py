"""`sentinel export`: what a run recorded, as tables or as other tools read it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.cli.export_options import moment_of, steps_of, words_of
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.outputs import STDOUT
from sentinel.cli.places import find_run
from sentinel.exports.formats import FORMATS, KnownFormats
from sentinel.exports.formats import export as write_export
from sentinel.exports.request import ExportRequest, ExportSetting, UnfitOptions, Written
from sentinel.judge.recorded import RecordedRun
from sentinel.record import STATISTICS

BY_SUFFIX = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
"""Ending of an output's name -> its format."""
DIRECTORIES = tuple(name for name, form in FORMATS.items() if form.goes_to == "directory")
"""Formats of several files: -o names a directory."""


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
    "tensorboard and msprobe-csv.",
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
    help="msprobe-csv: steps in one file, as its step_count_per_record.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(list(KnownFormats())),
    help="Default: by the name of FILE, else csv. docs/exports.md tells what stands where in each.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help=f"Written whole or not at all; {', '.join(DIRECTORIES)}: an empty directory, or none yet. Default, and -: stdout.",
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
    if output == STDOUT:
        output = None
    if form is None:
        usual = "jsonl" if vectors or (as_json and not output) else "csv"
        form = BY_SUFFIX.get(Path(output or "").suffix, usual)
    elif as_json and form == "csv" and output is None:
        raise click.UsageError("--json prints JSON lines and --format csv a table; give one of them")
    goes_to = KnownFormats()[form].goes_to
    if output is None and goes_to != "text":
        raise click.UsageError(f"--format {form} does not go to stdout; give -o {'FILE' if goes_to == 'file' else 'DIR'}")
    if None not in (start_time, end_time) and (start_time or 0) > (end_time or 0):
        raise click.UsageError("--start-time: expected a time before --end-time")
    is_timed = start_time is not None or end_time is not None
    request = ExportRequest(
        run_dir=find_run(run), state_dir=Path(state_dir) if state_dir else None, form=form,
        output=Path(output) if output else None, names=names, aggregates=aggregates, kinds=kinds, statistics=statistics,
        steps=steps, times=(start_time or 0.0, float("inf") if end_time is None else end_time) if is_timed else None,
        attempt=attempt, is_ranked=ranked, is_squashed=squash, is_vectors=vectors, steps_per_file=steps_per_file, jobs=jobs,
    )  # fmt: skip
    stdout: Callable[[], AbstractContextManager[Any]] = partial(click.open_file, "-", "wb")
    setting = ExportSetting(open_run=RecordedRun, stdout=stdout, to_stderr=to_stderr, progress=lambda: ExportBar(quiet))
    try:
        written = write_export(request, setting)
    except UnfitOptions as error:
        raise click.UsageError(str(error)) from error
    return _print_result(written, output, goes_to == "directory", as_json)


def _print_result(written: Written, output: str | None, is_directory: bool, as_json: bool) -> int:
    """Print a summary of what was written, and return the exit code."""
    if written.files is not None:
        if as_json:
            click.echo(msgspec.json.encode(written.files).decode())
        for one in [] if as_json else written.files:
            own = f", {len(one['apart'])} of single ranks" if one["apart"] else ""
            to_stderr(f"step {one['step']}: {one['num_tensors']} whole tensors{own} in {one['file']}")
        return CLEAN if written.is_clean else FOUND
    if as_json and output:
        click.echo(json.dumps({"file": output, **written.sums(is_directory)}))
    elif output and written.num_rows:
        to_stderr(f"{written.num_rows} rows of {written.num_series} series over {written.num_steps} steps in {output}")
    return CLEAN if written.num_rows else FOUND


class ExportBar:
    """A progress bar on stderr, if that is a terminal."""

    def __init__(self, is_quiet: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        if is_quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.fields[steps]} steps"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("export", total=1.0, steps=0)

    def __enter__(self) -> ExportBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, num_steps: int, share: Callable[[], float]) -> None:
        """Show the progress, not at each step: the share reads sizes from the disk. As `ExportProgress`."""
        if self._bar is not None and num_steps % 16 == 0:
            self._bar.update(self._task, completed=share(), steps=num_steps)
