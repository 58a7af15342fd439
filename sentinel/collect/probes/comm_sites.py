"""Calls of torch.distributed by the line of code that makes them: one series each, and which wishes of the plan select
it."""

from __future__ import annotations

import fnmatch
import sys
import time
import weakref
import zlib
from typing import Any

import torch

from sentinel.collect.probes.call_sites import CallSite
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.schedule.wishes import Wish
from sentinel.place import AXES
from sentinel.record import Flag, Kind
from sentinel.target import Target

MAX_SITES = 4096
"""Call sites with a name of their own; a bound on memory: all further ones share one name."""
CALL_FIELDS = "call,field"
"""Axis of the vector `calls`: (place among the step's calls, bytes sent or else received, seconds of the host in the call
and in waiting for it, ranks of the group, 1 when its result was waited for)."""


class CommSite:
    """One op at one line of code."""

    def __init__(self, op: str, where: CallSite, name: str) -> None:
        self.op = op
        self.where = where
        self.name = name
        self._generation = -1
        self._wishes: list[Wish] = []
        self.calls: list[list[float]] = []
        """Of the running step, as CALL_FIELDS."""
        self.group: Any = None
        self.is_group_reported = False
        self.turn = zlib.crc32(name.encode())
        """Where it stands among the turns of a staggered wish: alike on all ranks."""

    def wishes_of(self, plan: Plan) -> list[Wish]:
        """Return the plan's wishes that select this site."""
        if self._generation != plan.generation:
            self._generation = plan.generation
            self._wishes = [wish for wish in plan.wishes_of(Kind.COMM) if self._means(wish)]
        return self._wishes

    def take_calls(self) -> torch.Tensor:
        """Return the calls of the step that ends, [calls, fields] float64 with the fields of CALL_FIELDS.

        The next step begins with none.
        """
        values, self.calls = torch.tensor(self.calls, dtype=torch.float64, device="cpu"), []
        return values

    def _means(self, wish: Wish) -> bool:
        """Whether the code-line filter of a wish lets it through; no filter means every call.

        The targets of a request for other kinds as well name modules: it means every call.
        """
        is_filter = wish.schedule is not None or wish.kinds == {Kind.COMM}
        return not wish.targets or not is_filter or any(self._is_meant(target) for target in wish.targets)

    def _is_meant(self, target: Target) -> bool:
        where = self.where
        file = where.file.rpartition("/")[2]
        function = where.function.rpartition(".")[2]
        names = (self.op, self.name, where.file, file, str(where), f"{file}:{where.line}", where.function, function)
        if target.pattern is not None:
            return any(target.pattern.fullmatch(name) for name in names)
        return any(fnmatch.fnmatchcase(name, target.text) for name in names)


class CommCall:
    """One call that was made, until its result is measured."""

    def __init__(self, site: CommSite, fields: list[float], is_measured: bool, micro_step: int) -> None:
        self.site = site
        self.fields = fields
        self.is_measured = is_measured
        self.micro_step = micro_step
        self.began = time.perf_counter()
        self.group: Any = None
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        """Weak references: measuring keeps no tensor alive."""


class CommSites:
    """The call sites of this process, and the entries of the tensors that pass there."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._sites: dict[tuple[str, CallSite], CommSite] = {}
        self._entries: dict[tuple[CommSite, str], TensorEntry] = {}
        self._described: dict[int, Any] = {}
        """id of an entry -> shape and dtype as the table knows them in this step."""

    def begin_step(self) -> None:
        """Begin a step: each entry is described again when its first tensor passes."""
        self._described.clear()

    def site(self, op: str, where: CallSite) -> CommSite:
        """Return the site of an op at a line of code; past MAX_SITES one site of the op for all further lines."""
        site = self._sites.get((op, where))
        if site is None:
            if len(self._sites) >= MAX_SITES:
                where = CallSite("elsewhere", 0, "")
                site = self._sites.get((op, where))
                if site is not None:
                    return site
            site = self._sites[op, where] = CommSite(op, where, f"{op}@{where}")
        return site

    def entry(self, site: CommSite, path: str, tensor: torch.Tensor | None) -> TensorEntry:
        """Return the entry of one tensor of a call, described. path: its role and place; empty: of the calls themselves."""
        entry = self._entries.get((site, path))
        if entry is None:
            name = f"{site.name}:{path}" if path else site.name
            vpp_stage = self._context.chunks[0].vpp_stage if self._context.chunks else 0
            entry = self._entries[site, path] = self._context.table.entry(vpp_stage, name, Kind.COMM)
            entry.flags |= int(Flag.PER_RANK)
        shown = None if tensor is None else (tensor.shape, tensor.dtype)
        if self._described.get(entry.id, ()) != shown:
            self._described[entry.id] = shown
            place = self._context.place()
            placements = {axis: "unknown" for axis in AXES if place.size(axis) > 1}
            self._context.table.describe(entry, torch.empty(0) if tensor is None else tensor, placements)
        return entry

    def ship(self) -> None:
        """Write the calls of the step that ends as vectors, one for each site."""
        for site in self._sites.values():
            if site.calls:
                self._ship(site)

    def _ship(self, site: CommSite) -> None:
        entry = self.entry(site, "", None)
        self._context.recording.vector(entry, "calls", site.take_calls(), CALL_FIELDS)
        if not site.is_group_reported:
            site.is_group_reported = True
            ranks = ranks_of(site.group)
            if ranks:
                self._context.recording.vector(entry, "group", torch.tensor(ranks, dtype=torch.int64, device="cpu"), "rank")
        site.group = None


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a group, a mesh or a group's name; []: torch does not say."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if module is None or group is None:
        return []
    try:
        if isinstance(group, module.ProcessGroup):
            return list(module.get_process_group_ranks(group))
        if isinstance(group, str):
            return list(module.get_process_group_ranks(module._resolve_process_group(group)))
        return list(functional._expand_group(group)[1]) if functional is not None else []
    except Exception:
        return []  # Private names of torch: what we do not know is left out.
