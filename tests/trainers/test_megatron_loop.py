"""Megatron's loop, watched: iteration numbers, skipped and thrown-away iterations, scalars, resuming, ending."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sentinel.ingest.merge import ClosedStep

from ..layouts.layout import differences, gradient_norm
from ..support.closed_steps import closed_steps, statistics
from ..support.spools import SaidSoFar
from .megatron_launch import EVERYTHING, ROOT, Launcher, truth_of

pytestmark = pytest.mark.trainer
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

PRINTED = re.compile(r" iteration +(\d+)/ +\d+ \| lm loss: (\S+) \| grad norm: (\S+) \|")


def test_example_prints_the_numbers_that_steps_have(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sentinel.cli", "run", "--dir", str(tmp_path), "--name", "run", "--"]
    command += [sys.executable, str(ROOT / "examples" / "megatron_train.py"), "--iterations", "6"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    printed = {int(n): (float(loss), float(norm)) for n, loss, norm in PRINTED.findall(done.stdout)}
    said = {step: end.scalars for step, end in SaidSoFar(tmp_path / "run", 0).ends.items()}
    assert list(printed) == list(said) == [1, 2, 3, 4, 5, 6]
    for step, (loss, norm) in printed.items():
        assert said[step]["loss"] == pytest.approx(loss, rel=1e-6)
        assert said[step]["grad_norm"] == pytest.approx(norm, abs=1e-3)
    assert len({loss for loss, _ in printed.values()}) == 6  # No two steps could be mistaken for each other.


@pytest.mark.parametrize("layout", [{"pp": 2}, {"per_token": True}])
def test_scalars_are_those_of_the_trainer(layout: dict[str, Any], launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.train(tmp_path, world=2, steps=3, bare=False, **layout)
    views = closed_steps(tmp_path / "run")

    reported = [rank["watched"]["told"] for rank in ranks]
    assert [view.step for view in views] == [1, 2, 3]
    for at, view in enumerate(views):
        for rank in range(2):
            mine = reported[rank][at]
            assert f" iteration {view.step:8d}/" in mine["line"]
            assert view.scalars["lr"].by_rank[rank] == mine["lr"]
            assert view.scalars["grad_norm"].by_rank[rank] == mine["grad_norm"]
            if math.isnan(mine["loss"]):  # Another stage has it.
                assert rank not in view.scalars["loss"].by_rank
            else:
                assert view.scalars["loss"].by_rank[rank] == pytest.approx(mine["loss"], rel=1e-6)
    assert reported[0][0]["lr"] != reported[0][1]["lr"]
    tokens = [view.scalars["tokens"].by_rank if "tokens" in view.scalars else {} for view in views]
    assert tokens == [{0: 32.0, 1: 32.0} if "per_token" in layout else {}] * 3


def test_no_sync(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.train(tmp_path, world=2, pp=2, steps=2, counts_synchronising=True)

    for rank in ranks:
        bare, watched = (rank[how]["collectives"]["synchronising"] for how in ("bare", "watched"))
        assert bare == watched > 0  # The positive control: they are counted.


def test_logits_of_a_model_without_labels_are_cut(launcher: Launcher, tmp_path: Path) -> None:
    launcher.train(tmp_path / "one", steps=1, bare=False, has_outer_loss=True)
    launcher.train(tmp_path / "two", steps=1, bare=False, has_outer_loss=True, world=2, tp=2)
    whole, view = closed_steps(tmp_path / "one" / "run")[0], closed_steps(tmp_path / "two" / "run")[0]

    for kind in ("activation", "dgrad"):
        expected = statistics(whole, kind)
        assert differences(statistics(view, kind), expected) == []
        assert expected[f"model/{kind}"]["count"] == 4 * 2 * 8 * 32  # micro-batches, samples, tokens, vocabulary


def test_what_the_loop_logs_belongs_to_its_step_and_wins(launcher: Launcher, tmp_path: Path) -> None:
    launcher.train(tmp_path, steps=3, bare=False, is_logged=True)

    assert [view.scalars["custom"].mean for view in closed_steps(tmp_path / "run")] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("grads_in_fp32", [True, False])
def test_skipped_step_is_a_step(grads_in_fp32: bool, launcher: Launcher, tmp_path: Path) -> None:
    """fp16: the loss of iteration 2 overflows, the loss scale is halved, the weights stay."""
    job = {"precision": "fp16", "grads_in_fp32": grads_in_fp32}
    ranks = launcher.train(tmp_path / "scaled", steps=3, overflow_at=2, **job)
    launcher.train(tmp_path / "plain", steps=1, loss_scale=1.0, bare=False, **job)
    views, plain = closed_steps(tmp_path / "scaled" / "run"), closed_steps(tmp_path / "plain" / "run")

    assert [one["line"] for one in ranks[0]["bare"]["told"]] == [one["line"] for one in ranks[0]["watched"]["told"]]
    assert ranks[0]["bare"]["weights"] == ranks[0]["watched"]["weights"]
    assert [(view.step, view.is_skipped) for view in views] == [(1, False), (2, True), (3, False)]
    assert [one["success"] for one in ranks[0]["watched"]["told"]] == [True, False, True]
    assert [view.scalars["loss_scale"].mean for view in views] == [256.0, 256.0, 128.0]
    bad = {views[1].tensors[views[1].row_logical[at]].kind for at in views[1].bad_rows}
    assert {"wgrad", "dgrad"} <= bad
    assert "param" not in bad
    for at in (0, 2):
        truth = truth_of(ranks, at)
        assert gradient_norm(views[at]) == pytest.approx(math.sqrt(sum(one[0] for one in truth.values())), rel=1e-5)
        assert gradient_norm(views[at]) == pytest.approx(ranks[0]["watched"]["told"][at]["grad_norm"], rel=1e-2)
    for kind in ("wgrad", "dgrad"):  # Unscaled, both: like those of a run whose loss is not scaled at all.
        ours, theirs = (statistics(view, kind) for view in (views[0], plain[0]))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name]["norm"] == pytest.approx(theirs[name]["norm"], rel=0.05, abs=1e-6), name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_iteration_thrown_away_is_a_skipped_step(precision: str, launcher: Launcher, tmp_path: Path) -> None:
    """A loop that skips a batch never calls the optimizer: the zeroing of the buffers is the last chance."""
    ranks = launcher.train(tmp_path, world=2, steps=3, skip_at=2, precision=precision, distributed_optimizer=True)
    views = closed_steps(tmp_path / "run")

    assert ranks[0]["bare"]["weights"] == ranks[0]["watched"]["weights"]
    assert [(view.step, view.is_skipped) for view in views] == [(1, False), (2, True), (3, False)]
    truth = truth_of(ranks, 1)
    assert gradient_norm(views[1]) == pytest.approx(math.sqrt(sum(one[0] for one in truth.values())), rel=1e-5)


def test_second_attach_changes_nothing(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.train(tmp_path, steps=2, attaches_twice=True)
    views = closed_steps(tmp_path / "run")

    assert ranks[0]["watched"]["is_restored"]
    assert [view.step for view in views] == [1, 2]
    assert [view.scalars["loss"].mean for view in views] == pytest.approx([one["loss"] for one in ranks[0]["bare"]["told"]])


def test_evaluation_inside_the_loop_is_not_measured(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.train(tmp_path / "with", world=2, pp=2, steps=3, evaluate_after=1)
    launcher.train(tmp_path / "without", world=2, pp=2, steps=3, bare=False)
    ours, theirs = closed_steps(tmp_path / "with" / "run"), closed_steps(tmp_path / "without" / "run")

    assert [rank["bare"]["weights"] for rank in ranks] == [rank["watched"]["weights"] for rank in ranks]
    assert [view.num_rows for view in ours] == [view.num_rows for view in theirs]
    for view, other in zip(ours, theirs, strict=True):
        assert view.scalars["loss"].mean == other.scalars["loss"].mean
        for kind in ("activation", "dgrad"):
            assert differences(statistics(view, kind), statistics(other, kind), 1e-12) == []


@pytest.mark.parametrize("is_sharded", [False, True])
def test_resumed_run_goes_on_counting(is_sharded: bool, launcher: Launcher, tmp_path: Path) -> None:
    """Our state lies in the trainer's own checkpoint: a file of each rank, or Megatron's dist_checkpointing."""
    job = {"bare": False, "world": 2, "tp": 2, "is_sharded": is_sharded}
    launcher.train(tmp_path / "whole", steps=4, **job)
    launcher.train(tmp_path / "first", steps=2, checkpoint=str(tmp_path / "saved"), **job)
    launcher.train(tmp_path / "second", steps=2, resume=str(tmp_path / "saved"), **job)
    whole, second = closed_steps(tmp_path / "whole" / "run"), closed_steps(tmp_path / "second" / "run")

    assert [view.step for view in second] == [3, 4]
    for view, other in zip(second, whole[2:], strict=True):
        assert view.scalars["loss"].mean == other.scalars["loss"].mean
        assert differences(statistics(view, "param"), statistics(other, "param"), 1e-9) == []


def test_what_was_measured_is_on_disk_when_the_trainer_raises(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.train(tmp_path, steps=3, bare=False, raise_at=2)  # The process ends without running atexit.
    said = SaidSoFar(tmp_path / "run", 0)

    assert ranks[0]["watched"]["raised"] == "the data loader broke"
    assert {step: end.is_partial for step, end in said.ends.items()} == {1: False, 2: True}
    assert said.ends[2].num_micro_steps == 2
    assert said.of(2, "activation")
    assert said.of(2, "dgrad")


def test_disabled_it_is_not_there(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.train(tmp_path, steps=2, environment={"SENTINEL_DISABLE": "1"}, is_logged=True)

    assert not (tmp_path / "run").exists()
    assert ranks[0]["watched"]["is_alive"] is False
    assert [one["line"] for one in ranks[0]["bare"]["told"]] == [one["line"] for one in ranks[0]["watched"]["told"]]


def test_torch_optimizer_over_reduced_gradients(launcher: Launcher, tmp_path: Path) -> None:
    """A user's own loop: finalize_model_grads, `main_grad` into `grad`, torch's clipping and optimizer."""
    ranks = launcher.train(tmp_path, world=2, steps=3, plain_adam=True)
    views = closed_steps(tmp_path / "run")

    assert ranks[0]["bare"]["weights"] == ranks[0]["watched"]["weights"]
    assert [(view.step, view.is_skipped) for view in views] == [(1, False), (2, False), (3, False)]
    for at, view in enumerate(views):
        assert gradient_norm(view) == pytest.approx(ranks[0]["watched"]["told"][at]["grad_norm"], rel=1e-5)


def per_micro_step(view: ClosedStep, with_received: bool = False) -> dict[tuple[str, str, int], tuple[float, float]]:
    """(name, kind, micro_step) -> mean and second moment of the rows of module kinds."""
    found = {}
    for row, at in zip(view.rows, view.row_logical, strict=True):
        tensor = view.tensors[at]
        is_received = ":hidden_states" in tensor.name
        if tensor.kind in ("activation", "activation_in", "dgrad", "dgrad_in") and (with_received or not is_received):
            found[tensor.name, tensor.kind, int(row["micro_step"])] = (float(row["mean"]), float(row["m2"]))
    return found


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "recompute": "full", "precision": "bf16"}])
def test_micro_step_survives_reverse_backward(layout: dict[str, Any], launcher: Launcher, tmp_path: Path) -> None:
    config = {**EVERYTHING, "per_micro_step": True}
    what = {"precision": layout["precision"]} if "precision" in layout else {}
    one = launcher.once(steps=1, config=config, **what)
    launcher.train(tmp_path, steps=1, bare=False, config=config, world=2, **layout)
    whole, view = closed_steps(one / "run")[0], closed_steps(tmp_path / "run")[0]

    expected, ours = per_micro_step(whole), per_micro_step(view)
    if "recompute" in layout:
        # In the very first forward, without a graph, nothing tells a further input from a mask.
        expected, ours = ({key: one for key, one in some.items() if ":" not in key[0]} for some in (expected, ours))
    assert {key[2] for key in ours} == {0, 1, 2, 3}
    assert ours.keys() == expected.keys()
    for key, moments in expected.items():
        np.testing.assert_allclose(ours[key], moments, rtol=1e-4, atol=1e-9, err_msg=str(key))


def test_input_of_a_recomputed_region_is_measured_once(launcher: Launcher, tmp_path: Path) -> None:
    """The first layer's input comes from an embedding that nobody watches: from outside, though Megatron adds inside too."""
    config = {"kinds": ["dgrad", "dgrad_in"], "targets": ["decoder.layers.0"], "black_box": False, "per_micro_step": True}
    job = {"steps": 1, "bare": False, "config": config, "precision": "bf16"}
    launcher.train(tmp_path / "kept", **job)
    launcher.train(tmp_path / "again", recompute="full", **job)
    kept, again = closed_steps(tmp_path / "kept" / "run")[0], closed_steps(tmp_path / "again" / "run")[0]

    for view in (kept, again):
        names = [(view.tensors[at].name, view.tensors[at].kind) for at in view.row_logical]
        assert names.count(("decoder.layers.0:hidden_states", "dgrad_in")) == 4
    theirs, ours = (per_micro_step(view, with_received=True) for view in (kept, again))
    for micro_step in range(4):
        key = ("decoder.layers.0:hidden_states", "dgrad_in", micro_step)
        assert ours[key] == theirs[key]


def test_depth_is_that_of_the_interleaved_schedule(launcher: Launcher, tmp_path: Path) -> None:
    launcher.train(tmp_path, world=2, steps=1, bare=False, pp=2, vpp=2)
    view = closed_steps(tmp_path / "run")[0]

    depths = {one.name: (one.depth, one.pp_stage, one.vpp_stage) for one in view.tensors if one.kind == "param"}
    assert [depths[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] for layer in range(4)] == [
        (0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1),
    ]  # fmt: skip
    assert {place.schedule for place in view.places.values()} == {"interleaved1f1b"}
