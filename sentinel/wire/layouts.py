"""The layouts that a spool has described: what is written of the next one, so that each file can be read alone.

A file begins with a whole descriptor. Within it, one that differs travels as a change of the one in force, and one that was
there before is only named again. Both say where in the file their base lies, so that a reader may have forgotten it.
"""

from __future__ import annotations

import zlib

import msgspec

from sentinel.messages import Descriptor, LayoutChange
from sentinel.wire.frame import FrameType, encode_message

MAX_KNOWN = 16
"""Newest descriptors of an incarnation that keep their id when they come back; a bound on memory: others get a new id."""
MAX_CHANGES = 64
"""Changes upon changes before a descriptor is written whole again. Too small: more whole descriptors in the spool; too
large: a reader has as many frames to look back for."""


class Layouts:
    """Knows which layout is in force, and what the file that is being written has described. No I/O."""

    def __init__(self) -> None:
        self.id = 0
        """Of the layout that the next rows point into; 0: there is none."""
        self.epoch = 0
        """How often it has changed."""
        self._payload = b""
        self._known: dict[int, Descriptor] = {}
        """Layout id -> descriptor, the one that was in force last at the end."""
        self._places: dict[int, tuple[int, int]] = {}
        """Of layouts that this file has described: layout id -> (byte offset of the frame, changes it is made of)."""
        self._in_force = 0
        """Layout of the last description in this file; 0: it has none."""
        self._written: tuple[int, int] = (0, 0)

    def take_payload(self, payload: bytes) -> None:
        """Put a descriptor in force that came encoded; it will be written whole."""
        if payload != self._payload or self.id in self._known:
            self.epoch += 1
            self._payload, self.id = payload, self._new_id(zlib.crc32(payload))
        # It is written again, however often it is said.
        self._in_force = 0
        self._places.pop(self.id, None)

    def take(self, descriptor: Descriptor) -> None:
        """Put a descriptor in force; one that is known keeps its id."""
        newest = self._known.get(self.id)
        if newest == descriptor:
            return
        self.epoch += 1
        self._payload = b""
        known = next((number for number, one in self._known.items() if one == descriptor), None)
        if known is not None:
            self._known[known] = self._known.pop(known)
            self.id = known
            return
        change = None if newest is None else change_of(newest, descriptor, self.id, 0)
        if change is None:
            self._payload = encode_message(descriptor)
        self.id = self._new_id(zlib.crc32(self._payload if change is None else encode_message(change), self.id))
        self._known[self.id] = descriptor
        if len(self._known) > MAX_KNOWN:
            gone = next(iter(self._known))
            del self._known[gone]

    def begin_file(self) -> None:
        """Nothing is described yet: a new file begins."""
        self._places, self._in_force = {}, 0

    @property
    def is_owed(self) -> bool:
        """Whether the layout in force must be described before anything that points into it."""
        return self.id != 0 and self._in_force != self.id

    def description(self) -> tuple[FrameType, bytes]:
        """Return the frame that describes the layout in force here, in as few bytes as there are."""
        place = self._places.get(self.id)
        base = self._places.get(self._in_force)
        change: LayoutChange | None = None
        num_changes = 0
        if place is not None:
            change, num_changes = LayoutChange(base=self.id, base_offset=place[0]), place[1] + 1
        elif base is not None and base[1] < MAX_CHANGES and {self.id, self._in_force} <= self._known.keys():
            newest, num_changes = self._known[self._in_force], base[1] + 1
            change = change_of(newest, self._known[self.id], self._in_force, base[0])
        if change is None:
            self._written = (self.id, 0)
            return FrameType.DESCRIPTOR, self._payload or encode_message(self._known[self.id])
        self._written = (self.id, num_changes)
        return FrameType.CHANGE, encode_message(change)

    def written(self, offset: int) -> None:
        """Note that the description was written, and where in the file it begins."""
        number, num_changes = self._written
        self._in_force, self._payload = number, self._payload if number not in self._known else b""
        if number not in self._places:
            self._places[number] = (offset, num_changes)

    def _new_id(self, wanted: int) -> int:
        """Return an id that no known descriptor has, and none in this file."""
        while wanted in self._known or wanted in self._places or wanted == 0:
            wanted = (wanted + 1) & 0xFFFFFFFF
        return wanted


def change_of(base: Descriptor, descriptor: Descriptor, base_id: int, base_offset: int) -> LayoutChange | None:
    """Return what makes `descriptor` of `base`; None where it is better written whole."""
    kept = len(base.tensors)
    if len(descriptor.tensors) < kept:
        return None
    changed = []
    for old, new in zip(base.tensors, descriptor.tensors, strict=False):
        if old is not new and old != new:
            if old.id != new.id:
                return None
            changed.append(new)
    changed += descriptor.tensors[kept:]
    if 2 * len(changed) > len(descriptor.tensors):
        return None
    head = msgspec.structs.replace(descriptor, tensors=())
    is_same = head == msgspec.structs.replace(base, tensors=())
    return LayoutChange(base=base_id, base_offset=base_offset, tensors=tuple(changed), head=None if is_same else head)
