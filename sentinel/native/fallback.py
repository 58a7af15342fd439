"""The functions of `sentinel.native` in numpy: the same results within rounding, at a tenth of the speed."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sentinel.native.layout import (
    BF16,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    ELEMENT_BYTES,
    EMPTY_STATS,
    F16,
    FOLDED,
    MAX_BOUNDS,
    NONE_ID,
    STATS,
    check_layouts,
    check_rows,
    check_sums,
    stats_address,
)  # fmt: skip

CHUNK = 65_536
"""Elements measured at a time, in float64: three temporaries of half a megabyte."""

_STORAGE: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name)
    for name in ("<f4", "<f8", "<u2", "<f2", "u1", "i1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "u1", "u1", "u1", "u1")
)
"""What lies in memory, by code: bf16 and fp8 as their bits."""

_BITS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_FP8 = {E4M3FN: (3, 7, False), E5M2: (2, 15, False), E4M3FNUZ: (3, 8, True), E5M2FNUZ: (2, 16, True)}
"""Bits of mantissa, bias, and whether it is of the kind without infinities and negative zero, by code."""


def measure(
    pointers: np.ndarray,
    numels: np.ndarray,
    dtypes: np.ndarray,
    out: np.ndarray,
    zero_eps: float = 0.0,
    checksum: bool = False,
    *,
    num_threads: int = 1,
    layouts: np.ndarray | None = None,
) -> None:
    """As Library.measure; num_threads is ignored."""
    num = len(pointers)
    if not num == len(numels) == len(dtypes) == len(out):
        raise ValueError(f"expected {num} numels, dtypes and rows, got {len(numels)}, {len(dtypes)}, {len(out)}")
    if layouts is not None:
        layouts = check_layouts(layouts, num)
    if num == 0:
        return
    for index, code in enumerate(dtypes):
        if int(code) >= len(ELEMENT_BYTES):
            raise ValueError(f"tensor {index}: unknown dtype code {code}")
    address, stride = stats_address(out), out.strides[0]
    for index in range(num):
        shape = strides = None
        if layouts is not None and layouts[index]:
            place = int(layouts[index])
            num_dims = int(layouts[place])
            shape = layouts[place + 1 : place + 1 + num_dims].tolist()
            strides = layouts[place + 1 + num_dims : place + 1 + 2 * num_dims].tolist()
        measure_one(
            int(pointers[index]), int(numels[index]), int(dtypes[index]), address + index * stride, zero_eps, checksum,
            shape=shape, strides=strides,
        )  # fmt: skip


def measure_one(
    pointer: int,
    numel: int,
    dtype: int,
    out: int,
    zero_eps: float = 0.0,
    checksum: bool = False,
    accumulate: bool = False,
    num_threads: int = 1,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> None:
    """As Library.measure_one; num_threads is ignored."""
    if not 0 <= dtype < len(ELEMENT_BYTES):
        raise ValueError(f"unknown dtype code {dtype}")
    words = np.frombuffer(memoryview((ctypes.c_char * STATS.itemsize).from_address(out)), STATS)
    pairs, times = _pairs(numel, shape, strides)
    parts = [_measure_chunk(chunk, dtype, zero_eps, checksum) for chunk in _chunks(pointer, pairs, dtype)]
    whole = merge_rows(np.concatenate(parts), np.zeros(len(parts), np.int32), 1) if parts else np.full(1, EMPTY_STATS)
    for name in ("count", "m2", "m3", "m4", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "checksum"):
        whole[name] *= whole[name].dtype.type(times)
    if accumulate:
        whole = merge_rows(np.concatenate([words, whole]), np.zeros(2, np.int32), 1)
    words[:] = whole


def count_below(
    pointer: int,
    numel: int,
    dtype: int,
    bounds: Sequence[float] | np.ndarray,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    """As Library.count_below."""
    bounds = np.ascontiguousarray(bounds, np.float64)
    if bounds.ndim != 1 or len(bounds) > MAX_BOUNDS:
        raise ValueError(f"expected at most {MAX_BOUNDS} bounds in one dimension, got shape {bounds.shape}")
    if not 0 <= dtype < len(ELEMENT_BYTES):
        raise ValueError(f"unknown dtype code {dtype}")
    pairs, times = _pairs(numel, shape, strides)
    out = np.zeros(len(bounds), np.int64)
    for chunk in _chunks(pointer, pairs, dtype):
        with np.errstate(invalid="ignore"):
            sizes = np.abs(_as_measured(chunk, dtype)[0])
        out += [np.count_nonzero(sizes < bound) for bound in bounds]
    return out * times


def add_channel_squares(
    pointer: int, num_rows: int, num_channels: int, dtype: int, sums: np.ndarray, row_stride: int | None = None
) -> None:
    """As Library.add_channel_squares."""
    check_sums(sums, num_channels)
    if not 0 <= dtype <= F16:
        raise ValueError(f"expected the dtype code of a float, got {dtype}")
    stride = num_channels if row_stride is None else row_stride
    for row in range(num_rows):
        at = pointer + row * stride * ELEMENT_BYTES[dtype]
        for start, chunk in zip(itertools.count(0, CHUNK), _chunks(at, [(1, num_channels)], dtype), strict=False):
            with np.errstate(over="ignore", invalid="ignore"):
                squares = _as_measured(chunk, dtype)[0] ** 2
            sums[start : start + len(squares)] += np.where(squares <= np.finfo(np.float64).max, squares, 0.0)


def _pairs(numel: int, shape: Sequence[int] | None, strides: Sequence[int] | None) -> tuple[list[tuple[int, int]], int]:
    """Return (stride, size) of the dimensions to be read, the longest steps first, and how often a broadcast shows them."""
    if shape is None or strides is None:
        return [(1, numel)], 1
    pairs = sorted(((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1), reverse=True)
    if any(size == 0 for _, size in pairs):
        return [(1, 0)], 1
    return _joined([pair for pair in pairs if pair[0] != 0]), math.prod(size for stride, size in pairs if stride == 0)


def _joined(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (stride, size) pairs where those that follow one another without a gap are one."""
    joined: list[tuple[int, int]] = []
    for stride, size in pairs:
        if joined and joined[-1][0] == stride * size:
            joined[-1] = (stride, joined[-1][1] * size)
        else:
            joined.append((stride, size))
    return joined


def _chunks(pointer: int, pairs: list[tuple[int, int]], dtype: int) -> Iterator[np.ndarray]:
    """Yield what (stride, size) pairs, strides in elements and falling, show from `pointer` on: [at most CHUNK] each."""
    width = ELEMENT_BYTES[dtype]
    shape = [size for _, size in pairs]
    if 0 in shape:
        return
    inner, first = 1, len(pairs)
    while first > 0 and inner * shape[first - 1] <= CHUNK:
        first -= 1
        inner *= shape[first]
    whole, split = pairs[first:], pairs[:first]
    step = CHUNK // inner
    ranges = [range(0, size, step if at == first - 1 else 1) for at, (_, size) in enumerate(split)]
    for starts in itertools.product(*ranges):
        offset = sum(start * stride for start, (stride, _) in zip(starts, split, strict=True))
        some = [(split[-1][0], min(step, split[-1][1] - starts[-1])), *whole] if split else whole
        lowest = sum(min(0, stride * (size - 1)) for stride, size in some)
        extent = sum(abs(stride) * (size - 1) for stride, size in some) + 1
        memory = (ctypes.c_char * (extent * width)).from_address(pointer + (offset + lowest) * width)
        yield np.ndarray(
            [size for _, size in some], _STORAGE[dtype], memoryview(memory), -lowest * width,
            [stride * width for stride, _ in some],
        ).ravel()  # fmt: skip


def _as_measured(stored: np.ndarray, dtype: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the values in float64, and the bit patterns of the type that they are measured as."""
    if dtype == BF16:
        bits = stored
        values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return values, bits
    if dtype in _FP8:
        measured = fp8_values(dtype)[stored]
    elif dtype <= F16:
        measured = stored
    else:
        measured = stored.astype(np.float32 if ELEMENT_BYTES[dtype] <= 2 else np.float64)
    return measured.astype(np.float64), measured.view(_BITS[measured.dtype.itemsize])


@functools.cache
def fp8_values(dtype: int) -> np.ndarray:
    """Return the value of each byte in an fp8 format: [256] float32.

    Source: OCP 8-bit floating point (E4M3 with one nan a sign, E5M2 as IEEE), and the fnuz forms of arXiv:2206.02915.
    """
    mantissa_bits, bias, is_fnuz = _FP8[dtype]
    byte = np.arange(256)
    rest = byte & 0x7F
    exponent, mantissa = rest >> mantissa_bits, rest & (1 << mantissa_bits) - 1
    size = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa).astype(np.float64)
    size = np.ldexp(size, np.maximum(exponent, 1) - bias - mantissa_bits)
    bits = np.where(byte < 0x80, size, -size).astype(np.float32).view(np.uint32)
    # The patterns of what is not finite are those that torch widens them to, but for the one nan of fnuz.
    sign = (byte >> 7).astype(np.uint32) << np.uint32(31)
    if is_fnuz:
        bits[0x80] = 0x7FC00000
    elif mantissa_bits == 3:
        bits[rest == 0x7F] = sign[rest == 0x7F] | 0x7FF00000
    else:
        payload = np.array([0x7F800000, 0x7FE00000, 0x7FC00000, 0x7FE00000], np.uint32)
        bits[exponent == 31] = sign[exponent == 31] | payload[mantissa[exponent == 31]]
    values: np.ndarray = bits.view(np.float32)
    return values


def _measure_chunk(stored: np.ndarray, dtype: int, zero_eps: float, checksum: bool) -> np.ndarray:
    """Return the statistics of one chunk as an array of one STATS: two passes in float64, about the chunk's mean."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values, bits = _as_measured(stored, dtype)
    stats = np.full(1, EMPTY_STATS)
    if checksum:
        stats["checksum"] = bits.sum(dtype=np.uint64)
    is_finite = np.isfinite(values)
    finite = values if is_finite.all() else values[is_finite]
    if finite.size < values.size:
        stats["num_nan"] = np.count_nonzero(np.isnan(values))
        stats["num_pos_inf"] = np.count_nonzero(values == np.inf)
        stats["num_neg_inf"] = np.count_nonzero(values == -np.inf)
    if finite.size == 0:
        return stats
    low, high = float(finite.min()), float(finite.max())
    stats["count"] = finite.size
    stats["min"], stats["max"] = low, high
    stats["num_zero"] = np.count_nonzero(np.abs(finite) <= zero_eps)
    if low == high:
        stats["mean"] = low
        return stats
    # Powers of two scale without rounding: nothing overflows before the very last product.
    size = int(np.clip(np.frexp(max(abs(low), abs(high)))[1], -1000, 1000))
    scaled = np.ldexp(finite, -size)
    center = float(scaled.mean())
    scaled -= center
    reach = int(np.clip(np.frexp(np.abs(scaled).max())[1], -1000, 1000))
    np.ldexp(scaled, -reach, out=scaled)
    shift = float(scaled.mean())
    scaled -= shift
    squares = scaled * scaled
    unit = size + reach
    with np.errstate(over="ignore", under="ignore"):
        stats["mean"] = np.clip(np.ldexp(center + np.ldexp(shift, reach), size), low, high)
        stats["m2"] = np.ldexp(squares.sum(), 2 * unit)
        stats["m3"] = np.ldexp((squares * scaled).sum(), 3 * unit)
        stats["m4"] = np.ldexp((squares * squares).sum(), 4 * unit)
    return stats


def merge_rows(rows: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """As Library.merge_rows: all rows of a group at once, about the group's mean."""
    group = np.asarray(group, np.int64)
    if rows.ndim != 1 or len(group) != len(rows):
        raise ValueError(f"expected a group for each of {len(rows)} rows, got {len(group)}")
    if len(group) and int(group.max()) >= num_groups:
        raise ValueError(f"group must be below num_groups {num_groups}, got {int(group.max())}")
    stats_address(rows)
    out = np.full(num_groups, EMPTY_STATS)
    kept = group >= 0
    for name in ("num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "checksum"):
        np.add.at(out[name], group[kept], rows[name][kept])
    kept &= rows["count"] > 0
    group = group[kept]
    if group.size == 0:
        return out
    one = {name: rows[name][kept] for name in ("count", "mean", "m2", "m3", "m4", "min", "max")}
    np.add.at(out["count"], group, one["count"])
    np.minimum.at(out["min"], group, one["min"])
    np.maximum.at(out["max"], group, one["max"])
    first = np.zeros(num_groups)
    first[group[::-1]] = one["mean"][::-1]
    weight = one["count"].astype(np.float64)
    share = weight / out["count"][group]

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(group, values, num_groups)

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        mean = first + total(share * (one["mean"] - first[group]))
        d = one["mean"] - mean[group]
        dd = d * d
        out["mean"] = mean
        out["m2"] = total(one["m2"] + weight * dd)
        out["m3"] = total(one["m3"] + 3.0 * d * one["m2"] + weight * dd * d)
        out["m4"] = total(one["m4"] + 4.0 * d * one["m3"] + 6.0 * dd * one["m2"] + weight * dd * dd)
    return out


def fold_rows(rows: np.ndarray, num_rows: int) -> int:
    """As Library.fold_rows."""
    check_rows(rows, num_rows)
    used = rows[:num_rows]
    num_bad = used["num_nan"] + used["num_pos_inf"] + used["num_neg_inf"]
    point_at_own(rows, num_rows)
    is_folding = (used["micro_step"] != -1) | (used["flags"] & FOLDED != 0)
    key = used["tensor"].astype(np.int64) << 8 | used["kind"]
    key[~is_folding] = -1 - np.flatnonzero(~is_folding)
    _, firsts, group = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(firsts, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    group, firsts = place[group], firsts[order]
    num_groups = len(firsts)
    if num_groups == num_rows:
        return num_rows

    folded = used[firsts]
    size = np.bincount(group, minlength=num_groups)
    for name in STATS.names or ():
        folded[name] = merge_rows(used, group, num_groups)[name]
    folded["num_folded"] = np.bincount(group, used["num_folded"], num_groups)
    np.bitwise_or.at(folded["flags"], group, used["flags"])
    folded["flags"][size > 1] |= FOLDED
    folded["micro_step"][size > 1] = -1
    bad = np.flatnonzero((num_bad > 0) | (used["bad_call_id"] != NONE_ID))[::-1]
    largest = np.where(used["count"] > 0, np.maximum(np.abs(used["min"]), np.abs(used["max"])), -1.0)
    by_size = np.lexsort((-np.arange(num_rows), largest))
    for name, order_of in (("bad", bad), ("max", by_size)):
        for field in (f"{name}_call_id", f"{name}_micro_step"):
            folded[field][group[order_of]] = used[field][order_of]
    rows[:num_groups] = folded
    return num_groups


def point_at_own(rows: np.ndarray, num_rows: int) -> None:
    """As Library.point_at_own."""
    check_rows(rows, num_rows)
    rows = rows[:num_rows]
    rows["num_folded"] = np.maximum(rows["num_folded"], 1)
    num_bad = rows["num_nan"] + rows["num_pos_inf"] + rows["num_neg_inf"]
    for name, applies in (("bad", num_bad > 0), ("max", rows["count"] > 0)):
        mine = applies & (rows[f"{name}_call_id"] == NONE_ID)
        for field in ("call_id", "micro_step"):
            np.copyto(rows[f"{name}_{field}"], rows[field], where=mine)


def has_nonfinite(rows: np.ndarray, num_rows: int) -> bool:
    """As Library.has_nonfinite."""
    check_rows(rows, num_rows)
    rows = rows[:num_rows]
    return bool((rows["num_nan"] | rows["num_pos_inf"] | rows["num_neg_inf"]).any())


def crc32(data: bytes | bytearray | memoryview, value: int = 0, begin: int = 0, end: int | None = None) -> int:
    """As Library.crc32."""
    return zlib.crc32(memoryview(data).cast("B")[begin:end], value)
