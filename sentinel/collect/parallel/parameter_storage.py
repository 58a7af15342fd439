"""What this rank holds of a parameter and of its gradient, and how that is placed: the seam for trainers that keep either
somewhere else than in the parameter itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

from sentinel.collect.parallel.placements import ORDINARY, is_dtensor, local_of, part_of, placements_of
from sentinel.place import Place
from sentinel.record import Kind


class HeldPiece(NamedTuple):
    """One rank's piece of a tensor."""

    tensor: torch.Tensor
    """The local elements, on the rank's device; may be empty."""
    placements: dict[str, str]
    """Axis -> one of PLACEMENTS, for the axes with more than one rank."""
    part: str = ""
    """Which piece it is, where the coordinates of the rank do not say so (`TensorInfo.part`)."""
    shape: tuple[int, ...] | None = None
    """Shape of the whole tensor; None: that of `tensor`."""


class Master(NamedTuple):
    """What an optimizer steps in the place of a parameter: a tensor of its own, or a stretch of one."""

    tensor: torch.Tensor
    """As it lies in `optimizer.param_groups`."""
    start: int = 0
    numel: int = -1
    """Number of elements of the flattened `tensor` that are this parameter's; -1: all of it."""


class ParameterStorage(Protocol):
    """Where a trainer keeps parameters, gradients and optimizer state. No collective, no wait, no copy."""

    place: Place

    def look(self, params: Iterable[torch.Tensor]) -> None:
        """Read how these parameters are cut. Called outside of a forward, when parameters were added."""

    def param(self, param: torch.Tensor) -> HeldPiece | None:
        """Return what this rank holds of a parameter; None: nothing can be read now."""

    def wgrad(self, param: torch.Tensor) -> HeldPiece | None:
        """Return its reduced, unscaled gradient as this rank holds it; None: there is none now."""

    def state(self, param: torch.Tensor, tensor: torch.Tensor) -> HeldPiece:
        """Return how `tensor`, a part of the optimizer's state for `param`, is placed."""

    def master(self, param: torch.Tensor) -> Master | None:
        """Return the tensor that an optimizer steps instead of `param`; None: `param` itself, or it is not known."""


class FlatPiece(NamedTuple):
    """A stretch of a flattened parameter: elements [start, end) of `shape`."""

    start: int
    end: int
    shape: tuple[int, ...]
    is_replicated: bool

    @property
    def part(self) -> str:
        """As `HeldPiece.part`: `0:100`."""
        return f"{self.start}:{self.end}"


class TorchStorage:
    """Plain parameters, DTensors (FSDP2, tensor parallel), and the pieces of FSDP1 with `use_orig_params`."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place or Place()
        self._pieces: dict[int, FlatPiece] = {}
        self._replicated: frozenset[str] = frozenset()
        """Axes over which plain parameters are copies, for others of the same model are DTensors on them."""
        self._plain: dict[Kind, dict[str, str]] = {}
        """Kind -> placements of whatever is no DTensor and not cut, where `_plain_place` is this rank's place."""
        self._plain_place: Place | None = None

    def look(self, params: Iterable[torch.Tensor]) -> None:
        """Read which parameters FSDP1 cut, and over which axes parameters are DTensors."""
        params = list(params)
        if any(getattr(param, "_fsdp_flattened", False) and id(param) not in self._pieces for param in params):
            self._pieces = fsdp1_pieces()  # Looks through all objects of the process: only where FSDP1 marked a parameter.
        self._replicated = frozenset(
            axis for param in params if is_dtensor(param) for axis in placements_of(param, Kind.PARAM, self.place)
        )
        self._plain_place = None

    @property
    def cuts_nothing(self) -> bool:
        """Whether FSDP1 has flattened no parameter."""
        return not self._pieces

    def param(self, param: torch.Tensor) -> HeldPiece | None:
        """Return the parameter's local piece."""
        return self._held(param, param, Kind.PARAM)

    def wgrad(self, param: torch.Tensor) -> HeldPiece | None:
        """Return `.grad`, or `main_grad` where a trainer accumulates there."""
        grad = param.grad
        if grad is None:
            grad = getattr(param, "main_grad", None)
        return None if grad is None else self._held(param, grad, Kind.WGRAD)

    def state(self, param: torch.Tensor, tensor: torch.Tensor) -> HeldPiece:
        """Return the state's piece: cut as its parameter is."""
        return self._held(param, tensor, Kind.EXP_AVG)

    def master(self, param: torch.Tensor) -> Master | None:
        """Return None: torch's optimizers step the parameter."""
        del param
        return None

    def _held(self, param: torch.Tensor, tensor: Any, kind: Kind) -> HeldPiece:
        if type(tensor) in ORDINARY and not self._pieces:
            # All of them lie alike: a small step has no time to find that out again for each.
            if self._plain_place is not self.place:
                self._plain, self._plain_place = {}, self.place
            known = self._plain.get(kind)
            if known is None:
                known = self._plain[kind] = self._whole(param, tensor, kind).placements
            return HeldPiece(tensor, known)
        return self._whole(param, tensor, kind)

    def _whole(self, param: torch.Tensor, tensor: Any, kind: Kind) -> HeldPiece:
        piece = self._pieces.get(id(param))
        if piece is not None:
            placements = placements_of(tensor, kind, self.place)
            if piece.is_replicated:
                return HeldPiece(tensor, placements, "", piece.shape)
            return HeldPiece(tensor, {**placements, "dp": "shard"}, piece.part, piece.shape)
        placements = placements_of(tensor, kind, self.place)
        if self._replicated and not is_dtensor(tensor):
            placements = {
                axis: "replicate" if word == "unknown" and axis in self._replicated else word
                for axis, word in placements.items()
            }
        return HeldPiece(local_of(tensor), placements, part_of(tensor, self.place), tuple(tensor.shape))


def keeps_plain(storage: ParameterStorage) -> bool:
    """Whether a parameter of torch's own type, and its `.grad`, are themselves what this rank holds of it."""
    return type(storage) is TorchStorage and storage.cuts_nothing


def fsdp1_pieces() -> dict[int, FlatPiece]:
    """Return id of an original parameter -> its stretch on this rank, for all FSDP1 units of the process with
    use_orig_params."""
    module = sys.modules.get("torch.distributed.fsdp._flat_param")
    handle_type = getattr(module, "FlatParamHandle", None)
    found: dict[int, FlatPiece] = {}
    if handle_type is None:
        return found
    import gc

    for handle in [thing for thing in gc.get_objects() if type(thing) is handle_type]:
        flat = handle.flat_param
        infos = getattr(flat, "_shard_param_infos", None)
        if not getattr(handle, "_use_orig_params", False) or infos is None:
            continue
        for param, info, shape in zip(flat._params, infos, flat._shapes, strict=True):
            start, end = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
            whole = tuple(int(size) for size in shape)
            found[id(param)] = FlatPiece(start, end, whole, not handle.uses_sharded_strategy)
    return found
