"""Where this rank stands: read from torch.distributed, its meshes and pipeline stages, or the launcher's environment."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from sentinel.collect.environment import Environment
from sentinel.collect.hooks.structure import unwrap
from sentinel.collect.parallel.several_models import names_by_class
from sentinel.place import Place

AXIS_OF = {
    "dp": "dp", "data": "dp", "ddp": "dp", "data_parallel": "dp", "replicate": "dp", "dp_replicate": "dp", "fsdp": "dp",
    "dp_shard": "dp", "shard": "dp", "tp": "tp", "tensor": "tp", "model": "tp", "tensor_parallel": "tp", "mp": "tp",
    "pp": "pp", "pipe": "pp", "pipeline": "pp", "stage": "pp", "pipeline_parallel": "pp", "cp": "cp", "context": "cp",
    "context_parallel": "cp", "ep": "ep", "expert": "ep", "expert_parallel": "ep", "dp_cp": "dp", "dp_shard_cp": "dp",
    "dp_shard_mod_ep": "dp", "dp_shard_in_ep": "ep", "efsdp": "dp", "edp": "dp", "etp": "tp", "sequence": "cp", "sp": "cp",
}  # fmt: skip
"""Usual names of mesh dimensions. Two dimensions of one axis (dp_replicate, dp_shard) multiply."""


class Topology:
    """Reads the place of this rank at attach, and again at the first forward, when pipelines exist."""

    def __init__(self, environment: Environment, given: Place | None, names: Sequence[str] = ()) -> None:
        """names: of the model that each module belongs to, as the user gave them; empty: none were given."""
        self.environment = environment
        self._given = given
        self._names = tuple(names)
        self.stages: dict[int, Any] = {}
        """id of an unwrapped chunk -> the pipeline stage that runs it."""
        self.wrapped: dict[int, nn.parallel.DistributedDataParallel] = {}
        """id of an unwrapped model -> the DDP around it, also when that was made after attach."""
        self.meshes: list[Any] = []
        self.schedule = ""
        self.num_micro_batches = 1
        """By what the pipeline divides a step's gradients: its micro-batches, or 1 where the loss is divided instead."""

    def scan(self) -> None:
        """Search all objects of the process once for pipeline stages, schedules and device meshes: about 0.05 s a
        million."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.meshes = []
        takers = {
            **dict.fromkeys(_family("torch.distributed.pipelining.stage", "_PipelineStageBase"), self.note_stage),
            **dict.fromkeys(_family("torch.distributed.pipelining.schedules", "_PipelineSchedule"), self._note_schedule),
            **dict.fromkeys(_family("torch.distributed.device_mesh", "DeviceMesh"), self._note_mesh),
            nn.parallel.DistributedDataParallel: self._note_wrapper,
        }
        # Classes are looked up, not asked for their base: that takes ten times as long, and hundreds of thousands live.
        for thing in gc.get_objects():
            take = takers.get(type(thing))
            if take is not None:
                take(thing)

    def _note_wrapper(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        self.wrapped[id(unwrap(wrapper))] = wrapper

    def _note_schedule(self, schedule: Any) -> None:
        name = type(schedule).__name__.removeprefix("Schedule").removesuffix("Schedule").lower()
        is_mean = bool(getattr(schedule, "scale_grads", True))
        self.num_micro_batches = max(1, int(getattr(schedule, "_n_microbatches", 1))) if is_mean else 1
        self.schedule = "zbv" if name.endswith("zbvzerobubble") else name

    def _note_mesh(self, mesh: Any) -> None:
        if mesh.mesh_dim_names:
            self.meshes.append(mesh)

    def note_stage(self, stage: Any) -> None:
        """Remember which chunk a pipeline stage runs."""
        module = getattr(stage, "submod", None)
        if isinstance(module, nn.Module):
            self.stages[id(unwrap(module))] = stage

    def place(self, models: Sequence[nn.Module]) -> Place:
        """Return this rank's place, from what was given, else torch.distributed and its objects, else the launcher."""
        if self._given is not None:
            return self._given
        if not (dist.is_available() and dist.is_initialized()):
            world = max(1, self.environment.world_size or 1)
            return Place(rank=min(self.environment.rank or 0, world - 1), world_size=world)
        rank, world = dist.get_rank(), dist.get_world_size()
        vpp_size = max(Counter(self._names).values(), default=max(1, len(models)))
        megatron = _megatron_axes()
        if megatron:
            schedule = "" if megatron["pp_size"] == 1 else "interleaved1f1b" if vpp_size > 1 else "1f1b"
            return Place(rank=rank, world_size=world, vpp_size=vpp_size, schedule=schedule, **megatron)
        coordinates: dict[str, tuple[int, int]] = {}
        mine = [mesh for mesh in self.meshes if mesh.get_coordinate() is not None]
        # A flattened mesh may be as large as the one that tells the axes apart; one for experts only adds its own axis.
        mine.sort(key=lambda mesh: (mesh.mesh.numel(), len(_axes(mesh))), reverse=True)
        for mesh in mine[:1]:
            coordinates = _axes(mesh)
        for mesh in mine[1:]:
            if "ep" not in coordinates and "ep" in _axes(mesh):
                coordinates["ep"] = _axes(mesh)["ep"]
        stages = [self.stages[id(unwrap(model))] for model in models if id(unwrap(model)) in self.stages]
        if stages:
            coordinates["pp"] = (stages[0].group_rank, stages[0].group_size)
        self._fill_dp(coordinates, models, rank, world)
        fields: dict[str, Any] = {}
        for axis, (at, size) in coordinates.items():
            fields[f"{axis}_rank"], fields[f"{axis}_size"] = int(at), int(size)
        schedule = self.schedule if stages else ""
        if not self._names and self._is_no_pipeline(models, fields.get("pp_size", 1)):
            vpp_size = 1
        return Place(rank=rank, world_size=world, vpp_size=vpp_size, schedule=schedule, **fields)

    def _fill_dp(self, coordinates: dict[str, tuple[int, int]], models: Sequence[nn.Module], rank: int, world: int) -> None:
        if "dp" in coordinates:
            return
        for model in models:
            wrapper = self.wrapped.get(id(unwrap(model)))
            if wrapper is not None and wrapper.process_group is not None:
                group = wrapper.process_group
                coordinates["dp"] = (dist.get_rank(group), dist.get_world_size(group))
                return
        split = 1
        for axis, (_, size) in coordinates.items():
            split *= 1 if axis == "ep" else size  # Expert-parallel ranks are data-parallel ones to all other layers.
        if world > split and world % split == 0:
            # Nothing names the replicas: ranks that differ in no known axis are replicas, in the usual order.
            size = world // split
            coordinates["dp"] = (rank % size, size) if "pp" in coordinates else (rank // split, size)

    def model_names(self, models: Sequence[nn.Module], place: Place) -> tuple[str, ...]:
        """Return the name of the model that each module belongs to; empty where they are one model, or its chunks."""
        if self._names or len(models) < 2:
            return self._names
        return names_by_class(models) if self._is_no_pipeline(models, max(place.pp_size, place.vpp_size)) else ()

    @property
    def is_guessing(self) -> bool:
        """Whether the user has not named the model that each module belongs to."""
        return self._given is None and not self._names

    def _is_no_pipeline(self, models: Sequence[nn.Module], pp_size: int) -> bool:
        """Whether several modules of one rank cannot be chunks of a pipeline: torch and Megatron know of none."""
        has_stages = any(id(unwrap(model)) in self.stages for model in models)
        return len(models) > 1 and pp_size == 1 and not has_stages and not _megatron_axes()

    def vpp_stage(self, model: nn.Module, position: int) -> int:
        """Return which chunk of its rank a model is: by its stage's index where one is known, else its position."""
        stage = self.stages.get(id(unwrap(model)))
        if stage is not None and len(set(self._names)) < 2:
            return int(stage.stage_index) // int(stage.group_size)
        return position

    def stage_index(self, model: nn.Module) -> int | None:
        """Return the depth that the pipeline itself gives this chunk; None without a pipeline."""
        stage = self.stages.get(id(unwrap(model)))
        return None if stage is None else int(stage.stage_index)


def _family(module: str, name: str) -> set[type]:
    """Return a class and all that inherit from it; empty while its module is not imported: then nothing is one."""
    base = getattr(sys.modules.get(module), name, None)
    if base is None:
        return set()
    found, todo = {base}, [base]
    while todo:
        todo += (new := set(todo.pop().__subclasses__()) - found)
        found |= new
    return found


def _megatron_axes() -> dict[str, int]:
    """Return Place's ranks and sizes as Megatron's parallel_state knows them; empty where it is not in use."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    names = {
        "dp": "data_parallel", "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "cp": "context_parallel",
        "ep": "expert_model_parallel",
    }  # fmt: skip
    found: dict[str, int] = {}
    for axis, name in names.items():
        found[f"{axis}_rank"] = int(getattr(state, f"get_{name}_rank")())
        found[f"{axis}_size"] = int(getattr(state, f"get_{name}_world_size")())
    return found


def _axes(mesh: Any) -> dict[str, tuple[int, int]]:
    """Return axis -> (this rank's coordinate, size) of a mesh; dimensions of one axis multiply, in their order."""
    found: dict[str, tuple[int, int]] = {}
    for name, at, size in zip(mesh.mesh_dim_names, mesh.get_coordinate(), mesh.mesh.shape, strict=True):
        axis = AXIS_OF.get(name.lower())
        if axis is not None:
            before, total = found.get(axis, (0, 1))
            found[axis] = (before * size + at, total * size)
    return found
