"""What a Megatron rank holds of parameters and gradients, and what its model says about their names.

Gradients are accumulated in `main_grad`, a view of a buffer; `prepare_grads` hands them to the optimizer, divided by the
loss scale. With the distributed optimizer only this rank's stretch of the flat buffer is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sentinel.collect.adapters.megatron_placements import expert_tensor_size
from sentinel.collect.parallel.parameter_storage import HeldPiece, Master
from sentinel.place import Place, strip_wrappers

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers inside chained ones."""
    inner = getattr(optimizer, "chained_optimizers", None)
    if inner is None:
        return [optimizer]
    return [leaf for one in inner for leaf in leaves(one)]


class MegatronStorage:
    """Parameters as the model holds them, gradients as the optimizer is about to use them."""

    def __init__(self, chunks: Sequence[nn.Module], optimizers: Sequence[Any], place: Place) -> None:
        self.place = place
        self.is_prepared = False
        """The optimizer has taken the gradients over: they are unscaled, and not clipped yet."""
        self._chunks = chunks
        self._leaves = [leaf for one in optimizers for leaf in leaves(one)]
        self._experts: dict[int, str] = {}
        """id of a parameter of experts -> its name."""
        self._main: dict[int, list[torch.Tensor]] = {}
        """id of a parameter -> the optimizer's tensors for it, the first with a gradient counts."""
        self._ranges: dict[int, tuple[int, int]] = {}
        self._is_flat = False
        """A distributed optimizer cuts the gradients of all parameters."""
        self._is_gathered_late = False
        """Parameters are gathered while the next forward runs: only the own stretch is always new."""
        self.expert_tp = (0, 1)

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """What losses are multiplied by, on the device; gradients carry it until the optimizer takes them over."""
        scalers = (getattr(leaf, "grad_scaler", None) for leaf in self._leaves)
        scaler = next((one for one in scalers if one is not None), None)
        return None if scaler is None else scaler.scale

    def look(self, params: Iterable[torch.Tensor]) -> None:
        """Note which stretches of which parameters are this rank's."""
        del params
        self.expert_tp = expert_tensor_size() if self.place.world_size > 1 else (0, 1)
        self._experts = {
            id(param): name
            for chunk in self._chunks
            for name, param in chunk.named_parameters()
            if {"experts", "local_experts"} & set(name.split("."))
        }
        self._main, self._ranges = {}, {}
        for leaf in self._leaves:
            if hasattr(leaf, "_get_model_param_range_map"):
                self._look_distributed(leaf)
            else:
                for params_, mains in _pairs(leaf, "float16_groups", "fp32_from_float16_groups"):
                    self._main.setdefault(id(params_), []).append(mains)

    def _look_distributed(self, leaf: Any) -> None:
        ddp = getattr(leaf, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            return
        self._is_flat = True
        self._is_gathered_late |= bool(getattr(ddp, "overlap_param_gather", False))
        for param in getattr(leaf, "model_param_gbuf_map", {}):
            held = leaf._get_model_param_range_map(param)["param"]
            self._ranges[id(param)] = (int(held.start), int(held.end))
        for model, shard in (
            ("model_float16_groups", "shard_fp32_from_float16_groups"),
            ("model_float16_groups", "shard_float16_groups"),
            ("model_fp32_groups", "shard_fp32_groups"),
        ):
            for param, main in _pairs(leaf, model, shard):
                self._main.setdefault(id(param), []).append(main)

    def param(self, param: torch.Tensor) -> HeldPiece | None:
        """Return the model's own weight, not the optimizer's copy in fp32."""
        if self._is_gathered_late and param.requires_grad:
            start, end = self._stretch(param)
            return self._held(param, param.detach().view(-1)[start:end], (start, end))
        return self._held(param, param, None)

    def wgrad(self, param: torch.Tensor) -> HeldPiece | None:
        """Return the gradient: unscaled once the optimizer took it over, as it was accumulated until then."""
        stretch = self._stretch(param) if self._is_flat and param.requires_grad else None
        if self.is_prepared:
            for main in self._main.get(id(param), ()):
                grad = getattr(main, "decoupled_grad", None)
                grad = main.grad if grad is None else grad
                if grad is not None:
                    if stretch is None or grad.numel() == stretch[1] - stretch[0]:
                        return self._held(param, grad, stretch)
                    if stretch[0] == stretch[1]:
                        return self._held(param, grad.view(-1)[:0], stretch)
        grad = getattr(param, "main_grad", None)
        if grad is None:
            grad = param.grad
        if grad is None:
            return None
        return self._held(param, grad if stretch is None else grad.view(-1)[stretch[0] : stretch[1]], stretch)

    def state(self, param: torch.Tensor, tensor: torch.Tensor) -> HeldPiece:
        """Return the state's piece: cut as the gradient is."""
        stretch = self._stretch(param) if self._is_flat and param.requires_grad else None
        if stretch is not None and tensor.numel() != stretch[1] - stretch[0]:
            stretch = None
        return self._held(param, tensor, stretch)

    def master(self, param: torch.Tensor) -> Master | None:
        """Return the optimizer's own copy in fp32: all of the parameter, or this rank's stretch of it."""
        mains = self._main.get(id(param))
        return Master(mains[0]) if mains else None

    def _stretch(self, param: torch.Tensor) -> tuple[int, int]:
        # Megatron gives a tied embedding a bucket of its own: its copy on the last stage is cut at the same places.
        return self._ranges.get(id(param), (0, 0))

    def _held(self, param: torch.Tensor, tensor: torch.Tensor, stretch: tuple[int, int] | None) -> HeldPiece:
        placements, cuts, shape = self._placed(param)
        part = ""
        if stretch is not None:
            for axis in ("dp", "cp"):
                if axis in placements:
                    placements[axis] = "shard"
            part = ",".join([f"{axis}={at}" for axis, at in cuts.items()] + [f"{stretch[0]}:{stretch[1]}"])
        elif "etp" in cuts:
            part = ",".join(f"{axis}={at}" for axis, at in cuts.items())
        return HeldPiece(tensor, placements, part, shape)

    def _placed(self, param: torch.Tensor) -> tuple[dict[str, str], dict[str, int], tuple[int, ...]]:
        """Return (axis -> word, axis or `etp` -> coordinate where it is cut, shape of the whole parameter)."""
        place = self.place
        words = {axis: "replicate" for axis in ("dp", "tp", "cp", "ep") if place.size(axis) > 1}
        cuts: dict[str, int] = {}
        shape = [int(size) for size in param.shape]
        name = self._experts.get(id(param))
        at, size = self.expert_tp if name is not None else (place.tp_rank, place.tp_size)
        dim = int(getattr(param, "partition_dim", -1))
        is_cut = size > 1 and bool(getattr(param, "tensor_model_parallel", False)) and 0 <= dim < len(shape)
        if name is not None and place.ep_size > 1:
            if "local_experts" in name.split("."):
                words["ep"] = "owned"
            else:  # One tensor for all experts of the rank.
                words["ep"], cuts["ep"] = "shard", place.ep_rank
                if 0 <= dim < len(shape):
                    shape[dim] *= place.ep_size
        if is_cut:
            shape[dim] *= size
            if "tp" in words:
                words["tp"] = "shard"
            cuts["tp" if size == place.tp_size else "etp"] = at
        return words, cuts, tuple(shape)


def _pairs(leaf: Any, models: str, mains: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for params, others in zip(getattr(leaf, models, ()), getattr(leaf, mains, ()), strict=False):
        for param, other in zip(params, others, strict=False):
            if other is not None:
                yield param, other


def unwrap_chunk(module: nn.Module) -> nn.Module:
    """Return the model inside Megatron's wrappers (DDP, FSDP, Float16Module) and torch's."""
    while set(module._modules) == {"module"} and isinstance(module._modules["module"], nn.Module):
        module = module._modules["module"]
    return module


def offsets_of(chunk: nn.Module, place: Place) -> dict[str, int]:
    """Return container of numbered children -> what makes their numbers global, as Megatron itself counts.

    A layer knows its number in the whole model, 1-based; an expert-parallel rank counts its own experts from 0.
    """
    found: dict[str, int] = {}
    for full, module in chunk.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        name = strip_wrappers(full)
        if full.rpartition(".")[2] == "local_experts":
            found[name] = place.ep_rank * len(module)
            continue
        numbers = [getattr(child, "layer_number", None) for child in module]
        shifts = {number - 1 - at for at, number in enumerate(numbers) if isinstance(number, int)}
        if len(shifts) == 1 and None not in numbers:
            found[name] = shifts.pop()
    return found


def tied_names(chunk: nn.Module, name_map: Mapping[str, str]) -> dict[str, str]:
    """Return local name -> canonical name of the copies of an embedding that a later stage keeps."""
    found: dict[str, str] = {}
    for full, param in chunk.named_parameters():
        name = strip_wrappers(full)
        if getattr(param, "shared", False) and getattr(param, "shared_embedding", False):
            first = name.removesuffix(OUTPUT) + EMBEDDING if name.endswith(OUTPUT) else name
            found[name] = _mapped(first, name_map)
    return found


def _mapped(name: str, name_map: Mapping[str, str]) -> str:
    for prefix, other in name_map.items():
        if name == prefix or name.startswith(prefix + "."):
            return other + name[len(prefix) :]
    return name
