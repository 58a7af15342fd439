"""What a row or a step is worth when there is no room for all: what is finite and ordinary goes first, a NaN last."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sentinel.record import Flag


def is_nonfinite(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows, ROW_DTYPE, hold a NaN or an infinity."""
    found: npt.NDArray[np.bool_] = (rows["num_nan"] | rows["num_pos_inf"] | rows["num_neg_inf"]) != 0
    return found


def is_precious(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows, ROW_DTYPE, are kept when rows must go: the non-finite, and the borders of the black box."""
    found: npt.NDArray[np.bool_] = is_nonfinite(rows) | ((rows["flags"] & np.uint16(Flag.BORDER)) != 0)
    return found
