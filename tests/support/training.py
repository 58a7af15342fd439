"""The loop of most tests that train: micro-steps, clipping, an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .nets import loss_of


def train_steps(
    model: nn.Module,
    num_steps: int = 3,
    micro_steps: int = 2,
    *,
    optimizer: Any = None,
    loss: Callable[[Any, int], torch.Tensor] = loss_of,
    clip: float | None = 0.1,
    before_clip: Callable[[], object] = lambda: None,
    seed: int | None = None,
) -> list[float]:
    """Train, and return the loss of every micro-step; two models that start alike and train alike return the same bits.

    optimizer: AdamW with a learning rate of 0.01 unless given. loss: called with the model and 10 * step + micro_step, which
    says of what. clip: the norm that all gradients together are clipped to. before_clip: called when the gradients of a step
    are whole. seed: what torch's generator is seeded with first.

    Watched is what was attached to before: `monitor = sentinel.attach(model)`, then this, then `monitor.detach()`.
    """
    if seed is not None:
        torch.manual_seed(seed)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for micro_step in range(micro_steps):
            one = loss(model, 10 * step + micro_step)
            one.backward()
            losses.append(float(one.detach()))
        before_clip()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses


def train_on_ones(model: nn.Module, optimizer: Any, num_steps: int = 3) -> None:
    """Train a model of 4 inputs on two samples of ones; the loss is the sum of what it makes of them."""
    train_steps(model, num_steps, 1, optimizer=optimizer, loss=lambda model, seed: model(torch.ones(2, 4)).sum(), clip=None)
