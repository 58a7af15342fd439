"""Activation checkpointing of whole layers: what is run again in the backward is measured as it is without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sentinel

from ..support.nets import loss_of
from ..support.spools import Said, norm


class Attend(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ((q @ k.mT + mask).softmax(-1)) @ v


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(8, 24), Attend()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.full((x.shape[-2],) * 2, -torch.inf).triu(1)
        return x + self.core(q, k, v, mask)  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.emb, self.layers, self.is_checkpointed = nn.Embedding(11, 8), nn.ModuleList([Layer(), Layer()]), is_checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.is_checkpointed else layer(x)
        return x @ self.emb.weight.T  # type: ignore[no-any-return]


def test_keys_and_values_of_core_attention_are_measured_under_full_recompute_and_masks_are_not(run: Path) -> None:
    found = []
    for is_checkpointed in (False, True):
        torch.manual_seed(2)
        model = Recomputed(is_checkpointed)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        name = f"c{is_checkpointed}"
        monitor = sentinel.attach(model, optimizer, {"kinds": ["activation_in", "dgrad_in"], "run": name})
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        monitor.detach()
        found.append(Said(run.parent / name))
    bare, recomputed = found

    for kind in ("activation_in", "dgrad_in"):
        for step in (1, 2):  # The first recompute shows which inputs a gradient goes through.
            names = {name for name in bare.names(step, kind) if "core" in name}
            assert names == {f"layers.{at}.core{path}" for at in range(2) for path in ("", ":1", ":2")}
            assert {name for name in recomputed.names(step, kind) if "core" in name} == names
            for name in names:
                (ours,), (truth,) = recomputed.of(step, kind, name), bare.of(step, kind, name)
                assert norm(ours) == pytest.approx(norm(truth), rel=1e-5)
