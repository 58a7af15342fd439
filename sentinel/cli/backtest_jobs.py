"""Many logs and runs judged by several processes, returned in the order in which they were given."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from sentinel.errors import SentinelError
from sentinel.judge.backtest import BacktestOutcome, BacktestSubject, Settings, judge_subject

_shares: MutableSequence[float] | None = None
"""In a worker: the share done of each task, in memory shared with the process that shows the bar."""


def judged(
    subjects: Sequence[BacktestSubject], settings: Sequence[Settings], jobs: int, *, is_quiet: bool
) -> Iterator[list[BacktestOutcome | str]]:
    """Yield for each subject, in order, an outcome for each of the settings; in its place why it could not be judged."""
    tasks = [(subject, one) for subject in subjects for one in settings]
    sizes = [_size(subject) for subject, _ in tasks]
    jobs = min(jobs, len(tasks))
    with _JobsBar(sizes, is_quiet) as bar:
        results = _here(tasks, bar) if jobs < 2 or "fork" not in multiprocessing.get_all_start_methods() else None
        if results is not None:
            yield from _in_lots(results, len(settings))
            return
        yield from _in_lots(_in_parallel(tasks, sizes, jobs, bar), len(settings))


def _in_lots(results: Iterator[BacktestOutcome | str], size: int) -> Iterator[list[BacktestOutcome | str]]:
    lot: list[BacktestOutcome | str] = []
    for result in results:
        lot.append(result)
        if len(lot) == size:
            yield lot
            lot = []


def _here(tasks: Sequence[tuple[BacktestSubject, Settings]], bar: _JobsBar) -> Iterator[BacktestOutcome | str]:
    for at, (subject, settings) in enumerate(tasks):
        yield _judge(subject, settings, bar.reporter(at))
        bar.show(at, 1.0)


def _in_parallel(
    tasks: Sequence[tuple[BacktestSubject, Settings]], sizes: Sequence[int], jobs: int, bar: _JobsBar
) -> Iterator[BacktestOutcome | str]:
    context = multiprocessing.get_context("fork")
    shares = context.Array("d", len(tasks), lock=False)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(shares,)) as pool:
        futures: dict[int, Future[BacktestOutcome | str]] = {}
        # The longest first: no process is left alone with it at the end.
        for at in sorted(range(len(tasks)), key=lambda one: -sizes[one]):
            futures[at] = pool.submit(_in_worker, at, *tasks[at])
        try:
            for at in range(len(tasks)):
                while not futures[at].done():
                    wait([futures[at]], timeout=0.2)
                    bar.show_all(shares)
                yield _result(futures.pop(at), tasks[at][0])
            bar.show_all([1.0] * len(tasks))
        finally:
            # Whoever reads our output may leave.
            for future in futures.values():
                future.cancel()


def _result(future: Future[BacktestOutcome | str], subject: BacktestSubject) -> BacktestOutcome | str:
    try:
        return future.result()
    except BrokenProcessPool:
        return f"{subject.path}: the process that judged it, or one beside it, was killed; out of memory? try --jobs 1"


def _begin(shares: MutableSequence[float]) -> None:
    global _shares
    _shares = shares


def _in_worker(at: int, subject: BacktestSubject, settings: Settings) -> BacktestOutcome | str:
    def show(share: float) -> None:
        if _shares is not None:
            _shares[at] = share

    result = _judge(subject, settings, show)
    show(1.0)
    return result


def _judge(subject: BacktestSubject, settings: Settings, show: Callable[[float], None]) -> BacktestOutcome | str:
    try:
        return judge_subject(subject, settings, show)
    except SentinelError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or subject.path}: {error.strerror or error}"


def _size(subject: BacktestSubject) -> int:
    """Bytes on disk: how long judging it takes, about."""
    path = Path(subject.path)
    with contextlib.suppress(OSError):
        if path.is_file():
            return max(1, path.stat().st_size)
        return max(1, sum(one.stat().st_size for one in path.rglob("*") if one.is_file()))
    return 1


class _JobsBar:
    """A progress bar on stderr, if that is a terminal."""

    def __init__(self, sizes: Sequence[int], is_quiet: bool) -> None:
        self._sizes = sizes
        self._shares = [0.0] * len(sizes)
        self._bar: Any = None
        self._task: Any = None
        if is_quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.fields[done]} of {task.fields[num]} judged"), BarColumn())
        percent = TextColumn("{task.percentage:3.0f}%")
        self._bar = Progress(
            *columns, percent, TimeRemainingColumn(), console=Console(stderr=True), transient=True, auto_refresh=False
        )
        self._task = self._bar.add_task("backtest", total=float(sum(sizes)), done=0, num=len(sizes))

    def __enter__(self) -> _JobsBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def reporter(self, at: int) -> Callable[[float], None]:
        """Return the function that a task of this process calls with its share, in [0, 1]."""
        return lambda share: self.show(at, share)

    def show(self, at: int, share: float) -> None:
        """Show that a share of one task is done."""
        self._shares[at] = share
        self.show_all(self._shares)

    def show_all(self, shares: Sequence[float]) -> None:
        """Show the shares of all tasks."""
        if self._bar is not None:
            done = sum(size * share for size, share in zip(self._sizes, shares, strict=True))
            self._bar.update(self._task, completed=done, done=sum(share >= 1.0 for share in shares), refresh=True)
