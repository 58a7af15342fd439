"""Optimizers that evaluate again within one step, have two phases, or wrap another: steps are the trainer's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel

from ..support.nets import TinyModel, loss_of
from ..support.spools import Said, norm
from .wrapped_optimizers import SAM, Accumulating, Deriving, Evaluating, HandSAM, Lookahead, Minimizer, Modes

STEPS = 6
Watch = Callable[[Any], None]
"""Attaches to an optimizer, or does nothing."""


class Reported:
    """What a trainer knows of its own steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        """Of every evaluation."""
        self.norms: list[float] = []
        """Of a step each: the gradient of `head.weight` that the update used."""


def evaluate(model: nn.Module, reported: Reported, seed: int, scale: float = 1.0) -> None:
    loss = loss_of(model, seed)
    (loss * scale).backward()
    reported.losses.append(float(loss.detach()))


def of_update(model: TinyModel) -> float:
    grad = model.head.weight.grad
    assert grad is not None
    return float(grad.norm())


def with_closure(make: Callable[[Any], torch.optim.Optimizer], *, keeps_first: bool = False) -> Any:
    def story(model: TinyModel, watch: Watch, reported: Reported) -> None:
        optimizer = make(model.parameters())
        watch(optimizer)
        for step in range(STEPS):
            norms: list[float] = []

            def closure(step: int = step, norms: list[float] = norms) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                reported.losses.append(float(loss.detach()))
                norms.append(of_update(model))
                return loss

            optimizer.step(closure)
            reported.norms.append(norms[0] if keeps_first else norms[-1])

    return story


def sam_in_two_calls(make: Callable[[Any], Any], *, zero_grad: bool = True, clips: bool = False) -> Any:
    def story(model: TinyModel, watch: Watch, reported: Reported) -> None:
        optimizer = make(model.parameters())
        watch(optimizer)
        for step in range(STEPS):
            evaluate(model, reported, step)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.first_step(zero_grad=zero_grad)
            if not zero_grad:
                for p in model.parameters():
                    p.grad = None
            evaluate(model, reported, step)
            reported.norms.append(of_update(model))
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.second_step(zero_grad=zero_grad)
            if not zero_grad:
                model.zero_grad()

    return story


def sam_with_closure(model: TinyModel, watch: Watch, reported: Reported) -> None:
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    watch(optimizer)
    for step in range(STEPS):

        def closure(step: int = step) -> None:
            evaluate(model, reported, step)
            reported.norms.append(of_update(model))

        evaluate(model, reported, step)
        optimizer.step(closure)
        optimizer.zero_grad()


def sam_that_accumulates(model: TinyModel, watch: Watch, reported: Reported) -> None:
    optimizer = SAM(model.parameters(), torch.optim.AdamW, lr=0.01)
    watch(optimizer)
    for step in range(STEPS):
        for micro_step in range(2):
            evaluate(model, reported, 10 * step + micro_step, 0.5)
        optimizer.first_step(zero_grad=True)
        for micro_step in range(2):
            evaluate(model, reported, 10 * step + micro_step, 0.5)
        reported.norms.append(of_update(model))
        optimizer.second_step(zero_grad=True)


def ascent_and_descent(given: str) -> Any:
    def story(model: TinyModel, watch: Watch, reported: Reported) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        minimizer = Minimizer(optimizer, model)
        watch(minimizer if given == "minimizer" else optimizer if given == "optimizer" else None)
        for step in range(STEPS):
            evaluate(model, reported, step)
            minimizer.ascent_step()
            evaluate(model, reported, step)
            reported.norms.append(of_update(model))
            minimizer.descent_step()

    return story


def evaluates_by_itself(model: TinyModel, watch: Watch, reported: Reported) -> None:
    optimizer = Evaluating(model.parameters(), torch.optim.SGD(model.parameters(), 0.1))
    watch(optimizer)
    for step in range(STEPS):

        def loss(step: int = step) -> torch.Tensor:
            found = loss_of(model, step)
            reported.losses.append(float(found.detach()))
            return found

        optimizer.evaluate = loss
        optimizer.step()
        reported.norms.append(of_update(model))


def plain(make: Callable[[Any], Any], *, num_micro_steps: int = 1, modes: bool = False) -> Any:
    def story(model: TinyModel, watch: Watch, reported: Reported) -> None:
        optimizer = make(model.parameters())
        watch(optimizer)
        for step in range(STEPS):
            for micro_step in range(num_micro_steps):
                evaluate(model, reported, 10 * step + micro_step)
            reported.norms.append(of_update(model))
            optimizer.step()
            optimizer.zero_grad()
            if modes:
                optimizer.eval()
                with torch.no_grad():
                    reported.losses.append(float(loss_of(model, 99)))
                optimizer.train()

    return story


def accumulating_wrapper(model: TinyModel, watch: Watch, reported: Reported) -> None:
    optimizer = Accumulating(torch.optim.SGD(model.parameters(), 0.1))
    watch(optimizer)
    for step in range(STEPS):
        for micro_step in range(2):
            evaluate(model, reported, 10 * step + micro_step)
            if micro_step:
                reported.norms.append(of_update(model))
            optimizer.step()


def scaled_closure_free(model: TinyModel, watch: Watch, reported: Reported) -> None:
    """GradScaler around the base of two phases, unscaled and clipped before the update."""
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watch(optimizer)
    for step in range(STEPS):
        for phase in range(2):
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            reported.losses.append(float(loss.detach()))
            scaler.unscale_(optimizer)
            if phase == 0:
                optimizer.first_step(zero_grad=True)
                scaler.update()
        reported.norms.append(of_update(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.second_step(zero_grad=True)
        scaler.update()


def in_backward(model: TinyModel, watch: Watch, reported: Reported) -> None:
    """An optimizer for each parameter, stepped by the backward itself."""
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def hook(p: torch.Tensor) -> None:
        if p is model.head.weight:
            reported.norms.append(of_update(model))
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    watch(list(optimizers.values()))
    for step in range(STEPS):
        evaluate(model, reported, step)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


STORIES: dict[str, tuple[Any, int | None]] = {
    "SGD with a closure": (with_closure(sgd), 1),
    "Adam with a closure": (with_closure(torch.optim.Adam), 1),
    "Rprop with a closure": (with_closure(torch.optim.Rprop), 1),
    "a subclass with a closure": (with_closure(Deriving), 1),
    "LBFGS": (with_closure(lambda params: torch.optim.LBFGS(params, max_iter=4), keeps_first=True), None),
    "LBFGS with line search": (
        with_closure(lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"), keeps_first=True),
        None,
    ),
    "SAM in two calls": (sam_in_two_calls(lambda params: SAM(params, torch.optim.SGD, lr=0.1)), 2),
    "SAM around AdamW": (sam_in_two_calls(lambda params: SAM(params, torch.optim.AdamW, lr=0.01)), 2),
    "SAM cleared by hand": (sam_in_two_calls(lambda params: SAM(params, torch.optim.SGD, lr=0.1), zero_grad=False), 2),
    "SAM with clipping": (sam_in_two_calls(lambda params: SAM(params, torch.optim.SGD, lr=0.1), clips=True), 2),
    "SAM that writes by itself": (sam_in_two_calls(HandSAM), 2),
    "SAM with a closure": (sam_with_closure, 2),
    "SAM that accumulates": (sam_that_accumulates, 4),
    "SAM with GradScaler": (scaled_closure_free, 2),
    "phases around an optimizer": (ascent_and_descent("optimizer"), 2),
    "phases, by their object": (ascent_and_descent("minimizer"), 2),
    "phases, nothing given": (ascent_and_descent("nothing"), 2),
    "evaluations without a closure": (evaluates_by_itself, 2),
    "Lookahead": (plain(lambda params: Lookahead(torch.optim.SGD(params, 0.1))), 1),
    "Lookahead with a closure": (with_closure(lambda params: Lookahead(torch.optim.SGD(params, 0.1))), 1),
    "a wrapper that accumulates": (accumulating_wrapper, 2),
    "train and eval modes": (plain(Modes, modes=True), 1),
    "accumulation": (plain(sgd, num_micro_steps=3), 3),
    "a subclass": (plain(Deriving), 1),
    "in the backward": (in_backward, 1),
}


def played(story: Any, watches: bool, config: Any = None) -> tuple[Reported, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, reported = TinyModel(), Reported()
    monitors = []

    def watch(optimizer: Any) -> None:
        if watches:
            monitors.append(sentinel.attach(model, optimizer, config))

    story(model, watch, reported)
    for monitor in monitors:
        monitor.detach()
    return reported, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", STORIES)
def test_steps_and_gradients_are_the_trainers_own_and_training_is_bit_identical(run: Path, name: str) -> None:
    story, num_evaluations = STORIES[name]
    expected, weights = played(story, watches=False)

    reported, watched_weights = played(story, watches=True, config={"kinds": ["param", "wgrad", "update", "activation"]})

    said = Said(run)
    assert [end.step for end in said.ends] == list(range(STEPS))
    assert not any(end.is_skipped or end.is_partial for end in said.ends)
    if num_evaluations is not None:
        assert [end.num_micro_steps for end in said.ends] == [num_evaluations] * STEPS
    assert reported.losses == expected.losses
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))
    for step in range(STEPS):
        (row,) = said.of(step, "wgrad", "head.weight")
        assert norm(row) == pytest.approx(reported.norms[step], rel=1e-5), f"step {step}"
    assert not [one for one in said.health if one.code == "hook_failed"]


@pytest.mark.parametrize("name", [name for name in STORIES if name != "SAM that writes by itself"])
def test_what_the_optimizer_added_is_measured_in_every_step(run: Path, name: str) -> None:
    story, _ = STORIES[name]

    played(story, watches=True, config={"kinds": ["param", "update"]})

    said = Said(run)
    for step in range(0 if name != "phases, nothing given" else 1, STEPS):
        assert len(said.of(step, "update", "head.weight")) == 1, f"step {step}"


def test_an_update_that_no_optimizer_announced_is_told_once_and_measured_from_then_on(run: Path) -> None:
    story, _ = STORIES["SAM that writes by itself"]

    played(story, watches=True, config={"kinds": ["param", "update"]})

    said = Said(run)
    assert [one.code for one in said.health if one.count == 1] == ["unsupported"]
    assert [len(said.of(step, "update", "head.weight")) for step in range(STEPS)] == [0] + [1] * (STEPS - 1)


def test_an_optimizer_is_copied_and_pickled_as_before(run: Path) -> None:
    model = TinyModel()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    keys = set(optimizer.__dict__)
    monitor = sentinel.attach(model, optimizer)
    evaluate(model, Reported(), 0)
    optimizer.first_step(zero_grad=True)
    evaluate(model, Reported(), 0)
    optimizer.second_step(zero_grad=True)
    twin = copy.deepcopy(Minimizer(optimizer.base_optimizer, model))
    monitor.detach()

    assert set(optimizer.__dict__) == keys
    assert callable(twin.ascent_step)


def test_a_closure_that_raises_leaves_the_next_steps_as_they_are(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            if step == 1:
                raise MemoryError
            loss = loss_of(model, step)
            loss.backward()
            return loss

        try:
            optimizer.step(closure)
        except MemoryError:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        monitor.log(at=step)
    for step in (4, 5):  # Gradients cleared outside of a step are a skipped step, whatever was raised before.
        loss_of(model, step).backward()
        optimizer.zero_grad()
        monitor.log(at=step)
    monitor.detach()

    said = Said(run)

    assert [end.scalars["at"] for end in said.ends] == [0, 1, 2, 3, 4, 5]
    assert [end.is_skipped for end in said.ends] == [False] * 4 + [True] * 2


def test_two_phases_that_begin_late_are_learned_after_three_steps(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    minimizer = Minimizer(optimizer, model)
    monitor = sentinel.attach(model, optimizer)
    for step in range(16):
        loss_of(model, step).backward()
        if step < 6:
            optimizer.step()
            optimizer.zero_grad()
        else:
            minimizer.ascent_step()
            loss_of(model, step).backward()
            minimizer.descent_step()
        monitor.log(at=step)
    monitor.detach()

    ends = Said(run).ends

    assert sum(end.is_skipped for end in ends) == 2
    assert [end.scalars["at"] for end in ends[-8:]] == list(range(8, 16))
    assert [end.num_micro_steps for end in ends[-8:]] == [2] * 8


def test_going_back_to_kept_weights_without_a_step_is_a_skipped_step(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = copy.deepcopy(model.state_dict())
    monitor = sentinel.attach(model, optimizer)
    back = (5, 7, 10, 12, 13, 14, 15)
    for step in range(18):
        loss_of(model, step).backward()
        if step in back:
            model.load_state_dict(kept)
        else:
            optimizer.step()
        optimizer.zero_grad()
    monitor.detach()

    assert [end.is_skipped for end in Said(run).ends] == [step in back for step in range(18)]
