"""Parameters and their gradients: one multi-tensor pass a step, gradients before anything clips them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sentinel.collect.parallel.parameter_storage import HeldPiece, ParameterStorage, TorchStorage, keeps_plain
from sentinel.collect.rows.tensor_table import TensorEntry, TensorTable
from sentinel.collect.schedule.plan import Plan
from sentinel.place import Place, strip_wrappers
from sentinel.record import Kind

REFRESH_STEPS = 50
"""Steps between two looks for parameters that were added to the model."""


class Parameter:
    """One parameter of a chunk; a parameter that modules share is one."""

    __slots__ = (
        "described",
        "entry",
        "is_reported",
        "last_read",
        "last_version",
        "param",
        "version_after_backward",
        "wgrad",
    )

    def __init__(self, param: torch.Tensor, entry: TensorEntry, wgrad: TensorEntry) -> None:
        self.param = param
        self.entry = entry
        self.wgrad = wgrad
        self.last_read: weakref.ref[torch.Tensor] | None = None
        self.last_version = -1
        self.version_after_backward = -1
        self.is_reported = False
        self.described: tuple[torch.Size, torch.dtype, torch.layout, Place] | None = None
        """Of the plain gradient that was described last: one like it needs no description."""


class DescribedParameters:
    """The entries of all parameters where each is a plain tensor: described once, for small steps have no time to do it
    again."""

    def __init__(
        self, entries: list[TensorEntry], tensors: list[torch.Tensor], plan: Plan, storage: ParameterStorage
    ) -> None:
        self.entries = entries
        self.tensors = tensors
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._generation = plan.generation
        self._storage, self._place = storage, storage.place

    def holds(self, plan: Plan, storage: ParameterStorage, num: int) -> bool:
        """Return whether they are what the running step measures, under the plan and storage they were described for."""
        tensors = self.tensors
        return (
            plan.generation == self._generation
            and plan.takes_whole(Kind.PARAM)
            and storage is self._storage
            and keeps_plain(storage)
            and storage.place is self._place
            and num == len(tensors)
            and [tensor.shape for tensor in tensors] == self._shapes
            and [tensor.dtype for tensor in tensors] == self._dtypes
        )


class WatchedParameters:
    """All parameters of this rank's chunks, and which gradients were read in this step."""

    def __init__(self, table: TensorTable, health: Callable[[str, str, str], None], plan: Plan) -> None:
        self._table = table
        self._health = health
        self._plan = plan
        self.all: list[Parameter] = []
        self._by_id: dict[int, Parameter] = {}
        self.read: dict[int, int] = {}
        """id of a parameter -> row of its gradient in this step."""
        self.before_zeroing: set[int] = set()
        """Parameters whose row was read only because zero_grad was about to clear it: a later read replaces it."""
        self.reopened: set[int] = set()
        """Parameters whose row is not that of the update: whatever is read next replaces it."""
        self.storage: ParameterStorage = TorchStorage()
        """Where this trainer keeps parameters and gradients; an adapter may put its own here before the first step."""
        self._has_grads = False
        """A backward of this step left a gradient where torch keeps them, in `.grad`."""
        self._has_seen_backward = False
        """A backward of this step was seen. Where one was not, whatever ran (a CUDA graph) changes no version."""
        self._described: DescribedParameters | None = None
        """What `measurable` returned last, while nothing can have changed but the tensors themselves."""

    def refresh(self, chunks: Sequence[Any]) -> None:
        """Add parameters that were registered in the chunks since the last look, and drop those that were replaced."""
        known = {one.entry.id: one for one in self.all}
        for chunk in chunks:
            positions = {name: at for at, name in enumerate(chunk.structure.modules)}
            for name, param in chunk.root.named_parameters():
                if id(param) in self._by_id or not isinstance(param, torch.nn.Parameter):
                    continue  # FSDP1 shows a view of what it gathered under this name while it runs.
                local = strip_wrappers(name)
                entry = self._table.entry(chunk.vpp_stage, local, Kind.PARAM)
                former = known.get(entry.id)
                if former is not None:
                    if hasattr(former.param, "_local_tensor") and not hasattr(param, "_local_tensor"):
                        continue  # FSDP2 shows the gathered parameter under this name while it runs.
                    self.all.remove(former)
                    del self._by_id[id(former.param)]
                wgrad = self._table.entry(chunk.vpp_stage, local, Kind.WGRAD)
                entry.site_pos = wgrad.site_pos = positions.get(local.rpartition(".")[0], len(positions))
                parameter = Parameter(param, entry, wgrad)
                self.all.append(parameter)
                self._by_id[id(param)] = parameter
        self.storage.look(one.param for one in self.all)
        self._described = None

    def locate(self, place: Place) -> None:
        """Set the place of this rank, and look at the parameters again where it changed."""
        if place != self.storage.place:
            self.storage.place = place
            self.storage.look(one.param for one in self.all)
            self._described = None

    def forget(self) -> None:
        """Drop all parameters; the next `refresh` finds them again."""
        self.all.clear()
        self._by_id.clear()
        self._described = None

    def of(self, tensors: Iterable[torch.Tensor] | None) -> list[Parameter]:
        """Return the parameters that these tensors are, without those that are not the chunks'; None: all parameters."""
        if tensors is None:
            return self.all
        find = self._by_id.get
        return [one for t in tensors if (one := find(id(t))) is not None]

    def holds_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether any of these tensors is a parameter of the chunks."""
        known = self._by_id
        return any(id(one) in known for one in tensors)

    def of_grads(self, grads: Iterable[torch.Tensor]) -> list[Parameter]:
        """Return the parameters whose `.grad` is one of these tensors."""
        wanted = {id(grad) for grad in grads}
        return [p for p in self.all if p.param.grad is not None and id(p.param.grad) in wanted]

    def measurable(self, parameters: Iterable[Parameter]) -> tuple[list[TensorEntry], list[torch.Tensor]]:
        """Return (entries, local tensors) of the parameters that the running step measures, one of each for a parameter."""
        known = self._described
        if known is not None and parameters is self.all and known.holds(self._plan, self.storage, len(self.all)):
            return known.entries, known.tensors
        entries, tensors = [], []
        measures, hold = self._plan.measures, self.storage.param
        for one in parameters:
            tensor = self._local(one, one.entry, hold(one.param)) if measures(one.entry) else None
            if tensor is not None:
                entries.append(one.entry)
                tensors.append(tensor)
        if parameters is self.all:
            is_plain = self._plan.takes_whole(Kind.PARAM) and keeps_plain(self.storage)
            is_plain = is_plain and all(one.param is tensor for one, tensor in zip(self.all, tensors, strict=False))
            self._described = DescribedParameters(entries, tensors, self._plan, self.storage) if is_plain else None
        return entries, tensors

    def fresh_grads(
        self, parameters: Iterable[Parameter], is_before_zeroing: bool
    ) -> list[tuple[Parameter, torch.Tensor, bool, int | None]]:
        """Return (parameter, local gradient, whether it was written after the backward, row to replace or None) of each to
        read.

        is_before_zeroing: they are read because they are about to be zeroed; a later reading of the step replaces these
        rows.

        A gradient that is the very tensor read in an earlier step, unchanged, belongs to that step: it is left out. But what
        replays a backward unseen writes into the same tensors and leaves their versions: then all are read.
        """
        found: list[tuple[Parameter, torch.Tensor, bool, int | None]] = []
        if len(self.read) == len(self.all) and not self.reopened and not self.before_zeroing:
            return found  # All were read, by who clips: the optimizer that steps now asks in vain.
        measures, hold, read = self._plan.measures, self.storage.wgrad, self.read
        is_plain, place = keeps_plain(self.storage), self.storage.place
        for one in parameters:
            key = id(one.param)
            row = read.get(key)
            is_final = row is not None and key not in self.reopened and (is_before_zeroing or key not in self.before_zeroing)
            if is_final or not measures(one.wgrad):
                continue
            own = one.param.grad
            held = None
            if is_plain and type(own) is torch.Tensor and one.described == (own.shape, own.dtype, own.layout, place):
                grad = own
            else:
                held = hold(one.param)
                if held is None:
                    continue
                grad = held.tensor if own is None else own
            version = grad._version
            is_unchanged = one.last_read is not None and one.last_read() is grad and one.last_version == version
            if is_unchanged and row is None and self._has_seen_backward:
                continue
            local = grad if held is None else self._local(one, one.wgrad, held)
            if local is None:
                continue
            if held is not None and local is own and is_plain:
                one.described = local.shape, local.dtype, local.layout, place
            # A trainer that keeps gradients elsewhere may have noted those of `.grad` on their way there.
            touched = own is not None and 0 <= one.version_after_backward != version
            one.last_read, one.last_version = weakref.ref(grad), version
            self.reopened.discard(key)
            if is_before_zeroing:
                self.before_zeroing.add(key)
            else:
                self.before_zeroing.discard(key)
            found.append((one, local, touched, row))
        return found

    def reopen(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """Have the next reading replace the rows of these parameters (None: of all): they are not the gradient of the
        update."""
        wanted = self.read.keys() if tensors is None else {id(t) for t in tensors}
        self.reopened.update(key for key in wanted if key in self.read)

    def are_thrown_away(self) -> bool:
        """Return whether no parameter has a gradient although a backward of this step left one: they were cleared by
        hand."""
        return self._has_grads and all(one.param.grad is None for one in self.all)

    def note_grads(self) -> None:
        """Called after a backward: note whether it left gradients.

        A split one (zero bubble) leaves those of weights for later.
        """
        self._has_seen_backward = True
        self._has_grads = self._has_grads or any(one.param.grad is not None for one in self.all)

    def note_versions(self) -> None:
        """Note the version of each gradient: a later write is not part of the backward (clipping, say)."""
        for one in self.all:
            grad = one.param.grad
            if grad is not None:
                one.version_after_backward = grad._version

    def begin_step(self) -> None:
        """Called when a step begins: none of its gradients was read."""
        self.read.clear()
        self.before_zeroing.clear()
        self.reopened.clear()
        self._has_grads = self._has_seen_backward = False
        for one in self.all:
            one.version_after_backward = -1

    def _local(self, one: Parameter, entry: TensorEntry, held: HeldPiece | None) -> torch.Tensor | None:
        if held is None:
            return None
        if held.tensor.layout is not torch.strided:
            if not one.is_reported:
                one.is_reported = True
                message = f"{entry.name}: layout {held.tensor.layout} is not measured"
                self._health("unsupported_placement", message, entry.name)
            return None
        self._table.describe(entry, held.tensor, held.placements, held.part, held.shape)
        return held.tensor
