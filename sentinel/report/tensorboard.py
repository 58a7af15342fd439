"""TensorBoard's event files, written a step at a time: any number of values in one event."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from sentinel.errors import ConfigError

FILE_NAME = "events.out.tfevents.0000000000.sentinel"
"""TensorBoard reads what has `tfevents` in its name, files of one folder in the order of their names."""
VALUES_PER_EVENT = 512
"""Most values in one event (chosen): readers hold one event in memory."""


def load() -> tuple[Any, Any]:
    """Return (event_pb2, RecordWriter). ConfigError, saying what to install, where there is no tensorboard."""
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ConfigError(f"--format tensorboard needs it ({error}); pip install 'sentinel[tensorboard]'") from error
    return event_pb2, RecordWriter


def head() -> bytes:
    """Return what an event file begins with."""
    event_pb2, _ = load()
    return _record([event_pb2.Event(wall_time=0.0, file_version="brain.Event:2")])


def events(step: int, time: float, values: Iterable[tuple[str, float]]) -> bytes:
    """Return the bytes of a step's values, (tag, value), as they are appended to an event file."""
    event_pb2, _ = load()
    found = []
    event = None
    for tag, value in values:
        if event is None or len(event.summary.value) >= VALUES_PER_EVENT:
            event = event_pb2.Event(wall_time=time, step=step)
            found.append(event)
        event.summary.value.add(tag=tag, simple_value=value)
    return _record(found)


def _record(found: Iterable[Any]) -> bytes:
    _, record_writer = load()
    buffer = io.BytesIO()
    writer = record_writer(buffer)
    for event in found:
        writer.write(event.SerializeToString())
    return buffer.getvalue()
