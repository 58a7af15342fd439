"""The tap of one module: its inputs and outputs become rows, and hooks are put on for their gradients.

Nothing here changes, copies or waits for a tensor, and nothing escapes into autograd: every hook ends at `Recorder.guard`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sentinel.collect.hooks.backwards import graph_task, in_backward
from sentinel.collect.hooks.gradient_taps import KEYS, GradientTap, SummandTap
from sentinel.collect.hooks.graph_tap import GraphTap
from sentinel.collect.hooks.module_hooks import ModuleHooks
from sentinel.collect.hooks.nesting import tensors_in
from sentinel.collect.hooks.sightings import Sighting
from sentinel.collect.hooks.site_names import SiteNames
from sentinel.collect.hooks.sites import BORDER
from sentinel.collect.hooks.structure import Border
from sentinel.collect.kernels.native import NativeKernel
from sentinel.collect.parallel.pipelining import INFERENCE_GUARD
from sentinel.collect.parallel.placements import is_async, local_of
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.native import tensor_reader
from sentinel.record import Kind

if TYPE_CHECKING:
    from sentinel.collect.hooks.chunk import Chunk

INPUTS = frozenset({Kind.ACTIVATION_IN, Kind.DGRAD_IN})
OUTPUTS = frozenset({Kind.ACTIVATION, Kind.DGRAD})


class ModuleTap:
    """Decides which tensors of one module are measured. `ModuleHooks` calls it; for the chunk itself `RootHooks` does."""

    def __init__(self, chunk: Chunk, name: str, module: nn.Module, *, stays: bool = False) -> None:
        self.stays = stays
        """In a compiled part: hooks stay on, whatever is wanted."""
        self.chunk = chunk
        self.name = name
        self.module = module
        self.takes_in: frozenset[Kind] = frozenset()
        self.takes_out: frozenset[Kind] = frozenset()
        self._asks = {True: False, False: False}
        """Whether it is an input -> its gradient is taken."""
        self._measures = {True: False, False: False}
        """The same of the tensor itself."""
        self.names = SiteNames(chunk, name)
        self.takes_all = False
        """Every tensor of the site, not only the first as at a border."""
        self.may_skip = False
        """Steps that measure no module have no need of it: it sees no border under another name."""
        self.is_border_in = self.is_border_out = False
        """As in `names.borders`, for graphs: a guard each."""
        self.has_passed = False
        """Its module was called, and was seen."""
        self.has_gradient = False
        """It gave out a tensor that a gradient goes through."""
        self._recomputed: set[str] = set()
        """Paths of inputs that a gradient goes through, as reentrant checkpointing shows when it runs a forward again."""
        self.hooks = None if module is chunk.root else ModuleHooks(self, module)
        """None: the chunk's own hooks call this tap."""
        self.graph = GraphTap(self)

    @property
    def is_asking(self) -> bool:
        """Whether any tensor of this module is measured."""
        return bool(self.takes_in or self.takes_out)

    def configure(self, kinds: frozenset[Kind], borders: list[Border]) -> None:
        """Measure these kinds from now on, and all kinds at a border; remove hooks that are not needed."""
        self.may_skip = False
        self.names.borders = {border.is_input: border for border in borders}
        self.is_border_in, self.is_border_out = True in self.names.borders, False in self.names.borders
        self.takes_all = bool(kinds)
        self.takes_in = kinds & INPUTS
        self.takes_out = kinds & OUTPUTS
        # A tensor of this site may turn out to be a border: then it is measured with its gradient, whatever is wanted here.
        if self.is_border_in or (self.takes_in and self.chunk.taps.wants_borders):
            self.takes_in = INPUTS
        if self.is_border_out or (self.takes_out and self.chunk.taps.wants_borders):
            self.takes_out = OUTPUTS
        self._asks = {True: Kind.DGRAD_IN in self.takes_in, False: Kind.DGRAD in self.takes_out}
        self._measures = {True: Kind.ACTIVATION_IN in self.takes_in, False: Kind.ACTIVATION in self.takes_out}
        self.has_passed = False
        if self.hooks is not None:
            self.hooks.hang(before=self.stays or bool(self.takes_in), after=self.stays or bool(self.takes_out))

    def keep_hooks(self) -> None:
        """Keep the hooks installed from now on, for a compiler traces a graph through them."""
        self.stays = True
        if self.hooks is not None:
            self.hooks.hang(before=True, after=True)

    def after_whole_forward(self) -> None:
        """Called after the first whole forward of a plan: note whether steps with the black box alone need this tap."""
        self.may_skip = self.names.are_plain

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called before the module: measure its inputs in a training forward; in a recompute hook only their gradients."""
        chunk = self.chunk
        if module is not self.module or not chunk.recorder.is_alive or (self.may_skip and not chunk.recorder.sites.is_due):
            return
        self.has_passed = True
        if chunk.in_forward and not in_backward():
            self.take_inputs(args, kwargs)
        elif chunk.recomputed.is_seen and torch.is_grad_enabled() and in_backward():
            for source in (args, kwargs):
                self._take_recomputed(source, self.names.inputs, Kind.DGRAD_IN in self.takes_in)

    def returned(self, module: nn.Module, output: Any) -> None:
        """Called after the module: as `called`, for its outputs."""
        chunk = self.chunk
        if module is not self.module or not chunk.recorder.is_alive or (self.may_skip and not chunk.recorder.sites.is_due):
            return
        self.has_passed = True
        if chunk.in_forward and not in_backward():
            self.take_outputs(output)
        elif chunk.recomputed.is_seen and torch.is_grad_enabled() and in_backward():
            self._take_recomputed(output, self.names.outputs, Kind.DGRAD in self.takes_out)

    def take_inputs(self, args: Any, kwargs: Any) -> None:
        """Measure the inputs that no site has measured in this forward; add this module as a reader of the others."""
        if not self.takes_in:
            return
        chunk, names, seen = self.chunk, self.names, self.chunk.seen
        is_first = True
        for source in (args, kwargs) if kwargs else (args,):
            for path, tensor in tensors_in(source):
                was_first, is_first = is_first, False
                # Beside the first, what carries no gradient is a mask or a table, and a mask may hold -inf by design; a
                # parameter that is handed on (a tied weight, a bias to be fused) is measured as what it is.
                if not was_first and (
                    not self.takes_all or not self._carries_gradient(path, tensor) or isinstance(tensor, nn.Parameter)
                ):
                    continue
                known = seen.known(tensor)
                is_same = known is not None
                if known is not None:
                    chunk.pending.settle(self.name, chunk.micro_step, tensor)
                else:
                    known = seen.source(tensor)
                if known is None or (was_first and names.goes_on(known, path, True)):
                    entry = names.own(path, tensor, True, was_first)
                    self._take(entry, tensor, Kind.ACTIVATION_IN, path, known, was_first=was_first, is_same=is_same)
                    continue
                if not is_same:
                    seen.remember(tensor, known)
                self._meet_again(known.entry, path, True, was_first, tensor)
                if not is_same and Kind.DGRAD_IN in self.takes_in and tensor.requires_grad and tensor.grad_fn is not None:
                    tap = SummandTap(chunk, known.entry, self.name + path)
                    tensor.register_hook(tap)  # type: ignore[no-untyped-call]

    def _carries_gradient(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether a gradient goes through an input; where checkpointing runs without a graph, as the recompute has shown."""
        return tensor.requires_grad or (not torch.is_grad_enabled() and path in self._recomputed)

    def take_outputs(self, output: Any) -> None:
        """Measure the outputs that no inner site has measured in this forward.

        This module becomes a further producer of the others.
        """
        if not self.takes_out:
            return
        chunk, names, seen = self.chunk, self.names, self.chunk.seen
        chunk.pending.settle(self.name, chunk.micro_step)
        is_first = True
        for path, tensor in tensors_in(output):
            was_first, is_first = is_first, False
            self.has_gradient |= tensor.requires_grad
            if not was_first and (not self.takes_all or isinstance(tensor, nn.Parameter)):
                continue
            known = seen.known(tensor)
            is_same = known is not None
            known = known or seen.source(tensor)
            if known is None or (was_first and names.goes_on(known, path, False)):
                entry = names.own(path, tensor, False, was_first)
                self._take(entry, tensor, Kind.ACTIVATION, path, known, was_first=was_first, is_same=is_same)
                continue
            seen.remember(tensor, known)
            self._meet_again(known.entry, path, False, was_first, tensor)

    def _take(
        self,
        entry: TensorEntry,
        tensor: torch.Tensor,
        kind: Kind,
        path: str,
        former: Sighting | None,
        *,
        was_first: bool,
        is_same: bool,
    ) -> None:
        """Measure a tensor; former: as what it has passed before, as the same object or held in another way."""
        chunk, names, seen, sites = self.chunk, self.names, self.chunk.seen, self.chunk.recorder.sites
        takes, grad_kind = (self.takes_in, Kind.DGRAD_IN) if kind is Kind.ACTIVATION_IN else (self.takes_out, Kind.DGRAD)
        chunk.order.place(entry)
        chunk.survey.note_take(entry)
        sighting = Sighting(entry, is_border=was_first and (kind is Kind.ACTIVATION_IN) in names.borders)
        seen.remember(tensor, sighting)
        if former is not None:
            sighting.row = chunk.take_over(former, entry)
        if kind in takes:
            if is_async(tensor):
                sighting.row = sites.reserve(entry, chunk.micro_step) if sighting.row < 0 else sighting.row
                chunk.postpone(self.name, tensor, sighting)
            elif sighting.row < 0:
                measure = sites.observe if former is None or not sites.is_due else sites.catch_up
                sighting.row = measure(entry, local_of(tensor), chunk.micro_step)
            elif not is_same:
                sites.catch_up(entry, local_of(tensor), chunk.micro_step, sighting.row)
        if grad_kind in takes and not isinstance(tensor, nn.Parameter):
            origin = seen.origin(tensor) if kind is Kind.ACTIVATION_IN else None
            grad = names.own_gradient(entry, tensor if origin is None else local_of(tensor), grad_kind, path)
            if torch.is_grad_enabled():
                chunk.recomputed.note_with_graph(entry, grad, chunk.micro_step)
            else:
                chunk.recomputed.note_without_graph(entry, tensor, kind, chunk.micro_step)
                chunk.unsettle()
            is_made_without_graph = entry.id in chunk.recomputed.without_graph and kind is Kind.ACTIVATION
            if tensor.requires_grad and not is_made_without_graph and sites.is_looked_at(grad):
                sighting.hook = chunk.hook_gradient(tensor, grad, origin)
        if former is not None:
            sites.name_alike(former.entry, entry)
        seen.locals.ask(entry, tensor, self.module, kind is Kind.ACTIVATION)

    def _take_recomputed(self, values: Any, entries: dict[str, TensorEntry], is_wanted: bool) -> None:
        """Reentrant checkpointing ran the first forward without a graph: the gradients hang on the recomputed tensors."""
        chunk, names, seen = self.chunk, self.names, self.chunk.seen
        for path, tensor in tensors_in(values) if is_wanted else ():
            if tensor.requires_grad and entries is names.inputs:
                self._recomputed.add(path)
            entry = entries.get(path)
            if entry is None or entry.grad is None or not tensor.requires_grad:
                continue
            if entry.id not in chunk.recomputed.without_graph:
                continue
            known = seen.known(tensor)
            if known is not None and not names.goes_on(known, path, entries is names.inputs):
                continue
            if chunk.recorder.sites.is_looked_at(entry.grad):
                if known is not None:
                    chunk.skip_gradient(known)
                sighting = Sighting(entry, is_border=bool(entry.border))
                seen.remember(tensor, sighting)
                micro_step, chunk.micro_step = chunk.micro_step, chunk.backward_micro_step
                sighting.hook = chunk.hook_gradient(tensor, entry.grad)
                chunk.micro_step = micro_step

    def _meet_again(self, entry: TensorEntry, path: str, is_input: bool, was_first: bool, tensor: torch.Tensor) -> None:
        if self.names.name_again(entry, path, is_input, was_first, tensor) and tensor.requires_grad:
            assert entry.grad is not None
            self.chunk.hook_gradient(tensor, entry.grad)


if tensor_reader is not None:
    tensor_reader.know_passing(
        torch.Tensor, NativeKernel, Sighting, GradientTap, OrderedDict, KEYS, torch.is_grad_enabled, graph_task,
        INFERENCE_GUARD, BORDER,
    )  # fmt: skip
