"""Compressors of traces: a tensor becomes a small picture of it, on its own device. Nothing waits, nothing is random.

Each returns its parts: `""` is the picture itself, fp32 or whole numbers. They read under no_grad, draw nothing from any
generator of the trainer, and choose no algorithm that needs to know a value on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from sentinel.trace import Compressor

Parts = dict[str, torch.Tensor]
OwnDirections = Callable[[str, int, torch.device], torch.Tensor]
MOST_PICTURES = 16
"""Pictures of one tensor: of its leading dimensions, samples or heads, so many are shown."""
MOST_TOKENS = 4096
"""Tokens of one tensor that are projected: evenly spread over all."""
ROUNDS = 8
"""Iterations towards the principal directions: neighbours of a tenth less variance are apart by then to 0.9**16 = 0.2."""
MOST_BYTES = 4 << 20
"""Bytes of one picture; a bound on what a step copies."""


def compressed(tensor: torch.Tensor, asked: Compressor, own: OwnDirections | None = None) -> Parts:
    """Return the picture of a tensor, which may share its memory. ValueError where there is none, or it is too large.

    own: (name, width, device) -> [width, number] fp32, the vectors that `Compressor.vectors` names.
    """
    if tensor.numel() == 0:
        raise ValueError("it has no elements")
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        if asked.vectors and own is not None:
            tokens = _tokens(tensor.detach())
            parts = {"": tokens @ own(asked.vectors, tokens.shape[1], tokens.device)}
        else:
            parts = _COMPRESSORS[asked.name](tensor.detach(), asked)
    num_bytes = sum(part.numel() * part.element_size() for part in parts.values())
    if num_bytes > MOST_BYTES:
        raise ValueError(f"its picture has {num_bytes} bytes, more than {MOST_BYTES}; choose another compressor or size")
    return parts


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as fp32; whole numbers and bools too."""
    return tensor.float() if tensor.dtype is not torch.float32 else tensor


def _tile(tensor: torch.Tensor, asked: Compressor) -> Parts:
    size = asked.effective_size
    pictures = tensor.reshape(-1, *tensor.shape[-2:])[:MOST_PICTURES] if tensor.dim() > 2 else tensor.reshape(
        1, *(1,) * (2 - tensor.dim()), *tensor.shape
    )  # fmt: skip
    x = _numbers(pictures)
    for dim in (1, 2):
        x = _stretches(x, dim, min(size, x.shape[dim]), asked.reduce)
    return {"": x}


def _stretches(x: torch.Tensor, dim: int, number: int, reduce: str) -> torch.Tensor:
    """Return one number for each of `number` stretches of a dimension, cut as evenly as whole elements allow."""
    length = x.shape[dim]
    if number == length:
        return x.abs() if reduce == "absmax" else x
    each = math.ceil(length / number)
    number = math.ceil(length / each)
    rest = number * each - length
    if rest:
        # The last stretch is filled up with its last element, but for the mean, which divides by what there is.
        last = x.narrow(dim, length - 1, 1)
        fill = torch.zeros_like(last) if reduce == "mean" else last
        x = torch.cat([x, fill.expand(*x.shape[:dim], rest, *x.shape[dim + 1 :])], dim)
    x = x.unflatten(dim, (number, each))  # type: ignore[no-untyped-call]
    if reduce == "mean":
        mean = x.mean(dim + 1)
        if rest:
            mean.narrow(dim, number - 1, 1).mul_(each / (each - rest))
        return mean
    if reduce == "max":
        return x.amax(dim + 1)
    if reduce == "min":
        return x.amin(dim + 1)
    return x.abs().amax(dim + 1)


def _tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Return [tokens, channels] of fp32."""
    if tensor.dim() < 2:
        raise ValueError(f"expected tokens by channels, got a tensor of {tensor.dim()} dimensions")
    tokens = tensor.reshape(-1, tensor.shape[-1])
    return _numbers(tokens[:: math.ceil(len(tokens) / MOST_TOKENS)])


@functools.lru_cache(maxsize=256)
def _directions(width: int, number: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return [width, number] unit vectors, the same on every rank and in every step."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    drawn = torch.randn(width, number, generator=generator, device="cpu", dtype=torch.float64)
    unit: torch.Tensor = drawn / drawn.square().sum(0).sqrt()
    return unit.float().to(device, non_blocking=True)


def _projection(tensor: torch.Tensor, asked: Compressor) -> Parts:
    tokens = _tokens(tensor)
    return {"": tokens @ _directions(tokens.shape[1], asked.effective_size, asked.seed, tokens.device)}


def _pca(tensor: torch.Tensor, asked: Compressor) -> Parts:
    """Subspace iteration with Gram-Schmidt: a library's eigenvectors would wait for the device to say that it converged."""
    tokens = _tokens(tensor)
    number = min(asked.effective_size, *tokens.shape)
    away = tokens - tokens.mean(0)
    found = _directions(tokens.shape[1], number, 0, tokens.device)
    for _ in range(ROUNDS):
        found = _orthonormal(away.T @ (away @ found))
    along = away @ found
    order = along.square().sum(0).argsort(descending=True)
    return {"": along[:, order]}


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    done: list[torch.Tensor] = []
    for column in columns.unbind(1):
        for former in (*done, *done):  # Twice is enough (Kahan and Parlett).
            column = column - former * (former @ column)
        done.append(column / column.norm().clamp(min=1e-30))
    return torch.stack(done, 1)


def _top_k(tensor: torch.Tensor, asked: Compressor) -> Parts:
    if tensor.dim() < 1:
        raise ValueError("expected a last dimension to choose from, got a single number")
    rows = tensor.reshape(-1, tensor.shape[-1])
    rows = _numbers(rows[:: math.ceil(len(rows) / MOST_TOKENS)])
    values, indices = rows.topk(min(asked.effective_size, rows.shape[-1]), dim=-1)
    if asked.softmax:
        values = (values - rows.logsumexp(-1, keepdim=True)).exp()
    return {"": values, "indices": indices.int()}


def _histogram(tensor: torch.Tensor, asked: Compressor) -> Parts:
    bins = asked.effective_size
    x = _numbers(tensor).reshape(-1)
    is_finite = x.isfinite()
    least = torch.where(is_finite, x, torch.inf).amin()
    greatest = torch.where(is_finite, x, -torch.inf).amax()
    width = (greatest - least).clamp(min=torch.finfo(torch.float32).tiny)
    at = torch.where(is_finite, (x - least) / width * bins, 0.0).clamp(0, bins - 1).long()
    # One bin more, for what is not finite.
    at = torch.where(is_finite, at, bins)
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=x.device).scatter_add_(0, at, torch.ones_like(at))
    nonfinite = torch.stack([x.isnan().sum(), (x == torch.inf).sum(), (x == -torch.inf).sum()])
    return {"": counts[:bins], "range": torch.stack([least, greatest]), "nonfinite": nonfinite}


def _none(tensor: torch.Tensor, asked: Compressor) -> Parts:
    return {"": _numbers(tensor) if tensor.is_floating_point() else tensor.int()}


_COMPRESSORS: dict[str, Callable[[torch.Tensor, Compressor], Parts]] = {
    "tile": _tile, "projection": _projection, "pca": _pca, "top_k": _top_k, "histogram": _histogram, "none": _none,
}  # fmt: skip
