"""Reads the steps of an export, has them encoded by this process or several, and puts them where they belong."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import pickle
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import click
import msgspec

from sentinel.cli.main import say
from sentinel.errors import ConfigError, SentinelError
from sentinel.exports.formats import Before, Encoded, Encoder, MergedTable, RankTable
from sentinel.exports.output import WholeDirectory, WholeFile
from sentinel.exports.rank_series import RankStepRows
from sentinel.exports.series import MergedStep, Picker, newest_attempts

if TYPE_CHECKING:
    from sentinel.exports.parquet import ParquetTable
    from sentinel.exports.series import SeriesQuery
    from sentinel.judge.recorded import RecordedRun
    from sentinel.step_view import Layout, StepView

HELD_BYTES = 16 * 2**20
"""Output for stdout that memory holds until every glob has matched; more goes to a temporary file (chosen)."""


KEPT = "no known placement says how their parts make a group (--per-rank has them)"
SUMMANDS = "each rank holds a summand of them, whose statistics say nothing of the sum (--per-rank has them)"
"""Why series are not merged."""


class Written(msgspec.Struct):
    """What was written."""

    num_rows: int = 0
    num_series: int = 0
    num_steps: int = 0
    num_files: int = 0
    left_out: dict[str, int] = {}
    """Why -> series that were asked for and are not written."""


class StepReading:
    """The steps of a query, each once: of a resumed run what the newest attempt measured.

    Where no rank lived twice they are read in one pass; else a first pass finds which attempt speaks for each step.
    """

    def __init__(
        self, recorded: RecordedRun, query: SeriesQuery, attempt: int | None, times: tuple[float, float] | None
    ) -> None:
        self._recorded = recorded
        self._query = query
        self._attempt = attempt
        self._times = times
        self.picker = Picker(query)
        self._attempts: set[int] = set()
        self._num_gone = 0
        self.num_passes = 0
        self.began = 0.0
        """Time of the first step that was yielded."""

    def views(self) -> Iterator[tuple[StepView, dict[str, float] | None]]:
        """Yield (step, what was logged of the step before it, where that was yielded too)."""
        chosen = None
        if self._recorded.has_resumed and self._attempt is None:
            met = [(view.attempt, view.step) for view in self._wanted()]
            chosen = newest_attempts(met)
        done: set[int] = set()
        logged: tuple[int, dict[str, float]] = (-2, {})
        for view in self._wanted():
            if chosen is not None and chosen.get(view.step) != view.attempt:
                continue
            if view.step in done:
                continue
            if not done:
                self.began = view.time
            done.add(view.step)
            self.picker.meet(view.layout, view.scalars)
            yield view, logged[1] if logged[0] == view.step - 1 else {} if view.step - 1 in done else None
            logged = view.step, {name: one.mean for name, one in view.scalars.items()}
        if not done:
            self._say_nothing()
        else:
            self.picker.check()
        if self._num_gone:
            say(f"{self._num_gone} steps are no longer in the spool and are left out")
        if self._recorded.damage:
            say(f"the spool is damaged: {self._recorded.damage}; what is whole is here")
        for (name, kind), (num, has_others) in sorted(self.picker.excluded.items()):
            rest = "the others are merged" if has_others else "nothing of it can be merged"
            say(f'"{name}" of {kind}: {num} series have no known placement and stay with their ranks; {rest}')

    def unmerged(self, is_ranked: bool) -> dict[str, int]:
        """Return why -> series that the steps yielded so far hold and no merged table has."""
        if is_ranked:
            return {}
        kept = sum(num for num, _ in self.picker.excluded.values())
        found = {KEPT: kept, SUMMANDS: len(self.picker.partial)}
        return {why: num for why, num in found.items() if num}

    def _wanted(self) -> Iterator[StepView]:
        self.num_passes += 1
        self._num_gone = 0
        for view, _ in self._recorded.views():
            if not self._query.first_step <= view.step <= self._query.last_step:
                continue
            if not view.parts:
                self._num_gone += 1
                continue
            if self._times is not None and not self._times[0] <= view.time <= self._times[1]:
                continue
            self._attempts.add(view.attempt)
            if self._attempt is None or view.attempt == self._attempt:
                yield view

    def _say_nothing(self) -> None:
        if self._attempts and self._attempt is not None and self._attempt not in self._attempts:
            known = ", ".join(map(str, sorted(self._attempts)))
            raise ConfigError(f"--attempt: expected one of {known}, got {self._attempt}")
        say("no steps there")

    @property
    def share(self) -> float:
        """How much of the reading is done, in [0, 1]."""
        num_passes = 2 if self._recorded.has_resumed and self._attempt is None else 1
        done = self._recorded.num_bytes_read / max(self._recorded.num_bytes, 1)
        return min((max(self.num_passes - 1, 0) + min(done, 1.0)) / num_passes, 1.0)


class ExportTarget(Protocol):
    """Where encoded steps go."""

    def take(self, encoded: Encoded) -> None:
        """Write a step."""
        ...

    def release(self) -> None:
        """All globs have matched: what was held back may be seen."""
        ...


class StreamSink:
    """One text on stdout; held back until nothing can be wrong with what was asked for."""

    num_files = 0

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._held: IO[bytes] | None = tempfile.SpooledTemporaryFile(HELD_BYTES)  # noqa: SIM115 -- closed when released
        self._has_begun = False
        self.has_written = False
        """Whether anything was let out."""

    def take(self, encoded: Encoded) -> None:
        """Write a step."""
        for _, head, data in encoded.chunks:
            self._write((b"" if self._has_begun else head) + data)
            self._has_begun = True

    def release(self) -> None:
        """Let out what was held back."""
        if self._held is None:
            return
        held, self._held = self._held, None
        held.seek(0)
        while block := held.read(2**20):
            self._write(block)
        held.close()

    def _write(self, data: bytes) -> None:
        if self._held is not None:
            self._held.write(data)
        else:
            self.has_written = True
            self._out.write(data.decode())


class FileSink:
    """One file."""

    num_files = 1

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._has_begun = False

    def take(self, encoded: Encoded) -> None:
        """Write a step."""
        for _, head, data in encoded.chunks:
            self._file.write(data if self._has_begun else head + data)
            self._has_begun = True

    def release(self) -> None:
        """Nothing is held back: the file is not there yet."""


class ParquetSink:
    """One Parquet file."""

    num_files = 1

    def __init__(self, table: ParquetTable) -> None:
        self._table = table

    def take(self, encoded: Encoded) -> None:
        """Write a step."""
        if encoded.num_rows:
            self._table.add(encoded.columns, encoded.num_rows)

    def release(self) -> None:
        """Nothing is held back: the file is not there yet."""


class DirectorySink:
    """Many files. place: the name of a file in the directory, given what its encoder calls it."""

    def __init__(self, directory: WholeDirectory, place: Callable[[str], str] = str) -> None:
        self._directory = directory
        self._place = place
        self._heads: dict[str, bytes] = {}

    @property
    def num_files(self) -> int:
        """Files written to."""
        return len(self._heads)

    def take(self, encoded: Encoded) -> None:
        """Write a step. ConfigError where a file would have lines of two kinds."""
        for file, head, data in encoded.chunks:
            name = self._place(file)
            if self._heads.setdefault(name, head) != head:
                raise ConfigError(
                    f"{name}: its columns change from one step to another, for micro-steps came or went; give fewer "
                    "--steps-per-file, or other --steps"
                )
            self._directory.append(name, data, head)

    def release(self) -> None:
        """Nothing is held back: the directory is not there yet."""


def write(reading: StepReading, encoder: Encoder, sink: ExportTarget, *, jobs: int = 1, is_quiet: bool = True) -> Written:
    """Encode the steps with as many processes, in their order, into the sink."""
    written = Written()
    num_partial = 0
    series: set[tuple[str, str, str]] = set()
    left_out: dict[str, set[tuple[str, str, str]]] = {}
    encode = _in_parallel(encoder, jobs) if jobs > 1 else _here(encoder)
    with _Progress(reading, is_quiet) as progress, contextlib.closing(encode(_steps(reading, encoder))) as results:
        for encoded in results:
            sink.take(encoded)
            if set(reading.picker.query.globs) <= reading.picker.met:
                sink.release()
            written.num_steps += 1
            written.num_rows += encoded.num_rows
            series.update(encoded.series)
            num_partial += not encoded.is_whole
            for why, keys in encoded.left_out.items():
                left_out.setdefault(why, set()).update(keys)
            progress.show(written.num_steps)
    sink.release()
    if num_partial:
        say(f"{num_partial} steps lack shards of ranks that were not heard; their rows say is_whole false")
    written.num_series = len(series)
    written.left_out = {why: len(keys) for why, keys in left_out.items()} | reading.unmerged(encoder.is_ranked)
    for why, num in written.left_out.items():
        if why != KEPT:  # Which groups those would be in was said already.
            say(f"{num} series are left out: {why}")
    written.num_files = getattr(sink, "num_files", 0)
    return written


def _steps(reading: StepReading, encoder: Encoder) -> Iterator[tuple[Any, Before]]:
    for view, before in reading.views():
        yield RankStepRows.of(view) if encoder.is_ranked else MergedStep.of(view), before


def _here(encoder: Encoder) -> Callable[[Iterator[tuple[Any, Before]]], Generator[Encoded, None, None]]:
    def encode(steps: Iterator[tuple[Any, Before]]) -> Generator[Encoded, None, None]:
        for step, before in steps:
            yield encoder.encode(step, before)

    return encode


def _in_parallel(encoder: Encoder, jobs: int) -> Callable[[Iterator[tuple[Any, Before]]], Generator[Encoded, None, None]]:
    """Have steps encoded by other processes in turn. Each has one step at hand: nobody waits on a full pipe for ever."""

    def encode(steps: Iterator[tuple[Any, Before]]) -> Generator[Encoded, None, None]:
        workers = [_Worker(encoder) for _ in range(jobs)]
        try:
            at = 0
            for step, before in steps:
                worker = workers[at % jobs]
                if at >= jobs:
                    yield worker.result()
                worker.give(step, before)
                at += 1
            for number in range(max(at - jobs, 0), at):
                yield workers[number % jobs].result()
        finally:
            for worker in workers:
                worker.stop()

    return encode


class _Pickler(pickle.Pickler):
    """Leaves the layout of a step out."""

    def __init__(self, file: IO[bytes], layout: Layout) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._layout = layout

    def persistent_id(self, obj: Any) -> str | None:
        return "layout" if obj is self._layout else None


class _Unpickler(pickle.Unpickler):
    """Puts the layout back in."""

    def __init__(self, file: IO[bytes], layout: Layout) -> None:
        super().__init__(file)
        self._layout = layout

    def persistent_load(self, pid: Any) -> Layout:
        return self._layout


class _Worker:
    """A process that encodes."""

    def __init__(self, encoder: Encoder) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_encode_steps, args=(theirs, encoder), daemon=True)
        self._process.start()
        theirs.close()
        self._layout: Any = None

    def give(self, step: MergedStep | RankStepRows, before: Before) -> None:
        """Hand over a step. Layouts change seldom: the one that is known there is not sent again."""
        layout = step.layout if step.layout is not self._layout else None
        self._layout = step.layout
        buffer = io.BytesIO()
        _Pickler(buffer, step.layout).dump((step, before))
        self._pipe.send((None if layout is None else pickle.dumps(layout, pickle.HIGHEST_PROTOCOL), buffer.getvalue()))

    def result(self) -> Encoded:
        """Return what became of the step that it has. SentinelError when the process is gone."""
        try:
            found = self._pipe.recv()
        except EOFError as error:
            self._process.join(5)
            raise SentinelError(f"an encoding process ended, exit code {self._process.exitcode}; try --jobs 1") from error
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Encoded)
        return found

    def stop(self) -> None:
        """End the process."""
        # It holds nothing that would have to be put in order. Waiting for it to see the closed pipe would not do: the
        # processes started after it have the pipe open too.
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def _encode_steps(pipe: Connection, encoder: Encoder) -> None:
    layout: Any = None
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            fresh, data = pipe.recv()
            layout = layout if fresh is None else pickle.loads(fresh)
            step, before = _Unpickler(io.BytesIO(data), layout).load()
            try:
                pipe.send(encoder.encode(step, before))
            except Exception as error:
                pipe.send(error)


class _Progress:
    """A bar on stderr, where people look at it."""

    def __init__(self, reading: StepReading, is_quiet: bool) -> None:
        self._reading = reading
        self._bar: Any = None
        self._task: Any = None
        if is_quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.fields[steps]} steps"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("export", total=1.0, steps=0)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, num_steps: int) -> None:
        """Move on; looking at the disk is dear, so not at each step."""
        if self._bar is not None and num_steps % 16 == 0:
            self._bar.update(self._task, completed=self._reading.share, steps=num_steps)


def write_text(output: str | None, reading: StepReading, encoder: Encoder, *, jobs: int, is_quiet: bool) -> Written:
    """Write a table of text: to stdout, or to a file that appears when it is whole."""
    if output is None:
        with click.open_file("-", "w") as out:
            sink = StreamSink(out)
            try:
                return write(reading, encoder, sink, jobs=jobs, is_quiet=is_quiet)
            except BrokenPipeError:
                raise
            except BaseException:
                if sink.has_written:
                    say("what was written to stdout so far is not the whole table")
                raise
    with WholeFile(Path(output)) as whole:
        written = write(reading, encoder, FileSink(whole.file), jobs=jobs, is_quiet=is_quiet)
        whole.is_wanted = written.num_rows > 0
    return written


def write_parquet(
    output: str, reading: StepReading, encoder: MergedTable | RankTable, about: dict[str, str], *, jobs: int, is_quiet: bool
) -> Written:
    """Write a Parquet file that appears when it is whole."""
    from sentinel.exports.parquet import ParquetTable, load

    load()
    with WholeFile(Path(output)) as whole:
        with ParquetTable(whole.file, encoder.columns, about) as table:
            written = write(reading, encoder, ParquetSink(table), jobs=jobs, is_quiet=is_quiet)
        whole.is_wanted = written.num_rows > 0
    return written


def write_directory(
    output: Path, reading: StepReading, encoder: Encoder, *, place: Callable[[str], str] = str, jobs: int, is_quiet: bool
) -> Written:
    """Write files into a directory that appears when it is whole."""
    with WholeDirectory(output) as whole:
        return write(reading, encoder, DirectorySink(whole, place), jobs=jobs, is_quiet=is_quiet)
