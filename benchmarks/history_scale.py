"""What a history of a million steps answers, and how fast, beside SQLite and beside the spool; bytes a record.

    python benchmarks/history_scale.py [--steps 1000000] [--tensors 1000] [--asks 30] [--keep DIR] [--out FILE]

Two histories. `few`: all records of all steps of ten tensors, each through the daemon's writer. `many`: of a thousand
tensors the newest steps in that way, of older ones the buckets drawn at random (`long_history.py` says what is made how).
SQLite answers from a table with the same rows, its primary key (tensor, step), and, as other tools keep it, from a table of
every step. The spool answers by `sentinel export`, for so few steps that it has them. Cold: a process of its own, from
before the import to the answer; the files are in the page cache. Processor time: of all threads of the process that asks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import msgspec
import numpy as np
import pyarrow

sys.path.insert(0, str(Path(__file__).parent))

from long_history import LongHistory, bytes_of, write_single_steps
from recording import record

import sentinel
from sentinel.cli.main import run_cli
from sentinel.daemon.history_api import HistoryQueries, HistoryRequest
from sentinel.history.config import FOLDER, HistoryConfig
from sentinel.history.manifest import read_manifest
from sentinel.history.pictures import picture_of
from sentinel.history.questions import asking
from sentinel.history.table_schemas import WIDTHS
from sentinel.history.wanted import Wanted

FEW = 10
"""Tensors of the history whose every record went through the writer."""
NAME = "layers.7.weight"
COLD_ASKS = 10


class Figure(NamedTuple):
    """A line of the table."""

    what: str
    p50_ms: float
    p95_ms: float
    processor_ms: float
    """The median."""
    asked: str = ""


def timed(what: str, num: int, ask: Callable[[], object], asked: str = "") -> Figure:
    """Return how long a question takes, asked several times."""
    took, spent = [], []
    for _ in range(num):
        begun, before = time.perf_counter(), time.process_time()
        ask()
        took.append(1e3 * (time.perf_counter() - begun))
        spent.append(1e3 * (time.process_time() - before))
    return _figure(what, took, spent, asked)


def cold(what: str, code: str, asked: str = "") -> Figure:
    """Return how long a question takes in processes of its own: from before the imports to the answer."""
    took, spent = [], []
    for _ in range(COLD_ASKS):
        said = subprocess.run(
            [sys.executable, "-c", f"import time; t = time.perf_counter(); {code}; "
             "print(time.perf_counter() - t, time.process_time())"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if said.returncode:
            raise SystemExit(said.stderr)
        wall, processor = said.stdout.split()[-2:]
        took.append(1e3 * float(wall))
        spent.append(1e3 * float(processor))
    return _figure(what, took, spent, asked)


def _figure(what: str, took: list[float], spent: list[float], asked: str) -> Figure:
    return Figure(what, float(np.percentile(took, 50)), float(np.percentile(took, 95)), float(np.median(spent)), asked)


def history_figures(many: Path, few: Path, num: int, tensors: int) -> Iterator[Figure]:
    """Yield what the histories answer, and how fast."""
    opened, statistic = sentinel.open(many), "std"
    series = f"import sentinel; sentinel.open({str(many)!r}).series({NAME!r}, {statistic!r})"
    yield timed("one series, all steps", num, lambda: opened.series(NAME, statistic), "p95 < 150")
    yield cold("the same, cold process", series)
    yield timed("the same of `few`", num, lambda: sentinel.open(few).series(NAME, statistic), "p95 < 150")
    manifest = read_manifest(many / FOLDER)
    middle, newest = manifest.full_from // 2, manifest.decision - 1
    for steps in ((middle, middle + 200_000), (middle, middle + 20_000)):
        what = f"one series, {steps[1] - steps[0]:,} steps"
        yield timed(what, num, lambda span=steps: opened.series(NAME, statistic, steps=span))
    for derived in ("norm", "rms"):
        yield timed(f"one series of `{derived}`, all steps", num, lambda of=derived: opened.series(NAME, of))
    layers = (
        "from pathlib import Path; from sentinel.history.pictures import picture_of; "
        "from sentinel.history.wanted import Wanted; "
        f"picture_of('run', Path({str(many)!r}), Wanted(kind='wgrad', statistic={statistic!r}))"
    )
    wanted = Wanted(kind="wgrad", statistic=statistic)
    yield timed(f"layers x steps, {tensors:,} tensors, all steps", num, lambda: picture_of("run", many, wanted), "< 500")
    yield cold("the same, cold process", layers)
    queries = HistoryQueries()
    for what, first, last in (
        ("all steps", 0, newest),
        ("100,000 steps", middle, middle + 99_999),
        ("10,000 old steps", middle, middle + 9_999),
        ("the newest 1,000 steps", newest - 999, newest),
    ):
        request = HistoryRequest.parse([("run", "many"), ("kind", "wgrad"), ("from", str(first)), ("to", str(last))])
        yield timed(f"the same as the page asks it, {what}", num, lambda it=request: queries.heatmap(many, it), "< 500")
    scalar = HistoryRequest.parse([("run", "many"), ("name", "loss"), ("name", "grad_norm")])
    yield timed("the page's plots of two scalars, all steps", num, lambda: queries.series(many, scalar))
    times = HistoryRequest.parse([("run", "many"), ("kind", "steps")])
    yield timed("the page's plot of the time of a step, all steps", num, lambda: queries.series(many, times))
    yield timed("the page's list of what there is", num, lambda: queries.held(many, scalar))


def sqlite_figures(many: Path, folder: Path, num: int, tensors: int, steps: int) -> Iterator[Figure]:
    """Yield what SQLite answers from the same rows, and from every step of a few tensors."""
    width = WIDTHS[-1]
    with asking({"run": many}) as connection:
        rows = connection.execute(
            "SELECT series, step, std_min, std_max, std_avg, std_last, nans, infs, num_steps "
            f"FROM moments_{width} WHERE kind = 'wgrad' ORDER BY series, step"
        ).fetchall()
    base = sqlite3.connect(folder / "same.sqlite")
    base.execute(
        "CREATE TABLE buckets (tensor INT, step INT, least REAL, greatest REAL, mean REAL, last REAL, nans INT, infs INT, "
        "num_steps INT, PRIMARY KEY (tensor, step)) WITHOUT ROWID"
    )
    with base:
        base.executemany("INSERT INTO buckets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    of_one = "SELECT * FROM buckets WHERE tensor = 8 ORDER BY step"
    yield timed("SQLite, same rows: one series", num, lambda: base.execute(of_one).fetchall())

    def picture() -> object:
        made = np.full((4, tensors, 1 + steps // width), np.nan)
        every = np.array(base.execute("SELECT tensor, step, least, greatest, mean, last FROM buckets").fetchall(), float)
        made[:, every[:, 0].astype(int) - 1, every[:, 1].astype(int) // width] = every[:, 2:].T
        return made

    yield timed(f"SQLite, same rows: {tensors:,} tensors", min(num, 10), picture)
    base.close()
    full = sqlite3.connect(folder / "full.sqlite")
    full.execute("CREATE TABLE points (tensor INT, step INT, std REAL, bad INT, PRIMARY KEY (tensor, step)) WITHOUT ROWID")
    rng = np.random.default_rng(0)
    for tensor in range(FEW):
        with full:
            values = rng.standard_normal(steps).tolist()
            full.executemany("INSERT INTO points VALUES (?, ?, ?, 0)", ((tensor, at, one) for at, one in enumerate(values)))
    grouped = (
        f"SELECT step / {width}, min(std), max(std), avg(std), sum(bad) FROM points WHERE tensor = 7 GROUP BY 1 ORDER BY 1"
    )
    yield timed(f"SQLite, every step of {FEW} tensors: one series", min(num, 10), lambda: full.execute(grouped).fetchall())
    full.close()


def spool_figures(folder: Path, tensors: int, steps: int) -> Iterator[Figure]:
    """Yield what the spool answers, a series of a few steps."""
    run = folder / "spooled"
    record(run, steps, num_ranks=1, num_tensors=tensors)

    def ask() -> None:
        code = run_cli(["export", str(run), "--name", "layers.7.weight", "-o", str(folder / "out.csv"), "--quiet"])
        if code:
            raise SystemExit(f"the spool is not exported: {code}")

    yield timed(f"the spool: one series, {steps:,} steps x {tensors:,} tensors", 5, ask)


def seen(many: Path, history: LongHistory) -> Iterator[str]:
    """Yield what is seen of the spike and of the NaN of one step, at zooms from a column for all steps to single steps."""
    for step, number, what in ((history.spike_step, 2, "a spike"), (history.nan_step, 3, "7 NaN")):
        met = []
        for span in (history.num_steps, 200_000, 20_000, 2_000, 100):
            first = max(0, step - span // 3)
            for columns in (1, 100, 1000):
                of = Wanted(kind="wgrad", statistic="std", series=(number,), first_step=first, last_step=first + span)
                shown = picture_of("run", many, msgspec.structs.replace(of, columns=columns))
                met.append(np.nanmax(shown.greatest) >= 49.0 if number == 2 else shown.nans.sum() == 7)
        pictures = f"{len(met)} pictures, of 100 to all steps in 1 to 1,000 columns"
        yield f"{what} of one step ({step:,}) is seen in {sum(met)} of {pictures}"


@contextlib.contextmanager
def kept_in(keep: Path | None) -> Iterator[Path]:
    """Yield the folder of the histories. keep: where they stay, and are taken from if they are there."""
    if keep is not None:
        keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="history-") as made:
        yield Path(made)


def main() -> None:
    """Make what is not there, ask, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--asks", type=int, default=30)
    parser.add_argument("--spool-steps", type=int, default=500)
    parser.add_argument("--keep", type=Path, help="Make the histories there, or use those that lie there.")
    parser.add_argument("--out", type=Path, help="A file that has what is printed.")
    options = parser.parse_args()
    with kept_in(options.keep) as folder:
        many, few = folder / "many", folder / "few"
        history = LongHistory(many, options.tensors, options.steps)
        for run, write in (
            (many, history.write),
            (few, lambda: write_single_steps(few, FEW, options.steps, HistoryConfig(enabled=True, flush_s=3600))),
        ):
            if not (run / FOLDER / "manifest.json").exists() or read_manifest(run / FOLDER).decision < options.steps:
                shutil.rmtree(run, ignore_errors=True)
                run.mkdir(mode=0o700)
                write()
        with options.out.open("w") if options.out else contextlib.nullcontext() as out:

            def say(line: str = "") -> None:
                print(line, flush=True)
                if out is not None:
                    print(line, file=out, flush=True)

            _measure(options, many, few, history, say)


def _measure(options: Any, many: Path, few: Path, history: LongHistory, say: Callable[[str], None]) -> None:
    load = "/".join(f"{one:.1f}" for one in os.getloadavg())
    say(f"# A history of {options.steps:,} steps, {datetime.now(UTC):%Y-%m-%d}\n")
    say(
        f"`python benchmarks/history_scale.py --steps {options.steps} --tensors {options.tensors} --asks {options.asks}`, "
        f"{os.cpu_count()} cores ({platform.machine()}), load {load} at the start, DuckDB {duckdb.__version__}, "
        f"pyarrow {pyarrow.__version__}, Python {platform.python_version()}.\n"
    )
    say("| history | table | files | rows | MB | bytes a row | bytes a step and tensor |\n|---|---|---|---|---|---|---|")
    for name, run, tensors in ((f"many: {options.tensors:,} tensors", many, options.tensors), (f"few: {FEW}", few, FEW)):
        total = 0
        for table, files, rows, size in bytes_of(read_manifest(run / FOLDER)):
            total += size
            say(f"| {name} | {table} | {files} | {rows:,} | {size / 1e6:.1f} | {size / max(1, rows):.1f} | |")
        say(f"| {name} | all | | | {total / 1e6:.0f} | | {total / options.steps / tensors:.2f} |")
    newest = f"{options.steps - history.first_full:,}"
    say(
        f"\nOf `few` every record went through the writer; of `many` those of the newest {newest} steps, older ones were "
        "drawn as buckets of 16 and written by the same functions.\n"
    )
    say(f"| question, {options.asks} times | ms, p50 | p95 | processor, ms, p50 | asked |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="history-beside-") as made:
        for figures in (
            history_figures(many, few, options.asks, options.tensors),
            sqlite_figures(many, Path(made), options.asks, options.tensors, options.steps),
            spool_figures(Path(made), options.tensors, options.spool_steps),
        ):
            for one in figures:
                say(f"| {one.what} | {one.p50_ms:.0f} | {one.p95_ms:.0f} | {one.processor_ms:.0f} | {one.asked} |")
    say("")
    for line in seen(many, history):
        say(line + ".")
    load = "/".join(f"{one:.1f}" for one in os.getloadavg())
    say(f"\nLoad at the end {load} (1/5/15 minutes), this script's own included.")


if __name__ == "__main__":
    main()
