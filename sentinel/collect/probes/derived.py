"""DerivedEntries: entries of quantities computed from tensors of other entries, whose name, placement and order they
have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
from torch import nn

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.stepped import per_rank
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Flag, Kind

NOTHING_KNOWN: Mapping[str, str] = MappingProxyType({})


class DerivedEntries:
    """The entries `name:quantity` of one kind, for each source `name` that the plan selects."""

    def __init__(self, context: ProbeContext, kind: Kind, probe: str) -> None:
        self._context = context
        self._kind = kind
        self._made: dict[tuple[int, str], TensorEntry] = {}
        self._is_near: dict[int, tuple[int, bool]] = {}
        """Id of a source -> the plan's generation, and whether it wants this kind of that tensor in any step."""
        self._seen: dict[int, tuple[TensorEntry, TensorEntry, bool]] = {}
        """Id of an entry that has a row in this step -> it, its source, and whether it is a rank's own."""
        context.events.ending.subscribe(probe, self._follow)

    def due(
        self,
        source: TensorEntry,
        quantities: tuple[str, ...],
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        own: Collection[str] = (),
    ) -> list[TensorEntry]:
        """Return the entries to be measured now, described; []: the plan does not select `source` in this step.

        quantities: all of them, of which a target may pick some by name (`fc1:zero`). shape: of the values that a row is
        over. own: quantities that depend on which part of the tensor a rank holds, and so stay one series a rank.
        """
        plan = self._context.plan
        if not plan.takes(self._kind):
            return []
        generation, is_near = self._is_near.get(source.id, (-1, False))
        if generation != plan.generation:
            is_near = plan.wants_at(self._kind, source.name.partition(":")[0], source.chunk)
            self._is_near[source.id] = plan.generation, is_near
        if not is_near:
            return []
        is_due = plan.measures(source, self._kind)
        found = []
        for quantity in quantities:
            entry = self._made.get((source.id, quantity))
            if entry is None:
                name = f"{source.name}:{quantity}"
                entry = self._made[source.id, quantity] = self._context.table.entry(source.chunk, name, self._kind)
            entry.site_pos = source.site_pos
            if is_due or plan.measures(entry):
                placements, part = _placed(source, quantity in own)
                self._context.table.describe(entry, tensor, placements, part, shape)
                self._seen[entry.id] = entry, source, quantity in own
                found.append(entry)
        return found

    def _follow(self) -> None:
        """Placed as their sources are: of plain tensors that is known only when a forward has ended."""
        for entry, source, is_own in self._seen.values():
            placed = _placed(source, is_own)
            if (entry.placements, entry.part) != placed:
                entry.placements, entry.part = placed
                if "unknown" not in entry.placements.values():
                    entry.flags &= ~Flag.PER_RANK
                self._context.table.is_changed = True
        self._seen = {}


def _placed(source: TensorEntry, is_own: bool) -> tuple[dict[str, str], str]:
    """Return (placements, part) of what is made of a source: as it is, or a rank's own where no two ranks hold the same."""
    return (per_rank(source.placements), "") if is_own else (dict(source.placements), source.part)


def describe_site(
    context: ProbeContext,
    chunk: Chunk,
    entry: TensorEntry,
    shown: torch.Tensor,
    module: nn.Module,
    shape: tuple[int, ...],
    known: Mapping[str, str] = NOTHING_KNOWN,
) -> None:
    """Describe a quantity computed inside a module, placed over the axes as `shown`, a tensor that the module made.

    The placement of a plain tensor comes from the adapter's table, else from the autograd graph when the forward has ended.
    shape: of the values that a row is over. known: axis -> placement that the probe knows itself.
    """
    placements = {**context.sites.placements_at(entry, shown, True), **known}
    if placements.get("tp") == "unknown":
        placements["tp"] = entry.placements.get("tp", "unknown")  # As the graph declared before.
    context.table.describe(entry, shown, placements, "", shape)
    if chunk.in_forward:
        chunk.seen.locals.ask(entry, shown, module, True, Kind(entry.kind) is Kind.ATTENTION)


def producer(context: ProbeContext, entry: TensorEntry) -> nn.Module | None:
    """Return the module whose output has this entry; None: it is no module's output."""
    for chunk in context.chunks:
        if chunk.vpp_stage == entry.chunk:
            return chunk.structure.modules.get(entry.name.partition(":")[0])
    return None
