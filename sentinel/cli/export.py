"""`sentinel export`: the statistics of a recorded run as a table, by tensor or merged over groups of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from sentinel.aggregate import Aggregate
from sentinel.cli.main import CLEAN, FOUND, say
from sentinel.cli.places import find_run
from sentinel.errors import ConfigError
from sentinel.record import STATISTICS
from sentinel.report.export import FORMATS, TableText

if TYPE_CHECKING:
    from sentinel.daemon.recorded import RecordedRun
    from sentinel.daemon.series import MergedStep, Points, SeriesQuery

MEGATRON = "megatron-stats"


def steps_of(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int]:
    """Return the first and last step that `A:B`, `A:`, `:B` or `A` names."""
    if value is None:
        return 0, 2**62
    first, colon, last = (word.strip() for word in value.partition(":"))
    words = [word for word in (first, last) if word]
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise click.BadParameter(f'expected steps like 100:200, 100:, :200 or 100, got "{value}"', ctx, param)
    low, high = int(first or 0), int(last) if last else 2**62 if colon else int(first)
    if high < low:
        raise click.BadParameter(f'expected the first step before the last, got "{value}"', ctx, param)
    return low, high


def words_of(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return the words between commas."""
    return None if value is None else tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))


@click.command()
@click.argument("run", required=False)
@click.option(
    "--aggregate", "aggregates", multiple=True, metavar="[NAME=]GLOB[,GLOB]",
    help="A group of tensors, merged to one series a kind: 'layers.3.*', 'qkv=*.q_proj.*,*.k_proj.*'. {} takes one part of "
    "a name and makes a group for each value: 'layers.{}.*' is one series a layer. Several add up.",
)
@click.option(
    "--name", "names", multiple=True, metavar="GLOB",
    help="Without --aggregate: tensors by name, each its own series; * crosses dots. Several add up. Default: all.",
)
@click.option(
    "--kind", "kinds", callback=words_of, metavar="KIND,...", help="wgrad, param, ..., scalar. Default: all but scalar."
)
@click.option(
    "--statistic", "statistics", callback=words_of, metavar="NAME,...",
    help=f"Of {', '.join(STATISTICS)}; value for scalars. Default: all of them.",
)
@click.option(
    "--steps", callback=steps_of, metavar="A:B", help="Steps A to B, both included; A: and :B are open. Default: all."
)
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="N",
    help="Only what this attempt measured, 0 being the first. Default: the newest attempt of each step.",
)
@click.option(
    "--format", "form", type=click.Choice([*FORMATS, MEGATRON]),
    help=f"Default: by the name of FILE, else csv. {MEGATRON}: raw moments, as training_stats/ of the directory -o names.",
)
@click.option("-o", "--output", metavar="FILE", help="Written whole or not at all. Default: stdout.")
@click.option("--state-dir", metavar="DIR", help="Where the journal is, if the run does not say so itself.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines; with -o FILE, print one JSON object of what it holds.")
def export(
    run: str | None,
    aggregates: tuple[str, ...],
    names: tuple[str, ...],
    kinds: tuple[str, ...] | None,
    statistics: tuple[str, ...] | None,
    steps: tuple[int, int],
    attempt: int | None,
    form: str | None,
    output: str | None,
    state_dir: str | None,
    as_json: bool,
) -> int:
    """Write the statistics of RUN: a run's directory or name; by default the newest. One row a step and series.

    Shards are merged and replicas taken once, as the daemon does; groups merge exactly, each tensor once. Reads only: a
    daemon may be at work, or none. The gradient norm of the whole model:

        sentinel export RUN --kind wgrad --statistic norm --aggregate 'global_grad_norm=*'

    Exit 1 when there is nothing to write, 2 when a glob matches no name.
    """
    from sentinel.daemon.recorded import RecordedRun
    from sentinel.daemon.series import TENSOR_KINDS, VALUE, SeriesQuery
    from sentinel.report.megatron_stats import STAT_OF_KIND
    from sentinel.store.whereabouts import RunPaths

    if aggregates and names:
        raise click.UsageError("--name picks single tensors and --aggregate groups; give one of them")
    if as_json and form == "csv" and output is None:
        raise click.UsageError("--json prints JSON lines and --format csv a table; give one of them")
    if form == MEGATRON and (output is None or statistics is not None):
        raise click.UsageError(f"--format {MEGATRON} writes raw moments into a directory; give -o DIR and no --statistic")
    usual = tuple(STAT_OF_KIND) if form == MEGATRON else TENSOR_KINDS
    wanted = kinds if kinds is not None else usual
    if form == MEGATRON and not set(wanted) <= set(usual):
        raise click.UsageError(f"--format {MEGATRON} has no place for other kinds than {', '.join(usual)}")
    if statistics is None:
        statistics = (VALUE,) if wanted == ("scalar",) else (*STATISTICS, VALUE) if "scalar" in wanted else STATISTICS
    query = SeriesQuery(
        names=names or ("*",),
        aggregates=tuple(map(Aggregate.parse, aggregates)),
        kinds=wanted,
        statistics=statistics,
        first_step=steps[0],
        last_step=steps[1],
    )
    if form is None:
        form = "jsonl" if (as_json and not output) or Path(output or "").suffix in (".jsonl", ".json") else "csv"
    with RecordedRun(RunPaths.of(find_run(run), Path(state_dir) if state_dir else None)) as recorded:
        found = _Found(recorded, query, attempt)
        if form == MEGATRON:
            assert output is not None
            written = write_megatron_stats(found, Path(output))
        else:
            written = write_table(found, form, output)
    if as_json and output:
        click.echo(json.dumps({"file": output, **written}))
    elif output and written["num_rows"]:
        say(f"{written['num_rows']} rows of {written['num_series']} series over {written['num_steps']} steps in {output}")
    return CLEAN if written["num_rows"] else FOUND


class _Found:
    """What a first reading found: the series there are, and which attempt speaks for each step.

    So nothing is written for a glob that matches nothing, and an attempt that repeats steps is known before the steps it
    repeats are written. Statistics are not formed in it.
    """

    def __init__(self, recorded: RecordedRun, query: SeriesQuery, attempt: int | None) -> None:
        from sentinel.daemon.series import Picker, newest_attempts

        self._recorded = recorded
        self.picker = Picker(query)
        met: list[tuple[int, int]] = []
        num_gone = 0
        for view, _ in recorded.views():
            if not query.first_step <= view.step <= query.last_step:
                continue
            num_gone += not view.parts
            if view.parts:
                met.append((view.attempt, view.step))
                self.picker.meet(view.layout, view.scalars)
        if num_gone:
            say(f"{num_gone} steps are no longer in the spool and are left out")
        if not met:
            say("no steps there")
        else:
            self.picker.check()
        attempts = sorted({one for one, _ in met})
        if attempts and attempt is not None and attempt not in attempts:
            raise ConfigError(f"--attempt: expected one of {', '.join(map(str, attempts))}, got {attempt}")
        self._chosen = newest_attempts((one, step) for one, step in met if attempt is None or one == attempt)
        for name, (num, has_others) in sorted(self.picker.excluded.items()):
            rest = "the others are merged" if has_others else "nothing of it can be merged"
            say(f'"{name}": {num} series have no known placement and stay with their ranks; {rest}')

    def steps(self) -> Iterator[tuple[MergedStep, Points]]:
        """Yield the steps of a second reading."""
        from sentinel.daemon.series import MergedStep

        num_partial = 0
        for view, _ in self._recorded.views() if self._chosen else ():
            if self._chosen.get(view.step) == view.attempt and view.parts:
                del self._chosen[view.step]
                step = MergedStep.of(view)
                points = self.picker.points(step)
                num_partial += not points.is_whole.all()
                yield step, points
        if num_partial:
            say(f"{num_partial} steps lack shards of ranks that were not heard; their rows say is_whole false")


def write_table(found: _Found, form: str, output: str | None) -> dict[str, int]:
    """Write one row a step and series, and return how many there are."""
    from sentinel.daemon.series import COLUMNS, rows_of

    statistics = found.picker.query.statistics
    text = TableText(form, (*COLUMNS, *statistics))
    series: set[tuple[str, str, str]] = set()
    num_steps = num_rows = 0
    steps = found.steps()
    first = next(steps, None)
    if first is not None:
        with _opened(output) as out:
            out.write(text.head())
            for _, points in itertools.chain((first,), steps):
                out.writelines(text.row(row) for row in rows_of(points, statistics))
                num_steps += 1
                num_rows += len(points)
                series.update((one.kind, one.name, one.place) for one in points.series)
    return {"num_rows": num_rows, "num_series": len(series), "num_steps": num_steps}


def write_megatron_stats(found: _Found, directory: Path) -> dict[str, int]:
    """Write the files of Megatron's training stats, and return how many values there are."""
    from sentinel.report.megatron_stats import SAMPLES, MegatronStatsFiles, raw_moments

    if (directory / "training_stats").exists():
        raise ConfigError(f"{directory}: expected no training_stats there, got some; give another directory with -o DIR")
    files = MegatronStatsFiles(directory)
    series: set[tuple[str, str, str]] = set()
    num_rows = num_steps = 0
    try:
        for step, points in found.steps():
            samples = next((step.scalars[name] for name in SAMPLES if name in step.scalars), None)
            rows = zip(points.series, raw_moments(points.moments), strict=True)
            # What each rank keeps for itself stands in its own file, under the one name.
            named = ((one.name, one.kind, one.border, one.rank, values) for one, values in rows)
            num_rows += files.write(step.step, samples, named)
            num_steps += 1
            series.update((one.kind, one.name, one.place) for one in points.series)
    finally:
        files.close()
    return {"num_rows": num_rows, "num_series": len(series), "num_steps": num_steps}


@contextlib.contextmanager
def _opened(output: str | None) -> Iterator[IO[str]]:
    """Open the output: stdout, or a file that appears when it is whole."""
    if output is None:
        with click.open_file("-", "w") as out:
            yield out
        return
    path = Path(output)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as out:
            yield out
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
