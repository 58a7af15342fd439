"""Lightning that takes up what it is asked for: a checkpoint, a pause. It cannot pass over batches, and says so.

sentinel run -- python examples/requests_lightning.py, and beside it: sentinel request checkpoint
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sentinel


class TakeRequests(pl.Callback):
    """Asks behind each optimizer step, on every rank. Stands behind Sentinel's own callback."""

    def __init__(self, watched: sentinel.LightningCallback, directory: Path) -> None:
        self.watched, self.directory = watched, directory
        self.last_step = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take up what is asked for, unless the next batch adds to the same gradients."""
        if trainer.global_step == self.last_step:
            return
        self.last_step = trainer.global_step
        monitor = self.watched.monitor
        for request in monitor.requests():
            if request.action == "checkpoint":
                trainer.save_checkpoint(self.directory / f"step{trainer.global_step}.ckpt")  # on all ranks
                monitor.answer(request)
            elif request.action == "pause":
                while monitor.is_open(request):
                    time.sleep(0.1)
                monitor.answer(request)
            else:
                monitor.answer(request, is_done=False, why="Lightning passes over no single batches")


class Line(pl.LightningModule):
    """Learns one direction of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    inputs = torch.randn(64 * 2000, 16)
    watched = sentinel.LightningCallback()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[watched, TakeRequests(watched, Path())],
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=64))


if __name__ == "__main__":
    main()
