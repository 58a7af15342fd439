"""What the C structs look like from numpy: here, so that native imports nothing of ours; a test holds it to record.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

F32, F64, BF16, F16 = 0, 1, 2, 3
"""Codes of the element types that are measured as they are."""

U8, I8, I16, U16, I32, U32, I64, U64 = 4, 5, 6, 7, 8, 9, 10, 11
"""Codes of integers (bool: U8): up to 16 bits measured as fp32, the wider ones as fp64, checksum included."""

E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ = 12, 13, 14, 15
"""Codes of the fp8 formats, measured as fp32."""

ELEMENT_BYTES = (4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1, 1, 1, 1)
"""Bytes an element, by code."""

MAX_DIMS = 64
"""Dimensions of a strided tensor."""

MAX_BOUNDS = 64
"""Bounds that `count_below` counts at once."""

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

_POINTERS = (
    "index", "slots", "location", "spread", "peak", "run_location", "run_spread", "size", "count", "run", "inside",
    "settled", "zero_is_normal", "last", "streak", "longest", "age",
)  # fmt: skip
PLAN_ROW = np.dtype(
    [
        *((name, "<i4") for name in (
            "algorithm", "sides", "statistic", "warmup", "settle_after", "lasting", "after", "has_common",
            "num_points", "reserved",
        )),
        *((name, "<f8") for name in (
            "k", "floor", "minimum", "location_rate", "spread_rate", "peak_factor", "above", "below", "common",
        )),
        ("num_entries", "<i8"),
        *((name, "<u8") for name in _POINTERS),
        ("cursor", "<i8"),
    ]
)  # fmt: skip
"""One row of a compiled plan, as `judge_plan` reads it: an algorithm over the series of one statistic. Pointers are
addresses, 0: none."""

ALGORITHM_LOG, ALGORITHM_LINEAR, ALGORITHM_LIMIT, ALGORITHM_STILL = 0, 1, 2, 3
SIDES = ("both", "up", "down")
"""Sides of a baseline by number."""

HIT = np.dtype(
    [
        ("plan_row", "<i4"), ("entry", "<i4"), ("direction", "<i4"), ("what", "<i4"),
        ("value", "<f8"), ("score", "<f8"), ("baseline", "<f8"),
    ]
)  # fmt: skip
"""One anomalous point: which row of the plan, and which of its entries."""
HIT_SETTLED = 2
"""Bit of `what`: the series settled at this very point."""

STEP_PART = np.dtype(
    [
        ("rows", "<u8"), ("num_rows", "<i8"), ("stride", "<i8"), ("to_logical", "<u8"), ("to_copy", "<u8"),
        ("table_size", "<i8"), ("rank", "<i8"),
    ]
)  # fmt: skip
"""The rows of one rank, and what its tensor ids stand for, as `digest` reads them; pointers are addresses."""

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


def pack_layouts(layouts: Sequence[tuple[Sequence[int], Sequence[int]] | None]) -> np.ndarray:
    """Return what `measure` takes as `layouts`: int64 words, from (shape, strides in elements) or None for each tensor.

    The first words say where each tensor's number of dimensions, sizes and strides stand; 0: it is contiguous.
    """
    places: list[int] = []
    words: list[int] = []
    for layout in layouts:
        if layout is None:
            places.append(0)
            continue
        shape, strides = layout
        if len(shape) != len(strides) or len(shape) > MAX_DIMS:
            raise ValueError(f"expected strides for at most {MAX_DIMS} sizes, got {len(strides)} for {len(shape)}")
        places.append(len(layouts) + len(words))
        words += [len(shape), *shape, *strides]
    return np.array([*places, *words], np.int64)


def check_layouts(layouts: np.ndarray, num: int) -> np.ndarray:
    """Return `layouts` as C reads it; raise where it is not what pack_layouts makes for `num` tensors."""
    layouts = np.ascontiguousarray(layouts, np.int64)
    places = layouts[:num]
    places = places[places != 0]
    is_whole = len(layouts) >= num and bool(((places >= num) & (places < len(layouts))).all())
    if is_whole:
        num_dims = layouts[places]
        is_whole = bool(((num_dims >= 0) & (num_dims <= MAX_DIMS) & (places + 2 * num_dims < len(layouts))).all())
    if not is_whole:
        raise ValueError(f"expected layouts of {num} tensors as pack_layouts makes them, got {len(layouts)} words")
    return layouts


def check_sums(sums: np.ndarray, num_channels: int) -> None:
    """Raise where `sums` is not one contiguous, writeable float64 a channel."""
    if sums.dtype != np.float64 or sums.shape != (num_channels,) or not (sums.flags.c_contiguous and sums.flags.writeable):
        raise ValueError(f"expected [{num_channels}] float64, contiguous and writeable, got {sums.shape} {sums.dtype}")
