"""Optimizer state and updates where trainers keep copies in fp32 for their optimizer: Megatron and DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel

from ..layouts.layout import differences
from ..layouts.net import shifted_loss, tokens_of
from ..support.closed_steps import closed_steps, statistics
from .deepspeed_ranks import JOBS, backward, make_engine, plain, run
from .megatron_launch import Launcher

pytestmark = pytest.mark.trainer
KINDS = ["param", "wgrad", "wgrad_unreduced", "exp_avg", "exp_avg_sq", "update", "update_ratio", "grad_momentum_alignment"]
CONFIG: dict[str, Any] = {"kinds": KINDS, "black_box": False}
MERGED = ("exp_avg", "exp_avg_sq", "update")


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
    one = launcher.once(**{key: value for key, value in what.items() if key != "precision"}, config=CONFIG)

    ranks = launcher.train(tmp_path, world=world, **layout, **what, config=CONFIG)
    views, expected = closed_steps(tmp_path / "run"), closed_steps(one / "run")

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


DEEPSPEED = ("zero0-fp32", "zero1-fp32", "zero1-round-robin", "zero2-fp32", "zero3-fp32", "zero2-bf16", "zero3-bf16")


def trained(rank: int, world: int, folder: Path) -> None:
    """One rank: every job, watched."""
    for name in DEEPSPEED:
        (folder / name).mkdir(exist_ok=True, mode=0o700)
        os.environ["SENTINEL_DIR"] = str(folder / name)
        torch.manual_seed(0)
        engine = make_engine(JOBS[name])
        monitor = sentinel.attach_deepspeed(engine, CONFIG)
        for step in range(2):
            backward(engine, JOBS[name], step, 0, rank, world)
            engine.step()
        assert not monitor.recorder.recording.health
        monitor.detach()
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        assert not inner._optimizer_step_pre_hooks
        assert not inner._optimizer_step_post_hooks
        engine.destroy()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("jobs")
    run(folder, 2, trained, timeout_s=300)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The same model on the same data in one plain torch process."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SENTINEL_DIR", str(folder))
        patch.setenv("SENTINEL_RUN", "run")
        torch.manual_seed(0)
        model = plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
        monitor = sentinel.attach(model, optimizer, CONFIG)
        for step in range(2):
            optimizer.zero_grad()
            shifted_loss(model(tokens_of(step)), tokens_of(step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        monitor.detach()
    return closed_steps(folder / "run")


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeeds_partitions_merge_to_one_process(name: str, jobs: Path, alone: list[Any]) -> None:
    views = closed_steps(jobs / name / "run")
    assert len(views) == len(alone)
    for view, whole in zip(views, alone, strict=True):
        for kind in ("exp_avg", "update"):
            ours, truth = statistics(view, kind), statistics(whole, kind)
            assert ours.keys() == truth.keys(), kind
            if "fp32" in name or "round" in name:
                assert not differences(ours, truth, 5e-3)
            for key, one in ours.items():
                assert one["count"] == truth[key]["count"]
                assert one["norm"] == pytest.approx(truth[key]["norm"], rel=0.2, abs=1e-6), key
        ratios = statistics(view, "update_ratio")
        assert ratios.keys() == statistics(whole, "update_ratio").keys(), "of the whole parameter, not of its parts"
        assert len(statistics(view, "wgrad_unreduced")) == len(statistics(view, "param"))
