"""Models that train in milliseconds, with their data: the same seed is the same batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.ln(x))))


class TinyModel(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, num_blocks: int = 2, width: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recomputing(TinyModel):
    """Every block is checkpointed."""

    def __init__(self, use_reentrant: bool, num_blocks: int = 2) -> None:
        super().__init__(num_blocks)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    batch = tokens(seed)
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> a copy of the parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def outputs(model: nn.Module, names: list[str], run: Any) -> dict[str, list[torch.Tensor]]:
    """Run, and return what each module gave out at each call."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_hook(lambda m, a, out, name=name: found[name].append(out.detach().clone())))
    run()
    for handle in handles:
        handle.remove()
    return found
