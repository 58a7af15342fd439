"""What torch's ParallelStyles declare of a module, read from the hooks that they left on it.

For tensors without an autograd graph (frozen layers, the first forward of reentrant checkpointing); with one, the graph
itself says more (`tensor_parallel.py`). The closures are private to torch: where they are not as expected the answer is
None, never an exception. Read in torch 2.6 to 2.13: torch/distributed/tensor/parallel/style.py and `distribute_module`.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from torch import nn


def declared_by_style(module: nn.Module, is_output: bool) -> Any:
    """Return what a style declares of the first plain output (else input) of a module, with `device_mesh` and `placements`.

    None: no style declares it.
    """
    hooks = module._forward_hooks if is_output else module._forward_pre_hooks
    try:
        for hook in reversed(list(hooks.values())):
            names = _closure(hook)
            mesh = names.get("device_mesh")
            if mesh is None:
                continue
            found = _of_function(module, names["output_fn"]) if "output_fn" in names and is_output else None
            if found is None and "self" in names:
                found = _of_style(names["self"], is_output)
            if found is not None and len(found) == mesh.ndim:
                return SimpleNamespace(device_mesh=mesh, placements=tuple(found))
    except Exception:
        return None
    return None


def _closure(hook: Any) -> dict[str, Any]:
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None)
    if code is None or not cells:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _of_function(module: nn.Module, function: Any) -> Any:
    """Return the placements of what `_prepare_output_fn` of a style hands out as a plain tensor."""
    if not isinstance(function, functools.partial):
        return None
    name, given = getattr(function.func, "__qualname__", ""), function.args
    if name in ("ColwiseParallel._prepare_output_fn", "RowwiseParallel._prepare_output_fn") and len(given) == 2:
        return given[0] if given[1] else None
    if name == "SequenceParallel._prepare_output_fn" and given == (True,):
        for hook in module._forward_pre_hooks.values():
            before = _closure(hook).get("input_fn")
            if isinstance(before, functools.partial) and before.func.__qualname__ == "SequenceParallel._prepare_input_fn":
                return before.args[0]
    return None


def _of_style(style: Any, is_output: bool) -> Any:
    """Return what PrepareModuleInput, PrepareModuleOutput, or both in one, make of the first tensor, where it is plain."""
    if hasattr(style, "prepare_module_input") and hasattr(style, "prepare_module_output"):
        style = style.prepare_module_output if is_output else style.prepare_module_input
    if not getattr(style, "use_local_output", False):
        return None
    layouts = getattr(style, "desired_output_layouts" if is_output else "desired_input_layouts", None)
    return None if not layouts or layouts[0] is None else layouts[:1]
