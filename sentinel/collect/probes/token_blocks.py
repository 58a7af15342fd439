"""Activations as tokens by channels: which dimension is the channel, and pieces that are small enough to compute on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

BLOCK = 1 << 20
"""Elements computed on at a time: 8 MiB in float64."""

CHANNELS_FIRST: tuple[type[nn.Module], ...] = (
    nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.LocalResponseNorm,
)  # fmt: skip
"""Modules whose outputs are [batch, channel, ...]; of all others the last dimension is the channel."""


def by_channel(tensor: torch.Tensor, module: nn.Module | None) -> torch.Tensor | None:
    """Return a view of an activation whose last dimension is the channel; None: it has no channels.

    module: whose output it is; None: not known, the last dimension is the channel.
    """
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return None
    view = tensor.detach()
    if isinstance(module, CHANNELS_FIRST) and tensor.dim() > 2:
        view = view.movedim(1, -1)
    return view if view.shape[-1] > 1 and view.numel() else None


def blocks(view: torch.Tensor, most: int = BLOCK) -> Iterator[torch.Tensor]:
    """Yield pieces of at most `most` elements, cut between tokens, never between channels. Views, no copies."""
    if view.numel() <= most or view.numel() == view.shape[-1]:
        yield view
        return
    axis = max(range(view.dim() - 1), key=lambda at: view.shape[at])
    each = max(1, most // (view.numel() // view.shape[axis]))
    for piece in torch.split(view, each, axis):
        yield from blocks(piece, most)


def tokens_of(view: torch.Tensor) -> int:
    """Return the number of tokens of a view [..., channels]."""
    return view.numel() // view.shape[-1]


def leading(view: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a view [..., channels] that count tokens: all but the last."""
    return tuple(range(view.dim() - 1))
