"""TensorBoard's event files, written a step at a time: any number of values in one event."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from sentinel.errors import ConfigError

FILE_NAME = "events.out.tfevents.0000000000.sentinel"
"""TensorBoard reads what has `tfevents` in its name, files of one folder in the order of their names."""
VALUES_PER_EVENT = 512
"""Most values in one event; a bound on memory, since readers hold one event whole."""


def load() -> Any:
    """Return tensorboard's event_pb2. ConfigError, saying what to install, where there is no tensorboard."""
    try:
        from tensorboard.compat.proto import event_pb2
    except ImportError as error:
        raise ConfigError(f"--format tensorboard needs it ({error}); pip install 'sentinel[tensorboard]'") from error
    return event_pb2


def record(data: bytes) -> bytes:
    """Return a record of an event file, with its length and checksums, as tensorboard's own writer does."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(data)
    return buffer.getvalue()


def head() -> bytes:
    """Return the first record of an event file, which has its version."""
    return record(load().Event(wall_time=0.0, file_version="brain.Event:2").SerializeToString())


def events(step: int, time: float, values: Iterable[tuple[str, float]]) -> bytes:
    """Return the bytes of a step's values, (tag, value), as they are appended to an event file."""
    event_pb2 = load()
    listed = list(values)
    found = []
    for first in range(0, len(listed), VALUES_PER_EVENT):
        event = event_pb2.Event(wall_time=time, step=step)
        add = event.summary.value.add
        for tag, value in listed[first : first + VALUES_PER_EVENT]:
            add(tag=tag, simple_value=value)
        found.append(record(event.SerializeToString()))
    return b"".join(found)


def histograms(step: int, time: float, found: Iterable[tuple[str, Sequence[float], Sequence[float]]]) -> bytes:
    """Return the bytes of a step's histograms, (tag, numbers in the bins, edges), an event each.

    Empty bins at either end are left out; min and max are the edges of what is left. Sums are not known, and 0 there.
    """
    event_pb2 = load()
    records = []
    for tag, counts, edges in found:
        filled = [at for at, count in enumerate(counts) if count]
        first, last = (filled[0], filled[-1]) if filled else (0, 0)
        event = event_pb2.Event(wall_time=time, step=step)
        histogram = event.summary.value.add(tag=tag).histo
        histogram.min, histogram.max, histogram.num = edges[first], edges[last + 1], sum(counts)
        histogram.bucket_limit.extend(edges[first + 1 : last + 2])
        histogram.bucket.extend(counts[first : last + 1])
        records.append(record(event.SerializeToString()))
    return b"".join(records)
