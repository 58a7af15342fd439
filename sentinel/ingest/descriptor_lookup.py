"""Descriptors read again from a spool: after a restart, or when a change names one that is no longer remembered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sentinel.errors import WireError
from sentinel.ingest.trust import why_descriptor
from sentinel.messages import Descriptor, LayoutChange
from sentinel.wire.frame import DESCRIPTIONS, decode_message
from sentinel.wire.layouts import MAX_CHANGES
from sentinel.wire.spool_reader import SpoolReader

WINDOW_BYTES = 128 * 2**10


def look_back(
    folder: Path, incarnation: bytes, place: tuple[int, int], known: Mapping[int, Descriptor]
) -> tuple[int, Descriptor] | None:
    """Return (layout id, descriptor) of the description at a place of an incarnation's spool; None where there is none to
    be had.

    place: (file index, byte offset). known: layout id -> descriptor; at one of these it need not look back any further.
    """
    file_index, offset = place
    changes: list[LayoutChange] = []
    found: int | None = None
    while len(changes) <= MAX_CHANGES:
        frames = SpoolReader(folder, file_index=file_index, offset=offset).poll(final=True, max_bytes=WINDOW_BYTES)
        # What was thinned may begin with what it lost.
        frames = [frame for frame in frames if offset or frame.header.type in DESCRIPTIONS]
        if not frames or frames[0].file_index != file_index or frames[0].header.incarnation != incarnation:
            return None
        number = frames[0].header.layout_id
        found = number if found is None else found
        try:
            message = known[number] if number in known else decode_message(frames[0])
        except WireError:
            return None
        if isinstance(message, Descriptor):
            for change in reversed(changes):
                message = change.applied_to(message)
            return None if why_descriptor(message, frames[0].header.rank) else (found, message)
        if not isinstance(message, LayoutChange) or message.base_offset >= offset:
            return None
        changes.append(message)
        offset = message.base_offset
    return None
