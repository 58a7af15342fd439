"""Probes of the forward under tensor and data parallelism mean what they mean on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ...layouts.layout import Result, Trainer, differences, train_ranks
from ...support.closed_steps import closed_steps, statistics
from ...support.spools import Said
from .. import llama

KINDS = ["attention", "saturation", "precision", "channel"]
LAYOUTS: dict[str, tuple[Callable[[], Trainer], int]] = {
    "one process": (llama.one, 1),
    "tensor": (llama.tp, 2),
    "sequence": (partial(llama.tp, True), 2),
    "data x tensor": (partial(llama.tp_dp, False), 4),
}
Trained = Callable[[str], tuple[Path, list[Result]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    @functools.cache
    def once(name: str) -> tuple[Path, list[Result]]:
        folder = tmp_path_factory.mktemp("run")
        build, world = LAYOUTS[name]
        config = {"kinds": ["param", "wgrad", *KINDS]}
        return folder, train_ranks(folder, build, world, config=config, num_steps=2)

    return once


@pytest.mark.parametrize(
    "name", [*(pytest.param(one, marks=pytest.mark.long) for one in ("tensor", "sequence")), "data x tensor"]
)
def test_shares_and_attention_merge_to_those_of_one_process(name: str, trained: Trained) -> None:
    (folder, _), (alone, _) = trained(name), trained("one process")

    for ours, truth in zip(closed_steps(folder / "run"), closed_steps(alone / "run"), strict=True):
        for kind in KINDS:
            mine, theirs = statistics(ours, kind), statistics(truth, kind)
            if kind == "precision":  # The range of a shard is its own, and a summand of a gradient has other values.
                mine, theirs = (
                    {key: one for key, one in found.items() if "dynamic_range" not in key and "dgrad." not in key}
                    for found in (mine, theirs)
                )
            if kind == "channel":  # Of [batch, head, token, channel] a rank has other heads, no other channels.
                mine, theirs = ({key: one for key, one in each.items() if "core:" not in key} for each in (mine, theirs))
            if kind == "channel" and name != "tensor":  # Each rank has channels of its own tokens.
                mine, theirs = ({key: {"count": 1} for key in found if "attention.w" in key} for found in (mine, theirs))
            if kind == "saturation":  # The largest value, and whether a unit is dead, are a rank's own tokens'.
                mine, theirs = ({key: one for key, one in each.items() if ":zero/" in key} for each in (mine, theirs))
            shared = mine.keys() & theirs.keys()
            assert len(shared) >= 4, (kind, sorted(mine)[:20], sorted(theirs)[:20])
            assert differences({k: mine[k] for k in shared}, {k: theirs[k] for k in shared}, rel=2e-3) == [], kind
            if kind == "attention":
                assert shared == theirs.keys()


def test_each_rank_tells_of_its_own_heads(trained: Trained) -> None:
    folder, _ = trained("tensor")
    alone, _ = trained("one process")
    key = ("layers.0.attention.core:entropy", "entropy")

    (whole,) = Said(alone / "run").vectors[0][key]
    parts = [Said(folder / "run", rank).vectors[0][key][0] for rank in range(2)]

    assert [len(part) for part in parts] == [2, 2]
    assert np.allclose(np.concatenate(parts), whole, rtol=1e-4)
    descriptor = Said(folder / "run").descriptor
    assert descriptor is not None
    words = {tensor.placements.get("tp") for tensor in descriptor.tensors if tensor.kind == "attention"}
    assert words == {"shard"}
