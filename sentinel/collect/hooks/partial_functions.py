"""Partial functions: which functions that are not defined everywhere made a tensor, read from its autograd graph.

A logarithm of what may be negative, a division by what may be zero, a softmax over what may be masked altogether: where a
NaN is born, these are asked first. Read once a site, when the site is first described: names of nodes alone, no value of a
tensor on a device, nothing kept. What cannot be read (no graph, a compiled one, functions of users) is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

MAX_NODES = 256
"""Nodes of the graph that are read for one site; a bound on time: a transformer's layer has about a hundred."""
MAX_DEPTH = 8
"""Nodes in a row that are read to learn whether a value can be negative, masked or selected; a bound on time."""
MAX_FUNCTIONS = 8

_NODE = re.compile(r"^(?P<name>\w+?)Backward\d*$")

_LOGARITHMS = {"Log": "log", "Log2": "log2", "Log10": "log10"}
_WITHIN_ONE = {"Acos": "acos", "Asin": "asin", "Atanh": "atanh", "Erfinv": "erfinv"}
_OVERFLOWING = {"Exp": "exp", "Exp2": "exp2", "Expm1": "expm1", "Sinh": "sinh", "Cosh": "cosh"}
_OF_NUMBER = {"Mean": "mean", "Std": "std", "Var": "var", "StdMean": "std", "VarMean": "var"}
_SAME_VALUES = frozenset(
    {
        "View", "UnsafeView", "ReshapeAlias", "Expand", "Transpose", "Permute", "Unsqueeze", "Squeeze", "T", "Clone",
        "Alias", "ToCopy", "Slice", "Select", "Index", "IndexSelect", "Gather", "MaskedSelect", "AsStrided", "Unbind",
        "Split", "SplitWithSizes", "Chunk", "Flatten", "MaskedFill", "Amax", "Amin", "Max", "Min", "Dropout",
    }
)  # fmt: skip
"""Nodes whose results are elements of their first argument (or zeros among them)."""
_SUMS = frozenset({"Mean", "Sum", "Cumsum", "Cat", "Stack", "Topk", "Sort"})
_NEVER_NEGATIVE = frozenset(
    {
        "Abs", "Relu", "Sigmoid", "Softmax", "Softplus", "Exp", "Exp2", "Var", "Std", "Norm", "LinalgVectorNorm", "Sqrt",
        "Threshold", "Cosh", "Relu6", "Hardsigmoid",
    }
)  # fmt: skip
_SELECTIONS = frozenset({"Index", "MaskedSelect", "Slice"})
_BOUNDED = frozenset({"Clamp", "Hardtanh", "Tanh", "Sin", "Cos"})


def partial_functions(node: Any, measured: Mapping[Any, str]) -> tuple[str, ...]:
    """Return the functions between a tensor and those measured before it that are not defined everywhere, nearest first.

    node: the tensor's grad_fn. measured: grad_fn of tensors measured before it -> name of each.

    `log`, `div`, `softmax`, ...: its argument may lie outside the domain, as far as the graph shows. `log:blocks.1.up`: its
    argument is that very tensor. `sqrt'`, with a prime: it is defined, and its derivative is not.
    """
    found: dict[str, None] = {}
    seen, waiting = {node}, [node]
    while waiting and len(seen) < MAX_NODES:
        one = waiting.pop(0)
        name = _name(one)
        partial = _partial(one, name)
        if partial:
            argument = _argument(one, 1 if name == "Div" else 0)
            while argument is not None and argument not in measured and _name(argument) in _SAME_VALUES:
                argument = _argument(argument, 0)
            known = measured.get(argument) if argument is not None else None
            found[partial if known is None else f"{partial}:{known}"] = None
        for edge, _ in one.next_functions:
            if edge is not None and edge not in seen and edge not in measured:
                seen.add(edge)
                waiting.append(edge)
    return tuple(found)[:MAX_FUNCTIONS]


def _name(node: Any) -> str:
    matched = _NODE.match(node.name())
    return matched["name"] if matched else ""


def _argument(node: Any, at: int) -> Any:
    edges = node.next_functions
    return edges[at][0] if len(edges) > at else None


def _partial(node: Any, name: str) -> str:
    """Return the function of a node as people write it, where its argument may lie outside the domain; else empty."""
    sign = _sign(_argument(node, 0))
    if name in _LOGARITHMS:
        return _LOGARITHMS[name] if sign < 2 else ""
    if name == "Log1P":
        return "log1p" if sign < 1 else ""
    if name == "Sqrt":
        return "sqrt" if sign < 1 else "sqrt'" if sign < 2 else ""
    if name in ("Rsqrt", "Reciprocal"):
        return "" if sign == 2 else "rsqrt" if name == "Rsqrt" else "div"
    if name == "Div":
        return "div" if not _is_constant_divisor(node) and _sign(_argument(node, 1)) < 2 else ""
    if name == "Pow":
        return _power(node, sign)
    if name in _WITHIN_ONE:
        argument = _argument(node, 0)
        return "" if argument is not None and _name(argument) in _BOUNDED else _WITHIN_ONE[name]
    if name == "Acosh":
        return "acosh"
    if name in _OVERFLOWING:
        return "" if _is_below_its_maximum(_argument(node, 0)) else _OVERFLOWING[name]
    if name in ("Softmax", "LogSoftmax"):
        return "softmax" if _is_masked(_argument(node, 0)) else ""
    if name.startswith("ScaledDotProduct"):
        return "softmax" if _saved(node, "attn_mask", "attn_bias") is not None else ""
    if name in _OF_NUMBER:
        return _OF_NUMBER[name] if _is_selected(_argument(node, 0)) else ""
    return "norm'" if name in ("Norm", "LinalgVectorNorm") and sign < 2 else ""


def _sign(node: Any, depth: int = 0) -> int:
    """Return 2 where what a node makes is positive, 1 where it is not negative, 0 where neither is known.

    A number that is added to what is not negative is taken for the small one that keeps it from zero.
    """
    if node is None or depth >= MAX_DEPTH:
        return 0
    name, edges = _name(node), [edge for edge, _ in node.next_functions]
    if name in ("Clamp", "ClampMin"):
        least = _saved(node, "min")
        return 0 if not isinstance(least, int | float) or least < 0 else 2 if least > 0 else 1
    if name == "Add" and edges:
        signs = [_sign(edge, depth + 1) for edge in edges if edge is not None]
        return 0 if not signs or min(signs) < 1 else 2 if len(signs) < len(edges) else max(signs)
    if name in ("Mul", "Div") and len(edges) == 2:
        if name == "Mul" and edges[0] is not None and edges[0] is edges[1]:
            return 1
        signs = [_sign(edge, depth + 1) for edge in edges if edge is not None]
        return min(signs) if len(signs) == 2 else 0
    if name in ("Maximum", "Where") and None in edges:
        return 2  # Held against a constant: the usual guard.
    if name == "Pow":
        exponent = _saved(node, "exponent")
        return 1 if isinstance(exponent, int | float) and exponent % 2 == 0 else 0
    if name in _NEVER_NEGATIVE:
        return 1
    if name in _SAME_VALUES:
        return _sign(edges[0], depth + 1) if edges else 0
    if name in _SUMS:
        return min((_sign(edge, depth + 1) for edge in edges), default=0)
    return 0


def _power(node: Any, sign: int) -> str:
    exponent = _saved(node, "exponent")
    if not isinstance(exponent, int | float):
        return "" if sign == 2 else "pow"
    if exponent == int(exponent):
        return "pow" if exponent < 0 and sign < 2 else ""
    return "pow" if sign < (2 if exponent < 0 else 1) else "pow'" if exponent < 1 and sign < 2 else ""


def _is_constant_divisor(node: Any) -> bool:
    """Return whether a division is by a number of the program: torch makes those 0-dim tensors of a Python type's width."""
    if _argument(node, 1) is not None:
        return False
    other = _saved(node, "other")
    if other is None:
        return True
    return other.dim() == 0 and str(other.device) == "cpu" and str(other.dtype) in ("torch.float64", "torch.int64")


def _is_masked(node: Any) -> bool:
    """Return whether something is masked, or added from outside the graph, shortly before."""
    for _ in range(MAX_DEPTH):
        if node is None:
            return False
        name = _name(node)
        if name in ("MaskedFill", "Where") or (name == "Add" and any(edge is None for edge, _ in node.next_functions)):
            return True
        if name not in _SAME_VALUES and name not in ("Div", "Mul"):
            return False
        node = _argument(node, 0)
    return False


def _is_selected(node: Any) -> bool:
    """Return whether what is averaged is a selection, whose number follows the data."""
    for _ in range(MAX_DEPTH):
        if node is None:
            return False
        if _name(node) in _SELECTIONS:
            return True
        if _name(node) not in _SAME_VALUES:
            return False
        node = _argument(node, 0)
    return False


def _is_below_its_maximum(node: Any) -> bool:
    """Return whether a maximum is taken off first, as a softmax written by hand does."""
    other = _argument(node, 1) if node is not None and _name(node) == "Sub" else None
    while other is not None and _name(other) in _SAME_VALUES - {"Amax", "Max"}:
        other = _argument(other, 0)
    return other is not None and _name(other) in ("Amax", "Max", "Logsumexp")


def _saved(node: Any, *names: str) -> Any:
    """Return what a node keeps under one of some names; None: nothing, or it was freed."""
    for name in names:
        try:
            value = getattr(node, f"_saved_{name}", None)
        except RuntimeError:
            value = None
        if isinstance(value, float) and math.isnan(value):
            return None
        if value is not None:
            return value
    return None
