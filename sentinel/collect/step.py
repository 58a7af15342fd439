"""When a step ends: watched on the optimizers and on zero_grad, decided at the next training forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sentinel.collect.first_phases import FirstPhases
from sentinel.collect.hooks.optimizers import OptimizerHooks, Params, WatchedOptimizer

MAX_TURNS = 10
"""Steps of one optimizer for which the end of a step waits for the others. Too small: a GAN's critic (mostly 5 steps) cuts
one step into several; too large: a step ends late where an optimizer stopped."""


class Boundary:
    """Knows whether the current step is over.

    A step is over when every optimizer stepped; when gradients were zeroed again by one that had stepped, or by all
    without any having stepped (the trainer skipped the step); or when the trainer said so (`close`). Whatever runs inside
    an optimizer's `step` is part of one step, and so is the first phase of an optimizer that has two.
    """

    def __init__(
        self,
        on_gradients_ready: Callable[[Params | None], None],
        on_zeroing: Callable[[Params | None], None],
        guard: Callable[[str, Exception], None],
        on_stepped: Callable[[Any], None] = lambda optimizer: None,
        on_stepping: Callable[[Any], None] = lambda optimizer: None,
        on_reopened: Callable[[Params | None], None] = lambda params: None,
        model_params: Callable[[], Params] = list,
    ) -> None:
        """on_stepped: an optimizer has just written weights and state; on_stepping: it is about to.

        on_reopened: gradients read before are not those of the update. model_params: the parameters of the model, now.
        """
        self.is_explicit = False
        self.is_dirty = False
        """A backward ran since the step began, or since the last optimizer step in it."""
        self.hooks = OptimizerHooks(self, guard)
        self.watched = self.hooks.watched
        """The optimizers, and what each did since the step began."""
        self._is_over = False
        self._finished: bool | None = None
        """The trainer said that the step is over, and whether it left its weights alone."""
        self._first_to_step: WatchedOptimizer | None = None
        self._on_gradients_ready = on_gradients_ready
        self._on_zeroing = on_zeroing
        self._on_stepped = on_stepped
        self._on_stepping = on_stepping
        self._on_reopened = on_reopened
        self._phases = FirstPhases(model_params)

    # -- installing ------------------------------------------------------------------------------------------------

    def watch(self, optimizers: Iterable[Any] | Mapping[str, Any], models: Sequence[nn.Module]) -> None:
        """Hook the optimizers (torch ones, wrappers around one, lists of chained ones) and the zero_grad of the models.

        optimizers: may have names, for people.
        """
        named = optimizers.items() if isinstance(optimizers, Mapping) else (("", one) for one in optimizers)
        for name, optimizer in named:
            self.hooks.watch(optimizer, name)
        for model in models:
            self.hooks.wrap_zero_grad(model, None)

    def follow(self, optimizer: Any) -> None:
        """Tell of the steps of a torch optimizer inside another one: they end nothing, and its gradients are not read."""
        self.hooks.follow(optimizer, self._on_stepping, self._on_stepped)

    # -- what happens: the StepListener of optimizers.py -----------------------------------------------------------

    def about_to_step(self, watched: WatchedOptimizer, optimizer: Any, *, is_announced: bool) -> None:
        """Read the gradients of the update; where it is not the first of the step, they were read before, and stay."""
        self._on_gradients_ready(watched.params())
        if is_announced:
            self._on_stepping(optimizer)

    def stepped(self, watched: WatchedOptimizer, optimizer: Any) -> None:
        """Note that an optimizer has done its part; the step is over when all have."""
        self._on_stepped(optimizer)
        if self._first_to_step is None or not any(w.has_stepped for w in self.watched):
            self._first_to_step = watched
        watched.has_stepped, watched.is_dirty, watched.is_idle = True, False, False
        watched.num_steps += 1
        watched.found_inf = getattr(watched.optimizer(), "found_inf", None)
        self.is_dirty = False
        self._phases.over()
        if watched.num_steps >= MAX_TURNS:
            for other in self.watched:
                other.is_idle = other.is_idle or not (other.has_stepped or other.was_zeroed)
        if all(w.has_stepped or w.was_zeroed or w.is_idle for w in self.watched):
            self._is_over = True

    def first_phase(self, watched: WatchedOptimizer) -> None:
        """The next time that gradients are cleared, an evaluation is over and no step."""
        self._phases.moved()

    def zeroed(self, watched: WatchedOptimizer | None) -> None:
        """Decide what it means that gradients are about to be cleared."""
        if self.hooks.running is not None:
            return
        if not self.watched:
            if self.is_dirty:
                self._on_zeroing(None)
                self.thrown_away()
            return
        dirty = [w for w in ([watched] if watched is not None else self.watched) if w.is_dirty]
        if not dirty:
            return
        if self._phases.have_moved(dirty):
            self._end_first_phase(dirty)
            return
        self._on_zeroing([p for w in dirty for p in w.params()] if watched is not None else None)
        stepped = [w for w in self.watched if w.has_stepped]
        for one in dirty:
            one.is_dirty = False
            if one.has_stepped:
                self._is_over = True
            one.was_zeroed = True
        if not stepped and all(w.was_zeroed for w in self.watched):
            self._is_over = True
        others = [w for w in self.watched if w not in dirty]
        if others and all(w.has_stepped for w in others) and self._first_to_step in dirty:
            # The optimizer that steps first in every round begins the next one without having stepped in this.
            self._is_over = True

    # -- what happens: reported by the monitor and adapters ------------------------------------------------------------

    def mark_backward(self) -> None:
        """A backward ran: gradients that someone may throw away now exist."""
        self.is_dirty = True
        self._phases.over()
        for watched in self.watched:
            watched.is_dirty = True
        running = self.hooks.running
        if running is not None and not running.keeps_first:
            self._on_reopened(None)

    def backward_ended(self) -> None:
        """Gradients of a backward are complete: see which optimizers have any, and how the weights stand."""
        if len(self.watched) > 1:
            has_any = [any(p.grad is not None for p in one.params()) for one in self.watched]
            for watched, has in zip(self.watched, has_any, strict=True):
                watched.is_dirty = watched.is_dirty and (has or not any(has_any))
        self._phases.backward_ended(self.watched)

    def zeroed_by(self, optimizer: Any) -> None:
        """A wrapper's own zero_grad is about to clear the gradients of a watched optimizer."""
        for watched in self.watched:
            if watched.optimizer() is optimizer:
                self.zeroed(watched)

    def finish(self, *, is_skipped: bool | None) -> None:
        """The trainer says that the step is over; it ends when the next one begins, for it may be logged about until then.

        is_skipped: whether the weights were left alone; None: unless an optimizer was seen to step.
        """
        self.is_explicit = True
        self._finished = self.was_skipped if is_skipped is None else is_skipped

    def ending(self) -> None:
        """The trainer ends the step: where it skipped the update, its gradients are read while they are there."""
        is_unread = any(w.is_dirty for w in self.watched) if self.watched else self.is_dirty
        if is_unread and not any(w.has_stepped for w in self.watched):
            self._on_zeroing(None)

    def thrown_away(self) -> None:
        """The gradients of a backward are gone and nobody stepped: the step is over, or a first phase in it."""
        if self.hooks.running is not None:
            return
        if self._phases.have_moved(self.watched):
            self._end_first_phase(self.watched)
            return
        self._is_over, self.is_dirty = True, False
        for watched in self.watched:
            watched.is_dirty = False

    def _end_first_phase(self, dirty: Sequence[WatchedOptimizer]) -> None:
        self._phases.ended()
        self.is_dirty = False
        for watched in dirty:
            watched.is_dirty = False
        self._on_reopened(None)

    # -- deciding ----------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the next training forward begins a new step."""
        return self._finished is not None or (self._is_over and not self.is_explicit)

    def is_turn_of_idle(self, module: nn.Module) -> bool:
        """Whether the training forward of this module is the turn of an optimizer that others no longer waited for."""
        idle = [one for one in self.watched if one.is_idle and not one.has_stepped]
        if not idle:
            return False
        mine = {id(p) for p in module.parameters()}
        return all(
            any(id(p) in mine for one in group for p in one.params()) is is_idle
            for group, is_idle in ((idle, True), ([one for one in self.watched if one not in idle], False))
        )

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
        reported = [one for one in found if isinstance(one, torch.Tensor)]
        return torch.stack([one.reshape(()) for one in reported]).amin() if found and len(reported) == len(found) else None

    def close(self) -> None:
        """Forget the step that ended."""
        self._phases.close(has_stepped=any(w.has_stepped for w in self.watched))
        self._is_over = self.is_dirty = False
        self._finished = None
        for watched in self.watched:
            watched.has_stepped = watched.was_zeroed = False
            watched.num_steps, watched.found_inf = 0, None
            if self.is_explicit:
                watched.is_dirty = False  # Gradients that still lie there belong to the step that was said to be over.

    @property
    def name(self) -> str:
        """Which boundary is in use, for the log."""
        if self.is_explicit:
            return "monitor.step()"
        if self.watched or not self.hooks.adopts:
            return f"first training forward after {len(self.watched)} optimizer(s) stepped or zero_grad after a backward"
        return "first training forward after the optimizer found at its first step"
