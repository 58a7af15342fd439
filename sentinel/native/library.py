"""The C library behind ctypes: finding it, and calling it."""

from __future__ import annotations

import ctypes
import importlib.machinery
from pathlib import Path

import numpy as np

from sentinel.native import fallback
from sentinel.native.layout import STATS, check_rows, stats_address

ISAS = ("portable", "avx2", "avx512")
"""Instruction sets by the number that the library knows them by."""

QUICK_ELEMENTS = 100_000
"""Below this a call keeps the GIL: it ends within some 20 us, and to get the GIL back may take 5 ms (chosen)."""

_WITH_CHECKSUM, _ACCUMULATE = 1, 2


def find_library() -> Path | None:
    """Return the library that the build left beside this file; None where it was not built."""
    here = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = here / f"_kernels{suffix}"
        if path.is_file():
            return path
    return None


class Library:
    """The functions of `sentinel.native`, in C. Raises OSError where the file cannot be loaded."""

    def __init__(self, path: Path, isa: str | None = None) -> None:
        slow = ctypes.CDLL(str(path))
        quick = ctypes.PyDLL(str(path))
        i32, i64, u64, pointer, f64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_double
        try:
            for library in (slow, quick):
                library.sentinel_measure.argtypes = [i64, pointer, pointer, pointer, pointer, i64, f64, i32, i32, i32]
                library.sentinel_measure.restype = i64
                library.sentinel_measure_one.argtypes = [u64, i64, i32, pointer, f64, i32, i32, i32]
                library.sentinel_measure_one.restype = i64
                library.sentinel_fold_rows.argtypes = [pointer, i64]
                library.sentinel_fold_rows.restype = i64
                library.sentinel_merge_rows.argtypes = [pointer, i64, pointer, i64, pointer, i64]
                library.sentinel_merge_rows.restype = None
            best = int(slow.sentinel_best_isa())
        except AttributeError as error:
            raise OSError(f"{path}: not the library of this version: {error}") from error
        self._isa = best if isa is None else min(best, ISAS.index(isa))
        self.implementation = ISAS[self._isa]
        """The instruction set in use: `avx512`, `avx2` or `portable`."""
        self._measure = slow.sentinel_measure
        self._measure_one = slow.sentinel_measure_one
        self._measure_one_quickly = quick.sentinel_measure_one
        self._fold_rows = slow.sentinel_fold_rows
        self._merge_rows = slow.sentinel_merge_rows

    def measure(
        self,
        pointers: np.ndarray,
        numels: np.ndarray,
        dtypes: np.ndarray,
        out: np.ndarray,
        zero_eps: float = 0.0,
        checksum: bool = False,
        *,
        num_threads: int = 1,
    ) -> None:
        """Write the statistics of n contiguous tensors in CPU memory into the n rows of `out`. Releases the GIL.

        pointers: [n] uint64; numels: [n] int64; dtypes: [n] uint8 codes (F32, F64, BF16, F16).
        out: [n] of any dtype that holds the twelve STATS words side by side (STATS or whole rows), of any stride.
        zero_eps: |x| <= zero_eps counts as zero. checksum: sum of the bit patterns, 0 where not asked for.
        num_threads: at most so many, for large tensors only; the result does not depend on it by a bit.
        """
        num = len(pointers)
        pointers = np.ascontiguousarray(pointers, np.uint64)
        numels = np.ascontiguousarray(numels, np.int64)
        dtypes = np.ascontiguousarray(dtypes, np.uint8)
        if not num == len(numels) == len(dtypes) == len(out):
            raise ValueError(f"expected {num} numels, dtypes and rows, got {len(numels)}, {len(dtypes)}, {len(out)}")
        if num == 0:
            return
        bad = self._measure(
            num, pointers.ctypes.data, numels.ctypes.data, dtypes.ctypes.data, stats_address(out), out.strides[0],
            zero_eps, _WITH_CHECKSUM if checksum else 0, num_threads, self._isa,
        )  # fmt: skip
        if bad:
            raise ValueError(f"tensor {bad - 1}: unknown dtype code {dtypes[bad - 1]}")

    def measure_one(
        self,
        pointer: int,
        numel: int,
        dtype: int,
        out: int,
        zero_eps: float = 0.0,
        checksum: bool = False,
        accumulate: bool = False,
        num_threads: int = 1,
    ) -> None:
        """Write the statistics of one contiguous tensor to the twelve words at address `out`.

        accumulate: merge into the statistics that stand there. A small tensor is measured without releasing the GIL.
        """
        flags = (_WITH_CHECKSUM if checksum else 0) | (_ACCUMULATE if accumulate else 0)
        call = self._measure_one_quickly if numel < QUICK_ELEMENTS else self._measure_one
        if call(pointer, numel, dtype, out, zero_eps, flags, num_threads, self._isa):
            raise ValueError(f"unknown dtype code {dtype}")

    def fold_rows(self, rows: np.ndarray, num_rows: int) -> int:
        """Fold the first `num_rows` rows in place, one per (tensor, kind) in order of first appearance; return how many.

        Moments merge (Pebay), counts add, flags are united and FOLDED is set, micro_step becomes -1, call_id and
        site_pos stay the first's. `bad_*` keeps the first non-finite observation, `max_*` that of the largest finite
        absolute value; rows that do not say yet get their own. Rows that belong to no micro-batch (micro_step -1, not
        FOLDED: params, wgrads) are not folded. Releases the GIL.
        """
        check_rows(rows, num_rows)
        left = int(self._fold_rows(rows.ctypes.data, num_rows))
        return left if left >= 0 else fallback.fold_rows(rows, num_rows)

    def merge_rows(self, rows: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
        """Return the statistics of each group of rows: [num_groups] STATS, merged in the order of the rows.

        rows: [n] of any dtype that holds the STATS words side by side, of any stride; group: [n] integers in
        [0, num_groups), negative: left out. A group without rows is empty (count 0). Releases the GIL.
        """
        group = np.ascontiguousarray(group, np.int32)
        if rows.ndim != 1 or len(group) != len(rows):
            raise ValueError(f"expected a group for each of {len(rows)} rows, got {len(group)}")
        if len(group) and int(group.max()) >= num_groups:
            raise ValueError(f"group must be below num_groups {num_groups}, got {int(group.max())}")
        out = np.empty(num_groups, STATS)
        self._merge_rows(
            stats_address(rows), rows.strides[0], group.ctypes.data, len(group), out.ctypes.data, num_groups
        )
        return out
