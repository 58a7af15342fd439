"""The table of tensors that a rank's rows point into."""

from __future__ import annotations

from typing import Any

from sentinel.messages import TensorInfo
from sentinel.record import Flag, Kind


class Entry:
    """One tensor of the table: what never changes from row to row, and what the row needs at hand."""

    __slots__ = (
        "also", "border", "border_index", "chunk", "consumers", "dtype", "flags", "generation", "grad", "id", "kind",
        "name", "part", "placements", "plan_generation", "shape", "site_pos", "wishes",
    )  # fmt: skip

    def __init__(self, number: int, name: str, kind: Kind, chunk: int) -> None:
        self.id = number
        self.name = name
        self.kind = int(kind)
        self.chunk = chunk
        self.site_pos = 0
        self.generation = -1
        self.flags = 0
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.border = ""
        self.border_index = -1
        self.consumers: list[str] = []
        self.also: list[str] = []
        self.placements: dict[str, str] = {}
        self.part = ""
        self.grad: Entry | None = None
        """The entry of the gradient of this tensor."""
        self.plan_generation = -1
        self.wishes: dict[int, Any] = {}
        """Kind -> the plan's wishes that mean this tensor; kept by the plan."""

    def info(self) -> TensorInfo:
        """Return the entry as it travels in the descriptor."""
        return TensorInfo(
            id=self.id,
            name=self.name,
            kind=Kind(self.kind).label,
            shape=self.shape,
            dtype=self.dtype,
            chunk=self.chunk,
            site_pos=self.site_pos,
            consumers=tuple(self.consumers),
            also=tuple(self.also),
            placements=dict(self.placements),
            border=self.border,
            border_index=self.border_index,
            part=self.part,
        )


class TensorTable:
    """Entries by (chunk, name, kind); knows whether the descriptor must be sent again."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.is_changed = True
        self._known: dict[tuple[int, str, int], Entry] = {}

    def entry(self, chunk: int, name: str, kind: Kind) -> Entry:
        """Return the entry of that name, made when it is new."""
        key = (chunk, name, int(kind))
        entry = self._known.get(key)
        if entry is None:
            entry = self._known[key] = Entry(len(self.entries), name, kind, chunk)
            self.entries.append(entry)
            self.is_changed = True
        return entry

    def describe(
        self,
        entry: Entry,
        tensor: Any,
        placements: dict[str, str],
        part: str = "",
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Note shape (of the whole tensor), dtype and placement, where they changed."""
        shape = tuple(tensor.shape) if shape is None else shape
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (entry.shape, entry.dtype, entry.placements, entry.part) != (shape, dtype, placements, part):
            entry.shape, entry.dtype, entry.placements, entry.part = shape, dtype, placements, part
            if "unknown" in placements.values():
                entry.flags |= Flag.PER_RANK
            self.is_changed = True

    def add_consumer(self, entry: Entry, module: str) -> None:
        """Note that `module` reads this tensor: it is that module's input under another name."""
        for one in (entry, entry.grad):
            if one is not None and module not in one.consumers:
                one.consumers.append(module)
                self.is_changed = True

    def add_producer(self, entry: Entry, name: str) -> None:
        """Note that an outer module handed the same tensor on as its own output."""
        for one in (entry, entry.grad):
            if one is not None and name not in one.also and name != one.name:
                one.also.append(name)
                self.is_changed = True
