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
    """One parameter of a chunk, once however often it is shared."""

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
    """Plain parameters that were described in the table, all of them: a small step has no time to do that again."""

    def __init__(
        self, entries: list[TensorEntry], tensors: list[torch.Tensor], plan: Plan, holding: ParameterStorage
    ) -> None:
        self.entries = entries
        self.tensors = tensors
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._generation = plan.generation
        self._holding, self._place = holding, holding.place

    def holds(self, plan: Plan, holding: ParameterStorage, num: int) -> bool:
        """Whether they are what the running step measures, and described as they are now."""
        tensors = self.tensors
        return (
            plan.generation == self._generation
            and plan.takes_whole(Kind.PARAM)
            and holding is self._holding
            and keeps_plain(holding)
            and holding.place is self._place
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
        self.doomed: set[int] = set()
        """Parameters whose row was read only because zero_grad was about to clear it: a later read replaces it."""
        self.reopened: set[int] = set()
        """Parameters whose row is not that of the update: whatever is read next replaces it."""
        self.holding: ParameterStorage = TorchStorage()
        """Where this trainer keeps parameters and gradients; an adapter may put its own here before the first step."""
        self._has_grads = False
        """A backward of this step left a gradient where torch keeps them, in `.grad`."""
        self._described: DescribedParameters | None = None
        """What `measurable` returned last, while nothing can have changed but the tensors themselves."""

    def refresh(self, chunks: Sequence[Any]) -> None:
        """Look for parameters that are not known yet."""
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
        self.holding.look(one.param for one in self.all)
        self._described = None

    def locate(self, place: Place) -> None:
        """Take note of where this rank stands."""
        if place != self.holding.place:
            self.holding.place = place
            self.holding.look(one.param for one in self.all)
            self._described = None

    def forget(self) -> None:
        """Begin anew: the next `refresh` finds every parameter again."""
        self.all.clear()
        self._by_id.clear()
        self._described = None

    def of(self, tensors: Iterable[torch.Tensor] | None) -> list[Parameter]:
        """Return the known ones among `tensors`; None: all."""
        if tensors is None:
            return self.all
        find = self._by_id.get
        return [one for t in tensors if (one := find(id(t))) is not None]

    def holds_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of `tensors` is known."""
        known = self._by_id
        return any(id(one) in known for one in tensors)

    def of_grads(self, grads: Iterable[torch.Tensor]) -> list[Parameter]:
        """Return the parameters whose gradients these are."""
        wanted = {id(grad) for grad in grads}
        return [p for p in self.all if p.param.grad is not None and id(p.param.grad) in wanted]

    def measurable(self, parameters: Iterable[Parameter]) -> tuple[list[TensorEntry], list[torch.Tensor]]:
        """Return entries and local tensors of the parameters themselves."""
        known = self._described
        if known is not None and parameters is self.all and known.holds(self._plan, self.holding, len(self.all)):
            return known.entries, known.tensors
        entries, tensors = [], []
        measures, hold = self._plan.measures, self.holding.param
        for one in parameters:
            tensor = self._local(one, one.entry, hold(one.param)) if measures(one.entry) else None
            if tensor is not None:
                entries.append(one.entry)
                tensors.append(tensor)
        if parameters is self.all:
            is_plain = self._plan.takes_whole(Kind.PARAM) and keeps_plain(self.holding)
            is_plain = is_plain and all(one.param is tensor for one, tensor in zip(self.all, tensors, strict=False))
            self._described = DescribedParameters(entries, tensors, self._plan, self.holding) if is_plain else None
        return entries, tensors

    def fresh_grads(
        self, parameters: Iterable[Parameter], is_doomed: bool
    ) -> list[tuple[Parameter, torch.Tensor, bool, int | None]]:
        """Return (parameter, local gradient, was touched after the backward, row to replace) of gradients to be read now.

        A gradient that is the very tensor read in an earlier step, unchanged, belongs to that step: it is left out.
        """
        found: list[tuple[Parameter, torch.Tensor, bool, int | None]] = []
        if len(self.read) == len(self.all) and not self.reopened and not self.doomed:
            return found  # All were read, by who clips: the optimizer that steps now asks in vain.
        measures, hold, read = self._plan.measures, self.holding.wgrad, self.read
        is_plain, place = keeps_plain(self.holding), self.holding.place
        for one in parameters:
            key = id(one.param)
            row = read.get(key)
            is_final = row is not None and key not in self.reopened and (is_doomed or key not in self.doomed)
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
            if row is None and one.last_read is not None and one.last_read() is grad and one.last_version == version:
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
            if is_doomed:
                self.doomed.add(key)
            else:
                self.doomed.discard(key)
            found.append((one, local, touched, row))
        return found

    def reopen(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """What was read of these (None: of all) is not the gradient of the update: the next reading replaces it."""
        wanted = self.read.keys() if tensors is None else {id(t) for t in tensors}
        self.reopened.update(key for key in wanted if key in self.read)

    def are_thrown_away(self) -> bool:
        """Whether every gradient is gone although a backward of this step left some in `.grad`: cleared by hand."""
        return self._has_grads and all(one.param.grad is None for one in self.all)

    def note_grads(self) -> None:
        """A backward is over. One that leaves the weights for later (zero bubble) leaves no gradient yet."""
        self._has_grads = self._has_grads or any(one.param.grad is not None for one in self.all)

    def note_versions(self) -> None:
        """Remember how often each gradient was written up to now: a write after this is somebody else's."""
        for one in self.all:
            grad = one.param.grad
            if grad is not None:
                one.version_after_backward = grad._version

    def begin_step(self) -> None:
        """Forget what was read."""
        self.read.clear()
        self.doomed.clear()
        self.reopened.clear()
        self._has_grads = False
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
