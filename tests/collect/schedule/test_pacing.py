"""A kind that costs too much of a step is measured more rarely, says so, and blinds nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sentinel
from sentinel.collect.kernels import NativeKernel
from sentinel.collect.schedule import pacing
from sentinel.collect.schedule.pacing import FRESH_STEPS, MAX_DEFAULT_INTERVAL
from sentinel.collect.schedule.plan import Plan
from sentinel.command import EnableMonitoring
from sentinel.monitor_config import Measurement
from sentinel.record import Kind

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said

MS = 1_000_000
WARM_STEPS = 32
NUM_STEPS = WARM_STEPS + 72
"""Enough to be warm, and to have decided."""


@pytest.fixture(autouse=True)
def _soon_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "WARM_STEPS", WARM_STEPS)
    monkeypatch.setattr(pacing, "WARM_S", WARM_STEPS * 0.2)


class Trainer:
    """A training loop by a clock of its own: a step takes so long, and each row of a kind costs so much more."""

    def __init__(self, config: dict[str, Any], costs_us: dict[str, float], step_ms: float = 200.0) -> None:
        self.now = 0
        self.step_ms = step_ms
        self.model = TinyModel(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.monitor: Any = sentinel.attach(self.model, self.optimizer, config)
        self.monitor.recorder.recording.costs.clock = lambda: self.now
        self.before_step: Callable[[int], None] = lambda step: None
        self.before_backward: Callable[[int], None] = lambda step: None
        costs = {int(Kind.of(label)): us for label, us in costs_us.items()}

        class CostlyKernel(NativeKernel):
            def measure(kernel, tensors: Any, rows: Any, first_row: int, **keys: Any) -> None:
                super().measure(tensors, rows, first_row, **keys)
                kinds = rows.array["kind"][first_row : first_row + len(tensors)].tolist()
                self.now += int(sum(1000 * costs.get(kind, 0) for kind in kinds))

        self.monitor.recorder.recording.kernel = CostlyKernel()

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step = self.monitor.recorder.ended_steps + self.monitor.runner.running.is_begun
            loss = loss_of(self.model, step)
            self.before_backward(step)
            loss.backward()
            self.now += int(self.step_ms * MS)
            self.before_step(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % 32 == 0:
                assert self.monitor.session.handover.flush(60.0)

    def ended(self, run: Path) -> Said:
        self.monitor.detach()
        return Said(run)


def measured_at(said: Said, kind: str) -> list[int]:
    """Return the steps that have rows of a kind, beside the black box."""
    return sorted(step for step in said.rows if any(t.kind == kind and not t.border for t, _ in said.rows[step]))


def test_a_kind_that_costs_more_than_its_share_lengthens_its_interval_and_says_so(run: Path) -> None:
    trainer = Trainer({"kinds": ["param", "wgrad", "activation"]}, {"activation": 12_000})
    trainer.train(NUM_STEPS)
    said = trainer.ended(run)

    at = measured_at(said, "activation")
    every = trainer.monitor.planning.plan.intervals[Kind.ACTIVATION]
    first = next(end.step for end in said.ends if end.left_out)
    assert every in (4, 8)
    assert first > WARM_STEPS
    assert [step for step in at if step < first] == list(range(first))
    assert [step for step in at if step > first] == [step for step in range(first, NUM_STEPS) if step % every == 0]
    assert all(("activation" in end.left_out) == (end.step not in at) for end in said.ends)
    assert measured_at(said, "param") == measured_at(said, "wgrad") == list(range(NUM_STEPS))
    (reported,) = [one for one in said.health if one.code == "interval_lengthened"]
    assert reported.site == "activation"
    assert f"measured every {every} steps instead of every step" in reported.message
    assert "max_overhead (10 %)" in reported.message
    assert "{activation: {step_interval: 1}}" in reported.message


def test_borders_and_the_rows_of_a_due_step_are_as_without_a_bound(run: Path) -> None:
    rows = []
    for bound in (0.1, None):
        torch.manual_seed(0)
        config = {"run": f"bound-{bound}", "kinds": ["activation", "dgrad"], "max_overhead": bound}
        trainer = Trainer(config, {"activation": 12_000, "dgrad": 12_000})
        trainer.train(NUM_STEPS)
        said = trainer.ended(run.parent / f"bound-{bound}")
        rows.append(said.rows)

    bounded, whole = rows
    assert sum(map(len, bounded.values())) < sum(map(len, whole.values()))
    for step, expected in whole.items():
        found = {(t.kind, t.name): row["mean"].tobytes() for t, row in bounded[step]}
        assert found.items() <= {(t.kind, t.name): row["mean"].tobytes() for t, row in expected}.items()
        assert {(t.kind, t.name) for t, _ in expected if t.border} <= found.keys()


@pytest.mark.parametrize(
    "config",
    [
        {"kinds": ["activation"], "max_overhead": None},
        {"kinds": ["activation"], "max_overhead": 0},
        {"kinds": ["activation"], "max_overhead": 1},
        {"probes": {"activation": {"step_interval": 1}}},
        {"kinds": ["activation"], "collect_times": 10_000},
    ],
    ids=["null", "0", "1", "interval", "times"],
)
def test_what_somebody_said_is_measured_as_they_said(run: Path, config: dict[str, Any]) -> None:
    trainer = Trainer(config, {"activation": 12_000})
    trainer.train(NUM_STEPS)
    said = trainer.ended(run)

    assert measured_at(said, "activation") == list(range(NUM_STEPS))
    assert not any(one.code == "interval_lengthened" for one in said.health)


def test_what_is_measured_by_default_stays_within_half_of_it_and_weights_go_first(run: Path) -> None:
    # 14 of each: 3.5 % of a step for the weights, 3.5 % for the gradients.
    trainer = Trainer({}, {"param": 500, "wgrad": 500})
    trainer.train(NUM_STEPS)
    intervals = dict(trainer.monitor.planning.plan.intervals)
    said = trainer.ended(run)

    assert Kind.WGRAD not in intervals
    assert 2 <= intervals[Kind.PARAM] <= 4
    (reported,) = [one for one in said.health if one.code == "interval_lengthened"]
    assert "half of max_overhead (5 %)" in reported.message


def test_default_kinds_are_measured_every_eight_steps_at_least(run: Path) -> None:
    trainer = Trainer({}, {"param": 1700, "wgrad": 1700, "activation": 50_000})
    trainer.train(NUM_STEPS)
    said = trainer.ended(run)

    assert max(np.diff(measured_at(said, "wgrad"))) == max(np.diff(measured_at(said, "param"))) == MAX_DEFAULT_INTERVAL


def test_odd_steps_change_nothing(run: Path) -> None:
    trainer = Trainer({"kinds": ["activation"]}, {"activation": 500})
    odd = dict.fromkeys(range(36, 100, 12), 0.1)
    trainer.before_step = lambda step: setattr(trainer, "step_ms", odd.get(step + 1, 200.0))
    trainer.train(NUM_STEPS)
    said = trainer.ended(run)

    assert measured_at(said, "activation") == list(range(NUM_STEPS))


def test_the_interval_is_shortened_again_when_steps_get_longer(run: Path) -> None:
    trainer = Trainer({"kinds": ["activation"]}, {"activation": 12_000})
    trainer.train(NUM_STEPS)
    lengthened = trainer.monitor.planning.plan.intervals[Kind.ACTIVATION]
    trainer.step_ms = 4000.0
    trainer.train(160)
    said = trainer.ended(run)

    assert lengthened > 1
    assert trainer.monitor.planning.plan.intervals[Kind.ACTIVATION] == 1
    assert measured_at(said, "activation")[-40:] == list(range(NUM_STEPS + 120, NUM_STEPS + 160))


def next_left_out(trainer: Trainer, kind: Kind) -> int:
    """Train until a step is about to run that will leave a kind out; return its number."""
    for _ in range(64):
        trainer.train(1)
        step = trainer.monitor.current_step + 1
        if step % trainer.monitor.planning.plan.intervals.get(kind, 1):
            return step
    raise AssertionError("no step left it out")


def test_a_nan_in_a_step_that_was_left_out_is_seen_in_that_step_with_weights_and_gradients(run: Path) -> None:
    trainer = Trainer({}, {"param": 1700, "wgrad": 1700, "activation": 50_000})
    trainer.train(NUM_STEPS)
    bad = next_left_out(trainer, Kind.WGRAD)
    with torch.no_grad():
        trainer.model.blocks[0].fc1.weight[0, 0] = float("nan")
    trainer.train(FRESH_STEPS + 1)
    said = trainer.ended(run)

    assert said.of(bad, "param", "blocks.0.fc1.weight")[0]["num_nan"] == 1
    assert len(said.of(bad, "param")) == len(said.of(0, "param"))
    assert len(said.of(bad, "wgrad")) == len(said.of(0, "wgrad"))
    assert [step for step in measured_at(said, "wgrad") if step >= bad] == list(range(bad, bad + FRESH_STEPS + 1))


def test_a_nan_that_only_a_gradient_holds_is_read_before_it_is_clipped(run: Path) -> None:
    trainer = Trainer({}, {"param": 1700, "wgrad": 1700, "activation": 50_000})
    trainer.train(NUM_STEPS)
    bad = next_left_out(trainer, Kind.WGRAD)

    def spoil_and_clip(step: int) -> None:
        weight = trainer.model.head.weight
        assert weight.grad is not None
        if step == bad:
            weight.grad[0, 0] = float("inf")
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)

    trainer.before_step = spoil_and_clip
    trainer.train(1)
    said = trainer.ended(run)

    (row,) = said.of(bad, "wgrad", "head.weight")
    assert row["num_pos_inf"] == 1


def test_what_a_command_asks_for_is_measured_at_every_step_and_so_is_all_else(run: Path) -> None:
    trainer = Trainer({"kinds": ["activation", "wgrad"]}, {"activation": 12_000, "wgrad": 12_000})
    trainer.train(NUM_STEPS)
    first = next_left_out(trainer, Kind.ACTIVATION) + 4
    command = EnableMonitoring(id="1", seq=1, at_step=first, kinds=("dgrad",), for_steps=20)
    trainer.monitor.planning.inbox.receive(command)
    trainer.train(26)
    said = trainer.ended(run)

    for kind in ("activation", "wgrad", "dgrad"):
        assert set(range(first, first + 20)) <= set(measured_at(said, kind)), kind


def test_ranks_with_other_intervals_meet_at_the_longest(run: Path) -> None:
    plans = {every: Plan(Measurement()) for every in (1, 2, 8)}
    measured: dict[int, set[int]] = {}
    for every, plan in plans.items():
        plan.intervals = {Kind.WGRAD: every}
        steps = []
        for step in range(64):
            plan.begin(step)
            steps += [step] * plan.takes(Kind.WGRAD)
            assert plan.left_out == (frozenset() if plan.takes(Kind.WGRAD) else {Kind.WGRAD})
        measured[every] = set(steps)

    assert measured[8] < measured[2] < measured[1]


def test_a_bound_that_is_no_share_is_refused() -> None:
    with pytest.raises(sentinel.errors.ConfigError, match="max_overhead must be a share of a step from 0 to 1"):
        Measurement(max_overhead=5)
