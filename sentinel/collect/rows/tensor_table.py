"""The table of tensors that a rank's rows point into."""

from __future__ import annotations

import functools
from typing import Any

from sentinel.kinds import PARAMETER_KINDS
from sentinel.messages import TensorInfo
from sentinel.record import Flag, Kind

SHAPED_KINDS = frozenset(PARAMETER_KINDS) - {Kind.GRAD_MOMENTUM_ALIGNMENT, Kind.WEIGHT_SPECTRUM}
"""Kinds that have the shape of a weight, which is news when it changes. All others follow the batch: tokens of an expert,
lengths of sequences. Their rows carry the number of elements; the table tells the shape that was seen first."""


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class TensorEntry:
    """One tensor of the table: what never changes from row to row, and what the row needs at hand."""

    __slots__ = (
        "also",
        "border",
        "border_index",
        "chunk",
        "consumers",
        "dtype",
        "flags",
        "functions",
        "generation",
        "grad",
        "id",
        "is_part",
        "kind",
        "name",
        "part",
        "parts",
        "placements",
        "plan_generation",
        "reported",
        "shape",
        "site_pos",
        "wishes",
    )  # fmt: skip

    def __init__(self, number: int, name: str, kind: Kind, chunk: int) -> None:
        self.id = number
        self.name = name
        self.kind = int(kind)
        self.chunk = chunk
        self.site_pos = 0
        self.generation = -1
        self.flags = 0
        """Of `Flag`, as a plain int: what a flag enumeration computes costs a microsecond each time."""
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.border = ""
        self.border_index = -1
        self.consumers: list[str] = []
        self.also: list[str] = []
        self.placements: dict[str, str] = {}
        self.part = ""
        self.functions: tuple[str, ...] | None = None
        self.parts: tuple[int, ...] = ()
        """As TensorInfo.parts."""
        self.is_part = False
        self.grad: TensorEntry | None = None
        """The entry of the gradient of this tensor."""
        self.plan_generation = -1
        self.wishes: dict[int, Any] = {}
        """Kind -> the plan's wishes that mean this tensor; kept by the plan."""
        self.reported: TensorInfo | None = None
        """As it travelled last."""

    def info(self) -> TensorInfo:
        """Return the entry as it travels in the descriptor; the same object while nothing has changed."""
        reported = self.reported
        if (
            reported is not None
            and reported.site_pos == self.site_pos
            and reported.shape == self.shape
            and reported.dtype == self.dtype
            and reported.placements == self.placements
            and reported.part == self.part
            and reported.functions == self.functions
            and reported.parts == self.parts
            and (reported.border_index, reported.border) == (self.border_index, self.border)
            and (len(reported.consumers), len(reported.also)) == (len(self.consumers), len(self.also))
        ):
            return reported
        self.reported = TensorInfo(
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
            functions=self.functions,
            parts=self.parts,
            is_part=self.is_part,
        )
        return self.reported


class TensorTable:
    """Entries by (chunk, name, kind), which are never taken out; knows whether the descriptor must be sent again."""

    def __init__(self) -> None:
        self.entries: list[TensorEntry] = []
        self.is_changed = True
        """Something changed that is no matter of single entries, or nobody knows of which."""
        self._touched: list[TensorEntry] = []
        self._is_unreported = False
        self._known: dict[tuple[int, str, int], TensorEntry] = {}
        self._infos: list[TensorInfo] = []

    @property
    def is_news(self) -> bool:
        """Whether anything may have changed since the descriptor was written last."""
        return self.is_changed or self._is_unreported or bool(self._touched)

    def mark_reported(self) -> None:
        """What `infos` returned last is on its way."""
        self._is_unreported = False

    def infos(self) -> tuple[TensorInfo, ...]:
        """Return all entries as they travel; of those that did not change the same objects as before."""
        self._is_unreported |= self.is_news
        infos = self._infos
        for entry in self.entries if self.is_changed else self._touched:
            if entry.id < len(infos):
                infos[entry.id] = entry.info()
        infos.extend(entry.info() for entry in self.entries[len(infos) :])
        self.is_changed, self._touched = False, []
        return tuple(infos)

    def entry(self, chunk: int, name: str, kind: Kind) -> TensorEntry:
        """Return the entry of that name, made when it is new."""
        key = (chunk, name, int(kind))
        entry = self._known.get(key)
        if entry is None:
            entry = self._known[key] = TensorEntry(len(self.entries), name, kind, chunk)
            self.entries.append(entry)
            self._touched.append(entry)
        return entry

    def describe(
        self,
        entry: TensorEntry,
        tensor: Any,
        placements: dict[str, str],
        part: str = "",
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Note shape (of the whole tensor), dtype and placement, where they changed; a shape that follows the batch once."""
        if entry.dtype and entry.kind not in SHAPED_KINDS:
            shape = entry.shape
        elif shape is None:
            shape = tuple(tensor.shape)
        dtype = _name_of(tensor.dtype)
        if (entry.shape, entry.dtype, entry.placements, entry.part) != (shape, dtype, placements, part):
            entry.shape, entry.dtype, entry.placements, entry.part = shape, dtype, placements, part
            if "unknown" in placements.values():
                entry.flags |= int(Flag.PER_RANK)
            self._touched.append(entry)

    def add_consumer(self, entry: TensorEntry, module: str) -> None:
        """Note that `module` reads this tensor: it is that module's input under another name."""
        for one in (entry, entry.grad):
            if one is not None and module not in one.consumers:
                one.consumers.append(module)
                self._touched.append(one)

    def note_functions(self, entry: TensorEntry, functions: tuple[str, ...]) -> None:
        """Note which functions that are not defined everywhere made this tensor (`partial_functions.py`)."""
        entry.functions = functions
        self._touched.append(entry)

    def add_producer(self, entry: TensorEntry, name: str) -> None:
        """Note that an outer module handed the same tensor on as its own output."""
        for one in (entry, entry.grad):
            if one is not None and name not in one.also and name != one.name:
                one.also.append(name)
                self._touched.append(one)
