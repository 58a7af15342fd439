"""What is said of a hook that failed: module, probe, shapes, what is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel
from sentinel.collect.hooks.failures import describe_failure, shapes_of

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planned")


PLANNED = f"{__file__}:{fail.__code__.co_firstlineno + 1}"


def test_a_probe_that_fails_on_a_tensor_names_module_probe_shapes_and_loss(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentinel.collect.probes import saturation

    monkeypatch.setattr(saturation, "num_flat", fail)
    model = TinyModel()
    monitor = sentinel.attach(model, config={"probes": {"saturation": {"targets": "blocks.0.fc1"}}})
    loss_of(model, 0).backward()
    monitor.detach()

    (reported,) = [one for one in Said(run).health if one.code == "hook_failed"]
    shape = list(model.blocks[0].fc1(torch.zeros(1, 8)).shape[-1:])
    assert reported.site == "blocks.0.fc1:saturation"
    assert reported.message.startswith("probe saturation, at activation of blocks.0.fc1, given [")
    assert f"{shape[0]}] float32: RuntimeError: planned ({PLANNED}); " in reported.message
    assert (
        "rows of saturation at activation of blocks.0.fc1 are missing from this step; training goes on" in reported.message
    )


def test_a_probe_that_fails_at_the_end_of_a_step_says_that_its_rows_are_missing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentinel.collect.probes.step_sums import StepSums

    monkeypatch.setattr(StepSums, "take", fail)
    model = TinyModel()
    monitor = sentinel.attach(model, config={"kinds": ["channel"]})
    loss_of(model, 0).backward()
    monitor.detach()

    (reported,) = [one for one in Said(run).health if one.code == "hook_failed" and one.site == "channel"]
    assert reported.message == (
        f"probe channel: RuntimeError: planned ({PLANNED}); rows of channel are missing from this step; training goes on"
    )


def test_a_tap_that_fails_says_which_rows_are_missing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel()
    monitor = sentinel.attach(model, config={"kinds": ["activation"]})
    monkeypatch.setattr(monitor.recorder.sites, "observe", fail)
    loss_of(model, 0).backward()
    monkeypatch.undo()
    monitor.detach()

    reported = {one.site: one.message for one in Said(run).health if one.code == "hook_failed"}
    lost = "rows of its outputs, and of their gradients, are missing"
    assert f"RuntimeError: planned ({PLANNED}); {lost}" in reported["blocks.0.fc1"]
    assert "given [" in reported["blocks.0.fc1"] and "float32" in reported["blocks.0.fc1"]


def test_shapes_of_nested_and_sparse_tensors_are_told_and_what_cannot_be_told_is_left_out() -> None:
    nested = ({"a": torch.zeros(2, 3), "b": [torch.zeros(4, dtype=torch.bfloat16)]}, None, 7)
    many = [torch.zeros(1)] * 6

    assert shapes_of(nested) == "[2, 3] float32, [4] bfloat16"
    assert shapes_of(torch.eye(3).to_sparse()) == "[3, 3] float32 sparse_coo"
    assert shapes_of(many).endswith("and 2 more")
    assert shapes_of(object()) == "" and shapes_of(None) == ""


def test_what_is_no_probe_says_what_is_lost_by_its_site() -> None:
    reported = describe_failure("log(loss=...)", ValueError("no number"))

    assert reported == "log(loss=...): ValueError: no number; this value was not logged; training goes on"
    assert describe_failure("", KeyError("x")).startswith("the model itself: KeyError: 'x'; ")
