"""Pipelines of torch.distributed in one process: one stage, or two whose ranks are one and the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sentinel
from sentinel.collect.parallel import pipelining

from ...support.nets import TinyModel, tokens
from ...support.spools import Said

if TYPE_CHECKING:
    from torch.distributed.pipelining import ScheduleGPipe


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def pipeline(model: nn.Module, num_micro_steps: int = 4) -> ScheduleGPipe:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=dist.group.WORLD)
    return ScheduleGPipe(stage, num_micro_steps, loss_fn=loss_fn)


def run_pipeline(run: Path, num_steps: int = 2) -> Said:
    model = TinyModel()
    schedule = pipeline(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"per_micro_step": True})
    for step in range(num_steps):
        batch = tokens(step)
        schedule.step(batch, target=batch)
        optimizer.step()
        optimizer.zero_grad()
    monitor.detach()
    return Said(run)


def test_shape_inference_not_counted(run: Path, group: None) -> None:
    said = run_pipeline(run)

    assert [end.num_micro_steps for end in said.ends] == [4, 4]
    for step in range(2):
        for kind in ("activation", "dgrad"):
            assert [int(row["micro_step"]) for row in said.of(step, kind, "blocks.0")] == [0, 1, 2, 3]
    assert not said.health
    assert said.descriptor is not None
    assert said.descriptor.place.schedule == "gpipe"


def test_without_the_guard_shape_inference_would_be_counted(run: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.collect.hooks.root_hooks.in_inference", lambda: False)

    said = run_pipeline(run, num_steps=1)

    assert said.ends[0].num_micro_steps == 5


def test_this_torch_has_a_known_inference_method(run: Path, group: None) -> None:
    from torch.distributed.pipelining import stage as stage_module

    names = {name for cls in (stage_module._PipelineStageBase, stage_module.PipelineStage) for name in vars(cls)}

    assert names & set(pipelining.INFERENCE[:3])


def test_scaled_gradients_of_a_pipeline_are_not_called_touched(run: Path, group: None) -> None:
    said = run_pipeline(run, num_steps=1)  # The schedule divides the gradients by the number of micro-steps.

    assert not any(row["flags"] & 2 for row in said.of(0, "wgrad"))


def test_detach_restores_the_stage_classes(run: Path, group: None) -> None:
    from torch.distributed.pipelining import stage as stage_module

    before = dict(vars(stage_module.PipelineStage))
    run_pipeline(run, num_steps=1)

    assert dict(vars(stage_module.PipelineStage)) == before
