"""A small Lightning fit without and with Sentinel, alone or as a rank of DDP. usage: lightning_ranks.py FOLDER WORLD

With LOCAL_RANK, MASTER_ADDR and MASTER_PORT set each process is one rank, as torchrun would start it; else Lightning spawns.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sentinel

EVERYTHING = {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}
NUM_STEPS = 4


class ResidualBlock(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Blocks(pl.LightningModule):
    """Blocks and a head, which the module's own forward calls; the norm before clipping is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([ResidualBlock(), ResidualBlock()]), nn.Linear(8, 1)
        self.norms: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = torch.cat([p.grad.double().flatten() for p in self.parameters()]).norm()
        self.norms.append(float(total))

    def train_dataloader(self) -> DataLoader:
        # Each step sees the same 16 samples on every layout: in micro-batches of 8, or one of 4 on each of 2 ranks.
        inputs = torch.randn(16 * NUM_STEPS, 8, generator=torch.Generator().manual_seed(1))
        dataset, world = TensorDataset(inputs, inputs.sum(1, keepdim=True)), self.trainer.world_size
        sampler = DistributedSampler(dataset, world, self.trainer.global_rank, shuffle=False)
        return DataLoader(dataset, batch_size=8 // world, sampler=sampler)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Tells(pl.Callback):
    """Writes down what each rank can tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        weights = {name: param.detach().double().flatten().tolist() for name, param in pl_module.named_parameters()}
        result = {"norms": pl_module.norms, "weights": weights}
        (self.folder / f"result-{trainer.global_rank}.json").write_text(json.dumps(result))


def main() -> None:
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    strategy = "auto" if world == 1 else "ddp" if "LOCAL_RANK" in os.environ else "ddp_spawn"
    for name, callbacks in (("plain", []), ("watched", [sentinel.LightningCallback(EVERYTHING)])):
        if name == "plain" and strategy == "ddp_spawn":
            continue
        (folder / name).mkdir(exist_ok=True)
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, accumulate_grad_batches=2,
            gradient_clip_val=0.5, logger=CSVLogger(folder / name / "csv"), log_every_n_steps=1, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[Tells(folder / name), *callbacks],
            default_root_dir=folder, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(Blocks())


if __name__ == "__main__":
    main()
