"""Small models of many kinds that really train on one core, each with its data: text, images, tokens that choose experts.

A batch depends on nothing but (seed, step, rank, micro-step), so a resumed run reads again what it had read.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from data import StandardLibrary  # noqa: E402

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""
CLASSES = 10
SIDE = 16
"""Images are [3, SIDE, SIDE]."""


class Text:
    """Bytes of Python's standard library, and the next ones. Tokens: int64 [size, sequence]."""

    def __init__(self, sequence: int, seed: int) -> None:
        self.sequence, self.seed = sequence, seed
        self._libraries: dict[int, StandardLibrary] = {}

    def batch(self, step: int, rank: int, micro_step: int, size: int) -> Batch:
        """Return tokens and the tokens that follow them."""
        if size not in self._libraries:
            self._libraries[size] = StandardLibrary(self.sequence, size, self.seed)
        tokens = self._libraries[size].micro_step(step, rank, micro_step)
        return tokens[:, :-1], tokens[:, 1:]

    def corrupted(self, batch: Batch, rng: np.random.Generator) -> Batch:
        """Return a batch of random bytes in the place of `batch`."""
        shape = (batch[0].shape[0], batch[0].shape[1] + 1)
        tokens = torch.from_numpy(rng.integers(0, 256, shape))
        return tokens[:, :-1], tokens[:, 1:]


class Images:
    """Ten kinds of noisy pictures made by formula: gratings, rings, blobs and checks of any phase, place and colour."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def batch(self, step: int, rank: int, micro_step: int, size: int) -> Batch:
        """Return images, float32 [size, 3, SIDE, SIDE], and their classes, int64 [size]."""
        rng = np.random.default_rng((self.seed, step, rank, micro_step))
        kind = rng.integers(0, CLASSES, size)
        y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
        angle = (kind % 5)[:, None, None] * math.pi / 5 + 0.1 * rng.standard_normal((size, 1, 1))
        phase = rng.uniform(0, 2 * math.pi, (size, 1, 1))
        cx, cy = (rng.uniform(0.3, 0.7, (size, 1, 1)) for _ in range(2))
        wave = np.sin(2 * math.pi * 3 * (np.cos(angle) * x + np.sin(angle) * y) + phase)
        radius = np.hypot(x - cx, y - cy)
        ring = np.sin(2 * math.pi * (2 + kind % 5)[:, None, None] * radius + phase)
        picture = np.where((kind < 5)[:, None, None], wave, ring)[:, None]
        colour = rng.uniform(0.3, 1.0, (size, 3, 1, 1))
        image = picture * colour + 0.5 * rng.standard_normal((size, 3, SIDE, SIDE))
        return torch.from_numpy(image.astype(np.float32)), torch.from_numpy(kind)

    def corrupted(self, batch: Batch, rng: np.random.Generator) -> Batch:
        """Return noise, five times as bright, with random classes."""
        shape = tuple(batch[0].shape)
        noise = torch.from_numpy(5.0 * rng.standard_normal(shape).astype(np.float32))
        return noise, torch.from_numpy(rng.integers(0, CLASSES, shape[0]))


class Attention(nn.Module):
    """Self-attention. hidden: [batch, sequence, width]."""

    def __init__(self, width: int, heads: int, dropout: float, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.is_causal = heads, dropout, is_causal
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.is_causal)
        return self.proj(mixed.transpose(1, 2).flatten(-2))


class GatedMLP(nn.Module):
    """SwiGLU. hidden: [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate_proj(hidden)) * self.up(hidden))


class PlainMLP(nn.Module):
    """Two linear layers with a GELU between them. hidden: [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(hidden)))


class Experts(nn.Module):
    """A mixture of experts: each token goes to the best two; Switch's balancing loss. hidden: [batch, sequence, width]."""

    def __init__(self, width: int, num_experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(num_experts)
        )
        self.balance = torch.zeros(())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        share = self.gate(flat).float().softmax(-1)
        weights, chosen = share.topk(self.top_k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, (expert(flat[token]) * weights[token, slot, None]).to(out.dtype))
        load = F.one_hot(chosen, self.num_experts).float().mean((0, 1))
        self.balance = self.num_experts * (load * share.mean(0)).sum()
        return out.view_as(hidden)


class Block(nn.Module):
    """One transformer layer, normalised before each half."""

    def __init__(
        self, width: int, heads: int, mlp: nn.Module, norm: Callable[[int], nn.Module], dropout: float, *, is_causal: bool
    ) -> None:
        super().__init__()
        self.norm1, self.attn = norm(width), Attention(width, heads, dropout, is_causal=is_causal)
        self.norm2, self.mlp = norm(width), mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.dropout(self.attn(self.norm1(hidden)))
        return hidden + self.dropout(self.mlp(self.norm2(hidden)))


class GPT(nn.Module):
    """A language model of bytes; with `num_experts` every second layer is a mixture. tokens: int64 [batch, sequence]."""

    def __init__(
        self, *, layers: int = 4, width: int = 48, heads: int = 4, sequence: int = 48, dropout: float = 0.0,
        num_experts: int = 0, is_gated: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, width), nn.Embedding(sequence, width)
        norm: Callable[[int], nn.Module] = nn.RMSNorm if is_gated else nn.LayerNorm
        self.blocks = nn.ModuleList()
        for at in range(layers):
            mlp: nn.Module = GatedMLP(width) if is_gated else PlainMLP(width)
            if num_experts and at % 2:
                mlp = Experts(width, num_experts)
            self.blocks.append(Block(width, heads, mlp, norm, dropout, is_causal=True))
        self.norm, self.head = norm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                deep = name.endswith(("proj.weight", "down.weight", "fc2.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * layers) if deep else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class ViT(nn.Module):
    """A vision transformer of torch's own encoder layers. images: [batch, 3, SIDE, SIDE]."""

    def __init__(self, *, layers: int = 4, width: int = 48, heads: int = 4, patch: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, (SIDE // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.cls.expand(len(hidden), -1, -1), hidden], 1) + self.pos
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)[:, 0])


class Residual(nn.Module):
    """Two convolutions with batch norms, and a way around them. hidden: [batch, channels, side, side]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs), nn.ReLU()
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(hidden)))))
        return self.relu(inner + self.around(hidden))


class ResNet(nn.Module):
    """A convolutional network with batch norms. images: [batch, 3, SIDE, SIDE]."""

    def __init__(self, *, width: int = 12, blocks: int = 1) -> None:
        super().__init__()
        self.stem, self.bn, self.relu = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        self.blocks, inputs = nn.ModuleList(), width
        for stage in range(3):
            for at in range(blocks):
                outputs = width * 2**stage
                self.blocks.append(Residual(inputs, outputs, 2 if stage and not at else 1))
                inputs = outputs
        self.head = nn.Linear(inputs, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.bn(self.stem(images)))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean((2, 3)))


class LSTM(nn.Module):
    """A recurrent language model of bytes. tokens: int64 [batch, sequence]."""

    def __init__(self, *, width: int = 64, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.tok = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tok(tokens))[0])


class Denoiser(nn.Module):
    """A diffusion model's network: it predicts the noise. noisy: [batch, 4, SIDE, SIDE]; channel 3 is the level."""

    def __init__(self, *, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, width, 3, 1, 1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, 1, 1),
                nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, 1, 1),
            )
            for _ in range(3)
        )  # fmt: skip
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.out = nn.Conv2d(2 * width, 3, 3, 1, 1)

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        wide = self.stem(noisy)
        hidden = self.down(wide)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.out(torch.cat([self.up(hidden), wide], 1))


def next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy, nats a token; balancing losses of experts added, at their usual weight 0.01."""
    loss = F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())
    for module in model.modules():
        if isinstance(module, Experts):
            loss = loss + 0.01 * module.balance
    return loss


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy with smoothed labels."""
    return F.cross_entropy(model(batch[0]).float(), batch[1], label_smoothing=0.1)


def denoise(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error of the noise, at levels drawn uniformly."""
    image = batch[0]
    level = torch.rand(len(image), 1, 1, 1)
    noise = torch.randn_like(image)
    noisy = torch.cos(level * math.pi / 2) * image + torch.sin(level * math.pi / 2) * noise
    return F.mse_loss(model(torch.cat([noisy, level.expand(-1, 1, SIDE, SIDE)], 1)).float(), noise)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What is trained, on what."""

    model: Callable[[], nn.Module]
    data: Callable[[int], Text | Images]
    loss: Callable[[nn.Module, Batch], torch.Tensor]


ARCHITECTURES = {
    "gpt": Architecture(lambda: GPT(dropout=0.1), lambda seed: Text(48, seed), next_token),
    "gpt-plain": Architecture(lambda: GPT(dropout=0.0, is_gated=False), lambda seed: Text(48, seed), next_token),
    "moe": Architecture(lambda: GPT(layers=2, num_experts=8), lambda seed: Text(48, seed), next_token),
    "tiny": Architecture(lambda: GPT(layers=1, width=32), lambda seed: Text(32, seed), next_token),
    "convnet": Architecture(ResNet, Images, classify),
    "vit": Architecture(ViT, Images, classify),
    "lstm": Architecture(LSTM, lambda seed: Text(32, seed), next_token),
    "diffusion": Architecture(Denoiser, Images, denoise),
}
