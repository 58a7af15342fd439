"""examples/gpt/train.py with more ways to go wrong: those of `attribution_real.py`. Same options.

ATTRIBUTION_FAULT names what happens at ATTRIBUTION_STEP: `lr`, `attention`, `zeroed`, `absurd`, `top`, `norm`, `reload`;
empty: nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))
import faults as gpt_faults
import parallel
import train

KIND, AT = os.environ.get("ATTRIBUTION_FAULT", ""), int(os.environ.get("ATTRIBUTION_STEP", "60"))
LR_STEPS = 6


class MoreFaults(gpt_faults.Faults):
    """What the example cannot do to itself."""

    def __init__(self, faults: Any, dp_rank: int = 0, tp_rank: int = 0) -> None:
        super().__init__(faults, dp_rank, tp_rank)
        self._dp_rank, self._tp_rank, self._chunks = dp_rank, tp_rank, list[nn.Module]()
        self._last_dp_rank = int(os.environ.get("ATTRIBUTION_DP", "1")) - 1

    def plant(self, chunks: Iterable[nn.Module]) -> None:
        """Note the modules, too."""
        self._chunks = list(chunks)
        super().plant(self._chunks)

    def begin_step(self, step: int) -> None:
        """Strike."""
        super().begin_step(step)
        if step != AT:
            return
        with torch.no_grad():
            for name, weight in (pair for chunk in self._chunks for pair in chunk.named_parameters()):
                one = parallel.local(weight)
                if KIND == "attention" and name.endswith("blocks.1.attn.qkv.weight") and self._tp_rank == 0:
                    # The same rows in every layout: queries, keys and values of the first head, and queries of the next.
                    one[: weight.shape[0] // 3].mul_(30.0)
                elif KIND == "zeroed" and name.endswith("blocks.2.mlp.fc1.weight"):
                    weight.register_hook(torch.zeros_like)
                elif KIND == "absurd" and name.endswith("blocks.1.mlp.fc1.weight") and self._dp_rank == 1:
                    one.data.view(torch.int32).view(-1)[one.numel() // 2] ^= 1 << 29
                elif KIND == "top" and name.endswith("blocks.1.mlp.fc1.weight") and self._is_struck():
                    one.data.view(torch.int32).view(-1)[one.numel() // 2] ^= 1 << 30
                elif KIND == "norm" and name.endswith("blocks.1.ln2.weight") and self._tp_rank == 1:
                    one.data.view(torch.int32).view(-1)[one.numel() // 2] ^= 1 << 20
                elif KIND == "reload" and self._dp_rank == 1:
                    one.mul_(1.001)

    def _is_struck(self) -> bool:
        """On one rank alone: of the last replica, the first of its tensor-parallel group."""
        return self._dp_rank == self._last_dp_rank and self._tp_rank == 0


def learning_rate(step: int, options: Any) -> float:
    """A hundred times too high for some steps."""
    rate = healthy_rate(step, options)
    return rate * 100.0 if KIND == "lr" and AT <= step < AT + LR_STEPS else rate


healthy_rate = train.learning_rate
train.Faults = MoreFaults
train.learning_rate = learning_rate

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    train.main()
