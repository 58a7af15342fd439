"""The optimizer's state and updates where trainers keep weights of their own for it: Megatron's and DeepSpeed's fp32 copies."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..layouts.layout import differences, heard, statistics
from .megatron_launch import Launcher, launched

pytestmark = pytest.mark.trainer
KINDS = ["param", "wgrad", "wgrad_unreduced", "exp_avg", "exp_avg_sq", "update", "update_ratio", "grad_momentum_alignment"]
CONFIG: dict[str, Any] = {"kinds": KINDS, "black_box": False}
MERGED = ("exp_avg", "exp_avg_sq", "update")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    yield from launched()


MEGATRON: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "tp2": (2, {"tp": 2}, {}),
    "do2": (2, {"distributed_optimizer": True}, {}),
    "bf16": (1, {}, {"precision": "bf16"}),
    "bf16-do2": (2, {"distributed_optimizer": True}, {"precision": "bf16"}),
    "ep2": (2, {"ep": 2}, {"experts": 4}),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_copies_merge_to_one_process(name: str, launcher: Launcher, tmp_path: Path) -> None:
    world, layout, what = MEGATRON[name]
    launcher.train(tmp_path / "one", **{**what, "precision": "fp32"} if "precision" in what else what, config=CONFIG)

    ranks = launcher.train(tmp_path / "all", world=world, **layout, **what, config=CONFIG)
    views, expected = heard(tmp_path / "all"), heard(tmp_path / "one")

    for rank in ranks:
        assert [one["line"] for one in rank["bare"]["told"]] == [one["line"] for one in rank["watched"]["told"]]
        assert rank["bare"]["weights"] == rank["watched"]["weights"]
        assert rank["bare"]["collectives"] == rank["watched"]["collectives"]
    for view, whole in zip(views, expected, strict=True):
        assert not view.health
        num = len(statistics(view, "param"))
        for kind in (*MERGED, "wgrad_unreduced"):
            assert len({key.partition("@")[0] for key in statistics(view, kind)}) >= num - 1, kind
        for kind in MERGED if "bf16" not in name else ():
            wrong = differences(statistics(view, kind), statistics(whole, kind), 5e-3)
            assert not wrong, "\n".join([f"{kind} of step {view.step}", *wrong[:10], f"{len(wrong)} in all"])
        for key, one in statistics(view, "update").items() if "bf16" in name else ():
            assert one["norm"] == pytest.approx(statistics(whole, "update")[key]["norm"], rel=0.15), key
