"""What a rank says of itself for a replay: torch's seed, and how it was started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import sentinel

from ...support.nets import TinyModel
from ...support.spools import Said

TYPED = ["python", "train.py", "--hf-token", "s3cr3t", "--lr", "0.1"]


def test_a_rank_tells_its_seed_and_its_command_without_what_looks_like_a_secret(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "train.py", "--hf-token", "s3cr3t", "--lr", "0.1", "\udcff\x1b[2J" * 5000]
    )
    before = torch.initial_seed()
    try:
        torch.manual_seed(4711)
        model = TinyModel()
        drawn = torch.rand(3)
        torch.manual_seed(4711)
        monitor = sentinel.attach(TinyModel(), torch.optim.SGD(model.parameters(), 0.1), {"kinds": []})

        assert torch.equal(torch.rand(3), drawn), "no number of the trainer's was drawn"
        monitor.detach()
    finally:
        torch.manual_seed(before)
    said = Said(run).descriptor.environment

    assert said["seed"] == "4711"
    assert said["command"].startswith("python train.py --hf-token *** --lr 0.1") and "s3cr3t" not in said["command"]
