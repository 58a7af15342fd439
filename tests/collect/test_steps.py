"""When steps begin and end, and what belongs to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sentinel

from ..support.nets import TinyModel, loss_of
from ..support.spools import Said, norm


def test_step_number_is_the_trainers(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, first_step=100)
    for step in range(100, 103):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        monitor.log(loss=float(step))
    monitor.detach()

    said = Said(run)

    assert [end.step for end in said.ends] == [100, 101, 102]
    assert [end.scalars["loss"] for end in said.ends] == [100.0, 101.0, 102.0]
    assert not any(end.is_skipped or end.is_partial for end in said.ends)


def test_log_after_step_belongs_to_it(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, lr=0.1 * step)
    monitor.detach()

    said = Said(run)

    assert [end.scalars["lr"] for end in said.ends] == pytest.approx([0.0, 0.1, 0.2])


def test_a_scalar_that_is_no_number_is_said_by_name_and_costs_no_other(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(
            loss="abc", both=torch.ones(2), phase=torch.tensor(1j), absent=None, huge=10**400, low=-(10**400), lr=0.5
        )
    monitor.detach()

    said = Said(run)

    reported = [{n: value for n, value in end.scalars.items() if not n.startswith("memory_")} for end in said.ends]
    assert reported == [{"huge": np.inf, "low": -np.inf, "lr": 0.5}] * 2
    reported = [one.message for one in said.health if one.code == "hook_failed"]
    assert len(reported) == 6
    assert "monitor.log(loss=...): expected a number or a tensor of one element, got str 'abc'" in reported[0]
    assert "monitor.log(both=...): expected one element, got a tensor of shape (2,)" in reported[1]
    assert "monitor.log(phase=...): expected a real number, got a tensor of torch.complex64" in reported[2]


@pytest.mark.parametrize("zero_first", [True, False])
def test_skipped_step_is_a_step(run: Path, zero_first: bool) -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    monitor = sentinel.attach(model, optimizer)
    truth = []
    for step in range(6):
        if zero_first:
            optimizer.zero_grad()
        for micro_step in range(2):
            loss = loss_of(model, 10 * step + micro_step)
            (loss * float("nan") if step in (2, 3) else loss).backward()
        truth.append(float(model.head.weight.grad.norm()))
        if step not in (2, 3):
            optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        monitor.log(loss=float(step))
    monitor.detach()

    said = Said(run)

    assert [end.step for end in said.ends] == list(range(6))
    assert [end.is_skipped for end in said.ends] == [False, False, True, True, False, False]
    assert [end.num_micro_steps for end in said.ends] == [2] * 6
    assert [end.scalars["loss"] for end in said.ends] == [float(step) for step in range(6)]
    for step in range(6):
        (row,) = said.of(step, "wgrad", "head.weight")
        if step in (2, 3):
            assert row["num_nan"] == model.head.weight.numel()
        else:
            assert norm(row) == pytest.approx(truth[step], rel=1e-5)


@pytest.mark.parametrize("is_watched", [True, False])
def test_the_gradients_of_a_step_that_was_skipped_before_its_end_was_called_are_kept(run: Path, is_watched: bool) -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    monitor = sentinel.attach(model, optimizer if is_watched else None)
    for step in range(4):
        optimizer.zero_grad()
        (loss_of(model, step) * (float("nan") if step == 2 else 1.0)).backward()
        if step != 2:
            optimizer.step()
        monitor.step()
    monitor.detach()

    said = Said(run)

    rows = [said.of(step, "wgrad", "head.weight") for step in range(4)]
    assert [len(found) for found in rows] == [1] * 4
    assert [int(row["num_nan"]) for (row,) in rows] == [0, 0, model.head.weight.numel(), 0]


class Pair(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, *, is_detached: bool) -> torch.Tensor:
        made = self.generator(inputs)
        return self.critic(made.detach() if is_detached else made).mean()


def test_gradients_that_another_part_left_behind_are_not_those_of_the_step(run: Path) -> None:
    pair = Pair()
    first, second = torch.optim.SGD(pair.critic.parameters(), 0.1), torch.optim.SGD(pair.generator.parameters(), 0.1)
    monitor = sentinel.attach(pair, [first, second])
    norms = []
    for step in range(3):
        inputs = torch.full((2, 4), 1.0 + step)
        first.zero_grad()
        pair(inputs, is_detached=True).backward()
        norms.append(float(pair.critic.weight.grad.norm()))
        first.step()
        second.zero_grad()
        (-10.0 * pair(inputs, is_detached=False)).backward()  # It leaves gradients in the critic, which nobody uses.
        second.step()
        monitor.step()
    monitor.detach()

    said = Said(run)
    assert [norm(said.of(step, "wgrad", "critic.weight")[0]) for step in range(3)] == pytest.approx(norms, rel=1e-5)


def test_model_zero_grad_ends_a_skipped_step_too(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(4):
        model.zero_grad()
        loss_of(model, step).backward()
        if step != 1:
            optimizer.step()
    monitor.detach()

    assert [end.is_skipped for end in Said(run).ends] == [False, True, False, False]


def test_grad_scaler_step_that_overflowed_is_a_skipped_step(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    monitor = sentinel.attach(model, optimizer)
    truth = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        truth.append(float(model.head.bias.grad.norm()) / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    monitor.detach()

    said = Said(run)

    assert [end.is_skipped for end in said.ends] == [False, False, True, False]
    assert norm(said.of(1, "wgrad", "head.bias")[0]) == pytest.approx(truth[1], rel=1e-5)
    assert said.of(2, "wgrad", "head.bias")[0]["num_nan"] > 0


def test_two_optimizers_one_step(run: Path) -> None:
    model = TinyModel()
    one = torch.optim.AdamW(model.blocks.parameters(), 0.01)
    two = torch.optim.SGD([*model.emb.parameters(), *model.norm.parameters(), *model.head.parameters()], 0.01)
    monitor = sentinel.attach(model, [one, two])
    for step in range(5):
        one.zero_grad()
        two.zero_grad()
        loss_of(model, step).backward()
        if step != 3:
            one.step()
            two.step()
        monitor.log(at=step)
    monitor.detach()

    said = Said(run)

    assert [end.scalars["at"] for end in said.ends] == [0, 1, 2, 3, 4]
    assert [end.is_skipped for end in said.ends] == [False, False, False, True, False]
    assert len(said.of(2, "wgrad")) == len(list(model.parameters()))


@pytest.mark.parametrize("detaches", [True, False])
def test_gan_is_one_step_a_round(run: Path, detaches: bool) -> None:
    maker, critic = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    of_maker, of_critic = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
    monitor = sentinel.attach([maker, critic], [of_maker, of_critic])
    for step in range(4):
        of_critic.zero_grad()
        made = maker(torch.randn(3, 4))
        critic(made.detach() if detaches else made).mean().backward()
        of_critic.step()
        of_maker.zero_grad()
        (-critic(maker(torch.randn(3, 4))).mean()).backward()
        of_maker.step()
        monitor.log(at=step)
    monitor.detach()

    said = Said(run)

    assert [end.scalars["at"] for end in said.ends] == [0, 1, 2, 3]
    assert not any(end.is_skipped for end in said.ends)


def test_closure_runs_forward_inside_step(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    truth = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            truth.append(float(model.head.weight.grad.norm()))
            return loss

        optimizer.step(closure)
        monitor.log(at=step)
    monitor.detach()

    said = Said(run)

    assert [end.scalars["at"] for end in said.ends] == [0, 1, 2]
    for step in range(3):
        assert norm(said.of(step, "wgrad", "head.weight")[0]) == pytest.approx(truth[step], rel=1e-5)


def test_monitor_step_is_the_boundary_once_it_is_used(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(3):
        for half in range(2):  # Two optimizer steps are one step of this trainer.
            optimizer.zero_grad()
            loss_of(model, 2 * step + half).backward()
            optimizer.step()
        monitor.log(at=step)
        monitor.step()
    monitor.detach()

    said = Said(run)

    # Before the first monitor.step() nobody knows: the automatic boundary ended step 0 after one half.
    assert [end.scalars.get("at") for end in said.ends] == [None, 0, 1, 2]


def test_optimizer_that_was_not_given_is_found(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = sentinel.attach(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step != 2:
            optimizer.step()
    monitor.detach()

    said = Said(run)

    assert [end.step for end in said.ends] == [0, 1, 2, 3]
    assert [end.is_skipped for end in said.ends] == [False, False, True, False]
    assert len(said.of(0, "wgrad")) == len(list(model.parameters()))


def test_evaluation_inside_the_loop_is_not_measured(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            loss_of(model, 99)
        optimizer.step()
        model.eval()
        loss_of(model, 98)
        with torch.no_grad():
            loss_of(model, 97)
        model.train()
        monitor.log(at=step)
    monitor.detach()

    said = Said(run)

    assert [end.scalars["at"] for end in said.ends] == [0, 1, 2]
    assert [end.num_micro_steps for end in said.ends] == [1, 1, 1]


def test_failed_forward_is_forgotten_and_may_be_retried(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"per_micro_step": True})
    fail = [True]

    def out_of_memory(module: nn.Module, args: object) -> None:
        if fail[0]:
            raise MemoryError

    for step in range(2):
        optimizer.zero_grad()
        handle = model.head.register_forward_pre_hook(out_of_memory)
        try:
            loss_of(model, step).backward()
        except MemoryError:
            handle.remove()
            loss_of(model, step).backward()
        optimizer.step()
    monitor.detach()

    said = Said(run)

    assert [end.num_micro_steps for end in said.ends] == [1, 1]
    assert len(said.of(1, "activation", "blocks.0")) == 1


def test_state_dict_goes_on_counting(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    state = monitor.state_dict()
    monitor.detach()
    resumed = sentinel.attach(model, optimizer)
    resumed.load_state_dict(state)
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    optimizer.step()
    resumed.detach()

    assert sorted(end.step for end in Said(run).ends) == [0, 1, 2, 3]
    assert sorted(int(p.stem) for p in (run / "attempts").glob("*.json")) == [0, 1]


def test_step_interval_leaves_only_the_black_box(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"step_interval": 2, "kinds": ["param", "wgrad", "activation"]})
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    monitor.detach()

    said = Said(run)

    assert [len(said.of(step, "wgrad")) > 0 for step in range(4)] == [True, False, True, False]
    assert all(said.of(step, "activation", "blocks.0") for step in range(4))
    assert not said.of(1, "activation", "blocks.0.fc1")


def test_partial_step_at_the_end_is_sent_as_such(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    loss_of(model, 1)
    monitor.detach()

    said = Said(run)

    assert [(end.step, end.is_partial) for end in said.ends] == [(0, False), (1, True)]
    assert said.byes[-1].reason == "detached"
    assert np.isfinite(norm(said.of(1, "activation", "blocks.1")[0]))


def test_gradients_cleared_by_hand_end_a_skipped_step(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(5):
        for p in model.parameters():
            p.grad = None
        for micro_step in range(2):
            loss_of(model, 10 * step + micro_step).backward()
        if step != 3:
            optimizer.step()
        monitor.log(at=step)
    monitor.detach()

    said = Said(run)

    assert [end.scalars["at"] for end in said.ends] == [0, 1, 2, 3, 4]
    assert [end.is_skipped for end in said.ends] == [False, False, False, True, False]
    assert [end.num_micro_steps for end in said.ends] == [2] * 5


@pytest.mark.parametrize("is_called_before", [False, True], ids=["attached first", "called first"])
def test_forward_that_was_compiled_away_before_attach_is_said_and_its_gradients_measured(
    run: Path, is_called_before: bool
) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = torch.compile(lambda seed: loss_of(model, seed), backend="eager")
    if is_called_before:
        compiled(0)
    monitor = sentinel.attach(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        compiled(step).backward()
        optimizer.step()
        monitor.log(at=step)
    monitor.detach()

    said = Said(run)

    assert [end.scalars["at"] for end in said.ends] == [0, 1, 2]
    assert ("blind_forward" in {health.code for health in said.health}) == is_called_before
    assert all(bool(said.of(step, "activation")) != is_called_before for step in range(3))
    assert all(len(said.of(step, "wgrad")) == len(list(model.parameters())) for step in range(3))


def test_compiled_model_that_is_attached_has_its_outer_borders(run: Path) -> None:
    model = torch.compile(TinyModel(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    monitor.detach()

    said = Said(run)

    assert [end.num_micro_steps for end in said.ends] == [1, 1, 1]
    assert len(said.of(1, "activation", "")) == len(said.of(1, "dgrad", "")) == 1


def test_a_forward_that_is_captured_as_a_cuda_graph_belongs_to_no_step_and_replays_are_steps(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = iter([])
    monkeypatch.setattr("sentinel.collect.hooks.recorder.is_capturing", lambda: next(captures, False))
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)

    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        monitor.log(at=step)
    optimizer.zero_grad()
    captures = iter([True])
    loss_of(model, 2).backward()  # Recorded: nothing of it is computed, on a GPU.
    for step in range(2, 5):
        for p in model.parameters():
            p.grad = torch.full_like(p, step)
        optimizer.step()
        monitor.log(at=step)
    monitor.detach()

    said = Said(run)
    assert [end.scalars["at"] for end in said.ends] == [0, 1, 2, 3, 4]
    assert {health.code for health in said.health} == {"blind_forward"}
    assert [bool(said.of(step, "activation")) for step in range(5)] == [True, True, False, False, False]
    number = len(list(model.parameters()))
    assert [len(said.of(step, "wgrad")) for step in range(5)] == [number] * 5
    assert [said.of(step, "wgrad")[0]["max"] for step in range(2, 5)] == [2.0, 3.0, 4.0]
