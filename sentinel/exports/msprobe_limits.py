"""Statistics that no tensor can have: a file with such a one is damaged, whatever was trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sentinel.errors import ConfigError

DIGIT = 1e-5
"""Largest absolute error of a statistic: ten units of the sixth decimal, the last one that msProbe writes."""
SHARE = 0.02
"""Largest error beside that, as a share of the largest element: five units of bf16, whose 8 bits resolve 1/256."""
_INF = math.inf
RANGES: dict[str, tuple[float, float]] = {
    "norm": (0.0, _INF), "nans": (0.0, _INF), "zeros": (0.0, 1.0), "sr": (0.0, _INF), "kernel_norm": (0.0, _INF),
    "entropy": (0.0, _INF), "softmax_max": (0.0, 1.0), "per_token_expert_entropy": (0.0, _INF),
    "router_weight_similarity": (-1.0, 1.0),
}  # fmt: skip
"""Statistic -> the values that it can have."""


def refuse_impossible(where: str, values: Mapping[str, float], shape: Sequence[int] | None) -> None:
    """Raise ConfigError, beginning with `where`, for statistics that contradict themselves or each other.

    values: statistic -> value, NaN where it is not known. shape: of the tensor; None: the record is of no tensor.
    """
    for name, value in values.items():
        low, high = RANGES.get(name, (-_INF, _INF))
        if value < low - DIGIT or value > high + DIGIT:
            bounds = f"{low:g} or more" if high == _INF else f"a number in [{low:g}, {high:g}]"
            raise ConfigError(f"{where}: {name}: expected {bounds}, got {value:g}")
    if shape is None:
        return
    size = math.prod(shape)
    nans = values.get("nans", math.nan)
    if not math.isnan(nans) and (nans != math.floor(nans) or nans > size):
        raise ConfigError(f"{where}: nans: expected a whole number of at most {size} elements, got {nans:g}")
    low, high, mean, norm = (values.get(name, math.nan) for name in ("min", "max", "mean", "norm"))
    if low > high:
        raise ConfigError(f"{where}: min: expected at most the max of {high:g}, got {low:g}")
    room = DIGIT + SHARE * max(abs(low), abs(high))
    if math.isfinite(room) and (mean < low - room or mean > high + room):
        raise ConfigError(f"{where}: mean: expected one between min and max, {low:g} and {high:g}, got {mean:g}")
    most = max(abs(low), abs(high))
    if math.isfinite(most) and norm < most - room:
        raise ConfigError(f"{where}: norm: expected at least {most:g}, the size of the largest element, got {norm:g}")
    if math.isfinite(most) and math.isfinite(norm) and norm > (most + room) * math.sqrt(size):
        raise ConfigError(f"{where}: norm: expected at most {most:g} times the root of {size} elements, got {norm:g}")
