"""Unreduced gradients, updates, alignment and spectra on layouts of two ranks: what merges is one process's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from sentinel.ingest.merge import ClosedStep
from sentinel.record import ROW_DTYPE, Flag

from ..support.closed_steps import closed_steps, statistics
from ..support.spools import SaidSoFar
from .builds import CPU, LAYOUTS, REFERENCES, mine
from .builds import one as one_process
from .layout import Build, Trainer, Training, differences, steps_of, train_in_turn, train_ranks
from .net import LayoutBlock, Net, optimizer_of, shifted_loss, tokens_of

KINDS = ["param", "wgrad", "wgrad_unreduced", "update", "update_ratio", "grad_momentum_alignment", "weight_spectrum"]
CONFIG: dict[str, Any] = {"kinds": KINDS, "black_box": False}
NUM_MICRO_STEPS = 2


def micro_batches(step: int, rank: int, size: int) -> list[torch.Tensor]:
    return list(mine(tokens_of(step), rank, size).chunk(NUM_MICRO_STEPS))


def accumulating(model: nn.Module, optimizer: Any, no_sync: Any) -> Trainer:
    """Two micro-batches a step, of which only the second is reduced."""

    def train_step(step: int) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for at, batch in enumerate(micro_batches(step, dist.get_rank(), dist.get_world_size())):
            with no_sync(model) if at + 1 < NUM_MICRO_STEPS else contextlib.nullcontext():
                loss = shifted_loss(model(batch), batch) / NUM_MICRO_STEPS
                loss.backward()
        optimizer.step()
        return loss.detach(), torch.zeros(())

    return Trainer([model], optimizer, train_step)


def build_ddp() -> Trainer:
    model = nn.parallel.DistributedDataParallel(Net())
    return accumulating(model, optimizer_of(model.parameters()), lambda model: model.no_sync())


def build_fsdp1() -> Trainer:
    model = FSDP1(Net(), auto_wrap_policy=ModuleWrapPolicy({LayoutBlock}), use_orig_params=True, device_id=CPU)
    return accumulating(model, optimizer_of(model.parameters()), lambda model: model.no_sync())


@contextlib.contextmanager
def unsynced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def build_fsdp2(reshard: bool = True) -> Trainer:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Net()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return accumulating(model, optimizer_of(model.parameters()), unsynced)


def build_one() -> Trainer:
    """One process that sees what both ranks see, one backward for each rank and micro-batch."""
    model = Net()
    optimizer = optimizer_of(model.parameters())

    def train_step(step: int) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for rank in range(2):
            for batch in micro_batches(step, rank, 2):
                loss = shifted_loss(model(batch), batch) / NUM_MICRO_STEPS
                loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= 2  # As the ranks average.
        optimizer.step()
        return loss.detach(), torch.zeros(())

    return Trainer([model], optimizer, train_step)


@functools.cache
def alone() -> list[ClosedStep]:
    return steps_of(build_one, config=CONFIG)


BUILDS = {"ddp": build_ddp, "fsdp1": build_fsdp1, "fsdp2": build_fsdp2, "fsdp2_kept": partial(build_fsdp2, False)}
SHARDED = ("fsdp1", "fsdp2", "fsdp2_kept")


def only_plain(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Without what is named behind a colon: cosines."""
    return {key: one for key, one in found.items() if ":" not in key.partition("/")[0]}


@pytest.mark.parametrize(
    "name",
    # Kept whole after the forward, FSDP2 reduces as it does where it is cut again; FSDP reduces as FSDP2.
    [pytest.param(name, marks=pytest.mark.long) if name != "ddp" else name for name in BUILDS],
)
def test_two_ranks_with_two_micro_batches_merge_to_one_process(name: str, tmp_path: Path) -> None:
    expected = alone()

    bare, watched = train_in_turn([Training(tmp_path / "bare"), Training(tmp_path / "watched", CONFIG)], BUILDS[name], 2)
    views = closed_steps(tmp_path / "watched" / "run")

    assert [r.losses for r in watched] == [r.losses for r in bare]
    assert [r.weights for r in watched] == [r.weights for r in bare]
    assert [r.num_collectives for r in watched] == [r.num_collectives for r in bare]
    for view, whole in zip(views, expected, strict=True):
        for kind in ("wgrad_unreduced", "wgrad", "update"):
            ours, truth = statistics(view, kind), statistics(whole, kind)
            assert len(truth) > 10
            wrong = differences(ours, truth, rel=2e-3 if kind == "update" else 2e-4)
            assert not wrong, "\n".join([f"{kind} of step {view.step}:", *wrong[:20], f"{len(wrong)} in all"])
        if view.step:
            ours = only_plain(statistics(view, "grad_momentum_alignment"))
            truth = only_plain(statistics(whole, "grad_momentum_alignment"))
            assert ours.keys() == truth.keys()
            for key, one in truth.items():
                assert ours[key]["count"] == one["count"]
                assert ours[key]["mean"] == pytest.approx(one["mean"], abs=2 / one["count"]), key
        kept_apart = {key for key in statistics(view, "weight_spectrum") if "@dp" in key}
        assert bool(kept_apart) is (name in SHARDED and name != "fsdp1")  # Its pieces are no matrices.
        assert_formed(view, whole)
    health = [h for rank in range(2) for h in SaidSoFar(tmp_path / "watched" / "run", rank).health]
    assert {h.code for h in health} == ({"unsupported"} if name == "fsdp1" else set()), health
    assert all("no matrix" in h.message for h in health)


def assert_formed(view: ClosedStep, whole: ClosedStep) -> None:
    """Ratios and cosines are those of whole tensors, by name, and of the very numbers of this step."""
    ours, truth = statistics(view, "update_ratio"), statistics(whole, "update_ratio")
    assert ours.keys() == truth.keys() and not any("@" in key for key in ours)
    update, param = statistics(view, "update"), statistics(view, "param")
    ratios = [key.partition("/")[0] for key in ours if ":" not in key]
    assert len(ratios) > 5
    for name in ratios:
        found = ours[f"{name}/update_ratio"]
        assert found["count"] == 1
        assert found["mean"] == pytest.approx(update[f"{name}/update"]["norm"] / param[f"{name}/param"]["norm"], rel=1e-6)
        assert found["mean"] == pytest.approx(truth[f"{name}/update_ratio"]["mean"], rel=5e-3)
    ours, truth = (statistics(one, "grad_momentum_alignment") for one in (view, whole))
    assert ours.keys() == truth.keys() and not any("@" in key for key in ours)
    for key, one in truth.items():
        if ":cosine" in key:
            assert ours[key]["mean"] == pytest.approx(one["mean"], abs=1e-3), key


BOTH = pytest.param("tp_x_fsdp2", marks=pytest.mark.long)
"""Of which each part is there alone too."""


@pytest.mark.parametrize("name", ["tp", BOTH, "zero_redundancy"])
def test_ratios_of_shards_are_those_of_the_whole_on_layouts(name: str) -> None:
    for view, whole in zip(steps_of_layout(name), one_of_layouts(name), strict=True):
        assert_formed(view, whole)


def test_a_norm_that_no_shard_knows_is_flagged_and_never_merged(tmp_path: Path) -> None:
    train_ranks(tmp_path, build_fsdp2, 2, config=CONFIG, num_steps=2)

    for rank in range(2):
        spoken = SaidSoFar(tmp_path / "run", rank)
        rows = spoken.of(1, "weight_spectrum")
        assert rows and all(row["flags"] & Flag.PER_RANK for row in rows.values())
        for kind in ("update", "update_ratio"):
            assert not any(row["flags"] & Flag.PER_RANK for row in spoken.of(1, kind).values())


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.long), "fsdp2", "tp", BOTH, "zero_redundancy"])
def test_updates_merge_to_those_of_one_process_on_layouts(name: str) -> None:
    """Under DDP it is told of two micro-batches a step above."""
    for view, truth in zip(steps_of_layout(name), one_of_layouts(name), strict=True):
        wrong = differences(statistics(view, "update"), statistics(truth, "update"), rel=2e-3)
        assert not wrong, "\n".join([f"update of step {view.step}:", *wrong[:20], f"{len(wrong)} in all"])


@functools.cache
def steps_of_layout(name: str) -> list[ClosedStep]:
    """The steps of a layout, trained once for all that is asked of them."""
    build, world = LAYOUTS[name]
    return steps_of(build, world, config=CONFIG)


@functools.cache
def one_of(build: Build) -> list[ClosedStep]:
    return steps_of(build, config=CONFIG)


def one_of_layouts(name: str) -> list[ClosedStep]:
    """The steps of the one process that a layout is compared with."""
    return one_of(REFERENCES.get(name, one_process))


def test_unreduced_gradients_of_tensor_parallel_shards_merge() -> None:
    for view, truth in zip(steps_of_layout("tp"), one_of_layouts("tp"), strict=True):
        cut = {key for key in statistics(view, "wgrad_unreduced") if "@" not in key and ("attn" in key or "mlp" in key)}
        ours = {key: one for key, one in statistics(view, "wgrad_unreduced").items() if key in cut}
        whole = {key: one for key, one in statistics(truth, "wgrad_unreduced").items() if key in cut}
        assert len(cut) > 4
        assert not differences(ours, whole)


@pytest.mark.parametrize(
    "name", ["1f1b", *(pytest.param(name, marks=pytest.mark.long) for name in ("zero_bubble", "looped_bfs")), "dualpipev"]
)
def test_pipelines_name_the_micro_batch(name: str, tmp_path: Path) -> None:
    """Each micro-batch's own gradient, under its own number, whatever order the schedule runs backwards in."""
    from .builds import SCHEDULES

    train_ranks(tmp_path, SCHEDULES[name], 2, config={**CONFIG, "per_micro_step": True}, num_steps=2)

    model, truth = Net(), []
    for batch in tokens_of(0).chunk(4):
        model.zero_grad()
        shifted_loss(model(batch), batch).backward()
        truth.append({n: p.grad.double().norm().item() for n, p in model.named_parameters() if p.grad is not None})
    seen: set[str] = set()
    for rank in range(2):
        spoken = SaidSoFar(tmp_path / "run", rank)
        assert spoken.descriptor is not None
        rows = np.frombuffer(b"".join(part.tobytes() for part in spoken.rows[0]), ROW_DTYPE)
        for info in spoken.descriptor.tensors:
            if info.kind != "wgrad_unreduced":
                continue
            found = {
                int(row["micro_step"]): float(np.sqrt(row["m2"] + row["count"] * row["mean"] ** 2))
                for row in rows[rows["tensor"] == info.id]
            }
            if info.name in truth[0]:
                seen.add(info.name)
                assert found == pytest.approx({m: one[info.name] for m, one in enumerate(truth)}, rel=1e-3), info.name
            assert len(rows[rows["tensor"] == info.id]) == 4, info.name
    assert len(seen) > 8
