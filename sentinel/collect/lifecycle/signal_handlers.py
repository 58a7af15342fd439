"""Which signal a trainer's own handler was called for, read from the frames of what ends the process.

No handler of ours stands before the trainer's or the kernel's: a signal that nobody handles ends the process as ever, and
without a word.
"""

from __future__ import annotations

import inspect
import itertools
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

_ASKING = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a process to end."""
MAX_FRAMES, MAX_ERRORS = 400, 8
"""So many are looked through."""


def signal_of_frame(frame: FrameType | None) -> str:
    """Return the name of the signal whose handler this frame is in, or one that called it; empty: none."""
    return _signal_of(_callers(frame))


def signal_of_error(error: BaseException | None) -> str:
    """Return the name of the signal whose handler raised this, or what it was raised from; empty: none."""
    for _ in range(MAX_ERRORS):
        if error is None:
            break
        found = _signal_of(_frames_of(error))
        if found:
            return found
        error = error.__cause__ or error.__context__
    return ""


def _signal_of(frames: Iterable[FrameType]) -> str:
    for frame in frames:
        number = _called_for(frame)
        if number is not None:
            return number.name
    return ""


def _called_for(frame: FrameType) -> signal.Signals | None:
    """Return the signal that a function was called for: Python hands a handler its number and the frame that it broke into.

    Trainers call theirs by themselves too, to take themselves down after a failure: then there is no such frame.
    """
    code = frame.f_code
    num_names = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    if num_names == 0:
        return None
    values: list[Any] = []
    for name in code.co_varnames[:num_names]:
        value = frame.f_locals.get(name)
        values += value if isinstance(value, tuple) else (value,)
    for one, behind in itertools.pairwise(values):
        if isinstance(behind, FrameType) and isinstance(one, int) and one in _ASKING:
            return signal.Signals(one)
    return None


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _frames_of(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    for _ in range(MAX_FRAMES):
        if trace is None:
            return
        yield trace.tb_frame
        trace = trace.tb_next
