"""A small GPT that can be cut into pipeline stages; every piece keeps the name it has in the whole model."""

from __future__ import annotations

import dataclasses
import math
import zlib

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model."""

    vocabulary: int = 256
    """Bytes: no tokenizer to train."""
    layers: int = 4
    width: int = 64
    heads: int = 4
    sequence: int = 64
    seed: int = 0

    def layers_of(self, stage: int, num_stages: int) -> range:
        """Return the global numbers of the layers that stage `stage` of `num_stages` holds."""
        first, last = (self.layers * at // num_stages for at in (stage, stage + 1))
        return range(first, last)


class Attention(nn.Module):
    """Causal self-attention. hidden: [batch, sequence, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        # Output features lie as [head, (q, k, v), head_width], so that a column shard holds whole heads.
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(hidden).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(-2))
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_width)
        length = scores.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ value
        return self.proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them. hidden: [batch, sequence, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.gelu(self.fc1(hidden)))


class Block(nn.Module):
    """One transformer layer, normalised before each half. hidden: [batch, sequence, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.ln1(hidden))
        return hidden + self.mlp(self.ln2(hidden))


class GPT(nn.Module):
    """The whole model, or stage `stage` of `num_stages` of it.

    The first stage takes tokens, int64 [batch, sequence]; the others hidden, float32 [batch, sequence, width]. The last
    stage returns logits, float32 [batch, sequence, vocabulary]; the others hidden.
    """

    def __init__(self, config: GPTConfig, stage: int = 0, num_stages: int = 1) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if self.is_first:
            self.tok = nn.Embedding(config.vocabulary, config.width)
            self.pos = nn.Embedding(config.sequence, config.width)
        # A dict, not a list: layer 2 is blocks.2 on whichever stage it lies.
        self.blocks = nn.ModuleDict({str(n): Block(config) for n in config.layers_of(stage, num_stages)})
        if self.is_last:
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise(config)

    @torch.no_grad()
    def _initialise(self, config: GPTConfig) -> None:
        # Each parameter draws from its own generator, seeded by its name: the same model on every layout.
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            generator = torch.Generator().manual_seed(config.seed << 32 | zlib.crc32(name.encode()))
            deep = name.endswith(("proj.weight", "fc2.weight"))
            parameter.normal_(0.0, 0.02 / math.sqrt(2 * config.layers) if deep else 0.02, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        if self.is_first:
            hidden = self.tok(inputs) + self.pos(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks.values():
            hidden = block(hidden)
        return self.head(self.norm(hidden)) if self.is_last else hidden


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, nats a token. logits: [batch, sequence, vocabulary]; targets: [batch, sequence]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
