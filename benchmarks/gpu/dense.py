"""A dense decoder that trains on random tokens: the model of every part, of 1.0e9 parameters or small."""

from __future__ import annotations

import argparse
import time
from typing import Any

import results
import torch
from torch import nn

import sentinel

GROUPS = {"kinds": ["param", "wgrad", "activation", "dgrad"], "targets": ["embedding", "blocks", "norm"], "black_box": False}
EVERYTHING = {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "attached, everything off": {"kinds": [], "black_box": False},
    "black box": {"kinds": [], "black_box": True},
    "params + wgrads": {"kinds": ["param", "wgrad"], "black_box": False},
    "default": {},
    "four groups, every step": GROUPS,
    "four groups, stagger 8": {**GROUPS, "stagger": 8},
    "everything, every step": EVERYTHING,
}
"""Sentinel's settings by name; None: not attached. `groups`: params, wgrads, activations and dgrads but of the logits."""
SIZES = {"1b": (2048, 16, 16, 50_304, 2048), "small": (1024, 8, 8, 32_000, 512), "tiny": (32, 2, 2, 128, 16)}
"""Width, layers, heads, words, tokens in a sequence."""


class Block(nn.Module):
    """Attention and MLP, each behind a norm. hidden: [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = hidden.shape
        q, k, v = self.qkv(self.norm1(hidden)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm2(hidden))))


class Dense(nn.Module):
    """A plain decoder. tokens: [batch, sequence] int64 -> logits."""

    def __init__(self, width: int, layers: int, heads: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Training:
    """The model in bf16, AdamW, and one batch of random tokens, the same in every step."""

    def __init__(self, options: argparse.Namespace, size: str, batch: int) -> None:
        """size: of SIZES; with --tiny it is the tiny one, and the batch 2."""
        torch.manual_seed(0)
        *sizes, self.words, self.sequence = SIZES["tiny" if options.tiny else size]
        self.device, self.batch = options.device, 2 if options.tiny else batch
        with torch.device(options.device):
            self.model = Dense(*sizes, self.words).to(torch.bfloat16)
        self.call: Any = self.model
        """What the step calls for logits: the model, or what torch.compile made of it."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=options.device == "cuda")
        self.tokens = torch.randint(0, self.words, (self.batch, self.sequence + 1), device=self.device)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def halve_batch(self) -> None:
        """Take half of the sequences from now on: memory did not hold them all."""
        self.batch = max(1, self.batch // 2)
        self.tokens = self.tokens[: self.batch].clone()

    def loss(self) -> torch.Tensor:
        logits = self.call(self.tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def step(self, monitor: Any = None) -> torch.Tensor:
        """Train one step and return its loss, on the device."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        if monitor is not None:
            monitor.log(loss=loss)
        self.optimizer.zero_grad()
        return loss.detach()

    def attach(self, settings: dict[str, Any] | None, run: str) -> Any:
        """Return a monitor of this model; None for the settings None."""
        return None if settings is None else sentinel.attach(self.model, self.optimizer, {"run": run, **settings})


def steps_of(training: Training, number: int, settings: dict[str, Any] | None, run: str, *, strict: bool = False) -> float:
    """Return seconds a step: two steps warm up. strict: a call that waits for the device raises."""
    monitor = training.attach(settings, run)
    try:
        for _ in range(2):
            training.step(monitor)
        results.synchronize(training.device)
        began = time.perf_counter()
        if strict and training.device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(number):
                training.step(monitor)
        finally:
            if training.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        results.synchronize(training.device)
        return (time.perf_counter() - began) / number
    finally:
        if monitor is not None:
            monitor.detach()
