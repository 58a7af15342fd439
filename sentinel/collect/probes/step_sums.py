"""Sums over the micro-steps of a step, on the device, until the step ends.

A module may be called several times in a step, on tensors of different widths: each width has sums of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.rows.tensor_table import TensorEntry

Parts = tuple[torch.Tensor, ...]


class Summed(NamedTuple):
    """The sums of one entry over a step, of tensors of one width."""

    parts: Parts
    size: int
    """Number of elements that were summed."""


@dataclasses.dataclass
class _Sum:
    entry: TensorEntry
    micro_step: int
    parts: Parts | None
    """Of the micro-step that came last: its forward may still fail, and be tried again."""
    size: int
    call_id: int
    """Of the rank's step, when it began."""
    done: Parts | None = None
    done_size: int = 0

    def close(self) -> None:
        if self.parts is not None:
            self.done = self.parts if self.done is None else tuple(map(torch.add, self.done, self.parts))
            self.done_size += self.size
        self.parts, self.size = None, 0


class StepSums:
    """Sums over the running step, for each entry and each width that its tensors had."""

    def __init__(self, context: ProbeContext, probe: str) -> None:
        self._context = context
        self._sums: dict[tuple[int, torch.Size], _Sum] = {}
        """(id of an entry, shape of the first part) -> its sums."""
        self._began: dict[int, int] = {}
        """Id of an entry -> the call_id that it was first added at, in the step that ended last."""
        context.events.rewound.subscribe(probe, self._rewind)

    def add(self, entry: TensorEntry, micro_step: int, parts: Parts, size: int) -> None:
        """Add parts, tensors on a device, to the sums of an entry; they are kept, and not written into.

        size: elements in them.
        """
        key = entry.id, parts[0].shape
        kept = self._sums.get(key)
        if kept is None:
            self._sums[key] = _Sum(entry, micro_step, parts, size, self._context.recording.call_id)
            return
        if kept.micro_step != micro_step:
            kept.close()
            kept.micro_step = micro_step
        kept.parts = parts if kept.parts is None else tuple(map(torch.add, kept.parts, parts))
        kept.size += size

    def _rewind(self, chunk: Chunk) -> None:
        for kept in self._sums.values():
            if kept.entry.chunk == chunk.vpp_stage and kept.micro_step == chunk.micro_step:
                kept.parts, kept.size = None, 0

    def take(self) -> Iterator[tuple[TensorEntry, list[Summed]]]:
        """Yield (entry, its sums, one for each width in the order of their first tensor) of the step that ends.

        The next step begins with none.
        """
        sums, self._sums = self._sums, {}
        self._began = {}
        found: dict[int, tuple[TensorEntry, list[Summed]]] = {}
        for (number, _), kept in sums.items():
            self._began.setdefault(number, kept.call_id)
            kept.close()
            if kept.done is not None:
                found.setdefault(number, (kept.entry, []))[1].append(Summed(kept.done, kept.done_size))
        yield from found.values()

    def place_last_row(self, entry: TensorEntry) -> None:
        """Set the call_id of the row written last to that of the first tensor in the entry's sums.

        The call_id of the step's end would have the row depend on all that came before.
        """
        rows = self._context.recording.rows
        rows.array["call_id"][rows.num_rows - 1] = self._began[entry.id]
