"""A trainer, and the adapter of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sentinel


class TinyTrainer:
    """Trains, and calls `on_step(loss)` behind each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.on_step: list[Callable[[torch.Tensor], None]] = []

    def fit(self, steps: int, blow_up_at: int) -> None:
        """Train on noise; at one step a weight becomes 1,000 times as large."""
        for step in range(steps):
            loss = (self.model(torch.randn(4, 8)) - 1.0).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            if step == blow_up_at:
                with torch.no_grad():
                    next(self.model.parameters())[0, 0] *= 1000.0
            self.optimizer.step()
            for call in self.on_step:
                call(loss)


def attach_tiny(trainer: TinyTrainer, config: Any = None) -> sentinel.Monitor:
    """Attach Sentinel to a TinyTrainer: its steps end where it says so."""
    monitor = sentinel.attach(trainer.model, trainer.optimizer, config)

    def on_step(loss: torch.Tensor) -> None:
        monitor.log(loss=loss)
        monitor.step()

    trainer.on_step.append(on_step)
    monitor.port.at_end(lambda: trainer.on_step.remove(on_step))
    return monitor
