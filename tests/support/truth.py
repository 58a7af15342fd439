"""What a row must say of a tensor, worked out the slow and obvious way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sentinel.moments import Moments


def assert_row_of(row: Any, values: Any, rel: float = 1e-5) -> None:
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
