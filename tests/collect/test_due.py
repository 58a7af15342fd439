"""Steps that are not due cost next to nothing, and change no name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel
from sentinel.collect.hooks import chunk, root_hooks
from sentinel.collect.hooks.gradient_taps import GradientTap
from sentinel.collect.hooks.module_tap import ModuleTap
from sentinel.place import Place

from ..support.nets import TinyModel, loss_of
from ..support.spools import Said

KINDS = ["activation_in", "activation", "dgrad_in", "dgrad", "wgrad", "param"]


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: list[str]) -> None:
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


def calls_of_steps(
    monitor: Any, model: TinyModel, optimizer: torch.optim.Optimizer, steps: range, calls: list[str]
) -> list[int]:
    """Return how often each step came to the counted functions."""
    found = []
    for step in steps:
        before = len(calls)
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(len(calls) - before)
        assert monitor.session.handover.flush(60.0)
    return found


def test_defect_11_steps_not_due_do_not_pay(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for owner, name in (
        (ModuleTap, "take_inputs"), (ModuleTap, "take_outputs"), (GradientTap, "__init__"),
        (torch.Tensor, "register_hook"), (chunk, "hang"), (root_hooks, "hang"),
    ):  # fmt: skip
        counting(monkeypatch, owner, name, calls)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": KINDS, "black_box": False, "step_interval": 4})

    found = calls_of_steps(monitor, model, optimizer, range(9), calls)
    monitor.detach()

    due, others = found[4], [found[step] for step in (1, 2, 3, 5, 6, 7)]
    assert due > 40
    # One bare hook on the output says that a backward runs; the root's own hooks come by.
    assert max(others) <= 3
    said = Said(run)
    assert [step for step in range(9) if said.of(step, "activation")] == [0, 4, 8]
    assert [step for step in range(9) if said.of(step, "dgrad")] == [0, 4, 8]


@pytest.mark.parametrize("start_step", [0, 1, 3])
def test_names_and_places_do_not_depend_on_the_cadence(run: Path, start_step: int) -> None:
    """A border's tensor keeps its name in steps that measure the black box alone."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": KINDS, "start_step": start_step, "step_interval": 3})
    calls_of_steps(monitor, model, optimizer, range(8), [])
    monitor.detach()
    said = Said(run)

    def borders(step: int) -> set[tuple[str, str, int]]:
        return {(t.kind, t.name, int(r["site_pos"])) for t, r in said.rows[step] if t.border}

    whole = [step for step in range(8) if said.of(step, "param")]
    assert whole == [*range(start_step, 8, 3)]
    for step in range(start_step, 8):
        assert borders(step) == borders(whole[0])
        assert len(borders(step)) >= 6
    assert len(said.rows[whole[0]]) > len(borders(whole[0])) + 20


def test_staggered_steps_measure_every_site_once_a_round(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": KINDS, "black_box": False, "stagger": 4})
    calls_of_steps(monitor, model, optimizer, range(8), [])
    monitor.detach()
    said = Said(run)
    everything = {(t.kind, t.name) for rows in said.rows.values() for t, _ in rows}

    for first in (0, 4):
        seen = [(t.kind, t.name) for step in range(first, first + 4) for t, _ in said.rows.get(step, [])]
        assert len(seen) == len(set(seen)) and set(seen) == everything
    # A tensor and its gradient take the same turn.
    for rows in said.rows.values():
        assert {t.name for t, _ in rows if t.kind == "wgrad"} == {t.name for t, _ in rows if t.kind == "param"}
        assert {t.name for t, _ in rows if t.kind == "dgrad"} <= {t.name for t, _ in rows if t.kind == "activation"}


@pytest.mark.parametrize(("listed", "expected"), [([0], 0), ([1], 3), ([], 3)])
def test_defect_12_ranks_that_are_not_listed_measure_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, listed: list[int], expected: int
) -> None:
    """Rank 1 of 2: where it is not listed no tensor is read and no module carries a hook of ours."""
    calls: list[str] = []
    for owner, name in ((ModuleTap, "take_inputs"), (ModuleTap, "take_outputs"), (GradientTap, "__init__")):
        counting(monkeypatch, owner, name, calls)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    place = Place(rank=1, world_size=2, dp_rank=1, dp_size=2)
    config = {"kinds": KINDS, "black_box": False, "ranks": listed}
    monitor = sentinel.attach(model, optimizer, config, place=place)
    found = calls_of_steps(monitor, model, optimizer, range(3), calls)
    monitor.detach()
    said = Said(run, rank=1)

    assert len([step for step in said.rows if said.of(step, "wgrad")]) == expected
    assert sorted(end.step for end in said.ends) == [0, 1, 2]
    assert all(found) == bool(expected) and any(found) == bool(expected)


@pytest.mark.parametrize("kinds", [["activation"], ["dgrad"], ["activation_in"], ["dgrad_in"], KINDS])
def test_the_black_box_is_whole_whatever_else_is_measured(run: Path, tmp_path: Path, kinds: list[str]) -> None:
    """From the first step on, tensors that other sites met first too: the output of an embedding is a block's input."""

    def borders(name: str, kinds: list[str]) -> list[set[tuple[str, str, int, str]]]:
        torch.manual_seed(0)
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = sentinel.attach(model, optimizer, {"kinds": kinds, "run": name, "directory": str(tmp_path)})
        calls_of_steps(monitor, model, optimizer, range(3), [])
        monitor.detach()
        said = Said(tmp_path / name)
        return [
            {
                (t.kind.removesuffix("_in"), t.border, t.border_index, f"{r['mean']:.12e} {r['m2']:.12e}")
                for t, r in rows
                if t.border
            }
            for _, rows in sorted(said.rows.items())
        ]

    expected = borders("alone", [])

    assert borders("more", kinds) == expected
    assert len(expected) == 3 and all(len(one) >= 6 for one in expected)
