"""A small transformer with awkward sizes, its data, and one process that trains it: what every layout is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

VOCAB, WIDTH, HEADS, LENGTH, BATCH = 11, 12, 2, 8, 8
NUM_STEPS = 3
LEARNING_RATE = 0.05

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, d] each; causal, by hand: the same sums on every layout."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        # No bias for the keys: softmax does not see it, its gradient is rounding alone.
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v)]
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class Experts(nn.Module):
    """Four experts in two grouped weights; every token goes to all of them, weighed by the router."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, WIDTH, 6) / 4)
        self.w2 = nn.Parameter(torch.randn(4, 6, WIDTH) / 4)
        self.exchange: Callable[[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Under expert parallelism: brings the tokens to the experts and their sums back."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.weigh(x, gate) if self.exchange is None else self.exchange(self.weigh, x, gate)

    def weigh(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x: [batch, tokens, WIDTH]; gate: [batch, tokens, experts held here]."""
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        hidden = torch.tanh(torch.einsum("btd,edh->bteh", x, w1))
        return torch.einsum("bteh,ehd,bte->btd", hidden, w2, gate)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.router(x).softmax(-1))


class LayoutBlock(nn.Module):
    def __init__(self, attend: Attend, moe: bool = False) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(attend), MoE() if moe else MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Net(nn.Module):
    """`first` of `num` equal pieces of the model: `depth` blocks in all; the first piece embeds, the last has the head."""

    def __init__(
        self, first: int = 0, num: int = 1, attend: Attend = attend, tied: bool = False, moe: bool = False, depth: int = 4
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        blocks = nn.ModuleList([LayoutBlock(attend, moe) for _ in range(depth)])
        emb, norm, head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        scale = nn.Parameter(torch.full((1,), 1.5))
        per = depth // num
        self.emb = emb if first == 0 else None
        self.blocks = nn.ModuleDict({str(n): blocks[n] for n in range(first * per, (first + 1) * per)})
        is_last = first == num - 1
        self.norm, self.head = (norm, head) if is_last else (None, None)
        if is_last:
            self.scale = scale  # One element: an empty shard on all ranks but one.
        if tied and self.head is not None and self.emb is not None:
            self.head.weight = self.emb.weight
        with torch.no_grad():
            for name, param in self.named_parameters():
                # Means of the shards far from each other, so that a merge that forgets them shows.
                param += 0.1 * torch.linspace(-1, 1, param.numel()).view_as(param) * (len(name) % 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.emb is not None:
            x = self.emb(x)
        for block in self.blocks.values():
            x = block(x)
        return self.scale * self.head(self.norm(x)) if self.head is not None else x


def tokens_of(step: int) -> torch.Tensor:
    """[BATCH, LENGTH] int64, the same on every layout."""
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 + step))


def shifted_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens; each predicts itself shifted by a constant, so that it can be cut anywhere."""
    return F.cross_entropy(logits.flatten(0, 1).float(), ((batch + 3) % VOCAB).flatten())


def optimizer_of(params: object) -> torch.optim.Optimizer:
    """With state of both kinds, and an epsilon that keeps it from making rounding large."""
    return torch.optim.AdamW(params, LEARNING_RATE, eps=1e-2)  # type: ignore[arg-type]
