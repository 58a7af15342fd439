"""What the C structs look like from numpy: here, so that native imports nothing of ours; a test holds it to record.py."""

from __future__ import annotations

import numpy as np

F32, F64, BF16, F16 = 0, 1, 2, 3
"""Codes of the element types that `measure` reads."""

ELEMENT_BYTES = (4, 8, 2, 2)
"""Bytes an element, by code."""

STATS = np.dtype(
    [
        ("count", "<i8"),
        ("mean", "<f8"),
        ("m2", "<f8"),
        ("m3", "<f8"),
        ("m4", "<f8"),
        ("min", "<f8"),
        ("max", "<f8"),
        ("num_nan", "<i8"),
        ("num_pos_inf", "<i8"),
        ("num_neg_inf", "<i8"),
        ("num_zero", "<i8"),
        ("checksum", "<u8"),
    ]
)
"""Twelve words that a kernel writes."""

ROW_BYTES = 136
ROW_STATS_OFFSET = 40
NONE_ID = 0xFFFFFFFF
FOLDED = 4

EMPTY_STATS = np.zeros((), STATS)
"""Statistics of nothing."""
EMPTY_STATS["min"], EMPTY_STATS["max"] = np.inf, -np.inf


def stats_address(rows: np.ndarray) -> int:
    """Return the address of the STATS words of the first of `rows`: they begin at its field `count`."""
    fields = rows.dtype.fields
    if fields is None or "count" not in fields or fields["checksum"][1] - fields["count"][1] != 88:
        raise TypeError(f"expected rows that hold the twelve STATS words side by side, got dtype {rows.dtype}")
    return rows.ctypes.data + fields["count"][1]


def check_rows(rows: np.ndarray, num_rows: int) -> None:
    """Raise where `rows` is not a contiguous, writeable array of at least `num_rows` whole rows."""
    fields = rows.dtype.fields
    if rows.dtype.itemsize != ROW_BYTES or fields is None or fields["count"][1] != ROW_STATS_OFFSET:
        raise TypeError(f"expected rows of {ROW_BYTES} bytes with statistics from byte {ROW_STATS_OFFSET}, got {rows.dtype}")
    if not rows.flags.c_contiguous or not rows.flags.writeable or rows.ndim != 1:
        raise ValueError("expected a writeable, contiguous array of rows with one dimension")
    if not 0 <= num_rows <= len(rows):
        raise ValueError(f"num_rows must be in [0, {len(rows)}], got {num_rows}")
