"""The optimizer's moments, read behind its step: one multi-tensor pass over what it keeps for each parameter."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.tensors import Entry
from sentinel.record import Kind

STATE_KEYS = {"exp_avg": Kind.EXP_AVG, "momentum_buffer": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}
"""Key in a torch optimizer's state -> kind: Adam's family and Lion; the momentum of SGD and Muon is a first moment too."""


class OptimizerState:
    """Reads exp_avg and exp_avg_sq of every parameter, from the first step on that has them."""

    def __init__(self, context: ProbeContext) -> None:
        self._parameters = context.parameters
        self._recording = context.recording
        self._table = context.table
        self._plan = context.plan
        self._count = context.count
        self._rows: dict[int, int] = {}
        """id of an entry -> its row of this step: an optimizer that steps twice in one step is read again into it."""
        context.events.begun.subscribe("optimizer_state", self._rows.clear)
        context.events.updated.subscribe("optimizer_state", self._read)

    def _read(self, optimizer: Any) -> None:
        """Measure the state that an optimizer has just written. Does not wait."""
        kinds = {key: kind for key, kind in STATE_KEYS.items() if self._plan.takes(kind)}
        if not kinds:
            return
        is_owner = _is_zero_redundancy(optimizer)
        state: Mapping[Any, Any] = (optimizer.optim if is_owner else optimizer).state
        entries: list[Entry] = []
        tensors: list[torch.Tensor] = []
        due: dict[str, int] = {}
        for one in self._parameters.all:
            kept = state.get(one.param)
            if not kept:
                continue
            for key, kind in kinds.items():
                tensor = kept.get(key)
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() != one.param.dim():
                    continue
                held = self._parameters.holding.state(one.param, tensor)
                placements = {**held.placements, "dp": "owned"} if is_owner and "dp" in held.placements else held.placements
                entry = self._table.entry(one.entry.chunk, one.entry.name, kind)
                entry.site_pos = one.entry.site_pos
                if not self._plan.measures(entry):
                    continue
                self._table.describe(entry, held.tensor, placements, held.part, held.shape)
                if entry.id in self._rows:
                    self._recording.fill(self._rows[entry.id], held.tensor, checksum=True)
                    continue
                entries.append(entry)
                tensors.append(held.tensor)
                due[kind.label] = due.get(kind.label, 0) + 1
        first = self._recording.observe_all(entries, tensors, [0] * len(entries))
        self._rows.update({entry.id: first + at for at, entry in enumerate(entries)})
        self._count(due)


def _is_zero_redundancy(optimizer: Any) -> bool:
    """Whether each rank keeps the state of some parameters alone (torch.distributed.optim.ZeroRedundancyOptimizer)."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
