"""What is hung on optimizers: their steps, the closures that run inside them, first and second phases, and zero_grad.

An optimizer may be made of another one (SAM, Lookahead, a wrapper that accumulates): the inner one writes the weights, so
that its steps are the outer one's. It is found among the outer one's attributes, or when it first steps the same parameters.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from sentinel.collect.compiled.graphs import compiler_is_back, compiler_steps_aside, leave_alone
from sentinel.collect.hooks import every_step

Params = list[torch.Tensor]

FIRST_PHASES = ("first_step", "ascent_step", "perturb_weights", "perturb", "extrapolation")
"""Methods that move the weights to where the gradient of the update is taken: SAM, ASAM, GSAM, extragradient methods."""
SECOND_PHASES = ("second_step", "descent_step")
"""Methods that write the update, where `step` itself is not called."""


class WatchedOptimizer:
    """One optimizer of the trainer, and what it has done since the running step began."""

    def __init__(self, optimizer: Any, name: str) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = name
        """For people: `Adam`, or what `attach` was given."""
        self.inner: list[weakref.ref[Any]] = []
        """Optimizers that it is made of: they write the same parameters."""
        self.has_stepped = False
        self.num_steps = 0
        self.was_zeroed = False
        """Gradients of a backward were thrown away before it stepped."""
        self.is_dirty = False
        """A backward ran since it last stepped or zeroed."""
        self.is_idle = False
        """It has not stepped while others did again and again: no step waits for it until it steps."""
        self.found_inf: torch.Tensor | None = None
        """Not 0: GradScaler asked it to leave the weights alone, by a tensor on the device, as it asks fused optimizers."""
        self.noted_version: tuple[int, int | None] = (-1, None)
        """`version` when the last backward was over, and of how many parameters."""

    @property
    def keeps_first(self) -> bool:
        """Whether its gradient is that of the first evaluation: LBFGS moves the weights between its evaluations."""
        return "lbfgs" in type(self.optimizer()).__name__.lower()

    def params(self) -> Params:
        """Parameters it holds now, in order of its groups."""
        return params_of(self.optimizer())

    def version(self, most: int | None = None) -> int:
        """Return a number that changes whenever one of its parameters (the first `most`) is written in place."""
        groups = getattr(self.optimizer(), "param_groups", None) or ()
        return sum(param._version for param in itertools.islice((p for group in groups for p in group["params"]), most))

    def note_version(self, most: int | None) -> None:
        """Note the version of its weights, to learn later whether they were written."""
        self.noted_version = self.version(most), most

    @property
    def has_moved(self) -> bool:
        """Whether its weights were written since `note_version`."""
        noted, most = self.noted_version
        return noted not in (-1, self.version(most))


class StepListener(Protocol):
    """What is called before and after the steps of optimizers."""

    def about_to_step(self, watched: WatchedOptimizer, optimizer: Any, *, is_announced: bool) -> None:
        """Called when the gradients of the update are complete. is_announced: before the weights are written."""

    def stepped(self, watched: WatchedOptimizer, optimizer: Any) -> None:
        """Called when `optimizer`, the watched one or one inside it, has written weights and state."""

    def first_phase(self, watched: WatchedOptimizer) -> None:
        """Called before the first phase moves the weights to the point at which the gradient of the update is taken."""

    def zeroed(self, watched: WatchedOptimizer | None) -> None:
        """Called before gradients are zeroed: those of one optimizer, or of the whole model (None)."""


class _OpenStepCall:
    """A call of `step` that has not returned."""

    __slots__ = (
        "frame", "has_closure", "is_nested", "num_evaluations", "optimizer", "thread", "version", "was_dirty", "watched",
    )  # fmt: skip

    def __init__(self, watched: WatchedOptimizer, optimizer: Any, frame: types.FrameType, is_nested: bool) -> None:
        self.watched = watched
        self.optimizer = optimizer
        self.frame = frame
        self.thread = threading.get_ident()
        self.is_nested = is_nested
        """The step of a base class, called by that of the same optimizer."""
        self.has_closure = False
        self.num_evaluations = 0
        self.was_dirty = watched.is_dirty
        self.version = watched.version() if watched.inner else -1


class OptimizerHooks:
    """Puts hooks on optimizers and takes them off again; knows whether a step runs."""

    def __init__(self, listener: StepListener, guard: Callable[[str, Exception], None]) -> None:
        self.watched: list[WatchedOptimizer] = []
        self._listener = listener
        self._guard = guard
        self._undo: list[Callable[[], None]] = []
        self._calls: list[_OpenStepCall] = []
        self._owned: set[int] = set()
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()
        """Torch optimizers of which it is known whether they are ours."""
        self.adopts = False
        self.second: SecondPhase | None = None
        """The second phase that runs."""

    # -- installing ------------------------------------------------------------------------------------------------

    def watch(self, optimizer: Any, name: str = "") -> WatchedOptimizer:
        """Hook a torch optimizer, a wrapper around one, or a list of chained ones; return the one hooked last."""
        chained = getattr(optimizer, "chained_optimizers", None)
        if isinstance(chained, (list, tuple)) and chained:
            return [self.watch(inner, name) for inner in chained][-1]
        wrappers = []
        for _ in range(4):
            is_accelerated = type(optimizer).__name__ == "AcceleratedOptimizer"
            if isinstance(optimizer, torch.optim.Optimizer) and not is_accelerated:
                break
            inner = getattr(optimizer, "optimizer", None)
            if inner is None and not hasattr(optimizer, "param_groups"):
                several = list(inner_optimizers(optimizer))
                if len(several) > 1:
                    return [self.watch(one, name) for one in several][-1]
                inner = several[0] if several else None
            if inner is None or inner is optimizer:
                break
            if not is_accelerated:  # Its zero_grad is the inner one's, or nothing at all.
                wrappers.append(optimizer)
            optimizer = inner
        watched = self._watch(optimizer, name)
        for wrapper in wrappers:
            self.wrap_zero_grad(wrapper, None)
            self._wrap_phases(wrapper, watched)
        return watched

    def _watch(self, optimizer: Any, name: str) -> WatchedOptimizer:
        for known in self.watched:
            outer = known.optimizer()
            if outer is optimizer or any(one() is optimizer for one in known.inner):
                return known
            if isinstance(optimizer, torch.optim.Optimizer) and any(one is outer for one in inner_optimizers(optimizer)):
                self._hang(optimizer, known)  # It is made of one that is watched.
                return known
        watched = WatchedOptimizer(optimizer, name or self._name(optimizer))
        self.watched.append(watched)
        self._hang(optimizer, watched)
        self._undo.append(every_step.listen(self))
        if isinstance(optimizer, torch.optim.Optimizer):
            for inner in inner_optimizers(optimizer):
                self._join(watched, inner)
        return watched

    def adopt(self, model_params: Iterable[torch.Tensor]) -> None:
        """Watch any torch optimizer of the process once it steps one of these parameters.

        Called where attach was given no optimizer.
        """
        self.adopts = True
        self._owned = {id(p) for p in model_params}
        self._undo.append(every_step.listen(self))

    def follow(self, optimizer: Any, on_stepping: Callable[[Any], None], on_stepped: Callable[[Any], None]) -> None:
        """Call back around the steps of a torch optimizer inside another one.

        They end no step and its gradients are not read.
        """
        if not hasattr(optimizer, "register_step_pre_hook") or any(w.optimizer() is optimizer for w in self.watched):
            return
        self._met.add(optimizer)

        def reported(report: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
            def call(one: Any, args: Any, kwargs: Any) -> None:
                try:
                    report(one)
                except Exception as error:
                    self._guard("optimizer", error)

            return call

        self._undo.append(optimizer.register_step_pre_hook(reported(on_stepping)).remove)
        self._undo.append(optimizer.register_step_post_hook(reported(on_stepped)).remove)

    def meet(self, optimizer: Any) -> None:
        """Called when a torch optimizer of this process steps: watch it if it steps parameters of the model."""
        former = compiler_steps_aside()
        try:
            if optimizer in self._met:
                return
            self._met.add(optimizer)
            mine = {id(p) for p in params_of(optimizer)}
            outer = next((w for w in self.watched if any(id(p) in mine for p in w.params())), None)
            # The hooks put on the instance now are called for this same step already.
            if outer is not None and isinstance(outer.optimizer(), torch.optim.Optimizer):
                self._join(outer, optimizer)
            elif outer is None and self.adopts and not mine.isdisjoint(self._owned):
                self._watch(optimizer, "").is_dirty = True
        except Exception as error:
            self._guard("optimizer", error)
        finally:
            compiler_is_back(former)

    def _join(self, outer: WatchedOptimizer, inner: Any) -> None:
        """`inner` writes parameters of a watched optimizer: it is what that one is made of."""
        if any(w.optimizer() is inner for w in self.watched) or any(one() is inner for one in outer.inner):
            return  # One of two that step some parameters both is no part of the other.
        held = {id(p) for p in outer.params()}
        if not any(id(p) in held for p in params_of(inner)):
            return
        outer.inner.append(weakref.ref(inner))
        self._hang(inner, outer)

    def _hang(self, optimizer: Any, watched: WatchedOptimizer) -> None:
        # A subclass that never called Optimizer.__init__ has no hooks of torch.
        if "_optimizer_step_pre_hooks" in getattr(optimizer, "__dict__", {}):
            before = optimizer.register_step_pre_hook(functools.partial(self._before_step, watched))
            after = optimizer.register_step_post_hook(functools.partial(self._after_step, watched))
            self._undo += [before.remove, after.remove]
        else:
            self._wrap_step(optimizer, watched)
        self.wrap_zero_grad(optimizer, watched)
        self._wrap_phases(optimizer, watched)

    def _name(self, optimizer: Any) -> str:
        name = type(optimizer).__name__
        same = sum(one.name.partition(" ")[0] == name for one in self.watched)
        return f"{name} {same + 1}" if same else name

    def _wrap_step(self, optimizer: Any, watched: WatchedOptimizer) -> None:
        original = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._before_step(watched, optimizer, args, kwargs) or (args, kwargs)
            result = original(*args, **kwargs)
            self._after_step(watched, optimizer, args, kwargs)
            return result

        optimizer.step = step
        self._undo.append(lambda: _delete(optimizer, "step", step))

    def wrap_zero_grad(self, owner: Any, watched: WatchedOptimizer | None) -> None:
        """Report each `zero_grad` of an object: an optimizer, a wrapper around one, or a model (watched: None)."""
        if callable(getattr(owner, "zero_grad", None)):
            self._wrap(owner, "zero_grad", before=lambda: self._zeroed(watched))

    def _wrap_phases(self, optimizer: Any, watched: WatchedOptimizer) -> None:
        for name in FIRST_PHASES:
            if callable(getattr(type(optimizer), name, None)):
                self._wrap(optimizer, name, before=lambda: self._listener.first_phase(watched))
        for name in SECOND_PHASES:
            if callable(getattr(type(optimizer), name, None)):
                phase = SecondPhase(self, watched, optimizer)
                self._wrap(optimizer, name, before=phase.begin, after=phase.end)

    def _wrap(self, owner: Any, name: str, *, before: Callable[[], None], after: Callable[[], None] | None = None) -> None:
        if isinstance(owner.__dict__.get(name), InstanceWrap):
            return

        def guarded(call: Callable[[], None]) -> Callable[[], None]:
            def safely() -> None:
                former = compiler_steps_aside()
                try:
                    call()
                except Exception as error:
                    self._guard(name, error)
                finally:
                    compiler_is_back(former)

            leave_alone(safely)
            return safely

        wrap = InstanceWrap(owner, name, guarded(before), None if after is None else guarded(after))
        owner.__dict__[name] = wrap
        reference = weakref.ref(owner)
        self._undo.append(lambda: _delete(reference(), name, wrap))

    def remove(self) -> None:
        """Undo everything."""
        while self._undo:
            self._undo.pop()()

    # -- what happens ----------------------------------------------------------------------------------------------

    @property
    def running(self) -> WatchedOptimizer | None:
        """The optimizer whose `step` runs now; forwards inside it are evaluations of one step. None: none runs."""
        while self._calls:
            call = self._calls[-1]
            if call.thread != threading.get_ident():  # A backward may run in a thread of its own.
                return call.watched
            frame: types.FrameType | None = sys._getframe(1)
            while frame is not None and frame is not call.frame:
                frame = frame.f_back
            if frame is not None:
                return call.watched
            self._calls.pop()  # It raised.
        return None

    def _before_step(self, watched: WatchedOptimizer, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        former = compiler_steps_aside()
        try:
            is_nested = self.running is not None and any(one.optimizer is optimizer for one in self._calls)
            call = _OpenStepCall(watched, optimizer, sys._getframe(1), is_nested)
            self._calls.append(call)
            if is_nested:
                return None
            if any(is_closure(value) for value in (*args, *kwargs.values())):
                # Forward and backward run inside step: the gradients seen now are the former step's.
                call.has_closure = True
                reported = functools.partial(self._evaluated, call)
                return (
                    tuple(_reporting(value, reported) if is_closure(value) else value for value in args),
                    {name: _reporting(value, reported) if is_closure(value) else value for name, value in kwargs.items()},
                )
            if not self._is_made_of_others(call):
                self._listener.about_to_step(watched, optimizer, is_announced=True)
        except Exception as error:
            self._guard("optimizer", error)
        finally:
            compiler_is_back(former)
        return None

    def _zeroed(self, watched: WatchedOptimizer | None) -> None:
        if self.second is not None:
            self.second.end()  # What clears its own gradients has written the weights before.
        self._listener.zeroed(watched)

    def _evaluated(self, call: _OpenStepCall) -> None:
        """A closure has returned: the gradients of this evaluation are complete."""
        former = compiler_steps_aside()
        try:
            call.num_evaluations += 1
            if self._is_made_of_others(call) or (call.num_evaluations > 1 and call.watched.keeps_first):
                return
            # With a backward before the step the weights may have been moved by now, to where the second one looks.
            is_announced = call.num_evaluations == 1 and not call.was_dirty
            self._listener.about_to_step(call.watched, call.optimizer, is_announced=is_announced)
        except Exception as error:
            self._guard("optimizer", error)
        finally:
            compiler_is_back(former)

    def _after_step(self, watched: WatchedOptimizer, optimizer: Any, args: Any, kwargs: Any) -> None:
        former = compiler_steps_aside()
        try:
            while self._calls and self._calls[-1].optimizer is not optimizer:
                self._calls.pop()  # They raised, and this one went on.
            if not self._calls:
                return
            call = self._calls.pop()
            if call.is_nested:
                return
            if self._is_made_of_others(call) and (watched.num_steps or call.version == watched.version()):
                return  # The inner one has said so; or it was not called: a wrapper that accumulates.
            if call.has_closure and not call.num_evaluations:
                self._listener.about_to_step(watched, optimizer, is_announced=False)  # It did not call the closure.
            self._listener.stepped(watched, optimizer)
        except Exception as error:
            self._guard("optimizer", error)
        finally:
            compiler_is_back(former)

    def _is_made_of_others(self, call: _OpenStepCall) -> bool:
        return bool(call.watched.inner) and call.watched.optimizer() is call.optimizer

    # Where a whole training step is compiled, what is called around the optimizer stays as it is.
    for called in (meet, _before_step, _evaluated, _after_step):
        leave_alone(called)
    del called


class SecondPhase:
    """A call of the method that writes the update of a two-phase optimizer.

    Without an inner optimizer its end is the step.
    """

    def __init__(self, hooks: OptimizerHooks, watched: WatchedOptimizer, optimizer: Any) -> None:
        self._hooks = hooks
        self._watched = watched
        self._optimizer = weakref.ref(optimizer)
        self._num_steps = 0

    def begin(self) -> None:
        """Called before the method: the gradients of the second evaluation are complete."""
        self._hooks.second = self
        self._num_steps = self._watched.num_steps
        if self._hooks.running is None and not self._watched.inner:
            self._hooks._listener.about_to_step(self._watched, self._optimizer(), is_announced=False)

    def end(self) -> None:
        """Called after the method: the weights are written."""
        self._hooks.second = None
        if self._hooks.running is None and self._watched.num_steps == self._num_steps:
            self._hooks._listener.stepped(self._watched, self._optimizer())


class InstanceWrap:
    """A method replaced on one instance, which is copied and pickled as if it were not."""

    def __init__(self, owner: Any, name: str, before: Callable[[], None], after: Callable[[], None] | None = None) -> None:
        self._owner = weakref.ref(owner)
        self._name = name
        self._before = before
        self._after = after
        self.__wrapped__ = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        result = self.__wrapped__(*args, **kwargs)
        if self._after is not None:
            self._after()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy of the owner is in the memo before its attributes are copied.
        copied = memo.get(id(self._owner()))
        if copied is None:
            return self.__wrapped__
        return types.MethodType(getattr(type(copied), self._name), copied)

    def __reduce__(self) -> Any:
        return getattr, (self._owner(), self._name)


def params_of(optimizer: Any) -> Params:
    """Return the parameters that an optimizer holds now, in order of its groups; [] for what has no groups."""
    groups = getattr(optimizer, "param_groups", None) or []
    return [p for group in groups for p in group["params"]]


def inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers among an object's attributes."""
    for value in list(getattr(optimizer, "__dict__", {}).values()):
        if isinstance(value, torch.optim.Optimizer) and value is not optimizer:
            yield value


def is_closure(value: Any) -> bool:
    """Whether an argument of `step` is a closure that runs forward and backward inside it."""
    return callable(value) and not isinstance(value, (torch.optim.Optimizer, torch.nn.Module))


def _reporting(closure: Callable[..., Any], reported: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        reported()
        return result

    return evaluate


def _delete(owner: Any, name: str, ours: Any) -> None:
    if owner is not None and owner.__dict__.get(name) is ours:
        del owner.__dict__[name]
