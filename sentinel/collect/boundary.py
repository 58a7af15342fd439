"""When a step ends: watched on the optimizers and on zero_grad, decided at the next training forward."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

Params = list[torch.Tensor]


class Watched:
    """One optimizer: what it did since the step began."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.has_stepped = False
        self.was_zeroed = False
        """Gradients of a backward were thrown away before it stepped."""
        self.is_dirty = False
        """A backward ran since it last stepped or zeroed."""
        self.found_inf: torch.Tensor | None = None
        """Not 0: GradScaler told it to leave the weights alone, on the device, as it tells fused optimizers."""

    def params(self) -> Params:
        """Parameters it holds now, in order of its groups."""
        optimizer = self.optimizer()
        groups = getattr(optimizer, "param_groups", None) or []
        return [p for group in groups for p in group["params"]]


class Boundary:
    """Knows whether the current step is over.

    A step is over when every optimizer stepped; when gradients were zeroed again by one that had stepped, or by all
    without any having stepped (the trainer skipped the step); or when the trainer said so (`close`).
    """

    def __init__(
        self,
        on_gradients_ready: Callable[[Params | None], None],
        on_gradients_doomed: Callable[[Params | None], None],
        guard: Callable[[str, Exception], None],
        on_stepped: Callable[[Any], None] = lambda optimizer: None,
        on_stepping: Callable[[Any], None] = lambda optimizer: None,
    ) -> None:
        """on_stepped: an optimizer has just written weights and state; on_stepping: it is about to."""
        self.watched: list[Watched] = []
        self.is_explicit = False
        self._is_over = False
        self._finished: bool | None = None
        """The trainer said that the step is over, and whether it left its weights alone."""
        self.is_dirty = False
        """A backward ran since the step began, or since the last optimizer step in it."""
        self._first_to_step: Watched | None = None
        self._on_gradients_ready = on_gradients_ready
        self._on_gradients_doomed = on_gradients_doomed
        self._guard = guard
        self._on_stepped = on_stepped
        self._on_stepping = on_stepping
        self._undo: list[Callable[[], None]] = []
        self._owned: set[int] = set()
        self._adopts = False

    # -- installing ------------------------------------------------------------------------------------------------

    def watch(self, optimizers: Iterable[Any], models: Sequence[nn.Module]) -> None:
        """Hook the optimizers (torch ones, wrappers around one, lists of chained ones) and the zero_grad of the models."""
        for optimizer in optimizers:
            self._watch_optimizer(optimizer)
        for model in models:
            self._wrap_zero_grad(model, lambda: self._zeroed(None))

    def adopt(self, model_params: Iterable[torch.Tensor]) -> None:
        """Without an optimizer given: watch any torch optimizer that steps parameters of the model."""
        self._adopts = True
        self._owned = {id(p) for p in model_params}

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            try:
                known = any(w.optimizer() is optimizer for w in self.watched)
                if not known and any(id(p) in self._owned for g in optimizer.param_groups for p in g["params"]):
                    # The hooks this registers on the instance are called for this same step already.
                    self._watch_optimizer(optimizer).is_dirty = True
            except Exception as error:
                self._guard("optimizer", error)

        self._undo.append(register_optimizer_step_pre_hook(before).remove)

    def follow(self, optimizer: Any) -> None:
        """Tell of the steps of a torch optimizer inside another one: they end nothing, and its gradients are not read."""
        if not hasattr(optimizer, "register_step_pre_hook") or any(w.optimizer() is optimizer for w in self.watched):
            return

        def told(tell: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
            def call(one: Any, args: Any, kwargs: Any) -> None:
                try:
                    tell(one)
                except Exception as error:
                    self._guard("optimizer", error)

            return call

        self._undo.append(optimizer.register_step_pre_hook(told(self._on_stepping)).remove)
        self._undo.append(optimizer.register_step_post_hook(told(self._on_stepped)).remove)

    def _watch_optimizer(self, optimizer: Any) -> Watched:
        chained = getattr(optimizer, "chained_optimizers", None)
        if isinstance(chained, (list, tuple)) and chained:
            return [self._watch_optimizer(inner) for inner in chained][-1]
        for _ in range(4):
            if isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__name__ != "AcceleratedOptimizer":
                break
            inner = getattr(optimizer, "optimizer", None)
            if inner is None or inner is optimizer:
                break
            if type(optimizer).__name__ != "AcceleratedOptimizer":  # Its zero_grad is the inner one's, or nothing at all.
                self._wrap_zero_grad(optimizer, lambda: self._zeroed(None))
            optimizer = inner
        existing = next((w for w in self.watched if w.optimizer() is optimizer), None)
        if existing is not None:
            return existing
        watched = Watched(optimizer)
        self.watched.append(watched)
        if hasattr(optimizer, "register_step_pre_hook"):
            before = optimizer.register_step_pre_hook(lambda o, args, kwargs: self._before_step(watched, args, kwargs))
            after = optimizer.register_step_post_hook(lambda o, args, kwargs: self._after_step(watched, args, kwargs))
            self._undo += [before.remove, after.remove]
        else:
            self._wrap_step(optimizer, watched)
        self._wrap_zero_grad(optimizer, lambda: self._zeroed(watched))
        return watched

    def _wrap_step(self, optimizer: Any, watched: Watched) -> None:
        original = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self._before_step(watched, args, kwargs)
            result = original(*args, **kwargs)
            self._after_step(watched, args, kwargs)
            return result

        optimizer.step = step
        self._undo.append(lambda: _delete(optimizer, "step", step))

    def _wrap_zero_grad(self, owner: Any, before: Callable[[], None]) -> None:
        if isinstance(owner.__dict__.get("zero_grad"), InstanceWrap):
            return

        def guarded() -> None:
            try:
                before()
            except Exception as error:
                self._guard("zero_grad", error)

        wrap = InstanceWrap(owner, "zero_grad", guarded)
        owner.__dict__["zero_grad"] = wrap
        reference = weakref.ref(owner)
        self._undo.append(lambda: _delete(reference(), "zero_grad", wrap))

    def remove(self) -> None:
        """Undo everything that `watch` and `adopt` did."""
        while self._undo:
            self._undo.pop()()

    # -- what happens ------------------------------------------------------------------------------------------------

    def mark_backward(self) -> None:
        """A backward ran: gradients that someone may throw away now exist."""
        self.is_dirty = True
        for watched in self.watched:
            watched.is_dirty = True

    def zeroed(self, optimizer: Any) -> None:
        """A wrapper's own zero_grad is about to clear the gradients of a watched optimizer."""
        for watched in self.watched:
            if watched.optimizer() is optimizer:
                self._zeroed(watched)

    def finish(self, *, is_skipped: bool | None) -> None:
        """The trainer says that the step is over; it ends when the next one begins, for it may be logged about until then.

        is_skipped: whether the weights were left alone; None: unless an optimizer was seen to step.
        """
        self.is_explicit = True
        self._finished = self.was_skipped if is_skipped is None else is_skipped

    def skip(self) -> None:
        """The gradients of a backward are gone and nobody stepped: the step is over."""
        self._is_over, self.is_dirty = True, False
        for watched in self.watched:
            watched.is_dirty = False

    def _before_step(self, watched: Watched, args: Any, kwargs: Any) -> None:
        try:
            if has_closure(args, kwargs):
                return  # Forward and backward run inside step: the gradients seen now are the former step's.
            if watched.has_stepped and watched.is_dirty:
                self._is_over = True
            self._on_gradients_ready(watched.params())
            self._on_stepping(watched.optimizer())
        except Exception as error:
            self._guard("optimizer", error)

    def _after_step(self, watched: Watched, args: Any, kwargs: Any) -> None:
        try:
            if has_closure(args, kwargs):
                self._on_gradients_ready(watched.params())
            self._on_stepped(watched.optimizer())
            if self._first_to_step is None or not any(w.has_stepped for w in self.watched):
                self._first_to_step = watched
            watched.has_stepped, watched.is_dirty = True, False
            watched.found_inf = getattr(watched.optimizer(), "found_inf", None)
            self.is_dirty = False
            if all(w.has_stepped or w.was_zeroed for w in self.watched):
                self._is_over = True
        except Exception as error:
            self._guard("optimizer", error)

    def _zeroed(self, one: Watched | None) -> None:
        if not self.watched:
            if self.is_dirty:
                self._on_gradients_doomed(None)
                self.skip()
            return
        dirty = [w for w in ([one] if one is not None else self.watched) if w.is_dirty]
        if not dirty:
            return
        stepped = [w for w in self.watched if w.has_stepped]
        self._on_gradients_doomed([p for w in dirty for p in w.params()] if one is not None else None)
        for watched in dirty:
            watched.is_dirty = False
            if watched.has_stepped:
                self._is_over = True
            watched.was_zeroed = True
        if not stepped and all(w.was_zeroed for w in self.watched):
            self._is_over = True
        others = [w for w in self.watched if w not in dirty]
        if others and all(w.has_stepped for w in others) and self._first_to_step in dirty:
            # The optimizer that steps first in every round begins the next one without having stepped in this.
            self._is_over = True

    # -- deciding ----------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the next training forward begins a new step."""
        return self._finished is not None or (self._is_over and not self.is_explicit)

    @property
    def was_skipped(self) -> bool:
        """Whether no optimizer stepped since the step began, although there is one; or what the trainer said."""
        if self._finished is not None:
            return self._finished
        return bool(self.watched) and not any(w.has_stepped for w in self.watched)

    @property
    def found_inf(self) -> torch.Tensor | None:
        """Not 0: every optimizer that was called left the weights alone; None: no device has to be asked."""
        found = [w.found_inf for w in self.watched if w.has_stepped]
        told = [one for one in found if isinstance(one, torch.Tensor)]
        return torch.stack([one.reshape(()) for one in told]).amin() if found and len(told) == len(found) else None

    def close(self) -> None:
        """Forget the step that ended."""
        self._is_over = self.is_dirty = False
        self._finished = None
        for watched in self.watched:
            watched.has_stepped = watched.was_zeroed = False
            watched.found_inf = None
            if self.is_explicit:
                watched.is_dirty = False  # Gradients that still lie there belong to the step that was said to be over.

    @property
    def name(self) -> str:
        """Which boundary is in use, for the log."""
        if self.is_explicit:
            return "monitor.step()"
        if self.watched or not self._adopts:
            return f"first training forward after {len(self.watched)} optimizer(s) stepped or zero_grad after a backward"
        return "first training forward after the optimizer found at its first step"


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether `optimizer.step` was called with a closure that runs forward and backward inside it."""
    values = [*args, kwargs.get("closure")]
    return any(callable(value) and not isinstance(value, torch.optim.Optimizer) for value in values)


class InstanceWrap:
    """A method wrapped on one instance, that copies and pickles as if it were not wrapped."""

    def __init__(self, owner: Any, name: str, before: Callable[[], None]) -> None:
        self._owner = weakref.ref(owner)
        self._name = name
        self._before = before
        self.__wrapped__ = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self.__wrapped__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy of the owner is in the memo before its attributes are copied.
        copied = memo.get(id(self._owner()))
        if copied is None:
            return self.__wrapped__
        return types.MethodType(getattr(type(copied), self._name), copied)

    def __reduce__(self) -> Any:
        return getattr, (self._owner(), self._name)


def _delete(owner: Any, name: str, ours: Any) -> None:
    if owner is not None and owner.__dict__.get(name) is ours:
        del owner.__dict__[name]
