"""Trainers that take up what a person asks for, as the examples show it."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel.control.commands import RunCommands

from ..support.spools import Said

pytestmark = pytest.mark.trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
AT = 40
"""The step from which all is asked for."""


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Person:
    """Asks at step 2 for what is wanted from step AT on, so that it is there in time however busy the machine is."""

    def __init__(self, run: Path) -> None:
        self.commands = RunCommands(run)
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps == 2:
            for action, more in (("checkpoint", {}), ("skip_batches", {"num_batches": 3}), ("pause", {"for_s": 0.5})):
                self.commands.request(action, at_step=AT, now=time.time(), **more)
            time.sleep(1.0)

    def said(self, run: Path) -> dict[str, list[str]]:
        """Return action -> how the trainer answered, in order."""
        acks = Said(run).acks
        actions = {status.command.id: status.command.action for status in self.commands.known}
        return {action: [ack.state for ack in acks if ack.command == name] for name, action in actions.items()}


ANSWERS = {
    "checkpoint": ["armed", "applied", "ended"],
    "skip_batches": ["armed", "applied", "refused"],
    "pause": ["armed", "applied", "ended"],
}


def test_the_trainer_of_hugging_face(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from .hf_training import make

    module, person = example("requests_hf_trainer"), Person(run)

    class Asking(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            person.step()

    watched = sentinel.HuggingFaceCallback()
    trainer = make(tmp_path, watched, module.TakeRequests(watched), Asking(), max_steps=AT + 10)

    trainer.train()

    assert person.said(run) == ANSWERS
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


def test_lightning(run: Path, tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    module, person = example("requests_lightning"), Person(run)

    class Asking(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            person.step()

    watched = sentinel.LightningCallback()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[watched, module.TakeRequests(watched, tmp_path), Asking()],
    )  # fmt: skip
    inputs = torch.randn(8 * 2 * (AT + 10), 16)

    trainer.fit(module.Line(), DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8))

    assert person.said(run) == ANSWERS
    assert len(list(tmp_path.glob("step*.ckpt"))) == 1
