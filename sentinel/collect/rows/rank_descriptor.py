"""How a rank introduces itself: where it stands, which chunks it holds, and the table that its rows point into."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.parallel.gradient_mean import gradient_divisor
from sentinel.collect.parallel.topology import Topology
from sentinel.collect.rows.tensor_table import TensorTable
from sentinel.collect.schedule.plan import Plan
from sentinel.messages import START, ChunkInfo, Descriptor
from sentinel.monitor_config import ConfigSource, as_told
from sentinel.place import Place, depth
from sentinel.process import own_process
from sentinel.record import ROW_DTYPE
from sentinel.version import VERSION

log = logging.getLogger("sentinel")


class RankDescriptor:
    """Keeps place and depths up to date: pipelines and meshes may be made after attach."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        source: ConfigSource,
        topology: Topology,
        table: TensorTable,
        tell: Callable[[str, str], None],
        start: str,
    ) -> None:
        """start: by which the ranks of one start know one another, as in `Attempt`."""
        self._start = start
        self.place = Place()
        self.resumed_step = -1
        """The step that a state of ours said comes next; -1: none was loaded."""
        self.topology = topology
        self._models = models
        self._source = source
        self._table = table
        self._tell = tell
        self._gradient_divisor = 1.0

    def gradient_divisor(self) -> float:
        """Return by what the sum of all ranks' gradients is divided before the optimizer uses it."""
        given = self._source.config.gradient_divisor
        return self._gradient_divisor if given is None else given

    def resume(self, step: int) -> int:
        """Say with the next descriptor that a state of ours was loaded; returns its step."""
        self.resumed_step, self._table.is_changed = step, True
        return step

    def locate(self) -> None:
        """Look around once more: stages, schedules and meshes that exist by now. About 0.1 s."""
        self.topology.scan()
        place = self.topology.place(self._models)
        if place != self.place:
            self.place = place
            self._table.is_changed = True
        self._gradient_divisor = gradient_divisor(self._models, self.topology, place)

    def set_depths(self, chunks: Sequence[Chunk]) -> bool:
        """Give every chunk its number on this rank and its depth in its model; True when a number changed."""
        is_changed = False
        names = self.topology.model_names(self._models, self.place) or ("",) * len(chunks)
        for position, (chunk, model) in enumerate(zip(chunks, self._models, strict=True)):
            vpp_stage = self.topology.vpp_stage(model, position)
            is_changed |= vpp_stage != chunk.vpp_stage
            chunk.vpp_stage, chunk.model = vpp_stage, names[position]
            of_model = names[:position].count(chunk.model) if chunk.model else vpp_stage
            chunk.depth = depth(self.place.schedule, self.place.pp_rank, of_model, self.place.pp_size)
            said = self.topology.stage_index(model)
            if said is not None and said != chunk.depth:
                self._tell(
                    "unknown_schedule",
                    f"the pipeline calls chunk {vpp_stage} stage {said}, expected {chunk.depth} for schedule "
                    f"{self.place.schedule!r}; using {said}",
                )
                chunk.depth = said
        return is_changed

    def tell_reading(self, chunks: Sequence[Chunk]) -> None:
        """Say in the log how several modules that were given no names are read; pipelines are known by now, if ever."""
        names = [chunk.model for chunk in chunks]
        if len(names) < 2 or not self.topology.is_guessing or self.place.rank != 0:
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
    def is_speaker(self) -> bool:
        """Whether trainers would log the loss on this rank: on rank 0, or on the last one where a pipeline ends there."""
        return self.place.rank == (0 if self.place.pp_size == 1 else self.place.world_size - 1)

    def note_stage(self, stage: Any) -> None:
        """A pipeline stage was seen: it knows where it stands."""
        self.topology.note_stage(stage)

    def descriptor(self, chunks: Sequence[Chunk], plan: Plan, *, kernel: str, boundary: str, first_step: int) -> Descriptor:
        """Return what travels before any row that needs it."""
        config = self._source.config
        fields: Mapping[str, Any] = ROW_DTYPE.fields or {}
        environment = {
            **own_process().as_told(), "torch": str(torch.__version__), "python": sys.version.split()[0],
            "kernel": kernel, "boundary": boundary, **({START: self._start} if self._start else {}),
        }  # fmt: skip
        return Descriptor(
            version=VERSION,
            place=self.place,
            chunks=tuple(_chunk_info(chunk) for chunk in chunks),
            tensors=self._table.infos(),
            row_fields=tuple((name, fields[name][0].str, int(fields[name][1])) for name in ROW_DTYPE.names or ()),
            row_bytes=ROW_DTYPE.itemsize,
            environment=environment,
            first_step=first_step,
            resumed_step=self.resumed_step,
            layer_offset=config.layer_offset,
            # The first that fits counts, and a copy's own name is exact.
            name_map={**{name: one for chunk in chunks for name, one in chunk.tied.items()}, **config.name_map},
            config_path=self._source.path,
            config_hash=plan.text_hash,
            settings={**as_told(self._source.as_read), **as_told(plan.measurement)},
        )


def _chunk_info(chunk: Chunk) -> ChunkInfo:
    return ChunkInfo(
        vpp_stage=chunk.vpp_stage,
        depth=chunk.depth,
        segments=chunk.structure.segments,
        blocks=chunk.structure.blocks,
        modules=tuple(chunk.structure.modules),
        offsets=dict(chunk.offsets),
        model=chunk.model,
        flows=tuple(sorted(chunk.flows)),
    )
