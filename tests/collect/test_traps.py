"""The traps of training loops: each guard holds, and the trap bites where its guard is taken out.

Tried here: checkpointing, the loss scale, nested outputs, retried forwards and evaluation, the order of a backward,
clipping, two optimizers, identity of tensors, skipped steps, and leaves that outlive a step. Others are tried in
tests/layouts, tests/trainers, tests/end_to_end/test_origin.py, test_pipelining.py, test_steps.py and test_hooks.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

import sentinel
from sentinel.collect.hooks import module_tap, nesting, root_hooks
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.clipping import ClipWatch
from sentinel.collect.hooks.gradient_taps import GradientTap
from sentinel.collect.hooks.loss_scale import LossScale
from sentinel.collect.hooks.root_hooks import RootHooks
from sentinel.collect.hooks.seen_tensors import SeenTensors
from sentinel.collect.rows.recording import Recording
from sentinel.collect.step import Boundary

from ..support.nets import Recomputing, TinyModel, loss_of, tokens
from ..support.spools import ALL_KINDS, Said, norm

Scenario = Callable[[Path], Any]
Guard = Callable[[pytest.MonkeyPatch], None]


def watched(model: nn.Module, *optimizers: torch.optim.Optimizer, per_micro_step: bool = True) -> Any:
    return sentinel.attach(model, list(optimizers) or None, {"kinds": ALL_KINDS, "per_micro_step": per_micro_step})


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1)


def recompute(run: Path, use_reentrant: bool) -> Any:
    model = Recomputing(use_reentrant)
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.detach()
    said = Said(run)
    return [len(said.of(step, "activation", "blocks.0.fc1")) for step in range(2)]


def recompute_reentrant(run: Path) -> Any:
    return recompute(run, True)


def recompute_non_reentrant(run: Path) -> Any:
    return recompute(run, False)


def count_recomputes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(root_hooks, "in_backward", lambda: False)
    patch.setattr(module_tap, "in_backward", lambda: False)
    patch.setattr(Chunk, "in_forward", property(lambda self: True, lambda self, value: None), raising=False)


def retried_forward(run: Path) -> Any:
    model = TinyModel()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    handle = model.head.register_forward_hook(lambda module, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0)
    handle.remove()
    loss_of(model, 0).backward()
    optimizer.step()
    monitor.detach()
    return len(Said(run).of(0, "activation", "blocks.0.fc1"))


def keep_failed_forwards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recording, "rewind", lambda self, num_rows, call_id: None)


def evaluation(run: Path) -> Any:
    model = TinyModel()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for step in range(2):
        loss_of(model, step).backward()
        model.eval()
        loss_of(model, 7)
        with torch.no_grad():
            loss_of(model, 8)
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    monitor.detach()
    return [end.num_micro_steps for end in Said(run).ends]


def measure_evaluation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RootHooks, "_is_training", lambda self: True)


def backward_in_reverse(run: Path) -> Any:
    model = TinyModel()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for loss in [loss_of(model, micro_step) for micro_step in range(3)][::-1]:
        loss.backward()
    optimizer.step()
    monitor.detach()
    return [int(row["micro_step"]) for row in Said(run).of(0, "dgrad", "blocks.0.fc1")]


def match_backward_to_the_last_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        GradientTap, "micro_step", property(lambda self: self.chunk.micro_step, lambda self, value: None), raising=True
    )


def clip(run: Path, clipping: Callable[[nn.Module], Any]) -> Any:
    model = TinyModel()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    (1000 * loss_of(model, 0)).backward()
    truth = {name: float(param.grad.norm()) for name, param in model.named_parameters() if param.grad is not None}
    clipping(model)
    optimizer.step()
    monitor.detach()
    said = Said(run)
    return all(norm(said.of(0, "wgrad", name)[0]) == pytest.approx(value, rel=1e-4) for name, value in truth.items())


def clip_by_norm(run: Path) -> Any:
    return clip(run, lambda model: clip_grad_norm_(model.parameters(), 1.0))


def clip_with_norm(run: Path) -> Any:
    return clip(run, lambda model: clip_grads_with_norm_(list(model.parameters()), 1.0, torch.tensor(50.0)))


def clip_by_value(run: Path) -> Any:
    return clip(run, lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3))


def see_gradients_at_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClipWatch, "install", lambda self: None)


def loss_scale(run: Path) -> Any:
    model = TinyModel()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen: list[float] = []

    def see(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: seen.append(float(gradient.norm())))

    model.head.register_forward_hook(see)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    monitor.detach()
    return norm(Said(run).of(0, "dgrad", "head")[0]) == pytest.approx(seen[0] / 1024.0, rel=1e-5)


def keep_the_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossScale, "take", lambda self: (None, False))


def two_optimizers(run: Path) -> Any:
    model = TinyModel()
    first, second = torch.optim.SGD(model.blocks.parameters(), 0.1), torch.optim.SGD(model.head.parameters(), 0.1)
    monitor = watched(model, first, second)
    for step in range(3):
        loss_of(model, 2 * step).backward()
        first.step()
        first.zero_grad()
        loss_of(model, 2 * step + 1).backward()
        second.step()
        second.zero_grad()
    monitor.detach()
    return len(Said(run).ends)


def end_steps_at_any_optimizer(patch: pytest.MonkeyPatch) -> None:
    original = Boundary.stepped

    def stepped(self: Boundary, watched: Any, optimizer: Any) -> None:
        original(self, watched, optimizer)
        self._is_over = True

    patch.setattr(Boundary, "stepped", stepped)


def skipped_by_hand(run: Path) -> Any:
    model = TinyModel()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    for step in range(4):
        loss_of(model, step).backward()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    monitor.detach()
    return [(end.num_micro_steps, end.is_skipped) for end in Said(run).ends]


def end_steps_at_optimizers_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Boundary, "zeroed", lambda self, one: None)


class Rewriting(nn.Module):
    """Changes a tensor in place between the module that made it and the one that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x.mul_(3.0)
        return self.second(x)


def changed_in_place(run: Path) -> Any:
    model = Rewriting()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    model(tokens(0).float()).sum().backward()
    optimizer.step()
    monitor.detach()
    return len(Said(run).of(0, "activation_in", "second"))


def know_tensors_by_address(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeenTensors, "known", lambda self, tensor: (self.by_id.get(id(tensor)) or (None, 0, None))[2])


class Answering(nn.Module):
    """Gives its output in a dict within a tuple, beside a None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return None, {"logits": self.inner(x) * 2}


def nested_output(run: Path) -> Any:
    model = Answering()
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    model(tokens(0).float())[1]["logits"].sum().backward()
    optimizer.step()
    monitor.detach()
    return Said(run).names(0, "activation")


def look_at_tensors_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nesting, "MAX_NESTING", 0)


def persistent_leaf(run: Path) -> Any:
    """A pipeline stage's receive buffer: one leaf that every step goes through."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    leaf = torch.ones(3, 5, requires_grad=True)
    for _ in range(6):
        model(leaf).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    left = len(leaf._backward_hooks or {})
    monitor.detach()
    return left <= 1


def leave_hooks_on_leaves(patch: pytest.MonkeyPatch) -> None:
    def hook_gradient(self: Chunk, tensor: Any, entry: Any, *more: Any) -> None:
        tensor.register_hook(GradientTap(self, entry, self.micro_step))

    patch.setattr(Chunk, "hook_gradient", hook_gradient)


TRAPS: list[tuple[str, Scenario, Any, Guard]] = [
    ("1", recompute_reentrant, [1, 1], count_recomputes),
    ("1", recompute_non_reentrant, [1, 1], count_recomputes),
    ("9", loss_scale, True, keep_the_scale),
    ("12", nested_output, ["inner", ":1.logits"], look_at_tensors_only),
    ("13", retried_forward, 1, keep_failed_forwards),
    ("13", evaluation, [1, 1], measure_evaluation),
    ("14", backward_in_reverse, [2, 1, 0], match_backward_to_the_last_forward),
    ("18", clip_by_norm, True, see_gradients_at_the_step),
    ("18", clip_with_norm, True, see_gradients_at_the_step),
    ("18", clip_by_value, True, see_gradients_at_the_step),
    ("20", two_optimizers, 3, end_steps_at_any_optimizer),
    ("23", changed_in_place, 1, know_tensors_by_address),
    ("26", skipped_by_hand, [(1, False), (1, True), (1, False), (1, False)], end_steps_at_optimizers_only),
    ("27", persistent_leaf, True, leave_hooks_on_leaves),
]
IDS = [f"{number}-{scenario.__name__}" for number, scenario, _, _ in TRAPS]


@pytest.mark.parametrize(("number", "scenario", "expected", "guard"), TRAPS, ids=IDS)
def test_guard_holds(number: str, scenario: Scenario, expected: Any, guard: Guard, run: Path) -> None:
    assert scenario(run) == expected


@pytest.mark.parametrize(("number", "scenario", "expected", "guard"), TRAPS, ids=IDS)
def test_trap_bites_without_its_guard(
    number: str, scenario: Scenario, expected: Any, guard: Guard, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard(monkeypatch)

    assert scenario(run) != expected


def test_gradients_that_a_replayed_graph_writes_are_read_in_every_step(run: Path) -> None:
    model = TinyModel()
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    optimizer = sgd(model)
    monitor = watched(model, optimizer)
    expected = []
    for step in range(4):
        # A CUDA graph calls nobody, and writes into the same gradients without a change of their versions.
        gradients = torch.autograd.grad(loss_of(twin, step), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.data.copy_(gradient)
        expected.append(float(model.head.weight.grad.norm()))
        optimizer.step()
    monitor.detach()

    said = Said(run)
    assert [norm(row) for step in range(4) for row in said.of(step, "wgrad", "head.weight")] == pytest.approx(expected)
