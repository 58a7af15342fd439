"""Where this rank stands: its coordinates, the number and depth of each of its chunks, and what follows from that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.parallel.gradient_mean import gradient_divisor
from sentinel.collect.parallel.topology import Topology
from sentinel.collect.rows.tensor_table import TensorTable
from sentinel.place import Place, depth

log = logging.getLogger("sentinel")


class RankPlace:
    """Keeps place and depths up to date: pipelines and meshes may be made after attach."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        topology: Topology,
        table: TensorTable,
        report: Callable[[str, str], None],
        *,
        given_divisor: float | None = None,
    ) -> None:
        """table: is sent again when the place changes. given_divisor: as `MonitorConfig.gradient_divisor`."""
        self.place = Place()
        self._topology = topology
        self._models = models
        self._table = table
        self._report = report
        self._given_divisor = given_divisor
        self._gradient_divisor = 1.0

    @property
    def rank(self) -> int:
        """The global rank, 0-based."""
        return self.place.rank

    def gradient_divisor(self) -> float:
        """Return the divisor of the sum of all ranks' gradients (`gradient_mean.py`)."""
        return self._gradient_divisor if self._given_divisor is None else self._given_divisor

    def locate(self) -> None:
        """Read the place anew from the stages, schedules and meshes that exist by now. Takes about 0.1 s."""
        self._topology.scan()
        place = self._topology.place(self._models)
        if place != self.place:
            self.place = place
            self._table.is_changed = True
        self._gradient_divisor = gradient_divisor(self._models, self._topology, place)

    def set_depths(self, chunks: Sequence[Chunk]) -> bool:
        """Give every chunk its number on this rank and its depth in its model; True when a number changed."""
        is_changed = False
        names = self._topology.model_names(self._models, self.place) or ("",) * len(chunks)
        for position, (chunk, model) in enumerate(zip(chunks, self._models, strict=True)):
            vpp_stage = self._topology.vpp_stage(model, position)
            is_changed |= vpp_stage != chunk.vpp_stage
            chunk.vpp_stage, chunk.model = vpp_stage, names[position]
            of_model = names[:position].count(chunk.model) if chunk.model else vpp_stage
            chunk.depth = depth(self.place.schedule, self.place.pp_rank, of_model, self.place.pp_size)
            said = self._topology.stage_index(model)
            if said is not None and said != chunk.depth:
                self._report(
                    "unknown_schedule",
                    f"the pipeline calls chunk {vpp_stage} stage {said}, expected {chunk.depth} for schedule "
                    f"{self.place.schedule!r}; using {said}",
                )
                chunk.depth = said
        return is_changed

    def log_reading(self, chunks: Sequence[Chunk]) -> None:
        """Log how several modules without names are read: as chunks of a pipeline, or as models.

        Pipelines are known by now.
        """
        names = [chunk.model for chunk in chunks]
        if len(names) < 2 or not self._topology.is_guessing or self.place.rank != 0:
            return
        if not any(names):
            log.info("sentinel: the %d modules given to attach are read as chunks of one pipeline", len(names))
            return
        log.warning(
            "sentinel: the %d modules given to attach are chunks of no pipeline that torch or Megatron knows: they are "
            "read as models of their own, %s. attach({'name': module, ...}) gives them names of yours; for a pipeline of "
            "your own: attach(..., place=sentinel.place.Place(vpp_size=%d))",
            len(names), " and ".join(names) if len(names) == 2 else ", ".join(names), len(names),
        )  # fmt: skip

    @property
    def logs_loss(self) -> bool:
        """Whether trainers would log the loss on this rank: on rank 0, or on the last one where a pipeline ends there."""
        return self.place.rank == (0 if self.place.pp_size == 1 else self.place.world_size - 1)

    def vpp_stage(self, model: nn.Module, position: int) -> int:
        """Return the number of a chunk on this rank; position: its place among the modules that were given to attach."""
        return self._topology.vpp_stage(model, position)

    def note_stage(self, stage: Any) -> None:
        """Note the chunk that a pipeline stage runs, and its index."""
        self._topology.note_stage(stage)
