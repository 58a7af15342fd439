"""Scalars that nobody logs: learning rates of watched optimizers, and memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.lifecycle.memory import MemoryUse
from sentinel.collect.rows.scalars import Scalars

from ...support.nets import TinyModel, loss_of
from ...support.open_files import open_files
from ...support.spools import Said


def train_logging(
    model: nn.Module, optimizers: list[Any], number: int, log: dict[str, Any] | None = None, monitor: Any = None
) -> None:
    for step in range(number):
        for one in optimizers:
            one.zero_grad()
        loss_of(model, step).backward()
        if log:
            monitor.log(**log)
        for one in optimizers:
            one.step()
            one.param_groups[0]["lr"] = one.param_groups[0]["lr"] / 2  # A schedule: the step was made with the former.


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.5), torch.tensor([1.5], dtype=torch.float64), torch.tensor([[1.5]], dtype=torch.bfloat16),
        torch.tensor([0.0, 1.5])[1], nn.Parameter(torch.tensor(1.5)), torch.tensor(1.5 - 2.5j).conj().imag - 1.0,
        torch.tensor(1.0 - 1.5j).imag.neg(), torch.tensor(1.0 - 1.5j).conj().imag,
    ],
)  # fmt: skip
def test_a_tensor_counts_as_it_is_when_it_is_logged(value: torch.Tensor) -> None:
    scalars = Scalars()

    scalars.note("loss", value)
    with torch.no_grad():
        value += 1.0

    assert float(scalars.take()["loss"]) == 1.5


def test_the_learning_rate_is_that_of_the_step(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    monitor = sentinel.attach(model, optimizer, {"kinds": []})

    train_logging(model, [optimizer], 3)
    monitor.detach()

    assert [end.scalars["lr"] for end in Said(run).ends] == [0.5, 0.25, 0.125]


def test_groups_and_further_optimizers_have_names_of_their_own(run: Path) -> None:
    model = TinyModel()
    decay, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    first = torch.optim.SGD([{"params": decay[:2]}, {"params": decay[2:]}], 0.5)
    second = torch.optim.AdamW(rest, torch.tensor(0.25))
    monitor = sentinel.attach(model, [first, second], {"kinds": []})

    train_logging(model, [first, second], 3)
    monitor.detach()

    rates = [{name: value for name, value in end.scalars.items() if name.startswith("lr")} for end in Said(run).ends]
    # Alike at first, the second group is not told; once it differs it is, for good.
    assert rates == [
        {"lr": 0.5, "lr_1": 0.25},
        {"lr": 0.25, "lr_group1": 0.5, "lr_1": 0.125},
        {"lr": 0.125, "lr_group1": 0.5, "lr_1": 0.0625},
    ]


def test_what_the_trainer_logs_wins(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    monitor = sentinel.attach(model, optimizer, {"kinds": []})

    train_logging(model, [optimizer], 2, {"lr": 7.0, "memory_host_bytes": 1.0, "tokens": 20}, monitor)
    monitor.detach()

    assert [(end.scalars["lr"], end.scalars["memory_host_bytes"]) for end in Said(run).ends] == [(7.0, 1.0)] * 2
    assert all(end.scalars["tokens"] == 20 for end in Said(run).ends)


def test_memory_is_told_without_asking_a_device(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    monitor = sentinel.attach(model, optimizer, {"kinds": []})
    train_logging(model, [optimizer], 2)
    monitor.detach()

    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    for end in Said(run).ends:
        assert end.scalars["memory_host_bytes"] == pytest.approx(resident, rel=0.5)
        assert "memory_allocated_bytes" not in end.scalars  # There is no device.
    assert open_files("statm") == []


class Counters:
    """A device module as torch's accelerators have one."""

    def __init__(self, stats: Any) -> None:
        self.stats, self.asked = stats, 0

    def memory_stats_as_nested_dict(self, device: Any) -> Any:
        self.asked += 1
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def test_device_counters_are_told_until_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes": {"all": {"current": 3, "peak": 5}}, "reserved_bytes": {"all": {"current": 8}}}
    module = Counters(stats)
    monkeypatch.setattr("sentinel.collect.lifecycle.memory._module_of", lambda device: module)
    memory = MemoryUse(torch.device("cuda"), fresh_s=0.0)

    reported = memory()
    module.stats = RuntimeError("device-side assert triggered")
    blind = [memory(), memory()]
    memory.close()

    assert {name: value for name, value in reported.items() if name != "memory_host_bytes"} == {
        "memory_allocated_bytes": 3.0, "memory_peak_bytes": 5.0, "memory_reserved_bytes": 8.0,
    }  # fmt: skip
    assert module.asked == 2  # What failed once is not asked again.
    assert all(one.keys() == {"memory_host_bytes"} for one in blind)


def test_memory_of_short_steps_is_read_once_for_several_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Counters({"allocated_bytes": {"all": {"current": 3, "peak": 5}}, "reserved_bytes": {"all": {"current": 8}}})
    monkeypatch.setattr("sentinel.collect.lifecycle.memory._module_of", lambda device: module)
    memory = MemoryUse(torch.device("cuda"), fresh_s=3600.0)

    reported = [memory() for _ in range(3)]
    memory.close()

    assert module.asked == 1
    assert reported[0] == reported[1] == reported[2]


def test_an_optimizer_that_is_gone_leaves_its_name() -> None:
    scalars = Scalars()
    for rate in (0.5, 0.25):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], rate)
        scalars.note_rates(optimizer)
        assert scalars.take() == {"lr": rate}
        del optimizer
