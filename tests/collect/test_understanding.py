"""What was understood of a trainer's steps is said once, and nothing is said where it is the trainer's own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import sentinel
from sentinel.messages import LOSS_NAMES

from ..support.nets import TinyModel, loss_of
from ..support.spools import Said
from .parallel.test_several_models import Critic, Generator, adams

NO_LOSS = "no loss was logged"


def messages(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if words in one.getMessage()]


def train_and_log(
    num_steps: int, *, logs: Any = None, skips: Any = None, explicit: bool = False, scaler: Any = None
) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if skips is None or not skips(step):
            optimizer.step()
        if explicit:
            monitor.step()
        if logs is not None:
            monitor.log(**logs(step, loss))
    monitor.detach()


def test_the_names_of_a_loss_are_those_that_the_default_rules_look_for() -> None:
    pack = yaml.safe_load((Path(__file__).parents[2] / "rules" / "default.yaml").read_text())

    (rule,) = (one for one in pack["rules"] if one["name"] == "loss-spike")

    assert tuple(rule["match"]["name"]) == LOSS_NAMES


@pytest.mark.parametrize(
    ("logs", "is_reported"),
    [
        (None, True),
        (lambda step, loss: {"lr": 0.1}, True),
        (lambda step, loss: {"loss": loss}, False),
        (lambda step, loss: {"train/loss": loss}, False),
        (lambda step, loss: {"loss_of_batch": loss}, True),
    ],
    ids=["nothing", "something else", "a loss", "another name", "a name that no rule knows"],
)
def test_no_loss_with_the_first_step_is_said_once(
    run: Path, caplog: pytest.LogCaptureFixture, logs: Any, is_reported: bool
) -> None:
    train_and_log(6, logs=logs)

    reported = messages(caplog, NO_LOSS)
    assert len(reported) == is_reported
    if reported:
        assert "monitor.log(loss=loss)" in reported[0]
        assert ("loss_of_batch" in reported[0]) == (logs is not None and "loss_of_batch" in logs(0, torch.zeros(())))
    assert not Said(run).health


def test_a_loss_logged_behind_monitor_step_is_not_missed(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_and_log(4, logs=lambda step, loss: {"loss": loss}, explicit=True)

    assert not messages(caplog, NO_LOSS)


@pytest.mark.parametrize("skips", [lambda step: step % 2 == 0, lambda step: True], ids=["every second", "all"])
def test_a_run_whose_steps_look_skipped_is_told_the_remedy_once(run: Path, skips: Any) -> None:
    train_and_log(40, skips=skips)

    reported = [one for one in Said(run).health if one.code == "steps_look_skipped"]
    assert [one.count for one in reported] == [1]
    assert "monitor.step()" in reported[0].message


@pytest.mark.parametrize("skips", [lambda step: step in (3, 4, 20), lambda step: step % 5 == 0], ids=["some", "a fifth"])
def test_steps_that_a_trainer_skips_now_and_then_are_its_own(run: Path, skips: Any) -> None:
    train_and_log(40, skips=skips)

    assert not Said(run).health


def test_a_search_for_the_loss_scale_is_no_misunderstanding(run: Path) -> None:
    train_and_log(50, skips=lambda step: step < 20, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))

    assert not Said(run).health


def test_a_trainer_that_says_its_steps_is_believed(run: Path) -> None:
    train_and_log(40, skips=lambda step: step % 2 == 0, explicit=True)

    assert not Said(run).health


def gan(num_critic: int, num_rounds: int, *, given: str = "by name", logs: bool = True, first: str = "D") -> Any:
    maker, critic = Generator(), Critic()
    of_maker, of_critic = adams([maker, critic])
    optimizers = {"G": of_maker, "D": of_critic}
    monitor = sentinel.attach({"G": maker, "D": critic}, optimizers if given == "by name" else [of_maker, of_critic])
    for step in range(num_rounds):
        for turn in "DG" if first == "D" else "GD":
            for _ in range(num_critic if turn == "D" else 1):
                optimizers[turn].zero_grad()
                made = maker(torch.randn(3, 4))
                loss = critic(made.detach() if turn == "D" else made).mean()
                (loss if turn == "D" else -loss).backward()
                optimizers[turn].step()
        monitor.log(**{"G/loss": loss, "at": step})
    monitor.detach()


def test_a_critic_that_steps_five_times_is_part_of_one_step_and_that_is_said(run: Path) -> None:
    gan(5, 6)

    said = Said(run)
    assert [end.scalars["at"] for end in said.ends] == list(range(6))
    assert not any(end.is_skipped for end in said.ends)
    assert [end.num_micro_steps for end in said.ends] == [6] * 6
    (reported,) = said.health
    assert reported.code == "uneven_optimizers"
    assert "G steps once and D steps 5 times" in reported.message
    assert "monitor.step()" in reported.message


def test_the_number_of_steps_does_not_depend_on_who_begins(run: Path) -> None:
    gan(3, 6, first="G")

    # The first step is over when both have stepped: what the critic does behind it belongs to the next one.
    assert len(Said(run).ends) in (6, 7)
    assert not any(end.is_skipped for end in Said(run).ends)


def test_optimizers_that_step_alike_are_told_of_in_the_log_alone(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sentinel"):
        gan(1, 5, given="a list")

    assert not Said(run).health
    assert messages(caplog, "a step is one round of Adam and Adam 2")


def test_an_optimizer_that_begins_late_holds_no_step_up_for_long(run: Path) -> None:
    model, late = TinyModel(), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(late.parameters(), 0.1)]
    monitor = sentinel.attach({"model": model, "late": late}, optimizers)
    for step in range(30):
        optimizers[0].zero_grad()
        loss_of(model, step).backward()
        optimizers[0].step()
        if step >= 24:
            optimizers[1].zero_grad()
            late(torch.ones(2, 3)).sum().backward()
            optimizers[1].step()
        monitor.log(at=step, loss=0.5)
    monitor.detach()

    said = Said(run)

    # The first waits for both; from then on each step of the first optimizer is one.
    assert [end.scalars["at"] for end in said.ends] == list(range(9, 30))
    assert [one.code for one in said.health] == ["uneven_optimizers"]
