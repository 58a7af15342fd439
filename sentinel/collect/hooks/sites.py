"""Observed places: how a site's tensor is described, and whether it is measured in this step."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping

import torch

from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.parallel.placements import is_dtensor, part_of, placements_of
from sentinel.collect.rows.recording import Recording
from sentinel.collect.rows.tensor_table import TensorEntry, TensorTable
from sentinel.collect.schedule.plan import Plan
from sentinel.kinds import CARRIERS, MODULE_KINDS
from sentinel.place import Place
from sentinel.record import Flag, Kind

BORDER = int(Flag.BORDER)
"""As a plain int: asked for each tensor, a flag enumeration would cost a microsecond each time."""

SitePlacements = Callable[[str, bool], Mapping[str, str] | None]
"""(local name of a module, whether its output is meant) -> axis to placement of its plain tensors; None: not known."""


class Sites:
    """Measures the tensors of sites into rows of the running step, and describes them in the table of tensors."""

    def __init__(
        self,
        table: TensorTable,
        recording: Recording,
        plan: Plan,
        hints: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """hints: as `MonitorConfig.site_placements`; they go before all others."""
        self.place = Place()
        self.is_due = False
        """Whether anything passing a module is measured in this step, beyond the black box, which always is."""
        self.placements: SitePlacements | None = None
        """An adapter's table of the placements of plain tensors; None: there is none."""
        self._hints = hints or {}
        self._table = table
        self._recording = recording
        self._plan = plan

    def begin_step(self) -> None:
        """Note whether the running step measures modules."""
        plan = self._plan
        self.is_due = any(plan.takes(kind) for kind in (*MODULE_KINDS, *CARRIERS))

    def entry(self, vpp_stage: int, name: str, kind: Kind, tensor: torch.Tensor) -> TensorEntry:
        """Return the entry of a tensor, described. vpp_stage: chunk on this rank; name: local name of module and path."""
        entry = self._table.entry(vpp_stage, name, kind)
        self.describe(entry, tensor)
        return entry

    def describe(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Write shape, dtype and placements of a tensor into its entry."""
        placements = self.placements_at(entry, tensor, Kind(entry.kind) in (Kind.ACTIVATION, Kind.DGRAD))
        self._table.describe(entry, tensor, placements, part_of(tensor, self.place, placements))

    def placements_at(self, entry: TensorEntry, tensor: torch.Tensor, is_output: bool) -> dict[str, str]:
        """Return axis -> placement of a tensor: by the DTensor itself, else by the adapter's table and the config's
        hints."""
        placements = placements_of(tensor, Kind(entry.kind), self.place)
        if not is_dtensor(tensor):
            name = entry.name.partition(":")[0]
            if self.placements is not None:
                placements.update(self.placements(name, is_output) or {})
            for glob, words in self._hints.items():
                if fnmatch.fnmatchcase(name if is_output else f"{name}:in", glob):
                    placements.update({axis: word for axis, word in words.items() if axis in placements})
        return placements

    def placed(self, is_changed: bool) -> None:
        """Have the table sent again, where a forward has shown new placements (is_changed)."""
        self._table.is_changed |= is_changed

    def is_measured(self, entry: TensorEntry) -> bool:
        """Return whether the running step measures this tensor."""
        return bool(entry.flags & BORDER) or (self.is_due and self._plan.measures(entry))

    def is_looked_at(self, entry: TensorEntry) -> bool:
        """Return whether the running step measures this tensor, or shows it to a probe."""
        return self.is_measured(entry) or (self.is_due and self.has_observers)

    @property
    def has_observers(self) -> bool:
        """Whether a probe is shown tensors that are not measured themselves."""
        return bool(self._recording.observers)

    def observe(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> int:
        """Measure a tensor if the running step does, and return the number of its row; -1: it is not measured."""
        if self.is_measured(entry):
            return self._recording.observe(entry, tensor, micro_step)
        if self.is_due and self._recording.observers:
            self._recording.show(entry, tensor, micro_step)
        return -1

    def rename(self, former: Sighting, entry: TensorEntry, micro_step: int) -> int:
        """Give the row of an earlier sighting to a border's entry, and return its number; -1: there is no row to rename."""
        return former.row if self._recording.rename(former.row, former.entry, entry, micro_step) else -1

    def catch_up(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int, row: int = -1) -> int:
        """Measure a tensor that turned out to be a border after probes were shown it, and return its row.

        row: the one that it has already; -1: none.
        """
        row = row if row >= 0 else self._recording.reserve(entry, micro_step)
        self._recording.fill(row, tensor)
        return row

    def reserve(self, entry: TensorEntry, micro_step: int) -> int:
        """Return the number of an empty row for a tensor that is not complete yet; -1: it is not measured."""
        if self.is_measured(entry):
            return self._recording.reserve(entry, micro_step)
        return -1

    def fill(self, row: int, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> None:
        """Measure a tensor that is complete into a reserved row (-1: into none), and show it to probes."""
        if row >= 0:
            self._recording.fill(row, tensor)
        if self.is_due and self._recording.observers:
            self._recording.show(entry, tensor, micro_step)

    def report_blind(self, code: str, message: str, site: str = "") -> None:
        """Report tensors that are not measured: logged once a site, sent as health."""
        self._recording.report(code, message, site)

    def add_consumer(self, entry: TensorEntry, module: str) -> None:
        """Add a module to the readers of a tensor."""
        self._table.add_consumer(entry, module)

    def note_functions(self, entry: TensorEntry, functions: tuple[str, ...]) -> None:
        """Write into an entry which partial functions made the tensor (`partial_functions`)."""
        self._table.note_functions(entry, functions)

    def name_alike(self, former: TensorEntry, entry: TensorEntry) -> None:
        """Give a border, and its gradient, the other names of its tensor, as of the entry `former`."""
        if former.kind == Kind.ACTIVATION:
            self.add_producer(entry, former.name)
        elif former.name != entry.name:
            self.add_consumer(entry, former.name.partition(":")[0])
        for name in former.also:
            self.add_producer(entry, name)
        for name in former.consumers:
            if name != entry.name or entry.kind == Kind.ACTIVATION:
                self.add_consumer(entry, name)

    def add_producer(self, entry: TensorEntry, name: str) -> None:
        """Add the name of an outer module that returns the tensor as it is."""
        self._table.add_producer(entry, name)
