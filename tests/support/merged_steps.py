"""Judged steps that nobody judged: merged moments of a few tensors, whose values a test chooses."""

from __future__ import annotations

from typing import Any

import numpy as np

from sentinel.exports.series import MergedStep
from sentinel.moments import EMPTY
from sentinel.step_view import LogicalTensor


class FlatLayout:
    """A layout of `num` weight gradients, whole on one rank."""

    def __init__(self, num: int) -> None:
        self.tensors = [
            LogicalTensor(
                index=at, name=f"layers.{at}.weight", kind="wgrad", key=f"layers.{at}.weight/wgrad", depth=at, site_pos=at,
                pp_stage=0, vpp_stage=0, ranks=(0,), num_elements=1000, dtype="float32",
            )
            for at in range(num)
        ]  # fmt: skip


def merged_step(
    layout: Any, seq: int, *, step: int | None = None, attempt: int = 0, num_nan: int = 0, **scalars: float
) -> MergedStep:
    """Return the step of a decision. step: by default `seq - 1`. num_nan: NaN elements of the first tensor."""
    rng = np.random.default_rng(seq)
    stats = np.full(len(layout.tensors), EMPTY)
    size = 0.02 * np.exp(0.1 * rng.standard_normal(len(stats)))
    stats["count"], stats["mean"], stats["m2"] = 1000, 0.01 * rng.standard_normal(len(stats)), 1000 * size**2
    stats["m3"], stats["m4"] = 100 * size**3, 3100 * size**4
    stats["min"], stats["max"] = -3 * size, 3 * size
    if num_nan:
        stats[0]["count"] -= num_nan
        stats[0]["num_nan"] = num_nan
        if not stats[0]["count"]:
            stats[0] = EMPTY
            stats[0]["num_nan"] = num_nan
    index = np.arange(len(stats), dtype=np.int32)
    return MergedStep(
        seq,
        attempt,
        seq - 1 if step is None else step,
        1.7e9 + seq,
        False,
        layout,
        index,
        stats,
        None,
        {"loss": 2.0, **scalars},
    )
