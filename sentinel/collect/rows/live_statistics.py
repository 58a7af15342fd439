"""The statistics of now, for code in the trainer: what was measured in the running step, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sentinel.collect.hooks.loss_scale import LossScale
from sentinel.collect.rows.buffer import DGRAD_KINDS, divide_gradients, scaled_kinds
from sentinel.collect.rows.recording import Recording
from sentinel.moments import Moments
from sentinel.native import merge_rows
from sentinel.record import STATISTICS, Kind

Statistics = Mapping[str, Mapping[str, float]]
"""Local name of a tensor -> statistic (record.STATISTICS) -> value; NaN where it is undefined."""


class LiveStatistics:
    """Reads the rows of the running step while it runs."""

    def __init__(self, recording: Recording, loss_scale: LossScale) -> None:
        self._recording = recording
        self._loss_scale = loss_scale

    def of(self, kinds: Sequence[Kind]) -> dict[str, Statistics]:
        """Return kind -> name -> statistic -> value of what the running step has measured up to now on this rank.

        Micro-steps are merged; gradients are those of the loss itself. Waits for the device where tensors lie on one.
        """
        recording, loss_scale = self._recording, self._loss_scale
        rows = recording.rows.snapshot()
        scale = 1.0 if loss_scale.value is None else float(loss_scale.value)
        if scale not in (0.0, 1.0) and math.isfinite(scale):
            divide_gradients(rows, scale, scaled_kinds(not loss_scale.is_unscaled or recording.rows.is_read_early))
        divide_gradients(rows, recording.rows.dgrad_divisor, DGRAD_KINDS)
        found: dict[str, dict[str, Mapping[str, float]]] = {}
        for kind in kinds:
            mine = rows[rows["kind"] == kind]
            tensors, group = np.unique(mine["tensor"], return_inverse=True)
            merged = Moments(merge_rows(mine, group, len(tensors)))
            columns = {name: merged.statistic(name) for name in STATISTICS}
            found[kind.label] = {
                recording.table.entries[int(tensor)].name: {name: float(column[at]) for name, column in columns.items()}
                for at, tensor in enumerate(tensors)
            }
        for kind, output in ((Kind.ACTIVATION_IN, Kind.ACTIVATION), (Kind.DGRAD_IN, Kind.DGRAD)):
            for entry in recording.table.entries:
                known = found.get(Kind(entry.kind).label, {}).get(entry.name)
                if known is None or not entry.border or entry.kind not in (kind, output) or output.label not in found:
                    continue
                for name in entry.also:  # A border's tensor has the name of the module that made it, too.
                    found[output.label].setdefault(name, known)
        return dict(found)
