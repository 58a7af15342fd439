"""Attention and routers of real megatron-core: found by structure, merged over layouts, and weights as without them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..support.closed_steps import closed_steps, statistics
from ..support.spools import Said
from .megatron_launch import Launcher

pytestmark = pytest.mark.trainer
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

PROBES = {"kinds": ["wgrad", "attention", "router", "channel", "saturation", "precision"]}
JOB: dict[str, Any] = {"experts": 4, "layers": 2, "config": PROBES}


def test_weights_are_the_same_and_routers_and_attention_are_seen(launcher: Launcher, tmp_path: Path) -> None:
    (rank,) = launcher.train(tmp_path, **JOB)
    reported = Said(tmp_path / "run")

    assert rank["watched"]["weights"] == rank["bare"]["weights"]
    names = set(reported.names(1, "router")) | set(reported.names(1, "attention"))
    for layer in range(2):
        assert f"decoder.layers.{layer}.mlp.router:logits" in names, sorted(names)
        load = reported.vectors[1][f"decoder.layers.{layer}.mlp.router:load", "load"][0]
        row = reported.row(1, "router", f"decoder.layers.{layer}.mlp.router:load")
        logits = reported.of(1, "router", f"decoder.layers.{layer}.mlp.router:logits")[0]
        assert row["count"] == len(load) == 4
        assert row["mean"] == pytest.approx(load.sum() / (int(logits["count"]) / 4) / 4)
    assert any("attention" in name and name.endswith(":entropy") for name in names), sorted(names)
    assert not reported.health, reported.health


@pytest.mark.parametrize(("world", "layout"), [(2, {"tp": 2, "sequence_parallel": True}), (2, {"ep": 2}), (2, {"pp": 2})])
def test_attention_and_loads_are_those_of_one_process(
    world: int, layout: dict[str, Any], launcher: Launcher, tmp_path: Path
) -> None:
    alone = launcher.once(**JOB, steps=1)
    launcher.train(tmp_path, **JOB, **layout, world=world, steps=1, bare=False)
    (one,), (many,) = closed_steps(alone / "run"), closed_steps(tmp_path / "run")

    for name in ("decoder.layers.0.mlp.router", "decoder.layers.1.mlp.router"):
        ours, truth = (
            [one for key, one in statistics(view, "router").items() if key.startswith(f"{name}:entropy/")]
            for view in (many, one)
        )
        counts = sum(part["count"] for part in ours)
        assert counts == truth[0]["count"]
        mean = sum(part["count"] * part["mean"] for part in ours) / counts
        assert mean == pytest.approx(truth[0]["mean"], rel=1e-4)
    loads = [
        sum(
            np.sum([v for key, v in Said(folder / "run", rank).vectors[1].items() if key[1] == "load"], 0)
            for rank in range(ranks)
        ).sum()
        for folder, ranks in ((alone, 1), (tmp_path, world))
    ]
    assert loads[0] == loads[1] > 0
