"""Under which names the tensors of one module are measured, and which of them are borders of the black box."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.hooks.sites import BORDER
from sentinel.collect.hooks.structure import Border
from sentinel.collect.parallel.placements import is_async, local_of
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind

if TYPE_CHECKING:
    from sentinel.collect.hooks.chunk import Chunk


class SiteNames:
    """Decides whether a tensor is measured under this module's name, or adds the name to an entry that it has already."""

    def __init__(self, chunk: Chunk, name: str) -> None:
        self.inputs: dict[str, TensorEntry] = {}
        """Path -> entry of an input that this site was the first to see."""
        self.outputs: dict[str, TensorEntry] = {}
        """The same of outputs."""
        self.borders: dict[bool, Border] = {}
        """Whether it is an input -> the border that it is."""
        self._chunk = chunk
        self._name = name
        self._met: dict[tuple[bool, str], TensorEntry] = {}
        """(is input, path) -> as what a border's tensor was measured at another site, before it was measured here."""

    @property
    def are_plain(self) -> bool:
        """Whether no tensor of this module is a border of the black box, under this name or another."""
        entries = [*self.inputs.values(), *self.outputs.values()]
        return not self.borders and not any(entry.flags & BORDER for entry in entries)

    def own(self, path: str, tensor: torch.Tensor, is_input: bool, was_first: bool) -> TensorEntry:
        """Return the entry of a tensor that no earlier site of the forward has seen.

        was_first: it is the first of the module's inputs or outputs, the one that a border is.
        """
        entries, kind = (self.inputs, Kind.ACTIVATION_IN) if is_input else (self.outputs, Kind.ACTIVATION)
        entry = entries.get(path)
        if entry is None:
            met = self._met.get((is_input, path)) if was_first else None
            if met is None or met.id in self._chunk.survey.repeated:
                met = self._chunk.recorder.sites.entry(self._chunk.vpp_stage, self._name + path, kind, tensor)
            entry = entries[path] = met
        border = self.borders.get(is_input)
        if was_first and border is not None and not entry.border:
            entry.border, entry.border_index = border.label, border.index
            entry.flags |= BORDER
        return entry

    def own_gradient(self, entry: TensorEntry, tensor: torch.Tensor, grad_kind: Kind, path: str) -> TensorEntry:
        """Return the entry of the gradient of such a tensor."""
        grad = entry.grad
        if grad is None:
            grad = self._chunk.recorder.sites.entry(self._chunk.vpp_stage, self._name + path, grad_kind, tensor)
            entry.grad = grad
            grad.border, grad.border_index = entry.border, entry.border_index
            grad.consumers, grad.also = list(entry.consumers), list(entry.also)
            grad.flags |= entry.flags & BORDER
        grad.site_pos = entry.site_pos
        return grad

    def goes_on(self, known: Sighting, path: str, is_input: bool) -> bool:
        """Whether what another site has met is a border that was measured under its own name before: so it goes on.

        So is what a module gives out that was called before in this forward: its name stands for another tensor.
        """
        own = (self.inputs if is_input else self.outputs).get(path)
        if own is None and (is_input, path) not in self._met:
            return known.entry.id in self._chunk.survey.repeated and is_input in self.borders and not known.is_border
        is_own_border = own is not None and bool(own.border) and is_input in self.borders
        return is_own_border and known.entry is not own and not known.is_border

    def name_again(self, entry: TensorEntry, path: str, is_input: bool, was_first: bool, tensor: torch.Tensor) -> bool:
        """Add this module's name to a tensor that another site has seen; measure it now if only a border here selects it.

        Return whether its gradient is to be measured from now on, and was not before.
        """
        sites = self._chunk.recorder.sites
        if is_input:
            sites.add_consumer(entry, self._name)
        else:
            sites.add_producer(entry, self._name + path)
        if was_first and is_input in self.borders:
            grad = entry.grad
            was_measured, was_looked_at = sites.is_measured(entry), grad is not None and sites.is_looked_at(grad)
            self._widen_border(entry, is_input)
            if entry.chunk == self._chunk.vpp_stage:
                self._met[is_input, path] = entry
            if not was_measured and sites.is_measured(entry) and not is_async(tensor):
                sites.catch_up(entry, local_of(tensor), self._chunk.micro_step)
            return grad is not None and not was_looked_at and sites.is_looked_at(grad)
        return False

    def _widen_border(self, entry: TensorEntry, is_input: bool) -> None:
        """One tensor may be two borders (a chunk that begins with a block): its gradient was made behind the later one."""
        border = self.borders.get(is_input)
        if border is None or entry.chunk != self._chunk.vpp_stage:
            return
        if not entry.border:
            entry.border, entry.border_index = border.label, border.index
            entry.flags |= BORDER
            self._chunk.recorder.sites.placed(True)
        grad = entry.grad
        if grad is not None and grad.border_index < border.index:
            grad.border_index = border.index
            # The last block of a pipeline's stage ends a block as it does in one process; what a later stage receives is the
            # output of a block before it, and no other part of the residual stream.
            is_received = grad.border == "chunk_input" and self._chunk.depth > 0
            if grad.border != "block_output" and not is_received:
                grad.border = border.label
            grad.flags |= BORDER
            self._chunk.recorder.sites.placed(True)
