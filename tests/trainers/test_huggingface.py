"""The real Hugging Face Trainer on tiny random models: its numbers, its order of events, its settings."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments

import sentinel
from sentinel.errors import ConfigError
from sentinel.record import Flag

from ..support.spools import ALL_KINDS, Said, norm
from . import hf_models
from .hf_training import EVERYTHING, logged, make, same, scalar, weights

pytestmark = pytest.mark.trainer


class Gradients(TrainerCallback):
    """The reference: norms of all gradients, read where the Trainer hands them to its optimizer."""

    def __init__(self) -> None:
        self.norms: dict[int, dict[str, float]] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.norms[state.global_step + 1] = {
            name: float(p.grad.double().norm()) for name, p in kwargs["model"].named_parameters() if p.grad is not None
        }


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3])
def test_step_number_is_the_one_the_trainer_logs_beside_the_loss(run: Path, tmp_path: Path, accumulation: int) -> None:
    trainer = make(tmp_path, gradient_accumulation_steps=accumulation, num_train_epochs=2, max_steps=-1, examples=10)
    trainer.add_callback(sentinel.HuggingFaceCallback())

    trainer.train()

    said = Said(run)
    expected = logged(trainer)
    assert list(expected) == list(range(1, len(expected) + 1)) and len(expected) >= 4
    assert scalar(said, "loss") == expected  # the same bits: both are the same float32 sum
    assert scalar(said, "lr") == logged(trainer, "learning_rate")
    assert scalar(said, "grad_norm") == pytest.approx(logged(trainer, "grad_norm"))
    assert [end.step for end in said.ends] == list(expected) and not said.health
    assert all(said.of(step, "param") and said.of(step, "wgrad") for step in expected)
    assert said.descriptor.first_step == 1 and said.byes[0].reason == "detached"


def test_callback_may_be_given_as_a_class_and_before_or_after_the_trainers_own(run: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path, sentinel.HuggingFaceCallback, max_steps=2)
    trainer.callback_handler.callbacks.reverse()  # DefaultFlowCallback decides after us that a step is logged

    trainer.train()

    assert scalar(Said(run), "loss") == logged(trainer) and len(logged(trainer)) == 2


def test_uneven_last_accumulation_of_an_epoch_has_fewer_micro_steps(run: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path, gradient_accumulation_steps=3, num_train_epochs=2, max_steps=-1, examples=10)
    trainer.add_callback(sentinel.HuggingFaceCallback({**EVERYTHING, "per_micro_step": True}))

    trainer.train()

    said = Said(run)
    assert [end.num_micro_steps for end in said.ends] == [3, 2, 3, 2]  # 5 batches an epoch
    assert [int(row["micro_step"]) for row in said.of(1, "activation", "lm_head")] == [0, 1, 2]
    assert scalar(said, "loss") == logged(trainer)


def test_sparse_log_is_followed_beside_the_loss_of_each_step(run: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), logging_steps=3, max_steps=7)

    trainer.train()

    said = Said(run)
    losses = scalar(said, "loss")
    assert list(losses) == list(range(1, 8))
    averages = {step: np.mean([losses[step - back] for back in range(3)]) for step in (3, 6)}
    assert logged(trainer) == pytest.approx(averages)
    assert scalar(said, "logged_loss") == {step: logged(trainer)[step] for step in (3, 6)}
    assert list(scalar(said, "lr")) == list(scalar(said, "grad_norm")) == list(range(1, 8))


def test_nan_that_the_trainer_filters_from_its_log_is_not_filtered(run: Path, tmp_path: Path) -> None:
    class Broken(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 2 else loss

    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), kind=Broken, logging_nan_inf_filter=True, max_steps=3)

    trainer.train()

    losses = scalar(Said(run), "loss")
    assert math.isfinite(logged(trainer)[3])
    assert [math.isnan(losses[step]) for step in (1, 2, 3)] == [False, False, True]


# -- nothing changes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hf_models.CAUSAL)
def test_losses_and_weights_are_bit_identical_with_everything_measured(run: Path, tmp_path: Path, name: str) -> None:
    make_model = hf_models.CAUSAL[name]
    plain = make(tmp_path, model=make_model(), gradient_accumulation_steps=2, max_steps=3)
    plain.train()
    watched = make(
        tmp_path, sentinel.HuggingFaceCallback(EVERYTHING), model=make_model(), gradient_accumulation_steps=2, max_steps=3
    )

    watched.train()

    said = Said(run)
    assert logged(watched) == logged(plain) == scalar(said, "loss")
    assert same(weights(watched), weights(plain)) and not said.health
    kinds = {tensor.kind for tensor, _ in said.rows[3]}
    assert kinds >= set(ALL_KINDS)  # the positive control: everything was measured


@pytest.mark.parametrize("name", hf_models.OTHERS)
def test_other_heads_and_inputs_are_bit_identical_too(run: Path, tmp_path: Path, name: str) -> None:
    make_model, data = hf_models.OTHERS[name]
    losses, states = [], []
    for callbacks in ([], [sentinel.HuggingFaceCallback(EVERYTHING)]):
        trainer = make(tmp_path, *callbacks, model=make_model(), max_steps=3)
        trainer.train_dataset = data()
        trainer.train()
        losses.append(logged(trainer))
        states.append(weights(trainer))

    said = Said(run)
    assert losses[0] == losses[1] == scalar(said, "loss")
    assert same(*states) and not said.health
    assert {tensor.kind for tensor, _ in said.rows[3]} >= set(ALL_KINDS)


@pytest.mark.parametrize(
    "arguments",
    [{"bf16": True}, {"activation_checkpointing": True}, {"gradient_checkpointing": True}, {"neftune_noise_alpha": 5.0},
     {"optim": "adafactor"}, {"label_smoothing_factor": 0.1}, {"lr_scheduler_type": "reduce_lr_on_plateau",
     "eval_strategy": "steps", "eval_steps": 1}, {"average_tokens_across_devices": False}],
    ids=lambda arguments: next(iter(arguments)),
)  # fmt: skip
def test_settings_of_the_trainer_keep_their_bits(run: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    names = TrainingArguments.__dataclass_fields__
    if any(name not in names for name in arguments):
        pytest.skip(f"this version of transformers has no {list(arguments)}")
    plain = make(tmp_path, max_steps=3, **arguments)
    plain.train()
    watched = make(tmp_path, sentinel.HuggingFaceCallback(EVERYTHING), max_steps=3, **arguments)

    watched.train()

    said = Said(run)
    assert logged(watched) == logged(plain)
    assert scalar(said, "loss") == logged(watched) and scalar(said, "lr") == logged(watched, "learning_rate")
    assert same(weights(watched), weights(plain)) and not said.health
    assert [end.num_micro_steps for end in said.ends] == [1, 1, 1]  # a recompute is not a micro-step


def test_disabled_is_a_no_op(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(tmp_path, max_steps=2)
    plain.train()
    monkeypatch.setenv("SENTINEL_DISABLE", "1")
    callback = sentinel.HuggingFaceCallback({"no_such_key": 1})
    trainer = make(tmp_path, callback, max_steps=2, save_strategy="steps", save_steps=1)

    trainer.train()

    assert logged(trainer) == logged(plain) and same(weights(trainer), weights(plain))
    assert not run.exists() and not callback.monitor.is_alive
    assert "training_step" not in trainer.__dict__


def test_nothing_more_waits_for_a_device(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for callbacks in ([], [sentinel.HuggingFaceCallback(EVERYTHING)], [Waiting()]):
        with monkeypatch.context() as patch:
            count = count_waits(patch)
            make(tmp_path, *callbacks, max_steps=3, logging_steps=2).train()
            counts.append(count())

    assert counts[0] == counts[1] > 0
    assert counts[2] == counts[0] + 3  # the positive control
    assert len(Said(run).ends) == 3


class Waiting(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        next(kwargs["model"].parameters()).detach().sum().item()


def count_waits(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count what makes a number of a tensor in this thread: on a GPU each waits for it."""
    here, waits = threading.get_ident(), []

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any) -> Any:
            if threading.get_ident() == here:
                waits.append(original.__name__)
            return original(tensor, *args)

        return call

    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "numpy"):
        patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
    return lambda: len(waits)


def test_unknown_key_is_told_when_the_callback_is_made(run: Path) -> None:
    with pytest.raises(ConfigError, match="kinds"):
        sentinel.HuggingFaceCallback({"kind": ["param"]})


def test_model_and_trainer_are_as_before_when_training_has_ended(run: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(EVERYTHING), max_steps=2)
    before = set(trainer.__dict__)

    trainer.train()

    for module in trainer.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "zero_grad" not in module.__dict__
    assert "training_step" not in trainer.__dict__ and before <= set(trainer.__dict__)
    assert len(Said(run).ends) == 2


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [1e-3, 0.0])
def test_wgrad_is_reduced_over_micro_steps_and_before_clipping(run: Path, tmp_path: Path, max_grad_norm: float) -> None:
    reference, seen = Gradients(), Gradients()
    settings = {"gradient_accumulation_steps": 2, "optim": "sgd", "max_steps": 3}
    make(tmp_path, reference, max_grad_norm=0.0, learning_rate=0.0, **settings).train()

    make(tmp_path, sentinel.HuggingFaceCallback(), seen, max_grad_norm=max_grad_norm, learning_rate=0.0, **settings).train()

    said = Said(run)
    for step, expected in reference.norms.items():
        rows = {tensor.name: row for tensor, row in said.rows[step] if tensor.kind == "wgrad"}
        assert {name: norm(row) for name, row in rows.items()} == pytest.approx(expected, rel=1e-5)
        assert not any(int(row["flags"]) & Flag.POST_CLIP for row in rows.values())
        total = math.sqrt(sum(norm(row) ** 2 for row in rows.values()))
        assert scalar(said, "grad_norm")[step] == pytest.approx(total, rel=1e-5)
        clipped = math.sqrt(sum(value**2 for value in seen.norms[step].values()))
        assert clipped == pytest.approx(max_grad_norm or total, rel=1e-3)


def test_frozen_parameters_and_such_without_gradient_are_measured_as_what_they_are(run: Path, tmp_path: Path) -> None:
    model = hf_models.with_adapters(hf_models.llama())
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(EVERYTHING), model=model, max_steps=3)

    trainer.train()

    said = Said(run)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert 0 < len(trained) < len(dict(model.named_parameters()))
    assert set(said.names(2, "wgrad")) == trained
    assert set(said.names(2, "param")) == {name for name, _ in model.named_parameters()}
    assert scalar(said, "loss") == logged(trainer) and not said.health


class Scaling(Trainer):
    """fp16 as on a GPU, which accelerate refuses on a CPU: a real GradScaler, and an overflow in step 2."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Only now: the model is prepared without autocast, so that float32 is the reference.
        self.accelerator.state._mixed_precision, self.accelerator.native_amp = "fp16", True
        return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("inf") if self.state.global_step == 1 else loss


@pytest.mark.parametrize(("max_grad_norm", "optim"), [(0.0, "adamw_torch"), (1e-3, "adamw_torch_fused")])
def test_skipped_step_is_a_step_and_its_gradients_are_unscaled(
    run: Path, tmp_path: Path, max_grad_norm: float, optim: str
) -> None:
    reference = Gradients()
    make(tmp_path, reference, max_grad_norm=0.0, max_steps=1).train()
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), kind=Scaling, max_grad_norm=max_grad_norm, optim=optim)

    trainer.train()

    said = Said(run)
    assert [(end.step, end.is_skipped) for end in said.ends] == [(1, False), (2, True), (3, False), (4, False)]
    assert not math.isfinite(scalar(said, "loss")[2]) and math.isfinite(scalar(said, "loss")[3])
    found = {tensor.name: norm(row) for tensor, row in said.rows[1] if tensor.kind == "wgrad"}
    assert found == pytest.approx(reference.norms[1], rel=1e-5)
    bad = [row for tensor, row in said.rows[2] if tensor.kind == "wgrad"]
    assert bad and all(int(row["flags"]) & Flag.SKIPPED for row in bad)
    assert sum(int(row["num_nan"]) + int(row["num_pos_inf"]) + int(row["num_neg_inf"]) for row in bad) > 0
    assert scalar(said, "loss_scale") == {1: 2.0**16, 2: 2.0**16, 3: 2.0**15, 4: 2.0**15}


def test_several_forwards_of_one_micro_batch_are_one_micro_step(run: Path, tmp_path: Path) -> None:
    class Twice(Trainer):
        """As consistency losses and preference losses do."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return model(**inputs).loss + 0.5 * model(**inputs).loss

    trainer = make(
        tmp_path, sentinel.HuggingFaceCallback(EVERYTHING), kind=Twice, gradient_accumulation_steps=2, max_steps=2
    )

    trainer.train()

    said = Said(run)
    assert [end.num_micro_steps for end in said.ends] == [2, 2]
    assert [int(row["num_folded"]) for row in said.of(1, "dgrad", "lm_head")] == [4]
    assert scalar(said, "loss") == logged(trainer)


def test_model_that_is_entered_by_another_door_is_said_and_its_gradients_are_measured(run: Path, tmp_path: Path) -> None:
    class Inner(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            logits = model.lm_head(model.model(input_ids=inputs["input_ids"]).last_hidden_state)
            return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), kind=Inner, max_steps=3)

    trainer.train()

    said = Said(run)
    assert scalar(said, "loss") == logged(trainer) and list(logged(trainer)) == [1, 2, 3]
    trained = {name for name, _ in trainer.model.named_parameters()}
    assert all(set(said.names(step, "wgrad")) == trained for step in (1, 2, 3))
    assert {health.code for health in said.health} == {"blind_forward"}


# -- compiled ----------------------------------------------------------------------------------------------------------


def test_compiled_model_is_measured_at_its_outer_borders(run: Path, tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3}
    plain = make(tmp_path, **settings)
    plain.train()
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), **settings)

    trainer.train()

    said = Said(run)
    assert logged(trainer) == logged(plain) == scalar(said, "loss") and same(weights(trainer), weights(plain))
    assert [end.step for end in said.ends] == [1, 2, 3]
    assert set(said.names(2, "wgrad")) == {name for name, _ in trainer.model.named_parameters()}
    assert [end.num_micro_steps for end in said.ends] == [1, 1, 1]


# -- the example -------------------------------------------------------------------------------------------------------


def test_example_runs_under_sentinel_run(tmp_path: Path) -> None:
    root, environment = Path(__file__).parents[2], {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sentinel.cli", "run", "--dir", str(tmp_path), "--name", "example", "--"]
    command += [sys.executable, str(root / "examples" / "hf_trainer.py"), "--steps", "12", "--output", str(tmp_path / "out")]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)

    assert ended.returncode == 0, ended.stderr[-3000:]
    said = Said(tmp_path / "example")
    assert [end.step for end in said.ends] == list(range(1, 13))
    assert "loss" in said.ends[-1].scalars
