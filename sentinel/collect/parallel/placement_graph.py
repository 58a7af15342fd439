"""How plain tensors are placed over the tensor-parallel group, read from the autograd graph of one forward.

`_ToTorchTensor` and `_FromTorchTensor` (torch/distributed/tensor/_api.py, read in 2.6 to 2.13) know the placement of the
plain tensor on their outside, and of its gradient. From there this follows operations that cannot change a placement, and
nothing else: what is not certain is `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch

from sentinel.collect.parallel.placements import axes_of, is_dtensor, is_shard
from sentinel.place import Place

Key: TypeAlias = tuple[int, int]
"""(id of an autograd node, number of its output). The id is valid while the node is referenced."""

LAYOUT = frozenset((
    "View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Unsqueeze", "Squeeze", "Clone", "ToCopy", "Alias",
    "ViewAsComplex", "ViewAsReal",
))  # fmt: skip
"""Operations that keep every element, in another order or type."""
ELEMENTWISE = LAYOUT | frozenset((
    "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Sqrt", "Rsqrt", "Reciprocal", "Abs", "Clamp",
    "ClampMin", "ClampMax", "Erf", "Sin", "Cos", "Sigmoid", "Tanh", "Silu", "Gelu", "Relu", "LeakyRelu", "Elu", "Softplus",
    "Hardtanh", "Hardswish", "Hardsigmoid", "Mish", "MaskedFill", "Maximum", "Minimum",
))  # fmt: skip
"""Operations whose every element comes from the elements at its own place."""
DETERMINED = ELEMENTWISE | frozenset((
    "Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Dot", "NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm", "Mean", "Sum", "Var",
    "Std", "Softmax", "LogSoftmax", "Embedding", "Convolution", "Cat", "Stack", "Expand", "Repeat", "Cumsum",
    "LinalgVectorNorm", "Logsumexp", "NllLoss", "MseLoss", "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductEfficientAttention", "ScaledDotProductCudnnAttention",
))  # fmt: skip
"""Operations that give the same on all ranks where their inputs are the same: nothing random, nothing picked by rank."""
PER_HEAD = ELEMENTWISE | frozenset((
    "Expand", "Repeat", "Slice", "Select", "Split", "SplitWithSizes", "Chunk", "Unbind", "Cat", "Stack", "Softmax",
    "SafeSoftmax", "Where",
))  # fmt: skip
"""Operations that mix no two heads, on the way from projections that are cut by heads to the logits of attention."""
PRODUCTS = frozenset(("Bmm", "Baddbmm", "Mm", "Matmul"))
HANDED_ON = frozenset(("RegisterPostBackwardFunction", "RegisterPreBackwardFunction"))
"""FSDP's marks: each output is the input of the same number."""


class HeldPlacement(NamedTuple):
    """The placement of a tensor over the tensor-parallel group."""

    word: str
    """replicate, shard, partial or unknown; `leaf`: a leaf, whose placement its readers decide; `within`: it is a
    DTensor."""
    dim: int | None = None
    """The dimension that is cut, where that is known."""


UNKNOWN, REPLICATE, LEAF, WITHIN = (
    HeldPlacement("unknown"),
    HeldPlacement("replicate"),
    HeldPlacement("leaf"),
    HeldPlacement("within"),
)


def name_of(node: Any) -> str:
    """Return a node's operation without number: `Add`, `_FromTorchTensor`, `AccumulateGrad`."""
    name: str = node.name()
    return name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def word_of(spec: Any, place: Place) -> str:
    """Return the placement over tp of what has a `device_mesh` and `placements`; unknown for None."""
    return _held(spec, place).word


class PlacementGraph:
    """Every tensor of the graph behind `outputs` and `sites`, and how it is placed.

    sites: (node, number) of the tensors that are asked for; a leaf stands for its node.
    """

    def __init__(self, place: Place, outputs: Iterable[torch.Tensor], sites: list[tuple[Any, int]]) -> None:
        self._place = place
        ends = [(tensor.grad_fn, tensor.output_nr) for tensor in outputs if tensor.grad_fn is not None]
        self._ends = {(id(node), number) for node, number in ends}
        self._nodes: list[Any] = []
        """Each behind those that made its inputs."""
        self._leaves: dict[int, int] = {}
        """Id of a leaf tensor -> id of its node."""
        self._order([node for node, _ in [*ends, *sites] if not isinstance(node, torch.Tensor)])
        self._consumers: dict[Key, list[Any]] = {}
        for node in self._nodes:
            for source, number in node.next_functions:
                if source is not None:
                    self._consumers.setdefault((id(source), number), []).append(node)
        self._values: dict[Key, HeldPlacement] = {}
        self._declared: dict[Key, HeldPlacement] = {}
        """The placement that `from_local` calls declare of a tensor, where they agree."""
        self._is_replicated: dict[Key, bool] = {}
        """Whether all consumers treat a tensor as replicated; absent: no consumer shows it."""
        self._gradients: dict[Key, HeldPlacement] = {}
        for node in self._nodes:
            for key, held in self._made_by(node):
                self._values[key] = held
        for node in reversed(self._nodes):
            for key in self._outputs(node):
                self._collect_declarations(key)
        for node in self._nodes:
            for key, held in self._made_by(node):
                self._values[key] = self._judged(key, held)
        for node in reversed(self._nodes):
            for key in self._outputs(node):
                self._gradients[key] = self._arriving(node, key)

    def words(self, node: Any, number: int) -> tuple[str, str]:
        """Return the placements over tp of a tensor and of its gradient: replicate, shard, partial or unknown."""
        key = (self._leaves.get(id(node), 0), 0) if isinstance(node, torch.Tensor) else (id(node), number)
        both = self._values.get(key, UNKNOWN).word, self._gradients.get(key, UNKNOWN).word
        return tuple(word if word in ("replicate", "shard", "partial") else "unknown" for word in both)  # type: ignore[return-value]

    def is_cut_by_heads(self, node: Any) -> bool:
        """Whether what a module computed of queries and keys for each head has the heads of its own rank alone.

        So it is where all that it was computed of is cut over the ranks, and nothing on the way mixes two heads: products of
        attention are formed within a head.
        """
        todo, seen, found = [node], set(), False
        while todo:
            one = todo.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            word = self._values.get((id(one), 0), UNKNOWN).word
            if word == "shard":
                found = True
            elif word not in ("leaf", "replicate"):
                if name_of(one) not in PER_HEAD | PRODUCTS:
                    return False
                todo += [source for source, _ in one.next_functions]
        return found

    def _order(self, roots: list[Any]) -> None:
        """Depth first, without recursion: a model is deeper than Python's stack."""
        entered: set[int] = set()
        stack = [(node, False) for node in roots]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                self._nodes.append(node)
                if hasattr(node, "variable"):
                    self._leaves[id(node.variable)] = id(node)
            elif id(node) not in entered:
                entered.add(id(node))
                stack.append((node, True))
                stack += [(source, False) for source, _ in node.next_functions if source is not None]

    @staticmethod
    def _outputs(node: Any) -> list[Key]:
        return [(id(node), number) for number in range(len(getattr(node, "_input_metadata", None) or (0,)))]

    # -- values, from the inputs on ----------------------------------------------------------------------------------

    def _made_by(self, node: Any) -> list[tuple[Key, HeldPlacement]]:
        """Return how the outputs of a node are held, by what it does with its inputs."""
        name, keys = name_of(node), self._outputs(node)
        inputs = [self._values.get((id(source), number), UNKNOWN) for source, number in node.next_functions if source]
        if name in HANDED_ON and len(inputs) == len(keys):
            return list(zip(keys, inputs, strict=True))
        held = self._result(node, name, inputs)
        return [(key, held) for key in keys]

    def _result(self, node: Any, name: str, inputs: list[HeldPlacement]) -> HeldPlacement:
        if name == "_ToTorchTensor":
            return _held(getattr(node, "dtensor_spec", None), self._place)
        if name == "AccumulateGrad":
            return WITHIN if is_dtensor(node.variable) else LEAF
        if name in ("_FromTorchTensor", "Redistribute") or WITHIN in inputs:
            return WITHIN
        if not inputs or name not in DETERMINED or bool(getattr(node, "_saved_dropout_p", False)):
            return UNKNOWN
        words = {held.word for held in inputs}
        if words <= {"replicate", "leaf"}:
            # A product with something that the graph does not show: on a CPU, dropout is one.
            is_random = name == "Mul" and len(inputs) == 1
            return UNKNOWN if is_random else REPLICATE if "replicate" in words else LEAF
        if words == {"shard"} and name in ELEMENTWISE and _keeps_count(node):
            dims = {held.dim for held in inputs}
            known = dims - {None}
            if len(known) <= 1:
                return HeldPlacement("shard", known.pop() if known and len(dims) == 1 and name not in LAYOUT else None)
        return UNKNOWN

    def _judged(self, key: Key, held: HeldPlacement) -> HeldPlacement:
        """Return the placement of a tensor, corrected by what its consumers declare."""
        declared, is_replicated = self._declared.get(key), self._is_replicated.get(key)
        if held == LEAF:
            return REPLICATE if is_replicated else declared or UNKNOWN
        if held == UNKNOWN:
            return declared or UNKNOWN
        if held.word in ("replicate", "shard") and declared is not None and declared.word != held.word:
            return UNKNOWN
        return held

    # -- what consumers say, from the outputs back -------------------------------------------------------------------

    def _collect_declarations(self, key: Key) -> None:
        """Note the placements that the consumers of a tensor declare of it."""
        said: list[HeldPlacement] = []
        are_replicated: list[bool] = []
        for consumer in self._consumers.get(key, ()):
            name, made = name_of(consumer), self._values.get((id(consumer), 0), UNKNOWN)
            if name == "_FromTorchTensor":
                said.append(_held(_declaration(consumer), self._place))
                are_replicated.append(said[-1] == REPLICATE)
            elif made.word in ("replicate", "shard"):
                are_replicated.append(made == REPLICATE)
            elif made in (LEAF, UNKNOWN):
                further = self._declared.get((id(consumer), 0))
                if name in LAYOUT and further is not None:
                    said.append(HeldPlacement(further.word))
                if made == LEAF and (id(consumer), 0) in self._is_replicated:
                    are_replicated.append(self._is_replicated[id(consumer), 0])
        words = {held.word for held in said}
        if len(words) == 1 and words <= {"replicate", "shard"}:
            self._declared[key] = said[0] if len(set(said)) == 1 else HeldPlacement(said[0].word)
        if are_replicated:
            self._is_replicated[key] = all(are_replicated)

    # -- gradients, from the outputs back ----------------------------------------------------------------------------

    def _arriving(self, node: Any, key: Key) -> HeldPlacement:
        """Return how the gradient of a tensor is held when it has been summed over its consumers."""
        value = self._values.get(key, UNKNOWN)
        if name_of(node) == "_ToTorchTensor":
            return _gradient(getattr(node, "dtensor_spec", None), getattr(node, "grad_placements", None), self._place)
        found = {value} if key in self._ends else set()  # The loss, or the next stage, hands back what it was given.
        for consumer in self._consumers.get(key, ()):
            if name_of(consumer) == "_FromTorchTensor":
                found.add(_gradient(_declaration(consumer), getattr(consumer, "grad_placements", None), self._place))
            else:
                after = {self._values.get((id(consumer), 0), UNKNOWN), self._gradients.get((id(consumer), 0), UNKNOWN)}
                is_kept = value.word in ("replicate", "shard") and {held.word for held in after} == {value.word}
                found.add(value if is_kept else UNKNOWN)
        words = {held.word for held in found}
        return HeldPlacement(words.pop()) if len(words) == 1 else UNKNOWN


def _keeps_count(node: Any) -> bool:
    """Whether no input of an elementwise operation is repeated along a dimension."""
    try:
        counts = {_numel(node, 0), *(_numel(source, number) for source, number in node.next_functions if source)}
    except (AttributeError, IndexError, TypeError):
        return False
    return len(counts) == 1


def _numel(node: Any, number: int) -> int:
    size = 1
    for length in node._input_metadata[number].shape:
        size *= int(length)
    return size


def _held(spec: Any, place: Place) -> HeldPlacement:
    """Return how a DTensor's spec, or what declares one, is held over tp."""
    found = UNKNOWN
    for axis, _, _, placement in [] if spec is None else axes_of(spec, place):
        if axis != "tp":
            continue
        if found != UNKNOWN:
            return UNKNOWN  # Two dimensions of the mesh are one axis here.
        if placement.is_partial():
            found = HeldPlacement("partial")
        elif is_shard(placement):
            dim, rank = int(placement.dim), getattr(spec, "ndim", 0)
            found = HeldPlacement("shard", dim if dim >= 0 or not rank else dim + rank)
        else:
            found = REPLICATE
    return found


def _declaration(node: Any) -> Any:
    """Return mesh and placements that `from_local` was given; their names changed after torch 2.9."""
    mesh = getattr(node, "forward_input_device_mesh", None) or getattr(node, "previous_device_mesh", None)
    placements = getattr(node, "forward_input_placements", None) or getattr(node, "previous_placement", None)
    if mesh is None or placements is None:
        return None
    (shape,) = {tuple(metadata.shape) for metadata in node._input_metadata}
    return SimpleNamespace(device_mesh=mesh, placements=placements, ndim=len(shape))


def _gradient(spec: Any, given: Any, place: Place) -> HeldPlacement:
    """Return how torch takes, or hands back, the gradient of a plain tensor placed so: as the call asks for, else
    reduced."""
    if spec is None:
        return UNKNOWN
    if given is not None:
        return _held(SimpleNamespace(device_mesh=spec.device_mesh, placements=given, ndim=getattr(spec, "ndim", 0)), place)
    held = _held(spec, place)
    return REPLICATE if held.word == "partial" else held
