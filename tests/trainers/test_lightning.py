"""The adapter on the real Lightning trainer: its steps, its order of closure and clipping, its checkpoints and loggers."""

from __future__ import annotations

import copy
import csv
import functools
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sentinel

from ..end_to_end.ranks import ROOT, run_command
from ..support.closed_steps import closed_steps, statistics
from ..support.host_waits import READ, HostWaits
from ..support.ports import free_port
from ..support.spools import ALL_KINDS, Said, SaidSoFar, norm
from ..support.warm import interpreter

pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]

EVERYTHING = {"kinds": ALL_KINDS}


class Lit(pl.LightningModule):
    """Two nets that are called directly, never `self(...)`: Lightning's own first example."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 1)
        self.truth: list[dict[str, torch.Tensor]] = []
        """Gradients of each optimizer step, before clipping, as the module's own hook sees them."""
        self.faulty: set[int] = set()
        """Batches (across epochs) whose loss is multiplied by `fault`."""
        self.fault: Any = float("nan")

    def loss_of(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.head(self.encoder(inputs)), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        if self.trainer.fit_loop.total_batch_idx in self.faulty:
            loss = loss * self.fault if self.fault is not None else None
        if loss is not None:
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.truth.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def data(num_batches: int) -> DataLoader:
    made = torch.Generator().manual_seed(7)
    inputs = torch.randn(4 * num_batches, 8, generator=made)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    logger = CSVLogger(folder / "csv", flush_logs_every_n_steps=1)
    defaults = {"accelerator": "cpu", "max_epochs": 1, "logger": logger, "log_every_n_steps": 1, "default_root_dir": folder}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **defaults, **settings})


def logged(folder: Path, name: str = "train_loss") -> dict[int, float]:
    """What the logger wrote: step -> value."""
    (path,) = (folder / "csv").rglob("metrics.csv")
    with path.open() as file:
        return {int(line["step"]): float(line[name]) for line in csv.DictReader(file) if line[name]}


def said_losses(said: Said) -> dict[int, float]:
    return {end.step: end.scalars["loss"] for end in said.ends}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_step_number_is_the_one_that_loggers_print(tmp_path: Path, run: Path, accumulate: int) -> None:
    callback = sentinel.LightningCallback()
    fit = trainer(tmp_path, callback, max_epochs=2, accumulate_grad_batches=accumulate, val_check_interval=4)

    fit.fit(Lit(), data(10), data(2))

    said = Said(run)
    printed = logged(tmp_path)
    assert list(said_losses(said)) == list(range(20 if accumulate == 1 else 8)) == list(printed)
    assert said_losses(said) == pytest.approx(printed, rel=1e-6)
    # Ten batches in threes: the last step of an epoch has one.
    assert [end.num_micro_steps for end in said.ends] == [1] * 20 if accumulate == 1 else [3, 3, 3, 1] * 2
    assert not any(end.is_skipped or end.is_partial for end in said.ends)
    assert not said.health


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "val_check_interval": 3},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=["clip, accumulate, validate", "clip by value, bf16-mixed", "float64"],
)
def test_losses_and_weights_are_bit_identical(
    tmp_path: Path,
    run: Path,
    settings: dict[str, Any],
) -> None:
    def train(folder: Path, *callbacks: Any) -> tuple[dict[int, float], list[torch.Tensor]]:
        model = Lit()
        trainer(folder, *callbacks, max_epochs=2, **settings).fit(model, data(8), data(2))
        return logged(folder), list(model.parameters())

    plain, weights = train(tmp_path / "plain")
    watched, ours = train(tmp_path / "watched", sentinel.LightningCallback(EVERYTHING))

    assert watched == plain
    assert all(torch.equal(one, other) for one, other in zip(ours, weights, strict=True))
    said = Said(run)
    assert said.names(1, "dgrad") and said.names(1, "activation")
    assert not said.health


class ClipsByHand(Lit):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        for param in self.parameters():
            param.grad.mul_(1e-3)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (Lit, {"gradient_clip_val": 1e-3}),
        (Lit, {"gradient_clip_val": 1e-5, "gradient_clip_algorithm": "value"}),
        (Lit, {"gradient_clip_val": 1e-3, "accumulate_grad_batches": 2}),
        (ClipsByHand, {}),
    ],
    ids=["norm", "value", "accumulated", "by hand"],
)
def test_wgrad_is_before_clipping(tmp_path: Path, run: Path, model: Any, settings: dict[str, Any]) -> None:
    lit = model()

    trainer(tmp_path, sentinel.LightningCallback(), **settings).fit(lit, data(6))

    said = Said(run)
    assert len(lit.truth) == len(said.ends) == 6 // settings.get("accumulate_grad_batches", 1)
    for step, truth in enumerate(lit.truth):
        assert len(said.of(step, "wgrad")) == len(truth) == 6
        for name, gradient in truth.items():
            (row,) = said.of(step, "wgrad", name)
            assert norm(row) == pytest.approx(float(gradient.double().norm()), rel=1e-6)
            assert not row["flags"] & sentinel_flag("POST_CLIP")
    last = dict(lit.named_parameters())["head.weight"].grad
    assert float(last.norm()) < 0.1 * float(lit.truth[-1]["head.weight"].norm()), "it was clipped, after all"


def sentinel_flag(name: str) -> int:
    from sentinel.record import Flag

    return int(Flag[name])


def test_loss_learning_rate_and_norm_are_those_of_their_step(tmp_path: Path, run: Path) -> None:
    class Scheduled(Lit):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    lit = Scheduled()

    fit = trainer(tmp_path, sentinel.LightningCallback(), pl.callbacks.LearningRateMonitor("step"), gradient_clip_val=0.1)
    fit.fit(lit, data(5))

    said = Said(run)
    assert {end.step: end.scalars["lr"] for end in said.ends} == pytest.approx(logged(tmp_path, "lr-SGD"), rel=1e-6)
    assert said_losses(said) == pytest.approx(logged(tmp_path), rel=1e-6)
    for end, truth in zip(said.ends, lit.truth, strict=True):
        total = float(torch.cat([one.double().flatten() for one in truth.values()]).norm())
        assert end.scalars["grad_norm"] == pytest.approx(total, rel=1e-5)
        assert end.scalars["train_loss"] == end.scalars["loss"]


def test_nothing_is_read_that_lightning_does_not_read(tmp_path: Path, run: Path) -> None:
    def num_reads(folder: Path, *callbacks: Any) -> int:
        with HostWaits((READ,)) as reads:
            trainer(folder, *callbacks, gradient_clip_val=0.1, accumulate_grad_batches=2).fit(Lit(), data(8))
        return reads.count

    plain = num_reads(tmp_path / "plain")
    watched = num_reads(tmp_path / "watched", sentinel.LightningCallback(EVERYTHING))

    assert watched == plain > 0
    assert len(Said(run).ends) == 4


def test_validation_and_sanity_check_are_not_measured(tmp_path: Path, run: Path) -> None:
    callback = sentinel.LightningCallback({"kinds": ["activation"], "per_micro_step": True})
    model = Lit()
    trainer(tmp_path, callback, val_check_interval=2).fit(model, data(6), data(3))

    said = Said(run)

    assert [end.num_micro_steps for end in said.ends] == [1] * 6
    for step in range(6):
        (row,) = said.of(step, "activation", "head")
        assert row["count"] == 4


def test_training_in_evaluation_mode_is_measured(tmp_path: Path, run: Path) -> None:
    class Frozen(Lit):
        def on_train_epoch_start(self) -> None:
            self.eval()

    trainer(tmp_path, sentinel.LightningCallback(EVERYTHING), val_check_interval=2).fit(Frozen(), data(4), data(2))

    said = Said(run)
    assert [end.num_micro_steps for end in said.ends] == [1] * 4
    assert all(len(said.of(step, "activation", "head")) == 1 for step in range(4))


class Forwards(Lit):
    """Calls itself, twice a batch."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs))

    def loss_of(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets) + self(inputs * 0.5).pow(2).mean()


def test_a_batch_is_one_micro_step_however_often_forward_is_called(tmp_path: Path, run: Path) -> None:
    callback = sentinel.LightningCallback({**EVERYTHING, "per_micro_step": True})
    trainer(tmp_path, callback, accumulate_grad_batches=2).fit(Forwards(), data(4))

    said = Said(run)

    assert [end.num_micro_steps for end in said.ends] == [2, 2]
    assert {int(row["micro_step"]) for row in said.of(1, "activation", "head")} == {0, 1}
    assert sum(int(row["count"]) for row in said.of(1, "activation", "head")) == 2 * 2 * 4


def test_batch_and_loss_are_the_borders_of_the_black_box(tmp_path: Path, run: Path) -> None:
    class BadBatch(Lit):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * float("nan") if self.trainer.training else batch[0], batch[1]]

    trainer(tmp_path, sentinel.LightningCallback()).fit(BadBatch(), data(1))

    said = Said(run)
    assert said.of(0, "activation_in", "")[0]["num_nan"] == 4 * 8
    assert said.of(0, "activation", "")[0]["num_nan"] == 1


# -- skipped steps ---------------------------------------------------------------------------------------------------


def test_a_step_that_the_scaler_skips_is_a_step(tmp_path: Path, run: Path) -> None:
    lit = Lit(lr=0.01)
    lit.faulty, lit.fault = {3}, float("inf")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler)

    trainer(tmp_path, sentinel.LightningCallback(), plugins=[precision], gradient_clip_val=1e-3).fit(lit, data(6))

    said = Said(run)
    assert [end.is_skipped for end in said.ends] == [step == 3 for step in range(6)]
    assert [end.scalars["loss_scale"] for end in said.ends] == [64.0] * 4 + [32.0] * 2
    assert sum(int(row["num_nan"]) for row in said.of(3, "wgrad")) > 0
    for step in (0, 1, 2, 4, 5):
        for name, gradient in lit.truth[step].items():
            (row,) = said.of(step, "wgrad", name)
            assert norm(row) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def test_training_step_that_returns_none_is_a_skipped_step(tmp_path: Path, run: Path) -> None:
    lit = Lit()
    lit.faulty, lit.fault = {2}, None

    trainer(tmp_path, sentinel.LightningCallback(EVERYTHING)).fit(lit, data(5))

    said = Said(run)
    assert [end.step for end in said.ends] == list(range(5))
    assert [end.is_skipped for end in said.ends] == [False, False, True, False, False]
    assert [len(said.of(step, "wgrad")) for step in range(5)] == [6, 6, 0, 6, 6]


# -- manual optimisation ---------------------------------------------------------------------------------------------


class Gan(pl.LightningModule):
    """A generator and a critic, two optimizers, each toggled in its turn or not."""

    def __init__(self, toggles: bool = True, num_critic: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.toggles, self.num_critic = toggles, num_critic
        self.maker, self.critic = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.truth: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_maker, of_critic = self.optimizers()
        made, seen = self.maker(batch[0]), {}
        if self.toggles:
            self.toggle_optimizer(of_maker)
        loss = -self.critic(made).mean()
        of_maker.zero_grad()
        self.manual_backward(loss)
        seen.update({n: p.grad.clone() for n, p in self.named_parameters() if n.startswith("maker")})
        of_maker.step()
        if self.toggles:
            self.untoggle_optimizer(of_maker)
        for time in range(self.num_critic):
            critic_loss = self.critic(made.detach()).mean() - self.critic(batch[0]).mean()
            of_critic.zero_grad()
            self.manual_backward(critic_loss)
            if time == 0:
                seen.update({n: p.grad.clone() for n, p in self.named_parameters() if n.startswith("critic")})
            of_critic.step()
        self.truth.append(seen)
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.maker.parameters(), 0.01), torch.optim.Adam(self.critic.parameters(), 0.02)]


@pytest.mark.parametrize(("toggles", "num_critic"), [(True, 1), (False, 1), (False, 3)])
def test_manual_gan_is_one_step_a_batch(tmp_path: Path, run: Path, toggles: bool, num_critic: int) -> None:
    model = Gan(toggles, num_critic)

    trainer(tmp_path, sentinel.LightningCallback(EVERYTHING), max_epochs=2).fit(model, data(4))

    said = Said(run)
    assert said_losses(said) == pytest.approx(logged(tmp_path), rel=1e-6)
    assert list(said_losses(said)) == list(range(8))
    assert [(end.scalars["lr"], end.scalars["lr_1"]) for end in said.ends] == [(0.01, 0.02)] * 8
    assert not any(end.is_skipped for end in said.ends)
    for step, truth in enumerate(model.truth):
        assert len(said.of(step, "wgrad")) == len(truth) == 6
        for name, gradient in truth.items():
            (row,) = said.of(step, "wgrad", name)
            assert norm(row) == pytest.approx(float(gradient.double().norm()), rel=1e-6), (step, name)
    assert not said.health


class Manual(Lit):
    """Accumulates, skips what is not finite, and zeroes early or late: as users write it."""

    def __init__(self, every: int = 1, zeroes: str = "before", clips: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every, self.zeroes, self.clips = every, zeroes, clips
        self.whole: list[dict[str, torch.Tensor]] = []
        """Gradients before the user's own clipping."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss_of(batch)
        if self.trainer.fit_loop.total_batch_idx in self.faulty:
            loss = loss * self.fault
        self.log("train_loss", loss)
        if self.zeroes == "before" and batch_idx % self.every == 0:
            optimizer.zero_grad()
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every:
            return
        if all(p.grad.isfinite().all() for p in self.parameters()):
            self.whole.append({n: p.grad.clone() for n, p in self.named_parameters()})
            if self.clips:
                self.clip_gradients(optimizer, 1e-3, "norm")
            optimizer.step()
        if self.zeroes == "after":
            optimizer.zero_grad()


@pytest.mark.parametrize("zeroes", ["before", "after"])
def test_manual_step_that_the_user_skips_is_a_step(tmp_path: Path, run: Path, zeroes: str) -> None:
    model = Manual(zeroes=zeroes)
    model.faulty = {2, 3}

    trainer(tmp_path, sentinel.LightningCallback()).fit(model, data(6))

    said = Said(run)
    assert [end.step for end in said.ends] == list(range(6))
    assert [end.is_skipped for end in said.ends] == [False, False, True, True, False, False]
    assert [len(said.of(step, "wgrad")) for step in range(6)] == [6] * 6
    assert [said.of(step, "wgrad", "head.bias")[0]["num_nan"] for step in range(6)] == [0, 0, 1, 1, 0, 0]


def test_manual_accumulation_is_one_step(tmp_path: Path, run: Path) -> None:
    model = Manual(every=3, zeroes="after", clips=True)

    trainer(tmp_path, sentinel.LightningCallback(), max_epochs=2).fit(model, data(6))

    said = Said(run)
    # Loggers count every batch; a step has the number of the batch in which the optimizer stepped.
    assert [end.step for end in said.ends] == [2, 5, 8, 11]
    assert [end.num_micro_steps for end in said.ends] == [3] * 4
    printed = logged(tmp_path)
    assert all(end.scalars["loss"] == pytest.approx(printed[end.step], rel=1e-6) for end in said.ends)
    for end, truth, clipped in zip(said.ends, model.whole, model.truth, strict=True):
        (row,) = said.of(end.step, "wgrad", "encoder.0.weight")
        assert norm(row) == pytest.approx(float(truth["encoder.0.weight"].double().norm()), rel=1e-6)
        assert norm(row) > 10 * float(clipped["encoder.0.weight"].norm())


def test_manual_accumulation_that_zeroes_first_is_learned_at_once(tmp_path: Path, run: Path) -> None:
    model = Manual(every=3, zeroes="before")

    trainer(tmp_path, sentinel.LightningCallback(), max_epochs=2).fit(model, data(6))

    ends = Said(run).ends
    # At the first batch nobody can tell it from a step that was skipped.
    assert [(end.step, end.num_micro_steps) for end in ends] == [(0, 1), (2, 2), (5, 3), (8, 3), (11, 3)]
    assert [end.is_skipped for end in ends] == [True, False, False, False, False]


def test_lbfgs_takes_the_gradient_of_its_first_evaluation(tmp_path: Path, run: Path) -> None:
    class Lbfgs(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=4)

    lit = Lbfgs()
    firsts: list[int] = []
    lit.on_train_batch_start = lambda batch, batch_idx: firsts.append(len(lit.truth))

    trainer(tmp_path, sentinel.LightningCallback()).fit(lit, data(3))

    said = Said(run)
    assert len(lit.truth) > 3
    assert [end.step for end in said.ends] == [0, 1, 2]
    assert sum(end.num_micro_steps for end in said.ends) == len(lit.truth)
    for step, first in enumerate(firsts):
        (row,) = said.of(step, "wgrad", "encoder.0.weight")
        assert norm(row) == pytest.approx(float(lit.truth[first]["encoder.0.weight"].double().norm()), rel=1e-6)
    assert not any(end.is_skipped for end in said.ends)


# -- checkpoints, further fits, ends ---------------------------------------------------------------------------------


def test_resume_goes_on_counting_from_lightnings_own_checkpoint(tmp_path: Path, run: Path) -> None:
    keeps = pl.callbacks.ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_train_steps=2)
    settings: dict[str, Any] = {"enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer(tmp_path / "a", sentinel.LightningCallback(), keeps, **settings).fit(Lit(), data(8))
    path = next(one for one in (tmp_path / "kept").iterdir() if "step=2" in one.name)
    again = trainer(tmp_path / "b", sentinel.LightningCallback(), **{**settings, "enable_checkpointing": False})
    again.fit(Lit(), data(8), ckpt_path=path, weights_only=False)

    state = torch.load(path, weights_only=False)["callbacks"]["LightningCallback"]
    assert state["step"] == 2
    said = Said(run)
    assert sorted(end.step for end in said.ends) == sorted([0, 1, 2, 3, 2, 3])
    assert sorted(int(p.stem) for p in (run / "attempts").glob("*.json")) == [0, 1]
    assert list(logged(tmp_path / "b")) == [2, 3]


def test_a_further_fit_goes_on_in_the_same_run(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENTINEL_RUN")
    model, callback = Lit(), sentinel.LightningCallback()
    fit = trainer(tmp_path, callback)
    fit.fit(model, data(3))
    fit.validate(model, data(2))
    fit.fit_loop.max_epochs = 2
    fit.fit(model, data(3))

    (directory,) = (one for one in tmp_path.iterdir() if (one / "spool").is_dir())
    assert sorted(end.step for end in Said(directory).ends) == list(range(6)) == sorted(logged(tmp_path))
    assert not any(module._forward_hooks for module in model.modules())


def test_validate_test_and_predict_alone_leave_nothing(tmp_path: Path, run: Path) -> None:
    callback = sentinel.LightningCallback()
    fit = trainer(tmp_path, callback)
    fit.validate(Lit(), data(2))

    assert not run.exists()
    fit.fit(Lit(), data(2))
    assert len(Said(run).ends) == 2


def test_fast_dev_run_is_measured(tmp_path: Path, run: Path) -> None:
    trainer(tmp_path, sentinel.LightningCallback(), fast_dev_run=3).fit(Lit(), data(8), data(8))

    assert [end.step for end in Said(run).ends] == [0, 1, 2]


class Dies(Lit):
    def __init__(self, error: BaseException, where: str) -> None:
        super().__init__()
        self.error, self.where = error, where

    def on_after_backward(self) -> None:
        if self.where == "after backward" and self.global_step == 2:
            raise self.error

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "in validation" and not self.trainer.sanity_checking:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no more"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["after backward", "in validation"])
def test_what_there_is_is_on_disk_when_lightning_raises(
    tmp_path: Path,
    run: Path,
    error: BaseException,
    where: str,
) -> None:
    model = Dies(error, where)
    seen: list[list[tuple[int, bool]]] = []

    class Looks(pl.Callback):
        def on_exception(self, *args: Any) -> None:
            seen.append([(end.step, end.is_partial) for end in Said(run).ends])

    with pytest.raises((RuntimeError, SystemExit)):
        trainer(tmp_path, sentinel.LightningCallback(EVERYTHING), Looks(), val_check_interval=3).fit(model, data(6), data(1))

    assert seen == [[(0, False), (1, False), (2, where == "after backward")]]
    said = Said(run)
    assert len(said.of(2, "dgrad", "head")) == 1
    assert said.byes[-1].reason == ("interrupted" if isinstance(error, KeyboardInterrupt) else "exception")
    assert "training_step" not in model.__dict__


def test_disabled_it_does_nothing(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DISABLE", "1")
    model = Lit()
    hooked: list[bool] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            hooked.append("training_step" in pl_module.__dict__ or bool(pl_module.head._forward_hooks))

    trainer(tmp_path, sentinel.LightningCallback("/nowhere.yaml"), Looks()).fit(model, data(3))

    assert hooked == [False] * 3
    assert not run.exists()


def test_copies_and_checkpoints_of_the_module_are_free_of_us(tmp_path: Path, run: Path) -> None:
    copies: list[Any] = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            trainer_of, pl_module._trainer = pl_module._trainer, None
            copies.append(copy.deepcopy(pl_module))
            pl_module._trainer = trainer_of

    model = Lit()
    names = list(model.state_dict())
    trainer(tmp_path, sentinel.LightningCallback(), Copies()).fit(model, data(2))

    assert copies[-1].training_step.__self__ is copies[-1]
    assert list(model.state_dict()) == list(copies[-1].state_dict()) == names
    assert "training_step" not in model.__dict__
    assert [end.num_micro_steps for end in Said(run).ends] == [1, 1]


def test_an_unknown_key_is_said_when_the_callback_is_made() -> None:
    with pytest.raises(sentinel.errors.ConfigError, match='unknown key "kindz"'):
        sentinel.LightningCallback({"kindz": []})


def test_trial_steps_of_a_tuner_are_not_measured(tmp_path: Path, run: Path) -> None:
    callback = sentinel.LightningCallback()
    finder = pl.callbacks.LearningRateFinder(num_training_steps=5)
    fit = trainer(tmp_path, callback, finder, enable_checkpointing=True)
    fit.fit(Lit(), data(6))

    assert [(end.step, end.num_micro_steps) for end in Said(run).ends] == [(step, 1) for step in range(6)]


def test_a_hook_of_ours_that_fails_is_said_and_costs_the_trainer_nothing(
    tmp_path: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sentinel.collect.adapters import lightning as adapter

    def broken(trainer: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(adapter, "followed", broken)

    trainer(tmp_path, sentinel.LightningCallback()).fit(Lit(), data(3))

    said = Said(run)
    assert len(logged(tmp_path)) == 3
    assert any("RuntimeError: planted" in one.message for one in said.health)
    assert [(end.step, end.num_micro_steps) for end in said.ends] == [(0, 1), (1, 1), (2, 1)]


def test_arguments_of_training_step_are_found_behind_us(tmp_path: Path, run: Path) -> None:
    def wrapped(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    class Bare(Lit):
        def training_step(self, batch: Any) -> torch.Tensor:
            return self.loss_of(batch)

    class Decorated(Lit):
        @wrapped
        def training_step(self, batch: Any) -> torch.Tensor:
            return self.loss_of(batch)

    class Iterates(Lit):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            batch, _, _ = next(dataloader_iter)
            return self.loss_of(batch)

    for model in (Bare, Decorated, Iterates):
        trainer(tmp_path, sentinel.LightningCallback(EVERYTHING)).fit(model(), data(3))

    ends = Said(run).ends
    assert [(end.step, end.num_micro_steps) for end in ends] == [(0, 1), (1, 1), (2, 1)] * 3
    assert all("loss" in end.scalars and not end.is_skipped for end in ends)


def test_an_optimizer_that_is_exchanged_between_epochs_is_followed(tmp_path: Path, run: Path) -> None:
    class Exchanges(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers = [torch.optim.Adam(pl_module.parameters(), 0.5)]

    trainer(tmp_path, sentinel.LightningCallback(), Exchanges(), max_epochs=2).fit(Lit(), data(3))

    ends = Said(run).ends
    assert [end.scalars["lr"] for end in ends] == [0.1] * 3 + [0.5] * 3
    assert not any(end.is_skipped for end in ends)


def test_a_compiled_module_trains_as_without_us(tmp_path: Path, run: Path) -> None:
    class Silent(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss_of(batch)  # Lightning's own self.log does not compile with every torch.

    def train(folder: Path, *callbacks: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = Silent()
        trainer(folder, *callbacks).fit(torch.compile(model, backend="eager"), data(4))
        return list(model.parameters())

    weights = train(tmp_path / "plain")
    ours = train(tmp_path / "watched", sentinel.LightningCallback())

    assert all(torch.equal(one, other) for one, other in zip(ours, weights, strict=True))
    said = Said(run)
    assert [(end.step, end.num_micro_steps) for end in said.ends] == [(step, 1) for step in range(4)]
    assert [len(said.of(step, "wgrad")) for step in range(4)] == [6] * 4
    assert [len(said.of(step, "activation", "")) for step in range(4)] == [1] * 4


class Endless(IterableDataset):
    """11 batches of 2, and nobody knows."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        made = torch.Generator().manual_seed(3)
        for _ in range(22):
            inputs = torch.randn(8, generator=made)
            yield inputs, inputs.sum(0, keepdim=True)


class EndsItsEpoch(Lit):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class StepsEverySecondBatch(Lit):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class ClosesByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss_of(batch)
            self.manual_backward(loss)
            self.log("train_loss", loss)
            return loss

        optimizer.step(closure=closure)


class Recomputes(Lit):
    def loss_of(self, batch: Any) -> torch.Tensor:
        inner = checkpoint(self.encoder, batch[0], use_reentrant=False)
        return nn.functional.mse_loss(self.head(inner), batch[1])


UNUSUAL: dict[str, tuple[Any, Any, dict[str, Any], list[int], list[int]]] = {
    "no length, accumulated": (
        Lit, DataLoader(Endless(), batch_size=2), {"accumulate_grad_batches": 4, "max_epochs": 2}, [4, 4, 3] * 2, [],
    ),
    "max_steps": (Lit, data(10), {"accumulate_grad_batches": 2, "max_steps": 3, "max_epochs": -1}, [2] * 3, []),
    "limits": (
        Lit, data(10), {"limit_train_batches": 7, "val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2},
        [1] * 14, [],
    ),
    "an epoch ended by the user": (EndsItsEpoch, data(5), {"max_epochs": 2}, [1] * 4, []),
    "own optimizer_step": (StepsEverySecondBatch, data(6), {}, [1] * 6, [1, 3, 5]),
    "manual closure": (ClosesByHand, data(4), {}, [1] * 4, []),
    "recomputed": (Recomputes, data(3), {"detect_anomaly": True}, [1] * 3, []),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_settings_are_counted_as_loggers_count(tmp_path: Path, run: Path, case: str) -> None:
    model, batches, settings, micro_steps, skipped = UNUSUAL[case]

    trainer(tmp_path, sentinel.LightningCallback(EVERYTHING), **settings).fit(model(), batches, data(2))

    said = Said(run)
    assert [end.step for end in said.ends] == list(range(len(micro_steps))) == list(logged(tmp_path))
    assert [end.num_micro_steps for end in said.ends] == micro_steps
    assert [end.step for end in said.ends if end.is_skipped] == skipped
    assert all(len(said.of(end.step, "wgrad")) == 6 for end in said.ends)
    assert not said.health


def test_weights_averaged_at_the_end_are_nobodys_step(tmp_path: Path, run: Path) -> None:
    averaging = pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
    trainer(tmp_path, sentinel.LightningCallback(), averaging, max_epochs=3).fit(Lit(), data(4))

    said = Said(run)
    assert [end.step for end in said.ends] == list(range(12)) == list(logged(tmp_path))
    assert not any(end.is_skipped for end in said.ends)


# -- both packages, ranks, the example -------------------------------------------------------------------------------

FLAVOUR = """
import sys
{first}
import sentinel
{second}
import pytorch_lightning as pl, torch
from torch.utils.data import DataLoader

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False, callbacks={callbacks})
trainer.fit(Lit(), DataLoader(torch.randn(6, 4), batch_size=2))
assert isinstance(sentinel.LightningCallback(), pl.Callback) == {is_own}
"""


@pytest.mark.parametrize(
    ("first", "second", "callbacks", "is_own"),
    [
        ("", "", "sentinel.LightningCallback()", True),
        ("import lightning.pytorch", "sentinel.LightningCallback", "[sentinel.LightningCallback()]", False),
    ],
    ids=["pytorch_lightning alone", "bound to the other package first"],
)
def test_it_works_for_pytorch_lightning_too(tmp_path: Path, first: str, second: str, callbacks: str, is_own: bool) -> None:
    script = FLAVOUR.format(first=first, second=second, callbacks=callbacks, is_own=is_own)

    run_command(tmp_path, [sys.executable, "-W", "ignore", "-c", script], None, 120)

    assert list(SaidSoFar(tmp_path / "run", 0).ends) == [0, 1, 2]


def test_the_callback_travels_to_spawned_processes() -> None:
    made = pickle.loads(pickle.dumps(sentinel.LightningCallback(EVERYTHING)))

    assert type(made) is sentinel.LightningCallback and list(made.config.config.kinds) == ALL_KINDS


def ranks(folder: Path, world: int) -> list[dict[str, dict[str, Any]]]:
    """Train under DDP as torchrun would start it, plain and watched; return what each rank can tell of both."""
    folder.mkdir(mode=0o700)
    port = str(free_port())
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SENTINEL_")}
    clean.update(SENTINEL_DIR=str(folder), SENTINEL_RUN="run", PYTHONPATH=str(ROOT))
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "WORLD_SIZE": str(world)}
    command = [interpreter("lightning.pytorch"), str(ROOT / "tests/trainers/lightning_ranks.py"), str(folder), str(world)]
    processes = [
        subprocess.Popen(
            command, env={**clean, **({**launched, "LOCAL_RANK": str(rank)} if world > 1 else {})}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]  # fmt: skip
    reported = [process.communicate(timeout=600)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), reported[0][-3000:]
    return [
        {name: json.loads((folder / name / f"result-{rank}.json").read_text()) for name in ("plain", "watched")}
        for rank in range(world)
    ]


PLAIN_STATISTICS = ("mean", "std", "norm", "min", "max")


def test_two_ranks_under_ddp_merge_to_what_one_process_measures(tmp_path: Path) -> None:
    results = ranks(tmp_path / "two", 2)
    ranks(tmp_path / "one", 1)

    assert all(one["plain"] == one["watched"] for one in results), "watched, a rank trains the same bits"
    whole, views = closed_steps(tmp_path / "one" / "run"), closed_steps(tmp_path / "two" / "run")
    printed = logged(tmp_path / "two" / "watched")
    assert [view.step for view in views] == [view.step for view in whole] == list(printed) == [0, 1, 2, 3]
    for view, alone in zip(views, whole, strict=True):
        assert view.scalars["loss"].mean == pytest.approx(printed[view.step], rel=1e-6)
        for kind, num in (("param", 10), ("wgrad", 10), ("activation", 8), ("activation_in", 1)):
            ours, truth = (statistics(one, kind, PLAIN_STATISTICS) for one in (view, alone))
            assert ours.keys() == truth.keys() and len(ours) == num
            for name, expected in truth.items():
                # The loss of a rank is the mean of its own samples: only its mean is that of the batch.
                known = ("mean",) if name == "model/activation" else tuple(expected)
                assert [ours[name][one] for one in known] == pytest.approx(
                    [expected[one] for one in known], rel=2e-4, abs=2e-6
                ), (view.step, name)
        total = math.sqrt(sum(one["norm"] ** 2 for one in statistics(view, "wgrad").values()))
        assert total == pytest.approx(results[0]["watched"]["norms"][view.step], rel=1e-5)
    assert not any(SaidSoFar(tmp_path / "two" / "run", rank).health for rank in range(2))


def test_the_example_runs_under_sentinel(tmp_path: Path) -> None:
    sentinel_run = [sys.executable, "-m", "sentinel.cli", "run", "--dir", str(tmp_path), "--name", "run", "--"]
    example = str(ROOT / "examples" / "lightning_module.py")

    ended = run_command(tmp_path, [*sentinel_run, sys.executable, example], None, 120)

    assert "step   99  loss" in ended.stdout
    spoken = SaidSoFar(tmp_path / "run", 0)
    assert list(spoken.ends) == list(range(100))
    assert spoken.of(99, "wgrad") and not spoken.health
