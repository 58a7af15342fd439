"""Ops in compiled graphs: each hands a tensor, and later its gradient, to the tap that listens at its site.

Python does not run inside a compiled graph, and an op that writes into a buffer ties forwards to backwards: micro-batches
that go F F F B B B then fail. These ops are effectful instead: kept, in their order, by every pass, and run by the host. An
op answers with a ticket, a small tensor that the graph carries to the backward of the very same forward; so micro-steps
need no argument, no counter and no recompile, however forwards and backwards alternate.

The gradient is asked for while the graph is traced, by a tensor hook in the op's own autograd kernel: the tensor stays what
it is, where an identity in its place would be a view that in-place ops refuse. The site is a tensor too, so that blocks that
are compiled one by one share their graph.
"""

from __future__ import annotations

import itertools
import logging
import operator
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode, _pop_mode_temporarily

log = logging.getLogger("sentinel")

IS_INPUT, IS_FIRST, IS_PARAMETER, HAS_GRADIENT, IS_WITHOUT_GRAPH, IN_GRAPH, ENTERS_GRAPH, LEAVES_GRAPH = (
    1 << at for at in range(8)
)
"""Bits of `how`: whose tensor it is, what autograd will do with it, and where in the compiled graph it stands.
Inside a graph memory is used again without a trace: only what enters or leaves it can be recognised by its identity."""


class Ticket(NamedTuple):
    """What the forward's op hands to the backward's: an int64 tensor of five numbers, on the host."""

    site: int = -1
    entry: int = -1
    """Id of the tensor's entry; -1: it was not measured."""
    micro_step: int = 0
    step: int = 0
    """Number of steps that had ended in this process."""
    serial: int = 0
    """Unique in this process; below 0: the gradient is not measured; 0: no listener answered."""


class OpListener(Protocol):
    """What the ops of a site call: a module's tap, or a chunk."""

    def tensor_passes(self, tensor: torch.Tensor, former: Ticket, path: str, how: int) -> Ticket:
        """Take a tensor, and return the ticket for its backward.

        former: the ticket that another site of the graph returned for the very same tensor. path: of the tensor within the
        module's inputs or outputs. how: bits, as IS_INPUT.
        """

    def gradient_passes(self, gradient: torch.Tensor, ticket: Ticket) -> None: ...

    def forward_begins(self) -> None: ...

    def forward_ends(self) -> Ticket: ...

    def guard_op(self, error: Exception) -> None:
        """Report an exception of the listener; the graph goes on."""


_listeners: weakref.WeakValueDictionary[int, OpListener] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_serials = itertools.count(1)
NO_TICKET = Ticket()

on_root_traced: list[Callable[[], None]] = []
"""Called while a graph is traced that holds a chunk's whole forward, before the modules inside are."""
on_cuda_graph: list[Callable[[], None]] = []
"""Called while a graph is traced that is meant to be replayed as a CUDA graph."""
GRAPHED_DEVICES = ("cuda",)


def enlist(listener: OpListener) -> torch.Tensor:
    """Return the site of a listener, a 0-dim int64 tensor on the host. Listeners are held weakly."""
    number = next(_numbers)
    _listeners[number] = listener
    with _disable_current_modes():  # While a graph is traced new tensors are not real.
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def new_serial() -> int:
    """Return a number that no ticket of this process has."""
    return next(_serials)


# -- what runs when the graph runs ------------------------------------------------------------------------------------


def _paper(ticket: Ticket) -> torch.Tensor:
    return torch.tensor(ticket, dtype=torch.int64, device="cpu")


def _run(site: int, call: Callable[[OpListener], Ticket | None]) -> torch.Tensor:
    """Call the listener of a site; whatever happens there, the graph goes on."""
    listener = _listeners.get(site)
    ticket: Ticket | None = None
    if listener is not None:
        try:
            ticket = call(listener)
        except Exception as error:
            listener.guard_op(error)
    return _paper(NO_TICKET if ticket is None else ticket)


def _observe(tensor: torch.Tensor, site: torch.Tensor, former: torch.Tensor | None, path: str, how: int) -> torch.Tensor:
    reported = NO_TICKET if former is None else Ticket(*former.tolist())
    return _run(int(site), lambda listener: listener.tensor_passes(tensor, reported, path, how))


def _observe_gradient(gradient: torch.Tensor, ticket: torch.Tensor) -> None:
    reported = Ticket(*ticket.tolist())
    if reported.serial > 0:
        _run(reported.site, lambda listener: listener.gradient_passes(gradient, reported))


def _begin_forward(site: torch.Tensor) -> None:
    _run(int(site), lambda listener: listener.forward_begins())


def _end_forward(output: torch.Tensor, site: torch.Tensor) -> torch.Tensor:
    return _run(int(site), lambda listener: listener.forward_ends())


# -- what runs while the graph is traced (and, where nothing is traced below it, when it runs) -----------------------------


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds, or the tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


class _Traced:
    """The tensors of the graphs that are being traced now, each with the ticket of its last site."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, list[torch.Tensor]]] = {}

    def find(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        found = self._seen.get(id(tensor))
        return found[2] if found is not None and found[0]() is tensor and found[1] == tensor._version else None

    def remember(self, tensor: torch.Tensor, ticket: list[torch.Tensor]) -> None:
        number = id(tensor)
        gone = weakref.ref(tensor, lambda reference: self._forget(number, reference))
        self._seen[number] = (gone, tensor._version, ticket)

    def _forget(self, number: int, reference: weakref.ref[torch.Tensor]) -> None:
        if number in self._seen and self._seen[number][0] is reference:
            del self._seen[number]


_traced = _Traced()


def _position(op: Any) -> int:
    """Return where the tensor of the op that is being traced stands in the graph: ENTERS_GRAPH, LEAVES_GRAPH, or neither."""
    nodes: list[fx.Node] = []
    frame = sys._getframe(2)
    while frame is not None and len(nodes) < 2:
        node = frame.f_locals.get("n") if frame.f_code.co_name == "run_node" else None
        if isinstance(node, fx.Node) and node not in nodes:
            nodes.append(node)
        frame = frame.f_back  # type: ignore[assignment]
    # Inside another op's body (a checkpointed part) what enters and leaves is not the graph's.
    if len(nodes) != 1 or nodes[0].target is not op:
        return 0
    tensor = nodes[0].args[0]
    if not isinstance(tensor, fx.Node):
        return 0
    how = ENTERS_GRAPH if tensor.op == "placeholder" else 0
    following = nodes[0]
    while following.op != "output":
        following = following.next
        if _writes(following):  # Perhaps into this tensor: then what leaves is another.
            return how
    return how | (LEAVES_GRAPH if tensor in following.all_input_nodes else 0)


def _writes(node: fx.Node) -> bool:
    """Whether a node may change a tensor in place."""
    if node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            return bool(schema.is_mutable)
        name = getattr(node.target, "__name__", "")
        is_operator = getattr(node.target, "__module__", "") in ("_operator", "operator")
        if is_operator:
            return name in ("setitem", "delitem") or (name.startswith("i") and hasattr(operator, f"__{name}__"))
    elif node.op == "call_method":
        name = str(node.target)
    else:
        return node.op == "call_module"
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name == "__setitem__" or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def _stays_in_forward() -> AbstractContextManager[Any]:
    """Take the ops that are being traced out of a checkpointed part around them: its order may not be recomputed."""
    for key in ("recompute", "ac_graph_id"):
        fx.traceback.current_meta.pop(key, None)
    if type(_get_current_dispatch_mode()).__name__ in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"):
        return _pop_mode_temporarily()
    return nullcontext()


def _observe_traced(tensor: torch.Tensor, site: torch.Tensor, former: torch.Tensor | None, path: str, how: int) -> Any:
    """Autograd's kernel of `observe`: the tensor and its future are known here, below it they are not."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if how & IN_GRAPH:  # Traced before: the graph runs.
        with torch._C._AutoDispatchBelowAutograd():
            return _OBSERVE(tensor, site, former, path, how)
    kept = _kept(tensor)
    is_graph = isinstance(kept, FunctionalTensor)
    known = _traced.find(tensor) if is_graph else None
    if is_graph:
        how |= IN_GRAPH | _position(_OBSERVE)
        _note_cuda_graph(kept)
    if not torch.is_grad_enabled():
        how |= IS_WITHOUT_GRAPH
    elif tensor.requires_grad and not how & IS_PARAMETER:
        how |= HAS_GRADIENT
    with _stays_in_forward(), torch._C._AutoDispatchBelowAutograd():
        ticket = _OBSERVE(kept, site, known[0] if known is not None else None, path, how)
    if known is not None:
        known[0] = ticket  # The hook below asks with the last one: it holds what all sites of the tensor have answered.
        return ticket
    held = [ticket]
    if is_graph:
        _traced.remember(tensor, held)
    if how & HAS_GRADIENT and not isinstance(kept, FakeTensor):
        tensor.register_hook(lambda gradient: _answer(gradient, held[0]))  # type: ignore[no-untyped-call]
    return ticket


def _note_cuda_graph(tensor: torch.Tensor) -> None:
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and tensor.device.type in GRAPHED_DEVICES and config.triton.cudagraphs:
        for call in on_cuda_graph:
            call()


def _answer(gradient: torch.Tensor | None, ticket: torch.Tensor) -> None:
    if gradient is not None:
        _OBSERVE_GRADIENT(_kept(gradient), ticket)


def _end_forward_traced(output: torch.Tensor, site: torch.Tensor) -> Any:
    """Autograd's kernel of `end_forward`: a hook on the output reports the backward and its ticket."""
    with torch._C._AutoDispatchBelowAutograd():
        ticket = _END_FORWARD(_kept(output), site)
    if torch.is_grad_enabled() and output.requires_grad:
        output.register_hook(lambda gradient: _answer(gradient, ticket))  # type: ignore[no-untyped-call]
    return ticket


def _observe_gradient_traced(gradient: torch.Tensor, ticket: torch.Tensor) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        _OBSERVE_GRADIENT(gradient, ticket)


def _fake_ticket(*args: Any) -> torch.Tensor:
    return torch.empty(len(NO_TICKET), dtype=torch.int64, device="cpu")


def _fake_nothing(*args: Any) -> None:
    return None


def _fake_begin(site: torch.Tensor) -> None:
    for call in on_root_traced:
        call()


_library: Any = torch.library.Library("sentinel", "DEF")  # type: ignore[no-untyped-call]


_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
"""Python does not run when a CUDA graph is replayed: torch cuts the graph at such ops, or does without."""


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], traced: Callable[..., Any] | None = None) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    if traced is not None:
        _library.impl(name, traced, "Autograd")
    torch.library.register_fake(f"sentinel::{name}", fake, lib=_library)
    return getattr(torch.ops.sentinel, name).default


_OBSERVE = _define(
    "observe(Tensor tensor, Tensor site, Tensor? former, str path, int how) -> Tensor",
    _observe, _fake_ticket, _observe_traced,
)  # fmt: skip
_OBSERVE_GRADIENT = _define(
    "observe_gradient(Tensor gradient, Tensor ticket) -> ()", _observe_gradient, _fake_nothing, _observe_gradient_traced
)
_BEGIN_FORWARD = _define("begin_forward(Tensor site) -> ()", _begin_forward, _fake_begin)
_END_FORWARD = _define("end_forward(Tensor output, Tensor site) -> Tensor", _end_forward, _fake_ticket, _end_forward_traced)
observe, begin_forward, end_forward = _OBSERVE, _BEGIN_FORWARD, _END_FORWARD


def _make_effectful() -> str:
    """Declare to torch that the ops have effects, in order; return why that is impossible, or nothing."""
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    except ImportError:
        return f"torch {torch.__version__} knows no effectful ops"
    for op in (_OBSERVE, _OBSERVE_GRADIENT, _BEGIN_FORWARD, _END_FORWARD):
        try:
            _register_effectful_op(op._name, _EffectType.ORDERED)
        except Exception:
            _register_effectful_op(op, _EffectType.ORDERED)
        fx.node.has_side_effect(op)
    return ""


unavailable = _make_effectful()
"""Why graphs cannot be measured inside with this torch; empty: they can."""
