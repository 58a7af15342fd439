"""Compiled parts of a model: which they are, and what hooks do while a graph is traced through them.

Hooks that a graph is traced through run once, in the tracer, and leave ops behind (`ops.py`). The tracer does not
watch what hooks are installed, so in compiled parts they stand from before the first compiled call until the end; what they
leave behind depends on two booleans alone, each a guard: a graph without ops, one with the black box, one with every site.
Each is compiled when it is first needed and kept, and nothing else that is switched while training compiles anything.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn

from sentinel.collect.compiled.capability import is_tested
from sentinel.collect.compiled.ops import IS_FIRST, IS_INPUT, IS_PARAMETER, begin_forward, end_forward, observe
from sentinel.collect.hooks.nesting import MAX_NESTING

TOO_LATE = (
    "{}: compiled and called before attach, so that nothing inside is seen; attach before the first call, or call "
    "torch._dynamo.reset() after attach. Outer borders, parameters and gradients are measured"
)

CUDA_GRAPHS = (
    "a graph with ops of Sentinel was compiled for CUDA graphs, which cannot hold them: torch cuts it at each op or runs it "
    "as it is, slower than without Sentinel. Rows are exact; with black_box: false and no kinds of modules it is whole again"
)


class GraphGuard:
    """What graphs hold that are traced or chosen now.

    Graphs are guarded by these values: none is set while one is traced.
    """

    def __init__(self) -> None:
        self.borders = False
        """The black box."""
        self.sites = False
        """Every place that can be observed, whether it is due or not."""
        self.is_usable = is_tested()
        """This torch keeps the ops: it is one that the tests ran on, or it was tried out."""


gate = GraphGuard()


class WantsGraphs(Protocol):
    """What the graphs of a chunk's compiled parts are to hold."""

    wants_borders: bool
    wants_sites: bool


_wanting: weakref.WeakSet[WantsGraphs] = weakref.WeakSet()


def set_gate(one: WantsGraphs | None = None) -> None:
    """Set the guard to what any chunk of this process wants. one: a chunk whose wants may be new; None: one has left."""
    if one is not None:
        _wanting.add(one)
    gate.borders = any(one.wants_borders for one in _wanting)
    gate.sites = any(one.wants_sites for one in _wanting)


# -- the eager side: hooks of ours that run under a compiler are not for it to compile --------------------------------

_eval_frame: Any = getattr(torch._C, "_dynamo", None) and torch._C._dynamo.eval_frame
_set: Callable[[Any], Any] = getattr(_eval_frame, "set_eval_frame", lambda callback: None)


def compiler_steps_aside() -> Any:
    """Keep the compiler from compiling what runs until `compiler_is_back`.

    Return what that is to be given; None: no compiler is active.
    """
    return _set(None)


def compiler_is_back(former: Any) -> None:
    """Undo `compiler_steps_aside`."""
    if former is not None:
        _set(former)


def run_as_it_is(code: CodeType) -> None:
    """Have the compiler never compile this function by itself; graphs traced through its callers still contain it."""
    skip = getattr(_eval_frame, "skip_code", None)
    if skip is None and hasattr(_eval_frame, "set_code_exec_strategy"):
        action = _eval_frame._FrameAction
        _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif skip is not None:
        skip(code)


def leave_alone(function: Any) -> None:
    """Have the compiler neither compile a function nor look into it from a caller that it compiles: a graph ends there."""
    run_as_it_is(function.__code__)
    # What torch.compiler.disable says of its functions, without the import of the compiler, which takes seconds.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = None


# -- which parts are compiled ------------------------------------------------------------------------------------------


def compiled_parts(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the outermost modules that torch.compile was applied to; `""` is the whole chunk."""
    if "torch._dynamo" not in sys.modules:
        return []
    found: list[str] = []
    for name, module in modules.items():
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules
        if is_compiled and not any(is_inside(name, part) for part in found):
            found.append(name)
    return found


def is_inside(name: str, part: str) -> bool:
    """Return whether the module `name` is the compiled part `part`, or inside it."""
    return not part or name == part or name.startswith(part + ".")


# -- while a graph is traced: what follows is run by the tracer alone, and must stay simple enough for it --------------


def _is_exporting() -> bool:
    return False


_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", _is_exporting)


def trace_tensors(site: torch.Tensor, module: nn.Module, values: tuple[Any, ...], is_border: bool, how: int) -> None:
    """Leave an op in the graph for each tensor of a module that may be measured.

    site: of the module's listener. is_border: the first tensor is a border. how: bits that describe the first tensor.
    """
    # A forward without gradients is evaluation, or the first pass of a part that is checkpointed.
    if (not torch.is_grad_enabled() and not module.training) or _exporting():
        return
    if not gate.is_usable or (not gate.sites and not (gate.borders and is_border)):
        return
    for value in values:
        for path, tensor in _floating_in(value):
            if how & IS_FIRST:
                observe(tensor, site, None, path, how | (IS_PARAMETER if isinstance(tensor, nn.Parameter) else 0))
                how &= ~IS_FIRST
            elif gate.sites and not isinstance(tensor, nn.Parameter) and (tensor.requires_grad or not how & IS_INPUT):
                observe(tensor, site, None, path, how)


def trace_begin(site: torch.Tensor) -> None:
    """Leave an op in the graph where a chunk's forward begins."""
    if torch.is_grad_enabled() and gate.is_usable and not _exporting():
        begin_forward(site)


def trace_end(site: torch.Tensor, output: Any) -> None:
    """Leave an op in the graph where a chunk's forward ends. output: what the chunk returns, tensors in any nesting."""
    if torch.is_grad_enabled() and gate.is_usable and not _exporting():
        last = site
        for _, tensor in _floating_in(output):
            if tensor.requires_grad:
                last = tensor
                break
        end_forward(last, site)


def _floating_in(value: Any, path: str = "", nesting: int = 0) -> list[tuple[str, torch.Tensor]]:
    """As `nesting.tensors_in`, in code that every tracer can trace."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return []
        return [("" if path.strip("0.") == "" else f":{path}", value)]
    if nesting >= MAX_NESTING or value is None:
        return []
    found = []
    for key, item in _items(value):
        found += _floating_in(item, f"{path}.{key}" if path else str(key), nesting + 1)
    return found


def _items(value: Any) -> Iterator[tuple[Any, Any]] | list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        return list(zip(fields, value, strict=True)) if fields else list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []
