"""What a history costs: the judge beside it, bytes a record, and how long questions take, beside the spool.

    python benchmarks/history.py [--tensors 1000] [--steps 100000] [--judged-steps 400] [--rounds 5] [--live-rate 20]

Judging: a synthetic run is judged by turns with `history.enabled`, without, and without beside a process of another program
that moves memory, from its spool to the end; seconds of the thread that judges, and by the clock. What the third takes
longer than the second is the machine, whose cores share a cache and a memory. Live: the same run as it is written,
`--live-rate` steps a second, by turns with a history and without; what each step takes from the moment that it is there
until it is judged. Questions: of moments that nobody trained, written at full rate; those of a million steps:
`history_scale.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from long_history import write_single_steps

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.history_api import HistoryQueries, HistoryRequest
from sentinel.daemon.serving import ServedRun
from sentinel.history.config import HistoryConfig
from sentinel.history.manifest import read_manifest
from sentinel.history.questions import asking
from sentinel.judge.packs import RulePacks
from sentinel.store.run_paths import RunPaths
from sentinel.testing import SyntheticRun


def judged_s(run_dir: Path, *, is_enabled: bool) -> tuple[float, float]:
    """Return (processor time of this thread, time by the clock) that judging a run takes: seconds."""
    copy = run_dir.with_name(f"copy-{is_enabled}")
    shutil.copytree(run_dir, copy)
    copy.chmod(0o700)
    packs = RulePacks(())
    packs.load()
    run = ServedRun(RunPaths.of(copy), DaemonConfig(history=HistoryConfig(enabled=is_enabled)), packs)
    thread, wall = time.thread_time(), time.monotonic()
    while run.turn(time.time()):
        pass
    took = time.thread_time() - thread, time.monotonic() - wall
    run.close()
    shutil.rmtree(copy)
    return took


def live_ms(folder: Path, num_steps: int, rate: float, *, is_enabled: bool) -> list[float]:
    """Return what each step of a run that is being written took to be judged: milliseconds by the clock."""
    source = _run(folder / f"live-{is_enabled}")
    packs = RulePacks(())
    packs.load()
    run, took, due = None, [], time.monotonic()
    for _ in range(num_steps):
        source.write(1)
        due += 1.0 / rate
        run = run or ServedRun(RunPaths.of(source.directory), DaemonConfig(history=HistoryConfig(enabled=is_enabled)), packs)
        begun = time.perf_counter()
        while run.turn(time.time()):
            pass
        took.append(1e3 * (time.perf_counter() - begun))
        time.sleep(max(0.0, due - time.monotonic()))
    assert run is not None
    run.close()
    shutil.rmtree(source.directory)
    # Of the first steps layouts are made.
    return took[num_steps // 10 :]


def _run(directory: Path) -> SyntheticRun:
    return SyntheticRun(directory, dp=2, layers=100, d_model=16, elements=8)


@contextlib.contextmanager
def beside_another() -> Iterator[None]:
    """Have a process of another program sort and copy memory until the block ends."""
    words = "import numpy as np; a = np.random.rand(2_000_000); o = np.random.permutation(len(a))"
    moving = f"{words}\nwhile True: b = np.concatenate([a, a[o]])"
    with subprocess.Popen([sys.executable, "-c", moving]) as process:
        try:
            time.sleep(0.5)
            yield
        finally:
            process.kill()


def written(run_dir: Path, num_tensors: int, num_steps: int) -> tuple[float, float]:
    """Write a long run at full rate; return (records/s, bytes a record at full rate)."""
    begun = time.monotonic()
    write_single_steps(run_dir, num_tensors, num_steps, HistoryConfig(enabled=True, full_steps=0, flush_s=1.0))
    took = time.monotonic() - begun
    moments = read_manifest(run_dir / "history").of("moments")
    return num_steps * (num_tensors + 2) / took, sum(one.bytes for one in moments) / sum(one.rows for one in moments)


def asked_ms(run_dir: Path, query: str, num: int = 20) -> tuple[float, float]:
    """Return (median, slowest of 20) milliseconds of a question, the connection already there."""
    with asking({"run": run_dir}) as connection:
        took = []
        for _ in range(num):
            begun = time.monotonic()
            connection.sql(query).to_arrow_table()
            took.append(1e3 * (time.monotonic() - begun))
    return median(took), max(took)


def heatmap_ms(run_dir: Path, num: int = 10) -> tuple[float, float]:
    """Return median and greatest time of what the daemon does for one heat map of the page: milliseconds."""
    queries = HistoryQueries()
    request = HistoryRequest.parse([("run", run_dir.name), ("kind", "wgrad"), ("statistic", "std")])
    took = []
    for _ in range(num):
        began = time.perf_counter()
        queries.heatmap(run_dir, request)
        took.append(1e3 * (time.perf_counter() - began))
    return median(took), max(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--judged-steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--live-rate", type=float, default=20.0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="history-"))
    try:
        source = _run(folder / "run")
        source.write(options.judged_steps)
        source.end()
        print(f"judging {options.judged_steps} steps of {source.rows_per_step} rows, by turns, {options.rounds} rounds:")
        rounds = []
        for _ in range(options.rounds):
            off, on = (judged_s(folder / "run", is_enabled=one) for one in (False, True))
            with beside_another():
                rounds.append((off, on, judged_s(folder / "run", is_enabled=False)))
        for name, at in (("thread that judges", 0), ("by the clock", 1)):
            off_s, on_s, beside_s = (median(one[which][at] for one in rounds) for which in (0, 1, 2))
            alone, beside = (median(one[1][at] / one[which][at] for one in rounds) for which in (0, 2))
            print(
                f"  {name}: {off_s:.2f} s without, {on_s:.2f} s with a history, {beside_s:.2f} s without, beside another "
                f"process; with a history {alone:.3f} of without, {beside:.3f} of beside another (medians of pairs)"
            )
        num = round(10 * options.live_rate)
        print(f"live, {options.live_rate:g} steps a second, {num} steps by turns, {options.rounds} rounds:")
        pairs = [
            tuple(live_ms(folder, num, options.live_rate, is_enabled=one) for one in (False, True))
            for _ in range(options.rounds)
        ]
        for name, of in (("median", median), ("p99", lambda took: float(np.quantile(took, 0.99))), ("mean", fmean)):
            off_ms, on_ms = (median(of(one[which]) for one in pairs) for which in (0, 1))
            ratio = median(of(on) / of(off) for off, on in pairs)
            print(
                f"  {name}: {off_ms:.2f} ms without, {on_ms:.2f} ms with a history; {ratio:.3f} of without (median of pairs)"
            )
        rate, size = written(folder / "long", options.tensors, options.steps)
        print(
            f"writing {options.steps} steps x {options.tensors} tensors: {rate / 1e6:.2f} M records/s, {size:.1f} B a record"
        )
        last = options.steps - 1
        for name, query in (
            ("one series, all steps in buckets of 256", "SELECT step, std_min, std_max, std_avg FROM moments_256 "
             "WHERE name = 'layers.7.weight' ORDER BY step"),
            ("one series, newest 1,000 steps", "SELECT step, std, norm FROM moments WHERE name = 'layers.7.weight' "
             f"AND step > {last - 1000} ORDER BY step"),
            ("layers x steps, buckets of 4,096", "SELECT depth, step, std_max, bad_steps FROM moments_4096 "
             "WHERE kind = 'wgrad'"),
        ):  # fmt: skip
            middle, slowest = asked_ms(folder / "long", query)
            print(f"  {name}: median {middle:.0f} ms, slowest of 20 {slowest:.0f} ms")
        middle, slowest = heatmap_ms(folder / "long")
        print(f"  the page's layers x steps, all of the run: median {middle:.0f} ms, slowest of 10 {slowest:.0f} ms")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
