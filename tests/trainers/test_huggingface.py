"""The real Hugging Face Trainer on tiny random models: its numbers, its order of events, its checkpoints."""

from __future__ import annotations

import copy
import json
import math
import pickle
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

import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

import sentinel
from sentinel.errors import ConfigError
from sentinel.record import Flag
from sentinel.wire.frame import Frame, scan

from ..collect import conftest
from ..collect.conftest import ALL_KINDS, Said, norm
from . import hf_models

pytestmark = pytest.mark.trainer

EVERYTHING = {"kinds": ALL_KINDS}
run = conftest.run


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(
    folder: Path,
    *callbacks: Any,
    model: nn.Module | None = None,
    kind: type[Trainer] = Trainer,
    examples: int = 16,
    **arguments: Any,
) -> Trainer:
    """A Trainer that logs every step and does nothing else that it is not told to."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "seed": 7, "logging_nan_inf_filter": False,
    }  # fmt: skip
    data = hf_models.causal_data(examples)
    transformers.utils.logging.set_verbosity_error()
    return kind(
        model=hf_models.llama() if model is None else model,
        args=TrainingArguments(output_dir=str(folder / "out"), **{**settings, **arguments}),
        train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks),
    )  # fmt: skip


def logged(trainer: Trainer, name: str = "loss") -> dict[int, float]:
    """Step, as the Trainer prints it, to what it prints beside it."""
    return {line["step"]: line[name] for line in trainer.state.log_history if name in line}


def scalar(said: Said, name: str) -> dict[int, float]:
    return {end.step: end.scalars[name] for end in said.ends if name in end.scalars}


def lives(run: Path, rank: int = 0) -> list[Said]:
    """What each life of a rank said, by attempt."""
    found: dict[int, Said] = {}
    for folder in run.glob(f"spool/r{rank:05d}-*"):
        life = Said(run, rank=99_999)
        for path in sorted(folder.glob("*.spool")):
            data = path.read_bytes()
            life._read(data)
            frame = scan(data, 0)
            assert isinstance(frame, Frame)
            assert found.setdefault(frame.header.attempt, life) is life
    return [found[attempt] for attempt in sorted(found)]


def steps(run: Path) -> list[list[int]]:
    """The steps that each attempt ended."""
    return [[end.step for end in life.ends] for life in lives(run)]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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

    make(
        tmp_path, sentinel.HuggingFaceCallback(), seen, max_grad_norm=max_grad_norm, learning_rate=0.0, **settings
    ).train()

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
    trainer = make(
        tmp_path, sentinel.HuggingFaceCallback(), kind=Scaling, max_grad_norm=max_grad_norm, optim=optim
    )

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


# -- evaluation, checkpoints, several trainings ------------------------------------------------------------------------


def test_evaluation_and_checkpoints_are_announced_and_not_measured(run: Path, tmp_path: Path) -> None:
    callback = sentinel.HuggingFaceCallback(EVERYTHING)
    heard: list[tuple[int, str, str]] = []

    class Listener(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return super().__getattribute__(name)

            def listen(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if callback.monitor is not None:
                    heard.append((state.global_step, name, callback.monitor._position().activity))

            return listen

    trainer = make(
        tmp_path, callback, Listener(), max_steps=4, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2, load_best_model_at_end=True, eval_on_start=True,
    )  # fmt: skip
    trainer.evaluate()  # before train: nothing is attached yet
    assert callback.monitor is None

    trainer.train()

    said = Said(run)
    assert len(logged(trainer, "eval_loss")) >= 3
    assert [end.step for end in said.ends] == [1, 2, 3, 4] and [end.num_micro_steps for end in said.ends] == [1] * 4
    assert {step: len(rows) for step, rows in said.rows.items()}.keys() == {1, 2, 3, 4}
    assert len({len(said.rows[step]) for step in (2, 3, 4)}) == 1
    assert scalar(said, "loss") == logged(trainer)
    assert (0, "on_prediction_step", "eval") in heard and (0, "on_evaluate", "init") in heard
    assert (2, "on_prediction_step", "eval") in heard and (2, "on_evaluate", "checkpoint") in heard
    assert (2, "on_save", "train") in heard
    assert not [x for x in heard if x[1] in ("on_pre_optimizer_step", "on_substep_end") and x[2] != "train"]


def test_resumed_training_goes_on_with_numbers_and_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(tmp_path / "whole", max_steps=5)
    whole.train()
    monkeypatch.delenv("SENTINEL_RUN")
    first = make(tmp_path, sentinel.HuggingFaceCallback(), max_steps=3, save_strategy="steps", save_steps=3)
    first.args.max_steps = 5  # the schedule of the whole training

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    first.add_callback(Stop())
    first.train()
    again = make(tmp_path, sentinel.HuggingFaceCallback(), max_steps=5)

    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))

    runs = [path for path in tmp_path.iterdir() if (path / "spool").is_dir()]
    assert len(runs) == 1  # the checkpoint says which run it is of
    said = Said(runs[0])
    assert scalar(said, "loss") == logged(whole) == {**logged(first), **logged(again)}
    assert steps(runs[0]) == [[1, 2, 3], [4, 5]]
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["HuggingFaceCallback"]
    assert saved["monitor"]["step"] == 4 and saved["attributes"]["run"] == runs[0].name


def test_state_of_the_callback_is_restored_where_the_trainer_restores_such(run: Path, tmp_path: Path) -> None:
    config = {"kinds": ["wgrad"], "black_box": False}
    first = make(tmp_path, sentinel.HuggingFaceCallback(config), max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    again = make(
        tmp_path, sentinel.HuggingFaceCallback(), max_steps=4, restore_callback_states_from_checkpoint=True
    )

    again.train(resume_from_checkpoint=True)

    said = lives(run)[1]
    assert list(logged(again)) == [1, 2, 3, 4]
    assert steps(run) == [[1, 2], [3, 4]]
    assert {tensor.kind for tensor, _ in said.rows[4]} == {"wgrad"}
    assert scalar(said, "loss")[4] == logged(again)[4]


def test_second_train_is_a_new_attempt_of_the_same_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENTINEL_RUN")
    callback = sentinel.HuggingFaceCallback()
    trainer = make(tmp_path, callback, max_steps=2)
    trainer.train()
    first = callback.monitor

    trainer.train()

    (only,) = [path for path in tmp_path.iterdir() if (path / "spool").is_dir()]
    assert steps(only) == [[1, 2], [1, 2]]
    assert callback.monitor is not first and not callback.monitor.is_alive
    assert only.name == callback.run


def test_two_trainers_of_one_process_do_not_disturb_each_other(run: Path, tmp_path: Path) -> None:
    outer = make(tmp_path, sentinel.HuggingFaceCallback({"run": "outer"}), max_steps=2)
    inner = make(tmp_path, sentinel.HuggingFaceCallback({"run": "inner"}), model=hf_models.gpt2(), max_steps=2)

    class Distill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                inner.train()

    outer.add_callback(Distill())
    outer.train()

    for trainer, name in ((outer, "outer"), (inner, "inner")):
        said = Said(tmp_path / name)
        assert scalar(said, "loss") == logged(trainer) and len(said.ends) == 2
        assert set(said.names(2, "wgrad")) == {name for name, _ in trainer.model.named_parameters()}


def test_second_callback_on_one_trainer_counts_nothing_twice(run: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), sentinel.HuggingFaceCallback(), max_steps=3)

    trainer.train()

    said = Said(run)
    assert [end.step for end in said.ends] == [1, 2, 3] and steps(run) == [[1, 2, 3]]
    assert scalar(said, "loss") == logged(trainer)


def test_callback_is_copied_without_what_it_measures(run: Path, tmp_path: Path) -> None:
    callback = sentinel.HuggingFaceCallback(EVERYTHING)
    copies: list[Any] = []

    class Copy(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            copies.extend([pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)])

    trainer = make(tmp_path, callback, Copy(), max_steps=1, gradient_accumulation_steps=2)

    trainer.train()

    assert [one.monitor for one in copies] == [None, None] and copies[0].config == callback.config
    assert scalar(Said(run), "loss") == logged(trainer)


def test_each_model_that_a_trainer_makes_anew_is_an_attempt(run: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), max_steps=2)
    trainer.model_init = hf_models.gpt2  # as a search over hyperparameters has it

    for _ in range(2):
        trainer.train()

    assert steps(run) == [[1, 2], [1, 2]]
    for life in lives(run):
        assert scalar(life, "loss") == logged(trainer)
        assert set(life.names(2, "wgrad")) == {name for name, _ in trainer.model.named_parameters()}


def test_trainer_that_is_not_known_is_followed_by_its_log(run: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), max_steps=3)

    Trainer.train.__wrapped__(trainer)  # as a subclass with a `train` of its own

    said = Said(run)
    assert [end.step for end in said.ends] == [1, 2, 3]
    assert scalar(said, "loss") == logged(trainer) and said.byes[0].reason == "detached"


# -- trainings that end badly ------------------------------------------------------------------------------------------


class Raises(Trainer):
    """Raises in the second micro-step of step 3."""

    calls = 0
    error: type[BaseException] = RuntimeError

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.calls += 1
        if self.calls == 6:
            raise self.error("CUDA out of memory." if self.args.auto_find_batch_size else "boom")
        return loss


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_step_in_which_the_trainer_raises_is_on_disk_as_partial(run: Path, tmp_path: Path, error: Any) -> None:
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(EVERYTHING), kind=Raises, gradient_accumulation_steps=2)
    trainer.error = error

    with pytest.raises(error, match="boom"):
        trainer.train()

    said = Said(run)
    assert [(end.step, end.is_partial) for end in said.ends] == [(1, False), (2, False), (3, True)]
    assert said.of(3, "activation", "lm_head") and said.of(3, "dgrad", "lm_head")
    assert said.byes[-1].reason == "exception"
    assert not trainer.model._forward_hooks and "training_step" not in trainer.__dict__


def test_error_between_the_optimizer_and_the_log_loses_nothing_either(run: Path, tmp_path: Path) -> None:
    class Bad(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ValueError("tracker is gone")

    trainer = make(tmp_path, Bad())
    trainer.add_callback(sentinel.HuggingFaceCallback())

    with pytest.raises(ValueError, match="tracker"):
        trainer.train()

    said = Said(run)
    assert [(end.step, end.is_partial) for end in said.ends] == [(1, False), (2, False)]
    assert scalar(said, "loss") == logged(trainer)  # the loss is ours already


def test_loop_begun_anew_with_a_smaller_batch_is_a_new_attempt(run: Path, tmp_path: Path) -> None:
    trainer = make(tmp_path, sentinel.HuggingFaceCallback(), kind=Raises, auto_find_batch_size=True, max_steps=7)

    trainer.train()

    first, second = lives(run)
    assert [(end.step, end.is_partial) for end in first.ends] == [(step, step == 6) for step in range(1, 7)]
    assert [(end.step, end.is_partial) for end in second.ends] == [(step, False) for step in range(1, 8)]
    assert scalar(second, "loss") == logged(trainer)
    assert first.byes[0].reason == "exception" and second.byes[0].reason == "detached"


def test_failing_hook_of_ours_does_not_reach_the_trainer(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = sentinel.HuggingFaceCallback()
    monkeypatch.setattr(callback, "_note_loss", lambda monitor: 1 / 0)
    trainer = make(tmp_path, callback, max_steps=2)

    trainer.train()

    assert len(logged(trainer)) == 2
    said = Said(run)
    assert {(health.code, health.site) for health in said.health} >= {("hook_failed", "on_pre_optimizer_step")}


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
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "sentinel.cli", "run", "--dir", str(tmp_path), "--name", "example", "--"]
    command += [sys.executable, str(root / "examples" / "hf_trainer.py"), "--steps", "12", "--output", str(tmp_path / "out")]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr[-3000:]
    said = Said(tmp_path / "example")
    assert [end.step for end in said.ends] == list(range(1, 13))
    assert "loss" in said.ends[-1].scalars
