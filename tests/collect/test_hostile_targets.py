"""Targets that nobody can match in time: refused with a reason, never matched while a step waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.monitor import Monitor
from sentinel.command import ChangeConfig, DisableMonitoring, DumpTensors, EnableMonitoring
from sentinel.errors import ConfigError
from sentinel.messages import Ack
from sentinel.monitor_config import MonitorConfig, as_reported
from sentinel.target import Target, resolve

from ..support.training import train_on_ones

HANGS = r"re:((\w+\.?)+)+!"
LONG = "a_block_of_many_letters_that_never_ends"


class Deep(nn.Module):
    """A model whose names are long enough for a backtracking engine to hang on."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(LONG, nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, LONG)(x)  # type: ignore[no-any-return]


def attached(config: Any) -> tuple[nn.Module, torch.optim.Optimizer, Monitor]:
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, config)
    assert isinstance(monitor, Monitor)
    return model, optimizer, monitor


@pytest.mark.parametrize("kind", [EnableMonitoring, DumpTensors, DisableMonitoring, ChangeConfig])
def test_a_command_with_a_hostile_expression_costs_no_step_anything(run: Any, kind: Any) -> None:
    allowed = ("EnableMonitoring", "DumpTensors", "DisableMonitoring", "ChangeConfig")
    model, optimizer, monitor = attached({"allow_commands": allowed})
    settings = as_reported(MonitorConfig(kinds=("activation",), targets=(HANGS,)).measurement)
    named: dict[str, Any] = {"settings": settings} if kind is ChangeConfig else {"targets": (HANGS,), "kinds": ("wgrad",)}
    begun = time.process_time()

    answer = monitor.planning.inbox.receive(kind(id="c", seq=1, at_step=2, **named))
    train_on_ones(model, optimizer, 4)

    assert isinstance(answer, Ack)
    assert answer.state == "armed"
    assert time.process_time() - begun < 5.0
    monitor.detach()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (r"re:(\w+)\1", "a back reference cannot be matched in bounded time"),
        ("re:(a{900}){900}", "at most 1000 states"),
        ("a" * 5000, "at most 1000 characters"),
    ],
)
def test_a_command_that_cannot_be_matched_is_refused_with_a_reason(run: Any, target: str, why: str) -> None:
    _, _, monitor = attached(None)

    for kind in (EnableMonitoring, DisableMonitoring):
        answer = monitor.planning.inbox.receive(kind(id="c", seq=1, at_step=9, targets=(target,)))
        assert isinstance(answer, Ack)
        assert answer.state == "refused"
        assert why in answer.reason
    monitor.detach()


def test_more_targets_than_can_be_looked_up_in_time_are_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, monitor = attached(None)
    targets = tuple(f"re:.*{number}.*(a|b|c)*.*{number}" for number in range(20_000))
    begun = time.thread_time()

    answer = monitor.planning.inbox.receive(EnableMonitoring(id="c", seq=1, at_step=9, targets=targets))

    assert isinstance(answer, Ack)
    assert answer.state == "refused"
    assert "was not found within 1 s" in answer.reason
    assert time.thread_time() - begun < 15.0
    monitor.detach()


def test_the_training_thread_only_looks_up_what_was_found(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, monitor = attached(None)
    train_on_ones(model, optimizer, 1)
    matched_on: set[str] = set()
    from sentinel import regular_expression

    matches = regular_expression.RegularExpression._matches

    def seen(self: Any, name: str) -> bool:
        matched_on.add(threading.current_thread().name)
        return matches(self, name)

    monkeypatch.setattr(regular_expression.RegularExpression, "_matches", seen)
    command = EnableMonitoring(id="c", seq=1, at_step=3, targets=(r"re:.*many.*\.0",), kinds=("activation",), for_steps=3)
    writer = threading.Thread(target=monitor.planning.inbox.receive, args=(command,), name="writer")
    writer.start()
    writer.join()

    train_on_ones(model, optimizer, 5)

    assert matched_on == {"writer"}
    monitor.detach()


@pytest.mark.parametrize(
    "config", [{"targets": [HANGS], "kinds": ["activation"]}, {"probes": {"wgrad": {"targets": [HANGS]}}}]
)
def test_a_hostile_target_of_the_config_is_answered_at_attach(run: Any, config: dict[str, Any]) -> None:
    begun = time.process_time()

    with pytest.raises(ConfigError, match="matches no module"):
        sentinel.attach(Deep(), None, config)

    assert time.process_time() - begun < 5.0


def test_globs_that_hang_other_engines_are_matched_in_no_time() -> None:
    begun = time.process_time()

    for glob in ("*a" * 400 + "b", "?" * 900, "*" * 900 + "b", "[ab]*" * 150 + "c", "*.*" * 200):
        Target.parse(glob).means(("a" * 2000,))

    assert time.process_time() - begun < 2.0


def test_what_is_resolved_in_time_says_nothing() -> None:
    resolve(("layers.*", r"re:layers\.\d+"), [f"layers.{number}" for number in range(1000)], 30.0)
