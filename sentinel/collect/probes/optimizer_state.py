"""The optimizer's first and second moments, read after its step in one multi-tensor pass over all parameters."""

from __future__ import annotations

from typing import Any

import torch

from sentinel.collect.parallel.placements import is_dense, local_of
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.stepped import stepped_by
from sentinel.collect.rows.tensor_table import TensorEntry
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
        entries: list[TensorEntry] = []
        tensors: list[torch.Tensor] = []
        due: dict[str, int] = {}
        for stepped in stepped_by(optimizer, self._parameters):
            one, held = stepped.one, stepped.held
            for key, kind in kinds.items():
                tensor = stepped.state.get(key)
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                    continue
                if tensor.dim() != stepped.param.dim():
                    continue  # In another layout than the parameter's: blocks of eight bits, factors.
                if not is_dense(tensor):
                    message = f"{one.entry.name}: {kind.label} is sparse, and not measured"
                    self._recording.report("unsupported", message, f"{kind.label} {one.entry.name}")
                    continue
                local = local_of(tensor).detach()
                entry = self._table.entry(one.entry.chunk, one.entry.name, kind)
                entry.site_pos = one.entry.site_pos
                if not self._plan.measures(entry):
                    continue
                self._table.describe(entry, local, held.placements, held.part, held.shape)
                if entry.id in self._rows:
                    self._recording.fill(self._rows[entry.id], local, checksum=True)
                    continue
                entries.append(entry)
                tensors.append(local)
                due[kind.label] = due.get(kind.label, 0) + 1
        first = self._recording.observe_all(entries, tensors, [0] * len(entries))
        self._rows.update({entry.id: first + at for at, entry in enumerate(entries)})
        self._count(due)
