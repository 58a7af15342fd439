"""`sentinel import msprobe DIR`: msProbe's CSV files as a recorded run, for replay, export and back-tests of rules."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.outputs import no_stdout
from sentinel.cli.places import runs_directory
from sentinel.errors import ConfigError
from sentinel.place import Place
from sentinel.run_name import FOLDER

if TYPE_CHECKING:
    from sentinel.exports.imported import ImportedRank
    from sentinel.exports.msprobe_reading import RankFolder, Unread


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="RUN",
    type=click.Path(path_type=Path),
    callback=no_stdout,
    help="The run's directory, which must not exist. Default: msprobe-NAME among the runs, NAME being that of DIR.",
)
@click.option("--tp", type=click.IntRange(min=1), help="Tensor-parallel ranks of the run, numbered fastest.")
@click.option("--dp", type=click.IntRange(min=1), help="Data-parallel ranks, numbered behind tp: their parts are merged.")
@click.option("--pp", type=click.IntRange(min=1), help="Pipeline stages, numbered slowest.")
@click.option("--schedule", default="", metavar="NAME", help="Pipeline schedule: zbv and dualpipev fold. Default: looped.")
@click.option(
    "--resumed", is_flag=True, help="A step that is there twice was written again by a resumed run: the last time counts."
)
@click.option(
    "--year",
    type=click.IntRange(1970, 2999),
    metavar="YYYY",
    help="Of the folders' times, which have none. Default: that of the newest file.",
)
@click.option("-j", "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes, a rank each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object of what was read and what was not.")
def msprobe(
    directory: Path,
    output: Path | None,
    tp: int | None,
    dp: int | None,
    pp: int | None,
    schedule: str,
    resumed: bool,
    year: int | None,
    jobs: int,
    as_json: bool,
) -> int:
    """Read the CSV files that msProbe's monitor wrote into DIR as a run: judge it with `sentinel replay RUN --recompute`.

    All ranks (folders like Nov21_13-56-02-rank0-d3a1c196) and all files of tensors. A rank's second folder is the run's
    next attempt. Without --tp, --dp and --pp nobody knows which ranks hold the same, and each keeps its own series.

    What a CSV file does not say stays undefined: skew and kurtosis, and std where mean or norm is missing. A line that is
    torn or makes no sense is an error with its place. Exit 1 when there is nothing to read.
    """
    from sentinel.exports.msprobe_reading import Unread, other_files, rank_folders

    attempts = rank_folders(directory)
    target = output or runs_directory() / f"msprobe-{directory.resolve().name}"
    if not FOLDER.fullmatch(target.name):
        raise ConfigError(f'-o: expected a plain name for the run, got "{target.name}"')
    if target.exists():
        raise ConfigError(f"{target}: expected no such run yet; give another one with -o, or remove it")
    unread = Unread()
    for attempt in attempts:
        for folder in attempt:
            unread.files += [f"{Path(folder.path).name}/{name}" for name in other_files(Path(folder.path))]
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    scratch.mkdir(mode=0o700)
    try:
        tasks = [
            (scratch, who, folder.path, resumed)
            for who, folder in _ranks(target.name, attempts, Sizes.of(attempts, tp, dp, pp, schedule), year, resumed)
        ]
        results = [_read_rank(*task) for task in tasks] if min(jobs, len(tasks)) == 1 else _in_parallel(tasks, jobs)
        num_steps = len({step for one in results for step in one.steps})
        if num_steps:
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for one in results:
        unread.add(one.unread)
    num_rows = sum(one.num_rows for one in results)
    if as_json:
        reported = {
            "run": str(target) if num_steps else None, "num_rows": num_rows, "num_steps": num_steps,
            "num_ranks": len({one.rank for one in results}), "num_attempts": len(attempts), **msgspec.to_builtins(unread),
        }  # fmt: skip
        click.echo(json.dumps(reported))
    elif num_steps:
        click.echo(str(target))
    if num_steps:
        to_stderr(f"{num_rows} rows of {num_steps} steps in {target}")
    else:
        to_stderr(f"{directory}: no lines of tensors there")
    _report_unread(unread, results)
    return CLEAN if num_steps else FOUND


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of the tp, dp and pp axes of the recorded run; all None: not given."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    schedule: str = ""
    world_size: int = 1
    is_known: bool = False

    @classmethod
    def of(cls, attempts: list[list[RankFolder]], tp: int | None, dp: int | None, pp: int | None, schedule: str) -> Sizes:
        """Return the sizes; ConfigError when a folder's rank has no place in them."""
        world_size = max(folder.rank for attempt in attempts for folder in attempt) + 1
        if tp is None and dp is None and pp is None:
            return cls(world_size=world_size)
        sizes = cls(tp or 1, dp or 1, pp or 1, schedule, (tp or 1) * (dp or 1) * (pp or 1), True)
        if sizes.world_size < world_size:
            raise ConfigError(
                f"expected at least {world_size} ranks, there being a folder of rank {world_size - 1}; got tp {sizes.tp} x "
                f"dp {sizes.dp} x pp {sizes.pp} = {sizes.world_size}"
            )
        return sizes

    def place(self, rank: int) -> Place:
        """Return the place of a rank: tp counts fastest, then dp, then pp. Unknown sizes: no rank shares an axis."""
        if not self.is_known:
            return Place(rank=rank, world_size=self.world_size, dp_rank=rank, dp_size=self.world_size)
        return Place(
            rank=rank, world_size=self.world_size, tp_rank=rank % self.tp, tp_size=self.tp,
            dp_rank=rank // self.tp % self.dp, dp_size=self.dp, pp_rank=rank // (self.tp * self.dp), pp_size=self.pp,
            schedule=self.schedule,
        )  # fmt: skip


class Result(msgspec.Struct):
    """What was read of one rank's folder."""

    rank: int
    num_rows: int
    steps: set[int]
    unread: Unread
    num_changed_weights: int
    has_running_sums: bool


def _ranks(
    run: str, attempts: list[list[RankFolder]], sizes: Sizes, year: int | None, is_resumed: bool
) -> list[tuple[ImportedRank, RankFolder]]:
    from sentinel.exports.imported import ImportedRank

    found = []
    former_ns = -1
    for number, attempt in enumerate(attempts):
        began_ns = max(min(_began_ns(folder, year) for folder in attempt), former_ns + 1)
        former_ns = began_ns
        for folder in attempt:
            who = ImportedRank(
                # A resumed run that wrote into the same folder is an attempt more.
                run=run, rank=folder.rank, attempt=number * (REPEATS if is_resumed else 1), place=sizes.place(folder.rank),
                began_ns=began_ns, origin=Path(folder.path).resolve().name, is_placed=sizes.is_known,
            )  # fmt: skip
            found.append((who, folder))
    return found


LIKE_TIME = re.compile(r"[A-Z][a-z]{2}\d{1,2}_\d{1,2}-\d{1,2}-\d{1,2}", re.ASCII)
"""Name of a folder that begins with a time; others begin with a word of the user's."""
REPEATS = 1000
"""Most times that a folder may have one step."""


def _began_ns(folder: RankFolder, year: int | None) -> int:
    """Return when a folder was begun: as its name says, at UTC+8, in the year of its newest file unless one is given."""
    from sentinel.exports.msprobe_format import TIME_OFFSET_S
    from sentinel.exports.msprobe_reading import csv_files

    newest = max((path.stat().st_mtime for *_, path in csv_files(Path(folder.path))), default=0.0)
    of_files = datetime.fromtimestamp(newest, UTC) + timedelta(seconds=TIME_OFFSET_S)
    began = of_files.replace(microsecond=0)
    if LIKE_TIME.fullmatch(folder.time):
        # A 29 February is of the last leap year, unless the year was given.
        years = [year] if year is not None else range(of_files.year, of_files.year - 8, -1)
        found = next((moment for one in years if (moment := _moment(one, folder.time)) is not None), None)
        if found is None:
            of_year = f" of the year {year}" if year is not None else ""
            what = f"expected the time of its first step{of_year}, like Nov21_13-56-02, got {folder.time}"
            raise ConfigError(f"{folder.path}: {what}: there is no such moment; rename the folder")
        began = found
    return (int(began.timestamp()) - TIME_OFFSET_S) * 10**9


def _moment(year: int, time: str) -> datetime | None:
    """Return what a folder's name says, as if it were UTC; None: that year has no such moment."""
    from sentinel.exports.msprobe_format import TIME

    try:
        return datetime.strptime(f"{year} {time}", f"%Y {TIME}").replace(tzinfo=UTC)
    except ValueError:
        return None


def _read_rank(run_dir: Path, who: ImportedRank, folder: str, is_resumed: bool) -> Result:
    """Write one rank's attempt, and those that went on in the same folder."""
    from sentinel.exports.imported import IncarnationWriter
    from sentinel.exports.msprobe_steps import RankSteps

    steps = RankSteps(Path(folder), is_resumed=is_resumed)
    writers: dict[int, tuple[IncarnationWriter, int]] = {}
    seen: set[int] = set()
    for step in steps:
        if step.repeat >= REPEATS:
            raise ConfigError(f"{folder}: expected a step at most {REPEATS} times, got step {step.step} more often")
        writer, _ = writers.get(step.repeat, (None, 0))
        if writer is None:
            again = msgspec.structs.replace(
                who, attempt=who.attempt + step.repeat, began_ns=who.began_ns + step.repeat * 10**9,
                origin=who.origin + f"#{step.repeat}" * bool(step.repeat),
            )  # fmt: skip
            writer = IncarnationWriter(run_dir, again)
        writer.write(step)
        writers[step.repeat] = (writer, step.step)
        seen.add(step.step)
    for writer, last in writers.values():
        writer.close(last)
    num_rows = sum(writer.num_rows for writer, _ in writers.values())
    return Result(who.rank, num_rows, seen, steps.unread, steps.num_changed_weights, steps.has_running_sums)


def _in_parallel(tasks: list[tuple[Path, ImportedRank, str, bool]], jobs: int) -> list[Result]:
    with ProcessPoolExecutor(min(jobs, len(tasks))) as pool:
        waiting = [pool.submit(_read_rank, *task) for task in tasks]
        try:
            return [one.result() for one in waiting]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _report_unread(unread: Unread, results: list[Result]) -> None:
    if unread.num_no_tensor:
        to_stderr(
            f"{unread.num_no_tensor} lines are of what is no tensor (None), which msProbe writes as NaN; they are left out"
        )
    if unread.num_communication:
        to_stderr(
            f"{unread.num_communication} lines of collectives do not fit their header and are left out, the first is "
            f"{unread.first_communication}"
        )
    if unread.num_before_first:
        to_stderr(f"{unread.num_before_first} lines are of the optimizer's state before step 0 and are left out")
    if unread.files:
        to_stderr(f"{len(unread.files)} files hold no tensors and are left out: {', '.join(unread.files[:4])}")
    changed = sum(one.num_changed_weights for one in results)
    if changed:
        to_stderr(f"{changed} weights are not those that the step before had left behind; the ones before the step count")
    if any(one.has_running_sums for one in results):
        to_stderr("gradients by micro-step are msProbe's: sums of the micro-steps so far, not each one's own")
