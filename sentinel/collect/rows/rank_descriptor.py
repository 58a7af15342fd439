"""How a rank introduces itself: where it stands, which chunks it holds, and the table that its rows point into."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.parallel.rank_place import RankPlace
from sentinel.collect.rows.recording import Recording
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.step_count import StepCount
from sentinel.command_line import command_words
from sentinel.messages import START, ChunkInfo, Descriptor
from sentinel.monitor_config import ConfigSource, as_reported
from sentinel.place import Place
from sentinel.process import own_process
from sentinel.record import ROW_DTYPE
from sentinel.version import VERSION


class RankDescriptor:
    """Makes what travels before any row that needs it, and decides when it travels again."""

    def __init__(
        self,
        source: ConfigSource,
        place: RankPlace,
        recording: Recording,
        chunks: Sequence[Chunk],
        plan: Plan,
        count: StepCount,
        *,
        boundary: Callable[[], str],
        start: str,
        identity: Callable[[], Mapping[str, str]],
    ) -> None:
        """boundary: the name of the step boundary in use; start: by which the ranks of one start know one another, as in
        `RankAttempt`; identity: what this process is called by, as entries of a descriptor's `environment`.
        """
        self._source = source
        self._place = place
        self._recording = recording
        self._chunks = chunks
        self._plan = plan
        self._count = count
        self._boundary = boundary
        self._start = start
        self._identity = identity
        self._command = command_words(sys.orig_argv)
        self._resumed_step = -1
        """The step that a state of ours said comes next; -1: none was loaded."""

    @property
    def place(self) -> Place:
        """Where this rank stands."""
        return self._place.place

    def resume(self, step: int) -> None:
        """Go on counting where a state of ours was taken, and say so with the next descriptor."""
        self._count.resume(step)
        self._resumed_step, self._recording.table.is_changed = step, True

    def renumber(self, step: int) -> None:
        """Give another number to the running step, or to the next; of the first one the daemon is notified."""
        if self._count.renumber(step):
            self._recording.table.is_changed = True

    def news(self) -> Descriptor | None:
        """Return the descriptor where anything in it has changed since it was asked for last; else None."""
        table = self._recording.table
        descriptor = self.make() if table.is_news else None
        table.mark_reported()
        return descriptor

    def make(self) -> Descriptor:
        """Return what this rank says of itself now."""
        config, plan, chunks = self._source.config, self._plan, self._chunks
        fields: Mapping[str, Any] = ROW_DTYPE.fields or {}
        environment = {
            **own_process().as_reported(), "torch": str(torch.__version__), "python": sys.version.split()[0],
            "kernel": self._recording.kernel.name, "boundary": self._boundary(), "seed": str(torch.initial_seed()),
            "command": self._command, **self._identity(),
            **({START: self._start} if self._start else {}),
        }  # fmt: skip
        return Descriptor(
            version=VERSION,
            place=self.place,
            chunks=tuple(_chunk_info(chunk) for chunk in chunks),
            tensors=self._recording.table.infos(),
            row_fields=tuple((name, fields[name][0].str, int(fields[name][1])) for name in ROW_DTYPE.names or ()),
            row_bytes=ROW_DTYPE.itemsize,
            environment=environment,
            first_step=self._count.first,
            resumed_step=self._resumed_step,
            layer_offset=config.layer_offset,
            # The first that fits counts, and a copy's own name is exact.
            name_map={**{name: one for chunk in chunks for name, one in chunk.tied.items()}, **config.name_map},
            config_path=self._source.path,
            config_hash=plan.config.text_hash,
            settings={**as_reported(self._source.as_read), **as_reported(plan.config.measurement)},
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
