"""Small mixtures of experts whose routers look like those of the frameworks: in what they hold, take and return."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...support.training import train_steps

WIDTH, EXPERTS, TOP = 12, 6, 2


class Experts(nn.Module):
    """All of them as one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor, scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tk,tkde,td->te", scores, self.weight[indices], x)


class Moe(nn.Module):
    """A block that routes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def mix(self, x: torch.Tensor, scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x.flatten(0, -2), scores, indices)
        return y.view_as(x)


class LinearGate(Moe):
    """Hugging Face before version 5: the block itself chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = TOP, EXPERTS
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, indices = F.softmax(self.gate(x.flatten(0, -2)), -1).topk(TOP)
        return self.mix(x, scores, indices)


class TupleRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = TOP, EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        logits = F.linear(x.reshape(-1, WIDTH), self.weight)
        scores, indices = F.softmax(logits, -1).topk(TOP)
        return logits, scores, indices


class TupleGate(Moe):
    """Hugging Face from version 5 on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = TupleRouter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, scores, indices = self.gate(x)
        return self.mix(x, scores, indices)


class SigmoidRouter(TupleRouter):
    """DeepSeek-V3: chosen by scores and a bias, which the scores do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("e_score_correction_bias", torch.tensor([1.0, 0.0, 0.0, -1.0, 0.0, 0.5]))

    def forward(self, x: torch.Tensor) -> Any:
        scores = F.linear(x.reshape(-1, WIDTH), self.weight).sigmoid()
        indices = (scores + self.e_score_correction_bias).topk(TOP).indices
        return indices, scores.gather(1, indices)


class BiasedGate(Moe):
    def __init__(self) -> None:
        super().__init__()
        self.gate = SigmoidRouter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices, scores = self.gate(x)
        return self.mix(x, scores, indices)


class TokenChoiceTopKRouter(nn.Module):
    """torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.num_experts, self.top_k, self.score_func = EXPERTS, TOP, "sigmoid"

    def forward(self, x: torch.Tensor, expert_bias: torch.Tensor) -> Any:
        scores = torch.sigmoid(self.gate(x).float())
        indices = (scores + expert_bias).topk(TOP, 1).indices
        return scores.gather(1, indices), indices, torch.bincount(indices.flatten(), minlength=EXPERTS)


class TitanMoe(Moe):
    def __init__(self) -> None:
        super().__init__()
        self.router = TokenChoiceTopKRouter()
        self.register_buffer("expert_bias", torch.linspace(-0.5, 0.5, EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, indices, _ = self.router(x.flatten(0, -2), self.expert_bias)
        return self.mix(x, scores, indices)


class TopKRouter(nn.Module):
    """Megatron: [sequence, batch, width] in, a sparse matrix of scores and a map out."""

    def __init__(self) -> None:
        super().__init__()
        self.topk, self.score_function, self.expert_bias = TOP, "softmax", None
        self.config = type("Config", (), {"num_moe_experts": EXPERTS})()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        scores = F.softmax(F.linear(x, self.weight).view(-1, EXPERTS), -1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOP).indices, True)
        return scores * chosen, chosen


class MegatronMoe(Moe):
    def __init__(self) -> None:
        super().__init__()
        self.router = TopKRouter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, chosen = self.router(x)
        assert chosen.sum() == TOP * len(chosen)
        scores, indices = probs.topk(TOP)
        return self.mix(x, scores, indices)


class FlatRouter(nn.Module):
    """OLMo-core: a flat weight; indices, counts and losses out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.gating_function = EXPERTS, TOP, "softmax"
        self.weight = nn.Parameter(torch.randn(EXPERTS * WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        logits = F.linear(x.float(), self.weight.view(EXPERTS, WIDTH))
        scores, indices = F.softmax(logits, -1).topk(TOP)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS)
        return scores, indices, counts, scores.mean() * 0.01


class FlatMoe(Moe):
    def __init__(self) -> None:
        super().__init__()
        self.router = FlatRouter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, indices, _, loss = self.router(x)
        return self.mix(x, scores.flatten(0, -2), indices.flatten(0, -2)) + loss


class TopKGate(nn.Module):
    """DeepSpeed: a loss, what is dispatched where, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.wg, self.k = nn.Linear(WIDTH, EXPERTS, bias=False), TOP

    def forward(self, x: torch.Tensor) -> Any:
        gates = F.softmax(self.wg(x), -1)
        chosen = torch.zeros_like(gates, dtype=torch.bool).scatter(1, gates.topk(TOP).indices, True)
        sent = chosen[:, :, None] & (torch.arange(len(x)) == torch.arange(len(x))[:, None])[:, None]
        return gates.mean(), gates[:, :, None] * sent, sent, chosen.sum(0)


class SpeedMoe(Moe):
    def __init__(self) -> None:
        super().__init__()
        self.gate = TopKGate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss, combined, _, _ = self.gate(x.flatten(0, -2))
        scores, indices = combined.sum(-1).topk(TOP)
        return self.mix(x, scores, indices) + loss


MAKES: dict[str, tuple[type[Moe], str]] = {
    "linear": (LinearGate, "moe.gate"), "tuple": (TupleGate, "moe.gate"), "biased": (BiasedGate, "moe.gate"),
    "titan": (TitanMoe, "moe.router"), "megatron": (MegatronMoe, "moe.router"), "flat": (FlatMoe, "moe.router"),
    "deepspeed": (SpeedMoe, "moe.gate"),
}  # fmt: skip
"""What it is like -> the block, the name of the router in a Net."""


class Net(nn.Module):
    def __init__(self, like: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.moe, self.drop = nn.Linear(WIDTH, WIDTH), MAKES[like][0](), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.moe(self.stem(x))).square().mean()


def batch(seed: int) -> torch.Tensor:
    return 2 * torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(seed)) + 0.5


def train_routed(model: nn.Module, num_steps: int = 2) -> list[float]:
    return train_steps(model, num_steps, seed=7, loss=lambda model, seed: model(batch(seed)))
