"""Calls of torch.distributed as they are made: what goes in, what comes out, and when that is complete.

Every Python call ends in a method of `ProcessGroup`, however it was imported, batched or coalesced; functional collectives
(DTensor, tensor parallel) end in C++ and are seen at their Python functions. What C++ sends by itself (the reducer of
DistributedDataParallel, the backward of functional collectives) passes neither.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from sentinel.collect.hooks.interception import Interception


class Form(NamedTuple):
    """The signature of a method: positions of the tensors that are sent and received, and the operation it is."""

    op: str
    """Name of the operation as users call it: `all_reduce`."""
    sent: int = -1
    received: int = -1
    root: str = ""
    """`sends`: only the root's tensor means something before; `receives`: only the root's does behind."""
    names: tuple[str, ...] = ()
    """Keywords of its tensors, by position."""


_IO = ("tensors",)
_OUT_IN = ("output_tensors", "input_tensors")
METHODS: dict[str, Form] = {
    "allreduce": Form("all_reduce", 0, 0, names=_IO),
    "allreduce_coalesced": Form("all_reduce", 0, 0, names=_IO),
    "broadcast": Form("broadcast", 0, 0, "sends", names=_IO),
    "reduce": Form("reduce", 0, 0, "receives", names=_IO),
    "allgather": Form("all_gather", 1, 0, names=_OUT_IN),
    "allgather_coalesced": Form("all_gather", 1, 0, names=("output_lists", "input_list")),
    "_allgather_base": Form("all_gather_into_tensor", 1, 0, names=("output", "input")),
    "all_gather_single": Form("all_gather_into_tensor", 1, 0, names=("output", "input")),
    "allgather_into_tensor_coalesced": Form("all_gather_into_tensor", 1, 0, names=("outputs", "inputs")),
    "all_gather_single_coalesced": Form("all_gather_into_tensor", 1, 0, names=("outputs", "inputs")),
    "gather": Form("gather", 1, 0, names=_OUT_IN),
    "scatter": Form("scatter", 1, 0, names=_OUT_IN),
    "reduce_scatter": Form("reduce_scatter", 1, 0, names=_OUT_IN),
    "_reduce_scatter_base": Form("reduce_scatter_tensor", 1, 0, names=("outputTensor", "inputTensor")),
    "reduce_scatter_single": Form("reduce_scatter_tensor", 1, 0, names=("output", "input")),
    "reduce_scatter_tensor_coalesced": Form("reduce_scatter_tensor", 1, 0, names=("outputs", "inputs")),
    "reduce_scatter_single_coalesced": Form("reduce_scatter_tensor", 1, 0, names=("outputs", "inputs")),
    "alltoall": Form("all_to_all", 1, 0, names=_OUT_IN),
    "alltoall_base": Form("all_to_all_single", 1, 0, names=("output", "input")),
    "all_to_all_single": Form("all_to_all_single", 1, 0, names=("output", "input")),
    "send": Form("send", sent=0, names=_IO),
    "recv": Form("recv", received=0, names=_IO),
    "recv_anysource": Form("recv", received=0, names=_IO),
    "barrier": Form("barrier"),
    "monitored_barrier": Form("barrier"),
}
"""Method of `torch._C._distributed_c10d.ProcessGroup` -> its form. Names differ between versions of torch."""

FUNCTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "torch.distributed._functional_collectives": (
        ("broadcast", "broadcast"), ("all_reduce", "all_reduce"), ("all_gather_tensor", "all_gather_into_tensor"),
        ("all_gather_single", "all_gather_into_tensor"), ("all_gather_tensor_autograd", "all_gather_into_tensor"),
        ("all_gather_single_autograd", "all_gather_into_tensor"), ("reduce_scatter_tensor", "reduce_scatter_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"), ("reduce_scatter_tensor_autograd", "reduce_scatter_tensor"),
        ("reduce_scatter_single_autograd", "reduce_scatter_tensor"), ("all_reduce_coalesced", "all_reduce"),
        ("all_gather_into_tensor_coalesced", "all_gather_into_tensor"),
        ("all_gather_single_coalesced", "all_gather_into_tensor"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_tensor"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor"), ("all_to_all_single", "all_to_all_single"),
        ("all_to_all_single_autograd", "all_to_all_single"), ("permute_tensor", "permute"),
    ),
    "torch.distributed.tensor._collective_utils": (("shard_dim_alltoall", "all_to_all_single"),),
}  # fmt: skip
"""Module -> (functional collective, op): the first argument goes in, the result comes out."""

OBJECT_OPS = frozenset({
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
})  # fmt: skip
"""They send pickled Python objects, which are no tensors of the training."""


class CallListener(Protocol):
    """Called at each collective while `is_due`. Must not raise: an exception would reach the trainer."""

    is_due: bool

    def began(self, form: Form, group: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called before a call; return an object that stands for it, handed to `ended` and `failed`; None: not measured."""

    def ended(self, call: Any, result: Any) -> None:
        """Called when the call has returned. result: a Work or tensors, which may not be complete yet."""

    def failed(self, call: Any) -> None:
        """Called when the call has raised."""

    def arrived(self, tensor: Any) -> None:
        """Called when the trainer has waited for the result of a functional collective."""

    def coalescing(self, group: Any, work: Any) -> None:
        """Called when a group begins to coalesce calls (work: False), and when it has sent them (their Work, or None)."""


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument: one, a list of them, or lists of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)


def argument(form: Form, at: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a method's argument at a position, however it was given."""
    if at < 0:
        return None
    if at < len(args):
        return args[at]
    return kwargs.get(form.names[at]) if at < len(form.names) else None


def _replace_all(calls: Interception[CallListener]) -> None:
    group = getattr(sys.modules.get("torch._C._distributed_c10d"), "ProcessGroup", None)
    if group is None:
        return
    for name, form in METHODS.items():
        if hasattr(group, name):
            calls.replace(group, name, named(_watched(form, getattr(group, name)), name))
    for name in ("_start_coalescing", "_end_coalescing"):
        if hasattr(group, name):
            calls.replace(group, name, named(_coalesced(getattr(group, name), name.startswith("_end")), name))
    for path, functions in FUNCTIONS.items():
        module = importlib.import_module(path)
        for name, op in functions:
            original = getattr(module, name, None)
            if original is not None:
                calls.replace_everywhere(name, original, _functional(Form(op, 0, names=("self",)), original))
        wait = getattr(module, "wait_tensor", None)
        if wait is not None:
            calls.replace_everywhere("wait_tensor", wait, _awaited(wait))


calls: Interception[CallListener] = Interception(_replace_all)
"""The listeners to collectives. While there are none, torch is unchanged."""


def named(ours: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give a method's replacement its name in frames too: C++ that asks for an override sees who calls it, and stops."""
    ours.__code__ = ours.__code__.replace(co_name=name)
    return ours


def _watched(form: Form, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        for user in calls.users:
            if user.is_due:
                break
        else:
            return original(self, *args, **kwargs)
        return _reported(form, self, args, kwargs, lambda: original(self, *args, **kwargs))

    return method


def _functional(form: Form, original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(original).parameters)
    word = "group" if "group" in parameters else "mesh"
    at = parameters.index(word) if word in parameters else len(parameters)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not any(user.is_due for user in calls.users):
            return original(*args, **kwargs)
        group = args[at] if at < len(args) else kwargs.get(word)
        return _reported(form, group, args, kwargs, lambda: original(*args, **kwargs))

    return function


def _reported(form: Form, group: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
    tokens = [(user, token) for user in calls.users if (token := user.began(form, group, args, kwargs)) is not None]
    try:
        result = call()
    except BaseException:
        for user, token in tokens:
            user.failed(token)
        raise
    for user, token in tokens:
        user.ended(token, result)
    return result


def _awaited(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait_tensor(tensor: Any) -> Any:
        result = original(tensor)
        if not torch.compiler.is_compiling():
            for user in calls.users:
                user.arrived(tensor)
        return result

    return wait_tensor


def _coalesced(original: Callable[..., Any], is_end: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        for user in calls.users:
            user.coalescing(self, work if is_end else False)
        return work

    return method
