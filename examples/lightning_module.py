"""Lightning: one more callback, and nothing else changes. Clipping and accumulated gradients are respected.

pip install lightning
sentinel run -- python examples/lightning_module.py
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sentinel


class Regression(pl.LightningModule):
    """A small MLP that learns one direction of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log the loss of one batch."""
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        """Return optimizer and schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    pl.seed_everything(0)
    inputs = torch.randn(6400, 16)
    dataset = TensorDataset(inputs, torch.sin(inputs @ torch.randn(16, 1)))
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0, val_check_interval=25,
        limit_val_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[sentinel.LightningCallback()],
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(dataset, batch_size=64), DataLoader(dataset, batch_size=64))
    print(f"step {trainer.global_step - 1:4d}  loss {float(trainer.callback_metrics['train_loss']):.4f}")


if __name__ == "__main__":
    main()
