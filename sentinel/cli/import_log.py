"""`sentinel import log LOG`: what another tool logged as a recorded run, for the page, SQL, exports and replays."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from sentinel.bounds import MAX_NAME, MAX_SCALARS, MAX_STEP
from sentinel.cli.log_columns import column_options, header_names, named_columns
from sentinel.cli.main import CLEAN, to_stderr
from sentinel.cli.outputs import no_stdout
from sentinel.cli.places import runs_directory
from sentinel.errors import ConfigError
from sentinel.place import Place
from sentinel.run_name import FOLDER, folder_name

if TYPE_CHECKING:
    from sentinel.logs.log_file import Log

NS = 10**9


@click.command()
@click.argument("log", metavar="LOG", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="RUN",
    type=click.Path(path_type=Path),
    callback=no_stdout,
    help="The run's directory, which must not exist. Default: log-NAME among the runs, NAME being that of LOG.",
)
@column_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object of what was read and what was not.")
def log(log: Path, output: Path | None, columns: tuple[str, ...], header: str | None, as_json: bool) -> int:
    """Read a LOG as a run: `sentinel serve RUN` judges it and shows its page; report, export and replay read it.

    A LOG is what `sentinel rules backtest` takes: CSV, JSON lines, TensorBoard's event files, an offline run of W&B
    (run-*.wandb or its directory), Neptune's Parquet, what a trainer printed. Its numbers are the logged values of one rank
    that measures no tensor; a step that goes back begins the next attempt.
    """
    from sentinel.exports.imported import ImportedRank, IncarnationWriter
    from sentinel.logs.log_file import read_log

    read = read_log(log, columns=named_columns(columns), header=header_names(header))
    target = output or runs_directory() / folder_name(f"log-{log.resolve().name}")
    if not FOLDER.fullmatch(target.name):
        raise ConfigError(f'-o: expected a plain name for the run, got "{target.name}"')
    if target.exists():
        raise ConfigError(f"{target}: expected no such run yet; give another one with -o, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    scratch.mkdir(mode=0o700)
    began_ns = int(log.stat().st_mtime) * NS
    num_steps = num_attempts = num_left_out = 0
    try:
        for attempt, steps in _attempts(read):
            who = ImportedRank(
                run=target.name, rank=0, attempt=attempt, place=Place(), began_ns=began_ns + attempt * NS,
                origin=log.resolve().name, tool=read.form,
            )  # fmt: skip
            writer = IncarnationWriter(scratch, who)
            for step, scalars in steps.items():
                kept = dict(list(scalars.items())[:MAX_SCALARS])
                num_left_out += len(scalars) - len(kept)
                writer.write_scalars(step, kept)
            writer.close(max(steps))
            num_steps, num_attempts = num_steps + len(steps), num_attempts + 1
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    notes = [*read.notes]
    if read.num_rows > num_steps:
        notes.append(f"{read.num_rows - num_steps} rows are of a step that has one already: the later numbers count")
    if num_left_out:
        notes.append(f"{num_left_out} numbers are left out: a step has at most {MAX_SCALARS}")
    if as_json:
        reported = {
            "run": str(target), "form": read.form, "num_rows": read.num_rows, "num_steps": num_steps,
            "num_attempts": num_attempts, "channels": read.sources, "notes": notes,
        }  # fmt: skip
        click.echo(json.dumps(reported))
    else:
        click.echo(str(target))
    for note in notes:
        to_stderr(f"{log}: {note}")
    to_stderr(f"{num_steps} steps of {num_attempts} attempts in {target}: sentinel serve {target} judges them")
    return CLEAN


def _attempts(read: Log) -> Iterator[tuple[int, dict[int, dict[str, float]]]]:
    """Yield (attempt, step -> its values), steps rising. ConfigError where they do not rise, or no run has such a step."""
    if long := [name for name in read.columns if len(name) > MAX_NAME]:
        raise ConfigError(f"{read.path}: expected names of at most {MAX_NAME} characters, got one of {len(long[0])}")
    for attempt in np.unique(read.attempts).tolist():
        steps: dict[int, dict[str, float]] = {}
        newest = -1
        for row in np.flatnonzero(read.attempts == attempt).tolist():
            step = int(read.steps[row])
            if not newest <= step <= MAX_STEP:
                what = f"expected steps that rise from 0 to {MAX_STEP}, got {step} behind {newest} in row {row}"
                raise ConfigError(f"{read.path}: {what}; sentinel rules backtest judges such rows in their order")
            newest = step
            steps.setdefault(step, {}).update(
                (name, float(read.columns[name][row])) for name in read.columns if read.present[name][row]
            )
        yield attempt, steps
