"""`monitor.gradients()` and `monitor.activations()`: the statistics of now, against torch's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sentinel
from sentinel.collect.monitor import Monitor

from ...support.nets import TinyModel, loss_of


def test_gradients_are_those_of_the_running_step(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ["wgrad"]})
    assert isinstance(monitor, Monitor)
    for step in range(2):
        for micro_step in range(2):
            loss_of(model, 2 * step + micro_step).backward()
        expected = {name: param.grad.double().norm().item() for name, param in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

        found = monitor.gradients()

        assert {name: one["norm"] for name, one in found["reduced"].items()} == pytest.approx(expected, rel=1e-6)
        assert found["unreduced"] == {}
        optimizer.step()
        assert monitor.gradients()["reduced"].keys() == expected.keys()
        optimizer.zero_grad()
    monitor.detach()


def test_activations_merge_the_micro_steps_and_gradients_lose_the_loss_scale(run: Path) -> None:
    model = TinyModel()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ["activation", "dgrad", "wgrad"]})
    seen: list[torch.Tensor] = []
    name, module = next((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    module.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for micro_step in range(3):
        scaler.scale(loss_of(model, micro_step)).backward()
    whole = torch.cat([one.reshape(-1) for one in seen]).double()

    found = monitor.activations()

    assert found["activation"][name]["mean"] == pytest.approx(whole.mean().item(), rel=1e-5, abs=1e-9)
    assert found["activation"][name]["std"] == pytest.approx(whole.std(unbiased=False).item(), rel=1e-5)
    assert found["activation_in"] == {}
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    expected = {n: p.grad.double().norm().item() for n, p in model.named_parameters()}
    assert {n: one["norm"] for n, one in monitor.gradients()["reduced"].items()} == pytest.approx(expected, rel=1e-6)
    monitor.detach()


def test_a_monitor_that_is_switched_off_knows_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DISABLE", "1")
    monitor = sentinel.attach(TinyModel())

    assert monitor.gradients() == {"reduced": {}, "unreduced": {}}
    assert set(monitor.activations()) == {"activation_in", "activation", "dgrad", "dgrad_in"}
