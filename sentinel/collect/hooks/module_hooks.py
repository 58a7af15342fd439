"""The forward hooks of one module: installed while it is measured, and for good in a part that is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.compiled.graphs import compiler_is_back, compiler_steps_aside, run_as_it_is, trace_tensors
from sentinel.collect.compiled.ops import IS_FIRST, IS_INPUT
from sentinel.collect.hooks.graph_tap import NO_OUTPUTS
from sentinel.collect.hooks.pickle_stub import stub_methods
from sentinel.native import take_again

if TYPE_CHECKING:
    from sentinel.collect.hooks.module_tap import ModuleTap

NO_INPUTS = "rows of its inputs, and of their gradients, are missing from this step"


class ModuleHooks:
    """Hands what a module takes and returns to its tap, or, while a compiler traces it, leaves ops behind in the graph."""

    def __init__(self, tap: ModuleTap, module: nn.Module) -> None:
        self._tap = tap
        self._module = module
        self._costs = tap.chunk.recorder.recording.costs
        self._pre: RemovableHandle | None = None
        self._post: RemovableHandle | None = None
        self._former: list[Any] = []
        """What `compiler_is_back` needs, while the module runs without it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHooks:
        return self  # A copied model (an EMA, say) carries hooks that see it is not theirs, and do nothing.

    def __reduce__(self) -> Any:
        return stub_methods(type(self))

    def hang(self, *, before: bool, after: bool) -> None:
        """Install or remove the hooks. before, after: whether those before and after the forward are needed."""
        if before and self._pre is None:
            self._pre = self._module.register_forward_pre_hook(self._before, with_kwargs=True)
        elif not before and self._pre is not None:
            self._pre.remove()
            self._pre = None
        if after and self._post is None:
            self._post = self._module.register_forward_hook(self._after)
        elif not after and self._post is not None:
            self._post.remove()
            self._post = None

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in (self._pre, self._post):
            if handle is not None:
                handle.remove()
        self._pre = self._post = None

    def move_last(self) -> None:
        """Move the hooks behind those that users added later, which may replace inputs and outputs."""
        pairs: Any = ((self._pre, self._module._forward_pre_hooks), (self._post, self._module._forward_hooks))
        for handle, hooks in pairs:
            if handle is not None and next(reversed(hooks)) != handle.id:
                hooks.move_to_end(handle.id)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            trace_tensors(self._tap.graph.site, module, (args, kwargs), self._tap.is_border_in, IS_INPUT | IS_FIRST)
            return
        former, tap, costs = compiler_steps_aside(), self._tap, self._costs
        payer = costs.turn_to(costs.first_due(tap.takes_in)) if costs.is_on else 0
        try:
            if former is not None or kwargs or len(args) != 1 or not take_again(tap, args[0], True, module):
                tap.called(module, args, kwargs)
        except Exception as error:
            tap.chunk.recorder.guard(tap.name, error, given=(args, kwargs), lost=NO_INPUTS)
        finally:
            if costs.is_on:
                costs.turn_to(payer)
            if former is not None and self._is_left_alone(module):
                self._former.append(former)  # Until it returns; if it raises, until the compiled call has ended.
            else:
                compiler_is_back(former)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            trace_tensors(self._tap.graph.site, module, (output,), self._tap.is_border_out, IS_FIRST)
            return
        former, tap, costs = compiler_steps_aside(), self._tap, self._costs
        payer = costs.turn_to(costs.first_due(tap.takes_out)) if costs.is_on else 0
        try:
            if former is not None or not take_again(tap, output, False, module):
                tap.returned(module, output)
        except Exception as error:
            tap.chunk.recorder.guard(tap.name, error, given=output, lost=NO_OUTPUTS)
        finally:
            if costs.is_on:
                costs.turn_to(payer)
            compiler_is_back(self._former.pop() if self._former else former)

    def _is_left_alone(self, module: nn.Module) -> bool:
        """Whether the compiler, which met a module of torch's by itself, would compile it for no reason but our hooks."""
        is_torchs = type(module).__module__.startswith(("torch.nn.", "torch.ao.")) and not module._modules
        return is_torchs and len(module._forward_hooks) == len(module._forward_pre_hooks) == 1 and self._post is not None


for _hook in (ModuleHooks._before, ModuleHooks._after):
    run_as_it_is(_hook.__code__)
