"""Megatron-core: its training loop has no callbacks, so the optimizer's step tells where an iteration ends.

    monitor = sentinel.attach_megatron(model, optimizer)

Read in megatron-core 0.16: a schedule runs forward_step and backward_step per micro-batch and finalize_model_grads at its
end; `optimizer.step` is prepare_grads (copy, unscale, look for infinities), clip, update; it returns (success, grad norm,
zeros) and leaves the weights alone where success is False. Iterations are counted from 1, skipped ones included.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state  # noqa: F401  A missing megatron-core says so by itself.
from torch import nn

from sentinel.collect.adapters.megatron_placements import SitePlaces
from sentinel.collect.adapters.megatron_storage import (
    MegatronStorage,
    leaves,
    offsets_of,
    tied_names,
    unwrap_chunk,
)
from sentinel.collect.attach import attach
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.optimizers import InstanceWrap
from sentinel.collect.hooks.pickle_stub import stub_hook
from sentinel.collect.monitor import Monitor
from sentinel.collect.unmeasured import Unmeasured
from sentinel.monitor_config import MonitorConfig
from sentinel.place import Place


def attach_megatron(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any = None,
    config: MonitorConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    first_step: int = 1,
    place: Place | None = None,
) -> Monitor | Unmeasured:
    """Attach Sentinel to Megatron's model chunks (wrapped as they are) and its optimizer (one, chained, or a list).

    Steps are iterations, counted from `first_step` as Megatron prints them; `monitor.load_state_dict` (or `set_step`)
    continues a resumed count. Loss, lr, grad norm and loss scale are followed without a wait; what the loop logs wins.
    """
    chunks = [unwrap_chunk(one) for one in ([model] if isinstance(model, nn.Module) else model)]
    given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    own = [one for one in given if hasattr(one, "prepare_grads")]
    plain = [one for one in given if not hasattr(one, "prepare_grads")]
    stand_in = [Iterations()] if own else []
    monitor = attach(chunks, [*plain, *stand_in] or None, config, place=place, first_step=first_step)
    if isinstance(monitor, Monitor) and not isinstance(monitor.port.tensors.storage, MegatronStorage):
        try:
            MegatronTrainer(monitor, chunks, own, [model] if isinstance(model, nn.Module) else list(model), stand_in)
        except Exception as error:
            monitor.port.guard("attach_megatron", error)
            monitor.detach()  # Half followed, its steps would never end.
    return monitor


class Iterations:
    """What the boundary watches in the place of Megatron's optimizers: it never steps, `MegatronTrainer` says when."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def step(self) -> None:
        """Nothing."""

    def zero_grad(self) -> None:
        """Nothing."""


class Wrapped(InstanceWrap):
    """A method of one instance with something around it."""

    def __init__(self, owner: Any, name: str, around: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__(owner, name, lambda: None)
        self._call = around(owner, self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class FirstCall:
    """A forward pre-hook that hands on the arguments of a module's first call in training, and goes."""

    def __init__(self, module: nn.Module, look: Callable[[Any, Any], None]) -> None:
        self._look = look
        self._module = weakref.ref(module)
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstCall:
        return self

    def __reduce__(self) -> Any:
        return stub_hook()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and module is self._module():
            self.handle.remove()
            self._look(args, kwargs)


class MegatronTrainer:
    """Follows one trainer: its optimizer's step, its schedules' forward steps, its zeroing of gradients."""

    def __init__(
        self,
        monitor: Monitor,
        chunks: Sequence[nn.Module],
        optimizers: Sequence[Any],
        wrapped: Sequence[nn.Module],
        stand_in: Sequence[Iterations],
    ) -> None:
        self.monitor = monitor
        self._optimizers = optimizers
        self._stand_in = stand_in  # The boundary keeps a weak reference only.
        self._sums: dict[str, tuple[Any, Any]] = {}
        """Scalar -> (sum, count) over the micro-batches of the running step, on the device."""
        self._sums_of = -1
        self.storage = MegatronStorage(chunks, optimizers, monitor.place)
        self.storage.look(())
        monitor.port.tensors.storage = self.storage
        for mine in monitor.port.chunks:
            mine.offsets = offsets_of(mine.root, monitor.place)
            mine.tied = tied_names(mine.root, monitor.port.name_map)
        places = SitePlaces(chunks, monitor.place)
        monitor.port.tensors.place_sites(places)
        for chunk in chunks:
            if getattr(chunk, "post_process", False):
                self._learn_output(chunk, places)
        for optimizer in optimizers:
            self._wrap(optimizer, "step", self._around_step)
            self._wrap(optimizer, "prepare_grads", self._around_prepare)
            for leaf in leaves(optimizer):
                monitor.port.steps.follow(getattr(leaf, "optimizer", None))
        for chunk in wrapped:
            if hasattr(chunk, "zero_grad_buffer"):
                self._wrap(chunk, "zero_grad_buffer", self._around_zeroing)
            if hasattr(chunk, "scale_gradients"):
                self._wrap(chunk, "scale_gradients", self._around_scaling)
        _follow(self)
        monitor.port.at_end(lambda: _leave(self))

    def _wrap(self, owner: Any, name: str, around: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> None:
        ours = owner.__dict__[name] = Wrapped(owner, name, around)
        reference = weakref.ref(owner)

        def undo() -> None:
            alive = reference()
            if alive is not None and alive.__dict__.get(name) is ours:
                del alive.__dict__[name]

        self.monitor.port.at_end(undo)

    def _learn_output(self, chunk: nn.Module, places: SitePlaces) -> None:
        """See at its first call in training whether a last stage is given labels."""
        signature = inspect.signature(chunk.forward)
        if "labels" not in signature.parameters:
            return

        def look(args: Any, kwargs: Any) -> None:
            labels = signature.bind_partial(*args, **kwargs).arguments.get("labels")
            places.learn(has_labels=labels is not None, is_parallel=getattr(chunk, "parallel_output", True))

        first = FirstCall(chunk, lambda args, kwargs: self._guarded("labels", look, args, kwargs))
        self.monitor.port.at_end(first.handle.remove)

    def _guarded(self, site: str, work: Callable[..., None], *args: Any) -> None:
        if self.monitor.is_alive:
            try:
                work(*args)
            except Exception as error:
                self.monitor.port.guard(site, error)

    # -- the optimizer -----------------------------------------------------------------------------------------------

    def _around_step(self, optimizer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._guarded("optimizer.step", self._before_step, optimizer)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self.raised()
                raise
            self._guarded("optimizer.step", self._after_step, optimizer, result)
            return result

        return step

    def _before_step(self, optimizer: Any) -> None:
        groups = [group for group in optimizer.param_groups if not group.get("is_decoupled_lr", False)]
        if groups:
            self.monitor.noticed(lr=groups[0].get("lr"))
        self._note_scale(wgrads_are_scaled=False)

    def _note_scale(self, *, wgrads_are_scaled: bool) -> None:
        """Rows of gradients are divided by the loss scale of their step, on the writer's thread."""
        scale = self.storage.loss_scale
        if scale is None:
            return
        copied = self.monitor.port.tensors.losses_multiplied_on_device(scale, wgrads_carry_it=wgrads_are_scaled)
        if copied is not None:
            self.monitor.noticed(loss_scale=copied)

    def _around_prepare(self, optimizer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_grads(*args: Any, **kwargs: Any) -> Any:
            found_inf = original(*args, **kwargs)
            self._guarded("prepare_grads", self._prepared, optimizer)
            return found_inf

        return prepare_grads

    def _prepared(self, optimizer: Any) -> None:
        """The gradients are reduced and unscaled; Megatron's own clipping comes next."""
        del optimizer
        self.storage.is_prepared = True
        try:
            self.monitor.gradients_ready()
        finally:
            self.storage.is_prepared = False

    def _after_step(self, optimizer: Any, result: Any) -> None:
        success, grad_norm, zeros = result if isinstance(result, tuple) and len(result) == 3 else (True, None, None)
        # A tensor may lie on the device, and is not asked for its value; 0.0 stands for a norm that nobody computed.
        if isinstance(grad_norm, torch.Tensor) or grad_norm:
            self.monitor.noticed(grad_norm=grad_norm)
        if isinstance(zeros, torch.Tensor) or zeros:
            self.monitor.noticed(num_zeros=zeros)
        if optimizer is self._optimizers[-1]:
            self._finish(is_skipped=not success)

    def _finish(self, *, is_skipped: bool) -> None:
        self.monitor.port.steps.finish(is_skipped=is_skipped)
        # Not for good: a model whose forwards are captured in a graph begins its steps at the optimizer.
        self.monitor.port.steps.is_explicit = False

    # -- gradients of a sum over tokens ------------------------------------------------------------------------------

    def _around_scaling(self, chunk: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """`finalize_model_grads` multiplies what was summed over all tokens by one over their number."""

        def scale_gradients(scaling_factor: Any, *args: Any, **kwargs: Any) -> Any:
            self._guarded("scale_gradients", self._scaled, scaling_factor)
            return original(scaling_factor, *args, **kwargs)

        return scale_gradients

    def _scaled(self, factor: Any) -> None:
        self.monitor.port.tensors.wgrads_multiplied(factor)

    # -- gradients thrown away ---------------------------------------------------------------------------------------

    def _around_zeroing(self, chunk: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad_buffer(*args: Any, **kwargs: Any) -> Any:
            self._guarded("zero_grad_buffer", self._zeroing)
            return original(*args, **kwargs)

        return zero_grad_buffer

    def _zeroing(self) -> None:
        """A loop that throws an iteration away never calls the optimizer: it is a step all the same, a skipped one."""
        if self._optimizers and self.monitor.port.steps.has_unused_gradients:
            self._note_scale(wgrads_are_scaled=True)
            self.monitor.gradients_ready()
            self._finish(is_skipped=True)

    # -- the schedules -----------------------------------------------------------------------------------------------

    def chunk_of(self, model: Any) -> Chunk | None:
        """Return the chunk of this trainer that a schedule runs."""
        root = unwrap_chunk(model) if isinstance(model, nn.Module) else None
        return next((chunk for chunk in self.monitor.port.chunks if chunk.root is root), None)

    def forwarded(self, store: list[Any]) -> None:
        """Take what the loss function reports of a micro-batch: a number, or a sum and its count, by name."""
        self._note_scale(wgrads_are_scaled=False)
        said = store[-1] if store else None
        if not isinstance(said, Mapping):
            return
        if self._sums_of != self.monitor.port.ended_steps:
            self._sums, self._sums_of = {}, self.monitor.port.ended_steps
        for at, (key, value) in enumerate(said.items()):
            pair = _sum_and_count(value)
            if pair is not None:
                name = "loss" if at == 0 else str(key)
                total, count = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total, count = (total + pair[0], count + pair[1])
                self.monitor.noticed(**{name: total / count})
                if at == 0 and pair[1] is not ONE:
                    self.monitor.noticed(tokens=count)

    def raised(self) -> None:
        """The trainer is about to end with an exception, most likely: what there is goes to the disk."""
        self.monitor.flush()


ONE = 1.0
"""The count of what is reported without one."""


def _sum_and_count(value: Any) -> tuple[Any, Any] | None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)
        if flat.numel() == 1:
            return flat[0].clone(), ONE
        return (flat[0].clone(), flat[1].clone()) if flat.numel() == 2 else None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        total, count = (one.detach().clone() if isinstance(one, torch.Tensor) else one for one in value)
        return total, count
    return (float(value), ONE) if isinstance(value, (int, float)) else None


SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_followers: list[MegatronTrainer] = []
_restore: list[tuple[Any, str, Any, Any]] = []


def _follow(one: MegatronTrainer) -> None:
    """Wrap the schedules' own steps while somebody follows: they are looked up in their module at each call."""
    _followers.append(one)
    if _restore:
        return
    module = importlib.import_module(SCHEDULES)
    for name, around in (("forward_step", _around_forward), ("backward_step", _around_backward)):
        original = getattr(module, name, None)
        if original is not None:
            ours = around(original)
            _restore.append((module, name, original, ours))
            setattr(module, name, ours)


def _leave(one: MegatronTrainer) -> None:
    if one in _followers:
        _followers.remove(one)
    while not _followers and _restore:
        module, name, original, ours = _restore.pop()
        if getattr(module, name, None) is ours:
            setattr(module, name, original)


def _around_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """forward_step(forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, ...)"""

    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model", args[2] if len(args) > 2 else None)
        store = kwargs.get("forward_data_store", args[5] if len(args) > 5 else None)
        mine = [(one, chunk) for one in _followers if (chunk := one.chunk_of(model)) is not None]
        before = [chunk.num_forwards for _, chunk in mine]
        steps = [one.monitor.port.ended_steps for one, _ in mine]
        said = len(store) if isinstance(store, list) else 0
        try:
            result = original(*args, **kwargs)
        except BaseException:
            for one, _ in mine:
                one.raised()
            raise
        for (one, chunk), num_forwards, step in zip(mine, before, steps, strict=True):
            was_counted = chunk.num_forwards > (num_forwards if one.monitor.port.ended_steps == step else 0)
            if was_counted:
                one._guarded("forward_step", one.forwarded, store[said:] if isinstance(store, list) else [])
        return result

    return forward_step


def _around_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            for one in list(_followers):
                one.raised()
            raise

    return backward_step
