"""What one rank told of its probes: rows by kind and name, vectors, and statistics against slow references."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sentinel.messages import Descriptor, LayoutChange, Vectors
from sentinel.moments import Moments
from sentinel.record import STATS_DTYPE
from sentinel.wire.frame import Frame, FrameType, decode_message, scan

from ..conftest import Said


class Reported(Said):
    """A rank's rows and vectors."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        super().__init__(run, rank)
        self.vectors: dict[int, dict[tuple[str, str], list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
        for folder in sorted(run.glob(f"spool/r{rank:05d}-*")):
            for path in sorted(folder.glob("*.spool")):
                self._read_vectors(path.read_bytes())

    def _read_vectors(self, data: bytes) -> None:
        offset, names = 0, {}
        while offset < len(data):
            frame = scan(data, offset)
            assert isinstance(frame, Frame), frame
            offset = frame.offset_after
            if frame.header.type == FrameType.ROWS:
                continue
            message = decode_message(frame)
            if isinstance(message, Descriptor | LayoutChange):
                names.update((tensor.id, tensor.name) for tensor in message.tensors)
            elif isinstance(message, Vectors):
                for one in message.items:
                    values = np.frombuffer(one.values, one.dtype).reshape(one.shape)
                    self.vectors[frame.header.step][names[one.tensor], one.statistic].append(values)

    def row(self, step: int, kind: str, name: str) -> Any:
        """The only row of that name."""
        rows = self.of(step, kind, name)
        assert len(rows) == 1, (name, len(rows), sorted(set(self.names(step, kind))))
        return rows[0]

    def steps_of(self, kind: str) -> list[int]:
        """Steps that have rows of a kind."""
        return [step for step in sorted(self.rows) if self.of(step, kind)]


def check(row: Any, values: Any, rel: float = 1e-5) -> None:
    """The row says of its elements what two passes in float64 say of `values`."""
    if isinstance(values, torch.Tensor):
        values = values.detach().double().numpy()
    truth = Moments.of(values).stats[0]
    for name in ("count", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero"):
        assert row[name] == truth[name], (name, row[name], truth[name])
    for name in ("mean", "m2", "m3", "m4", "min", "max"):
        scale = abs(float(truth["max"])) + abs(float(truth["min"])) if truth["count"] else 0.0
        power = {"m2": 2, "m3": 3, "m4": 4}.get(name, 1)
        slack = max(1e-12, 1e-6 * scale**power * (float(truth["count"]) if power > 1 else 1.0))
        assert float(row[name]) == pytest.approx(float(truth[name]), rel=rel, abs=slack), name


def outputs(model: nn.Module, names: list[str], run: Any) -> dict[str, list[torch.Tensor]]:
    """Run, and return what each module gave out at each call."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_hook(lambda m, a, out, name=name: found[name].append(out.detach().clone())))
    run()
    for handle in handles:
        handle.remove()
    return found


assert STATS_DTYPE.names is not None
