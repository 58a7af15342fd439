"""TensorBoard's event files, written a step at a time: any number of values in one event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sentinel.crc32c import masked_crc32c
from sentinel.errors import ConfigError

FILE_NAME = "events.out.tfevents.0000000000.sentinel"
"""TensorBoard reads what has `tfevents` in its name, files of one folder in the order of their names."""
LIVE_FILES = "events.out.tfevents.*.sentinel-live"
"""The files of a mirror, which grow while a run is judged."""
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
    length = len(data).to_bytes(8, "little")
    checksums = (masked_crc32c(one).to_bytes(4, "little") for one in (length, data))
    return b"".join((length, next(checksums), data, next(checksums)))


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


def text(step: int, time: float, tag: str, markdown: str) -> bytes:
    """Return the bytes of a text, which TensorBoard shows as Markdown."""
    event_pb2 = load()
    from tensorboard.compat.proto import tensor_pb2, types_pb2

    event = event_pb2.Event(wall_time=time, step=step)
    value = event.summary.value.add(tag=tag)
    value.metadata.plugin_data.plugin_name = "text"
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[markdown.encode("utf-8", "replace")])
    tensor.tensor_shape.dim.add(size=1)
    value.tensor.CopyFrom(tensor)
    return record(event.SerializeToString())


def session_start(step: int, time: float) -> bytes:
    """Return the bytes that say that a run begins anew at a step: TensorBoard drops what it has of it and of later ones."""
    event_pb2 = load()
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    return record(event_pb2.Event(wall_time=time, step=step, session_log=start).SerializeToString())


def live_file_name(number: int) -> str:
    """Return the name of a mirror's file, which sorts behind those of lower numbers."""
    return LIVE_FILES.replace("*", f"{number:010d}")


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
