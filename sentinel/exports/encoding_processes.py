"""Encodes the steps of an export in this process or in several, in their order."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import pickle
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any

from sentinel.errors import SentinelError
from sentinel.exports.encoders import Before, Encoded, Encoder
from sentinel.exports.rank_series import RankStepRows
from sentinel.exports.series import MergedStep

if TYPE_CHECKING:
    from sentinel.step_view import Layout


def encoded(steps: Iterator[tuple[Any, Before]], encoder: Encoder, jobs: int) -> Generator[Encoded, None, None]:
    """Yield each step encoded, in order. steps: (step, logged values of the step before). jobs: processes that encode.

    SentinelError when one of them ends before its time.
    """
    if jobs > 1:
        yield from _in_parallel(steps, encoder, jobs)
        return
    for step, before in steps:
        yield encoder.encode(step, before)


def _in_parallel(steps: Iterator[tuple[Any, Before]], encoder: Encoder, jobs: int) -> Generator[Encoded, None, None]:
    """Have steps encoded by other processes in turn. Each has at most one step, so that no full pipe blocks both ends."""
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
        """Send a step to the process. Its layout is sent only when it differs from the one sent last."""
        layout = step.layout if step.layout is not self._layout else None
        self._layout = step.layout
        buffer = io.BytesIO()
        _Pickler(buffer, step.layout).dump((step, before))
        self._pipe.send((None if layout is None else pickle.dumps(layout, pickle.HIGHEST_PROTOCOL), buffer.getvalue()))

    def result(self) -> Encoded:
        """Wait for the step that was sent, and return it encoded. SentinelError when the process has ended."""
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
        # processes started after it have the pipe open too. Nor would SIGTERM: it has the handlers of whoever exports.
        self._process.kill()
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
