"""Incarnations of a Hugging Face Trainer: evaluation, checkpoints, several trainings, and such that end badly."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback

import sentinel

from ..support.spools import Said
from . import hf_models
from .hf_training import EVERYTHING, incarnations, logged, make, scalar, steps

pytestmark = pytest.mark.trainer


# -- evaluation, checkpoints, several trainings ------------------------------------------------------------------------


def test_evaluation_and_checkpoints_are_announced_and_not_measured(run: Path, tmp_path: Path) -> None:
    callback = sentinel.HuggingFaceCallback(EVERYTHING)
    received: list[tuple[int, str, str]] = []

    class Listener(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return super().__getattribute__(name)

            def listen(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if callback.monitor is not None:
                    received.append((state.global_step, name, callback.monitor.runner.position().activity))

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
    assert (0, "on_prediction_step", "eval") in received and (0, "on_evaluate", "init") in received
    assert (2, "on_prediction_step", "eval") in received and (2, "on_evaluate", "checkpoint") in received
    assert (2, "on_save", "train") in received
    assert not [x for x in received if x[1] in ("on_pre_optimizer_step", "on_substep_end") and x[2] != "train"]


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
    again = make(tmp_path, sentinel.HuggingFaceCallback(), max_steps=4, restore_callback_states_from_checkpoint=True)

    again.train(resume_from_checkpoint=True)

    said = incarnations(run)[1]
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
    for incarnation in incarnations(run):
        assert scalar(incarnation, "loss") == logged(trainer)
        assert set(incarnation.names(2, "wgrad")) == {name for name, _ in trainer.model.named_parameters()}


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
    assert said.byes[-1].reason == ("interrupted" if error is KeyboardInterrupt else "exception")
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

    first, second = incarnations(run)
    assert [(end.step, end.is_partial) for end in first.ends] == [(step, step == 6) for step in range(1, 7)]
    assert [(end.step, end.is_partial) for end in second.ends] == [(step, False) for step in range(1, 8)]
    assert scalar(second, "loss") == logged(trainer)
    assert first.byes[0].reason == "exception" and second.byes[0].reason == "detached"


@pytest.mark.parametrize("broken", ["_config", "_end"])
def test_failing_attach_or_detach_does_not_reach_the_trainer(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    callback = sentinel.HuggingFaceCallback()
    monkeypatch.setattr(callback, broken, lambda *args: 1 / 0)
    trainer = make(tmp_path, callback, max_steps=2)

    with caplog.at_level("WARNING", logger="sentinel"):
        trainer.train()

    assert len(logged(trainer)) == 2 and callback.monitor is None
    assert "attach failed" in caplog.text


def test_failing_hook_of_ours_does_not_reach_the_trainer(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = sentinel.HuggingFaceCallback()
    monkeypatch.setattr(callback, "_note_loss", lambda monitor: 1 / 0)
    trainer = make(tmp_path, callback, max_steps=2)

    trainer.train()

    assert len(logged(trainer)) == 2
    said = Said(run)
    assert {(health.code, health.site) for health in said.health} >= {("hook_failed", "on_pre_optimizer_step")}
