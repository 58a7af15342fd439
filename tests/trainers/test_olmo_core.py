"""The adapter on the real OLMo-core trainer: its steps, its dry run, skipped steps, checkpoints, errors and metrics."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.record import Flag

from ..end_to_end.ranks import ROOT, run_command
from ..support.closed_steps import closed_steps, statistics
from ..support.host_waits import READ, HostWaits
from ..support.ports import free_port
from ..support.spools import Said, SaidSoFar, norm
from ..support.warm import interpreter

pytest.importorskip("olmo_core")
from olmo_core.config import DType
from olmo_core.optim import AdamWConfig, SkipStepAdamWConfig
from olmo_core.train import Duration
from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConfigSaverCallback
from olmo_core.train.common import LoadStrategy, StepSkipRange
from olmo_core.train.train_module.transformer.config import (
    TransformerActivationCheckpointingConfig,
    TransformerActivationCheckpointingMode,
)

from .olmo_core_run import EVERYTHING, NUM_STEPS, build, printed

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]

LOSS, NORM, LR = "train/CE loss", "optim/total grad norm", "optim/LR (group 0)"


class Truth(Callback):
    """Gradients of each step, before the trainer clips them, and how often the model was called."""

    priority = -5

    def post_attach(self) -> None:
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.num_forwards = 0

    def pre_train(self) -> None:
        self.trainer.train_module.model.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: Any) -> None:
        self.num_forwards += 1

    def pre_optim_step(self) -> None:
        named = self.trainer.train_module.model.named_parameters()
        self.gradients[self.step] = {name: param.grad.clone() for name, param in named}


def watch(trainer: Any, callback: Callback) -> Any:
    trainer.add_callback(type(callback).__name__, callback)
    return callback


def test_step_number_is_the_one_that_the_console_prints(
    tmp_path: Path,
    run: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "olmo_core"):
        build(tmp_path, sentinel.OlmoCoreCallback()).fit()

    lines = re.findall(r"\[step=(\d+)/.*\n    train/CE loss=([0-9.]+)", caplog.text)
    said = Said(run)
    assert [int(step) for step, _ in lines] == [end.step for end in said.ends] == list(range(1, NUM_STEPS + 1))
    assert [end.scalars["loss"] for end in said.ends] == pytest.approx([float(loss) for _, loss in lines], abs=1e-3)
    assert [end.num_micro_steps for end in said.ends] == [2] * NUM_STEPS
    assert not any(end.is_skipped or end.is_partial for end in said.ends)
    assert not said.health


@pytest.mark.parametrize("interval", [1, 3])
def test_loss_learning_rate_and_norm_are_those_of_their_step(tmp_path: Path, run: Path, interval: int) -> None:
    trainer = build(tmp_path, sentinel.OlmoCoreCallback(), trainer={"metrics_collect_interval": interval})
    trainer.fit()

    said, metrics = Said(run), printed(trainer)
    assert len({end.scalars["lr"] for end in said.ends}) > 1
    for end in said.ends:
        reported = metrics[end.step]
        assert (end.scalars["loss"], end.scalars["grad_norm"], end.scalars["lr"]) == pytest.approx(
            (reported[LOSS], reported[NORM], reported[LR]), rel=1e-6
        )
        assert end.scalars["tokens"] == 64


@pytest.mark.parametrize(
    "module",
    [
        {},
        {"optim": SkipStepAdamWConfig(lr=1e-2, rolling_interval_length=4, sigma_factor=-100), "z_loss_multiplier": 1e-3},
        {"autocast_precision": DType.bfloat16, "max_grad_norm": None},
    ],
    ids=["clip", "skip-step", "bf16 autocast"],
)
def test_losses_and_weights_are_bit_identical(tmp_path: Path, run: Path, module: dict[str, Any]) -> None:
    def train(folder: Path, *callbacks: Any) -> tuple[dict[int, float], list[torch.Tensor]]:
        trainer = build(folder, *callbacks, module=module)
        trainer.fit()
        return {step: reported[LOSS] for step, reported in printed(trainer).items()}, list(
            trainer.train_module.model.parameters()
        )

    plain, weights = train(tmp_path / "plain")
    watched, ours = train(tmp_path / "watched", sentinel.OlmoCoreCallback(EVERYTHING))

    assert watched == plain and len(plain) == NUM_STEPS
    assert all(torch.equal(one, other) for one, other in zip(ours, weights, strict=True))
    said = Said(run)
    assert said.names(1, "dgrad_in") and said.names(1, "activation")
    assert not said.health


@pytest.mark.parametrize("max_grad_norm", [1e-3, None])
def test_wgrad_is_before_clipping(tmp_path: Path, run: Path, max_grad_norm: float | None) -> None:
    trainer = build(tmp_path, sentinel.OlmoCoreCallback(), module={"max_grad_norm": max_grad_norm})
    truth = watch(trainer, Truth())
    trainer.fit()

    said = Said(run)
    assert list(truth.gradients) == list(range(1, NUM_STEPS + 1))
    for step, gradients in truth.gradients.items():
        assert len(said.of(step, "wgrad")) == len(gradients) == 21
        for name, gradient in gradients.items():
            (row,) = said.of(step, "wgrad", name)
            assert norm(row) == pytest.approx(float(gradient.double().norm()), rel=1e-6)
            assert not row["flags"] & Flag.POST_CLIP


def test_the_dry_run_is_nobodys_step(tmp_path: Path, run: Path) -> None:
    trainer = build(tmp_path, sentinel.OlmoCoreCallback({**EVERYTHING, "per_micro_step": True}), steps=2)
    truth = watch(trainer, Truth())
    trainer.fit()

    said = Said(run)
    assert truth.num_forwards == 2 + 2 * 2, "the trainer did run its two micro-batches of random tokens"
    assert [(end.step, end.num_micro_steps) for end in said.ends] == [(1, 2), (2, 2)]
    assert [int(row["micro_step"]) for row in said.of(1, "activation", "blocks.0.attention.w_q")] == [0, 1]
    (row,) = said.of(1, "wgrad", "lm_head.w_out.weight")
    assert norm(row) == pytest.approx(float(truth.gradients[1]["lm_head.w_out.weight"].double().norm()), rel=1e-6)


class Evaluates(Callback):
    """Evaluates inside of the loop, as evaluators do."""

    def post_step(self) -> None:
        self.trainer.train_module.eval_batch({"input_ids": torch.ones(3, 16, dtype=torch.long)})


def test_evaluation_inside_the_loop_is_not_measured(tmp_path: Path, run: Path) -> None:
    trainer = build(tmp_path, sentinel.OlmoCoreCallback(EVERYTHING))
    watch(trainer, Evaluates())
    truth = watch(trainer, Truth())
    trainer.fit()

    said = Said(run)
    assert truth.num_forwards == 2 + 3 * NUM_STEPS
    assert [end.num_micro_steps for end in said.ends] == [2] * NUM_STEPS
    assert {int(said.of(step, "activation", "lm_head.norm")[0]["count"]) for step in range(1, 5)} == {64 * 32}


def test_recomputed_activations_are_counted_once(tmp_path: Path, run: Path) -> None:
    mode = TransformerActivationCheckpointingMode.full
    module = {"ac_config": TransformerActivationCheckpointingConfig(mode=mode)}
    build(tmp_path, sentinel.OlmoCoreCallback(EVERYTHING), module=module).fit()

    said = Said(run)
    assert [end.num_micro_steps for end in said.ends] == [2] * NUM_STEPS
    for step in range(1, NUM_STEPS + 1):
        for name in ("blocks.0.attention.w_q", "blocks.1.feed_forward.w1"):
            assert [int(row["count"]) for row in said.of(step, "activation", name)] in ([64 * 32], [64 * 96], [64 * 64])
    assert not said.health


def test_nothing_is_read_that_the_trainer_does_not_read(tmp_path: Path, run: Path) -> None:
    def num_reads(folder: Path, *callbacks: Any) -> int:
        module = {"optim": SkipStepAdamWConfig(lr=1e-2, rolling_interval_length=4)}
        trainer = build(folder, *callbacks, module=module)
        with HostWaits((READ,)) as reads:
            trainer.fit()
        return reads.count

    plain = num_reads(tmp_path / "plain")
    watched = num_reads(tmp_path / "watched", sentinel.OlmoCoreCallback(EVERYTHING))

    assert watched == plain > 0
    assert len(Said(run).ends) == NUM_STEPS


# -- skipped steps ---------------------------------------------------------------------------------------------------


def test_a_step_that_the_optimizer_skips_is_a_step(tmp_path: Path, run: Path) -> None:
    # Every step after the first two is an outlier to this optimizer.
    optim = SkipStepAdamWConfig(lr=1e-2, rolling_interval_length=4, sigma_factor=-100)
    trainer = build(tmp_path, sentinel.OlmoCoreCallback(), module={"optim": optim})
    truth = watch(trainer, Truth())
    trainer.fit()

    said, metrics = Said(run), printed(trainer)
    skipped = [bool(metrics[step]["optim/step skipped"]) for step in range(1, NUM_STEPS + 1)]
    assert [end.is_skipped for end in said.ends] == skipped == [False, True, True, True]
    for step, gradients in truth.gradients.items():
        (row,) = said.of(step, "wgrad", "lm_head.w_out.weight")
        assert norm(row) == pytest.approx(float(gradients["lm_head.w_out.weight"].double().norm()), rel=1e-6)
        assert bool(row["flags"] & Flag.SKIPPED) == skipped[step - 1]


def test_a_step_that_the_trainer_leaves_out_is_a_skipped_one(tmp_path: Path, run: Path) -> None:
    trainer = build(tmp_path, sentinel.OlmoCoreCallback(), trainer={"steps_to_skip": [StepSkipRange(2, 4)]})
    trainer.fit()

    said = Said(run)
    assert [(end.step, end.is_skipped, end.num_micro_steps) for end in said.ends] == [
        (1, False, 2), (2, True, 0), (3, True, 0), (4, False, 2),
    ]  # fmt: skip
    assert "loss" not in said.ends[1].scalars


# -- checkpoints, errors, ends ---------------------------------------------------------------------------------------


def test_resume_goes_on_counting_from_the_trainers_own_checkpoint(tmp_path: Path, run: Path) -> None:
    saves = {"no_checkpoints": False}
    checkpointer = CheckpointerCallback(save_interval=2, save_async=False)
    build(tmp_path / "a", checkpointer, sentinel.OlmoCoreCallback(), trainer=saves).fit()
    path = tmp_path / "a" / "save" / "step2"
    again = build(
        tmp_path / "b", sentinel.OlmoCoreCallback(),
        trainer={**saves, "load_path": str(path), "load_strategy": LoadStrategy.always},
    )  # fmt: skip
    again.fit()

    state = torch.load(path / "train" / "rank0.pt", weights_only=False)["callbacks"]
    assert [one["step"] for name, one in state.items() if name.startswith("OlmoCoreCallback")] == [3]
    assert sorted(end.step for end in Said(run).ends) == sorted([1, 2, 3, 4, 3, 4])
    assert sorted(int(p.stem) for p in (run / "attempts").glob("*.json")) == [0, 1]
    assert list(printed(again))[-2:] == [3, 4]


class Poisons(Callback):
    """Makes one weight NaN before a step, or raises in the middle of one."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.at, self.error = step, error

    def pre_step(self, batch: dict[str, Any]) -> None:
        if self.step == self.at and self.error is None:
            self.trainer.train_module.model.lm_head.w_out.weight.data[0, 0] = float("nan")

    def pre_optim_step(self) -> None:
        if self.step == self.at and self.error is not None:
            raise self.error


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step_on_disk(tmp_path: Path, run: Path) -> None:
    trainer = build(tmp_path, sentinel.OlmoCoreCallback(EVERYTHING))
    watch(trainer, Poisons(3))

    with pytest.raises(RuntimeError, match="nan loss encountered at step 3"):
        trainer.fit()

    said = Said(run)
    assert [(end.step, end.is_partial) for end in said.ends] == [(1, False), (2, False), (3, False)]
    assert said.of(3, "param", "lm_head.w_out.weight")[0]["num_nan"] == 1
    assert said.of(3, "wgrad", "embeddings.weight")[0]["num_nan"] > 0
    assert said.byes[-1].reason == "exception"


@pytest.mark.parametrize("error", [ValueError("no more"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_there_is_is_on_disk_when_the_trainer_raises(tmp_path: Path, run: Path, error: BaseException) -> None:
    trainer = build(tmp_path, sentinel.OlmoCoreCallback(EVERYTHING))
    watch(trainer, Poisons(2, error))
    seen: list[list[tuple[int, bool]]] = []

    class Looks(Callback):
        priority = -20

        def on_error(self, exc: BaseException) -> None:
            seen.append([(end.step, end.is_partial) for end in Said(run).ends])

    watch(trainer, Looks())

    with pytest.raises(type(error)):
        trainer.fit()

    assert seen == [[(1, False), (2, True)]]
    said = Said(run)
    assert len(said.of(2, "wgrad")) == 21 and len(said.of(2, "dgrad", "lm_head.norm")) == 1
    assert said.byes[-1].reason == ("interrupted" if isinstance(error, KeyboardInterrupt) else "exception")
    assert not any(module._forward_hooks for module in trainer.train_module.model.modules())


def test_disabled_it_does_nothing(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DISABLE", "1")
    trainer = build(tmp_path, sentinel.OlmoCoreCallback("/nowhere.yaml"))
    trainer.fit()

    assert len(printed(trainer)) == NUM_STEPS
    assert not run.exists()


def test_it_is_part_of_a_config_that_is_copied_and_saved(tmp_path: Path, run: Path) -> None:
    from olmo_core.train import TrainerConfig

    config = TrainerConfig(save_folder=str(tmp_path)).with_callback("sentinel", sentinel.OlmoCoreCallback(EVERYTHING))
    copied = config.with_callback("config_saver", ConfigSaverCallback())

    assert copied.callbacks["sentinel"] == config.callbacks["sentinel"]
    assert copied.callbacks["sentinel"] is not config.callbacks["sentinel"]
    assert copied.as_config_dict()["callbacks"]["sentinel"]["config"] == EVERYTHING
    with pytest.raises(sentinel.errors.ConfigError, match='unknown key "kindz"'):
        sentinel.OlmoCoreCallback({"kindz": []})


def test_a_hook_of_ours_that_fails_is_said_and_costs_the_trainer_nothing(
    tmp_path: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Any, name: str, namespace: str | None = None) -> None:
        raise RuntimeError("planted")

    trainer = build(tmp_path, sentinel.OlmoCoreCallback())
    monkeypatch.setattr(type(trainer), "get_metric", broken)
    trainer.fit()

    said = Said(run)
    assert len(printed(trainer)) == NUM_STEPS
    assert any("RuntimeError: planted" in one.message for one in said.health)
    assert [(end.step, end.num_micro_steps) for end in said.ends] == [(step, 2) for step in range(1, NUM_STEPS + 1)]


def test_without_a_scheduler_the_learning_rate_is_the_optimizers(tmp_path: Path, run: Path) -> None:
    build(tmp_path, sentinel.OlmoCoreCallback(), module={"scheduler": None, "optim": AdamWConfig(lr=0.125)}).fit()

    assert [end.scalars["lr"] for end in Said(run).ends] == [0.125] * NUM_STEPS


def test_a_further_fit_goes_on_in_the_same_run(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENTINEL_RUN")
    trainer = build(tmp_path / "trained", sentinel.OlmoCoreCallback(), steps=2)
    trainer.fit()
    trainer.max_duration = Duration.steps(4)
    trainer.fit()

    (directory,) = (one for one in tmp_path.iterdir() if (one / "spool").is_dir())
    assert sorted(end.step for end in Said(directory).ends) == [1, 2, 3, 4]


# -- ranks and the example -------------------------------------------------------------------------------------------


def ranks(folder: Path, layout: str) -> list[dict[str, dict[str, Any]]]:
    """Train as a layout of ranks over gloo, plain and watched; return what each can tell of both."""
    world = 1 if layout == "one" else 2
    folder.mkdir(mode=0o700)
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SENTINEL_")}
    command = [interpreter("olmo_core.train.train_module"), "-m", "tests.trainers.olmo_core_run", str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(port), layout], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            stdout=subprocess.DEVNULL, env={**clean, "SENTINEL_DIR": str(folder), "SENTINEL_RUN": "run"},
        )
        for rank in range(world)
    ]  # fmt: skip
    reported = [process.communicate(timeout=600)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), reported[0][-3000:]
    return [
        {name: json.loads((folder / name / f"result-{rank}.json").read_text()) for name in ("plain", "watched")}
        for rank in range(world)
    ]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    ranks(folder / "one", "one")
    return folder / "one"


PLAIN_STATISTICS = ("mean", "std", "norm", "min", "max")


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_ranks_merge_to_what_one_process_measures(tmp_path: Path, one_process: Path, layout: str) -> None:
    results = ranks(tmp_path / layout, layout)

    assert all(one["plain"] == one["watched"] for one in results), "watched, a rank trains the same bits"
    reported = results[0]["watched"]
    views, whole = ({view.step: view for view in closed_steps(one / "run")} for one in (tmp_path / layout, one_process))
    assert list(views) == list(whole) == list(range(1, NUM_STEPS + 1))
    for step, view in views.items():
        for kind in ("param", "wgrad"):
            ours, truth = (statistics(one, kind, PLAIN_STATISTICS) for one in (view, whole[step]))
            assert ours.keys() == truth.keys() and len(ours) == 21
            for name, expected in truth.items():
                assert ours[name] == pytest.approx(expected, rel=2e-4, abs=2e-6), (step, name)
        total = math.sqrt(sum(one["norm"] ** 2 for one in statistics(view, "wgrad").values()))
        assert total == pytest.approx(reported["norms"][str(step)], rel=1e-5)
        assert view.scalars["loss"].mean == pytest.approx(reported["seen"][str(step)], rel=1e-5)
    assert len(statistics(views[2], "activation")) >= 33
    assert not any(SaidSoFar(tmp_path / layout / "run", rank).health for rank in range(2))


def test_the_example_runs_under_sentinel(tmp_path: Path) -> None:
    sentinel_run = [sys.executable, "-m", "sentinel.cli", "run", "--dir", str(tmp_path), "--name", "run", "--"]
    example = str(ROOT / "examples" / "olmo_core_train.py")

    ended = run_command(tmp_path, [*sentinel_run, sys.executable, example], None, 120)

    assert "Training complete" in ended.stderr + ended.stdout
    spoken = SaidSoFar(tmp_path / "run", 0)
    assert list(spoken.ends) == list(range(1, 31))
    assert spoken.of(30, "wgrad") and not spoken.health
