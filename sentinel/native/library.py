"""The C library behind ctypes: finding it, and calling it."""

from __future__ import annotations

import ctypes
import importlib.machinery
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from sentinel.native import fallback, layout
from sentinel.native.layout import MAX_DIMS, STATS, check_layouts, check_rows, stats_address

ISAS = ("portable", "avx2", "avx512")
"""Instruction sets by the number that the library knows them by."""

GIL_ELEMENTS = 100_000
"""Elements below which a call keeps the GIL, for some 20 us: to get it back may take 5 ms, Python's switch interval."""

GIL_TENSORS = 4096
"""Tensors of a step below which it is judged, and folded, without releasing the GIL, which takes some 50 us."""

GIL_BYTES = 1_000_000
"""Bytes below which a checksum is computed without releasing the GIL, which takes some 100 us."""

_INTERFACE = 6
"""Grows when arguments of a function change: a library built from other sources would read the wrong ones."""

_WITH_CHECKSUM, _ACCUMULATE = 1, 2

JudgePlan: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], int]
Digested: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
DigestRows: TypeAlias = Callable[[bytes, int, int], Digested]
"""See `Library.prepare_plan` and `Library.prepare_digest`."""

_NONE = np.zeros(0, np.int64)
"""No rows, no copies: the usual answer, shared."""
_NONE.flags.writeable = False

_PAIRS = [ctypes.c_int64 * (2 * num_dims) for num_dims in range(MAX_DIMS + 1)]
"""Sizes and strides as C reads them, by number of dimensions."""


def _packed(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ctypes.Array[ctypes.c_int64]]:
    """Return the number of dimensions, and sizes and strides as C reads them."""
    num_dims = len(shape)
    if num_dims != len(strides) or num_dims > MAX_DIMS:
        raise ValueError(f"expected strides for at most {MAX_DIMS} sizes, got {len(strides)} for {num_dims}")
    return num_dims, _PAIRS[num_dims](*shape, *strides)


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
        gil_released = ctypes.CDLL(str(path))
        gil_kept = ctypes.PyDLL(str(path))
        i32, i64, u64, pointer, f64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_double
        try:
            for library in (gil_released, gil_kept):
                library.sentinel_measure.argtypes = [i64, *[pointer] * 5, i64, f64, i32, i32, i32]
                library.sentinel_measure.restype = i64
                library.sentinel_measure_one.argtypes = [u64, i64, i32, i32, pointer, pointer, f64, i32, i32, i32]
                library.sentinel_measure_one.restype = i64
                library.sentinel_count_below.argtypes = [u64, i64, i32, i32, pointer, pointer, i32, pointer, i32]
                library.sentinel_count_below.restype = i64
                library.sentinel_add_channel_squares.argtypes = [u64, i64, i64, i64, i32, pointer, i32]
                library.sentinel_add_channel_squares.restype = i64
                library.sentinel_fold_rows.argtypes = [pointer, i64]
                library.sentinel_fold_rows.restype = i64
                library.sentinel_point_at_own.argtypes = [pointer, i64]
                library.sentinel_point_at_own.restype = None
                library.sentinel_has_nonfinite.argtypes = [pointer, i64]
                library.sentinel_has_nonfinite.restype = i32
                library.sentinel_merge_rows.argtypes = [pointer, i64, pointer, i64, pointer, i64]
                library.sentinel_merge_rows.restype = None
                library.sentinel_judge_plan.argtypes = [*[pointer] * 4, i64, pointer, i64, pointer, i32]
                library.sentinel_judge_plan.restype = i64
                library.sentinel_digest_rows.argtypes = [pointer, i64, i64, pointer, pointer, i64, i64, pointer, pointer]
                library.sentinel_digest_rows.restype = i64
                library.sentinel_take_rows.argtypes = [pointer, i64, pointer, pointer, pointer]
                library.sentinel_take_rows.restype = i64
                library.sentinel_take_rms.argtypes = [pointer, i64, pointer, pointer, pointer]
                library.sentinel_take_rms.restype = i64
                library.sentinel_group_medians.argtypes = [pointer, pointer, i64, i64, *[pointer] * 5]
                library.sentinel_group_medians.restype = None
            for function, address in ((gil_kept.sentinel_crc32, ctypes.c_char_p), (gil_released.sentinel_crc32, pointer)):
                function.argtypes = [address, i64, i64, ctypes.c_uint32, i32]
                function.restype = ctypes.c_uint32
            gil_kept.sentinel_prepare_crc32()
            if gil_released.sentinel_interface() != _INTERFACE:
                raise OSError(
                    f"{path}: has interface {gil_released.sentinel_interface()}, expected {_INTERFACE}; build it again"
                )
            best = int(gil_released.sentinel_best_isa())
        except AttributeError as error:
            raise OSError(f"{path}: not the library of this version: {error}") from error
        self._isa = best if isa is None else min(best, ISAS.index(isa))
        self.implementation = ISAS[self._isa]
        """The instruction set in use: `avx512`, `avx2` or `portable`."""
        self._measure, self._measure_with_gil = gil_released.sentinel_measure, gil_kept.sentinel_measure
        self._measure_one = gil_released.sentinel_measure_one
        self._measure_one_with_gil = gil_kept.sentinel_measure_one
        self._count_below = gil_released.sentinel_count_below
        self._add_channel_squares = gil_released.sentinel_add_channel_squares
        self._fold_rows, self._fold_rows_with_gil = gil_released.sentinel_fold_rows, gil_kept.sentinel_fold_rows
        self._point_at_own = gil_kept.sentinel_point_at_own
        self._has_nonfinite = gil_kept.sentinel_has_nonfinite
        self._merge_rows = gil_released.sentinel_merge_rows
        self._digest, self._digest_with_gil = gil_released.sentinel_digest_rows, gil_kept.sentinel_digest_rows
        self._take_rows, self._take_rms = gil_kept.sentinel_take_rows, gil_kept.sentinel_take_rms
        self._group_medians = gil_kept.sentinel_group_medians
        self._crc32, self._crc32_of_bytes = gil_released.sentinel_crc32, gil_kept.sentinel_crc32
        self._judge_plan, self._judge_plan_with_gil = gil_released.sentinel_judge_plan, gil_kept.sentinel_judge_plan

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
        layouts: np.ndarray | None = None,
    ) -> None:
        """Write the statistics of n tensors in CPU memory into the n rows of `out`. Releases the GIL unless all are small.

        pointers: [n] uint64, to the first element; numels: [n] int64; dtypes: [n] uint8 codes of layout.py.
        out: [n] of any dtype that holds the twelve STATS words side by side (STATS or whole rows), of any stride.
        zero_eps: |x| <= zero_eps counts as zero. checksum: sum of the bit patterns, 0 where not asked for.
        num_threads: at most so many, for large tensors only; the result does not depend on it by a bit.
        layouts: None where all are contiguous, else as pack_layouts makes it. A strided tensor is read in the order in
        which it lies in memory; what a broadcast repeats is read once.
        """
        num = len(pointers)
        pointers = np.ascontiguousarray(pointers, np.uint64)
        numels = np.ascontiguousarray(numels, np.int64)
        dtypes = np.ascontiguousarray(dtypes, np.uint8)
        if not num == len(numels) == len(dtypes) == len(out):
            raise ValueError(f"expected {num} numels, dtypes and rows, got {len(numels)}, {len(dtypes)}, {len(out)}")
        if layouts is not None:
            layouts = check_layouts(layouts, num)
        if num == 0:
            return
        call = self._measure_with_gil if int(numels.sum()) < GIL_ELEMENTS else self._measure
        bad = call(
            num, pointers.ctypes.data, numels.ctypes.data, dtypes.ctypes.data,
            None if layouts is None else layouts.ctypes.data, stats_address(out), out.strides[0],
            zero_eps, _WITH_CHECKSUM if checksum else 0, num_threads, self._isa,
        )  # fmt: skip
        if bad < 0:
            raise MemoryError(f"no room to measure {num} tensors in threads")
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
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        """Write the statistics of one tensor to the twelve words at address `out`.

        accumulate: merge into the statistics that stand there. A small tensor is measured without releasing the GIL.
        shape, strides: of a tensor that is not contiguous, strides in elements; then numel only says how large it is.
        """
        flags = (_WITH_CHECKSUM if checksum else 0) | (_ACCUMULATE if accumulate else 0)
        call = self._measure_one_with_gil if numel < GIL_ELEMENTS else self._measure_one
        num_dims, words = (0, None) if shape is None or strides is None else _packed(shape, strides)
        bad = call(pointer, numel, dtype, num_dims, words, out, zero_eps, flags, num_threads, self._isa)
        if bad < 0:
            raise MemoryError(f"no room to measure {numel} elements in threads")
        if bad:
            raise ValueError(f"unknown dtype code {dtype}")

    def count_below(
        self,
        pointer: int,
        numel: int,
        dtype: int,
        bounds: Sequence[float] | np.ndarray,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Return how many elements have |x| < bound, for each of at most 64 bounds: [bounds] int64. Releases the GIL.

        One read of the tensor, compared exactly, nan below no bound: with the bounds [tiny, low, next after high, inf]
        (tiny: 5e-324, whose count is that of the zeros) the elements that a format of range [low, high] loses are
        count[1] - count[0] that vanish and count[3] - count[2] that overflow. Arguments as in measure_one.
        """
        bounds = np.ascontiguousarray(bounds, np.float64)
        if bounds.ndim != 1 or len(bounds) > layout.MAX_BOUNDS:
            raise ValueError(f"expected at most {layout.MAX_BOUNDS} bounds in one dimension, got shape {bounds.shape}")
        num_dims, words = (0, None) if shape is None or strides is None else _packed(shape, strides)
        out = np.empty(len(bounds), np.int64)
        if self._count_below(
            pointer, numel, dtype, num_dims, words, bounds.ctypes.data, len(bounds), out.ctypes.data, self._isa
        ):
            raise ValueError(f"unknown dtype code {dtype}")
        return out

    def add_channel_squares(
        self,
        pointer: int,
        num_rows: int,
        num_channels: int,
        dtype: int,
        sums: np.ndarray,
        row_stride: int | None = None,
    ) -> None:
        """Add the squares of each channel of [num_rows, num_channels] to `sums`: [num_channels] float64. Releases the GIL.

        Channels lie side by side, rows `row_stride` elements apart (None: without a gap). dtype: F32, F64, BF16 or F16.
        Values that are not finite add nothing. The RMS of a channel is sqrt(sums / num_rows), where all are finite.
        """
        layout.check_sums(sums, num_channels)
        stride = num_channels if row_stride is None else row_stride
        if self._add_channel_squares(pointer, num_rows, num_channels, stride, dtype, sums.ctypes.data, self._isa):
            raise ValueError(f"expected the dtype code of a float, got {dtype}")

    def fold_rows(self, rows: np.ndarray, num_rows: int) -> int:
        """Fold the first `num_rows` rows in place, one per (tensor, kind) in order of first appearance; return how many.

        Moments merge (Pebay), counts add, flags are united and FOLDED is set, micro_step becomes -1, call_id and
        site_pos stay the first's. `bad_*` keeps the first non-finite observation, `max_*` that of the largest finite
        absolute value; rows that do not say yet get their own. Rows that belong to no micro-batch (micro_step -1, not
        FOLDED: params, wgrads) are not folded. Releases the GIL where there are many.
        """
        check_rows(rows, num_rows)
        fold = self._fold_rows_with_gil if num_rows < GIL_TENSORS else self._fold_rows
        left = int(fold(rows.ctypes.data, num_rows))
        return left if left >= 0 else fallback.fold_rows(rows, num_rows)

    def point_at_own(self, rows: np.ndarray, num_rows: int) -> None:
        """Let rows that do not say which observation was non-finite, or largest, point at their own: the first `num_rows`.

        In place; rows that stand for no observation yet stand for one.
        """
        check_rows(rows, num_rows)
        self._point_at_own(rows.ctypes.data, num_rows)

    def has_nonfinite(self, rows: np.ndarray, num_rows: int) -> bool:
        """Return whether one of the first `num_rows` rows counts a NaN or an infinity."""
        check_rows(rows, num_rows)
        return bool(self._has_nonfinite(rows.ctypes.data, num_rows))

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
        self._merge_rows(stats_address(rows), rows.strides[0], group.ctypes.data, len(group), out.ctypes.data, num_groups)
        return out

    def prepare_plan(self, plan: np.ndarray, hits: np.ndarray) -> JudgePlan:
        """Return what judges a step by a compiled plan, and learns; it returns how many `hits` (anomalous points) it wrote.

        plan: [rows] PLAN_ROW, whose `num_points` say after a call how many points each judged; hits: [all entries together]
        HIT. A call takes stats: [tensors] STATS; present, bad:
        [tensors] bool, whether the step has the tensor, and whether it holds anything that is not finite; norm_scale:
        [tensors] float64 factors of the norm, or None. A small step keeps the GIL.
        """
        room = int(plan["num_entries"].sum())
        if len(hits) < room:
            raise ValueError(f"expected room for {room} hits, got {len(hits)}")
        plan_at, num_plan_rows, hits_at, isa = plan.ctypes.data, len(plan), hits.ctypes.data, self._isa
        with_gil, without_gil = self._judge_plan_with_gil, self._judge_plan

        def judge(
            stats: np.ndarray, present: np.ndarray, bad: np.ndarray, norm_scale: np.ndarray | None,
            _kept: object = (plan, hits),
        ) -> int:  # fmt: skip
            num = len(stats)
            if not num == len(present) == len(bad) or (norm_scale is not None and len(norm_scale) != num):
                raise ValueError(f"expected what is said of {num} tensors, got {len(present)} and {len(bad)}")
            found: int = (with_gil if num < GIL_TENSORS else without_gil)(
                stats.ctypes.data if stats.dtype is STATS else stats_address(stats), present.ctypes.data, bad.ctypes.data,
                None if norm_scale is None else norm_scale.ctypes.data, num, plan_at, num_plan_rows, hits_at, isa,
            )  # fmt: skip
            return found

        return judge

    def judge_plan(
        self,
        stats: np.ndarray,
        present: np.ndarray,
        bad: np.ndarray,
        norm_scale: np.ndarray | None,
        plan: np.ndarray,
        hits: np.ndarray,
    ) -> int:
        """Judge once what `prepare_plan` judges again and again."""
        return self.prepare_plan(plan, hits)(stats, present, bad, norm_scale)

    def prepare_digest(self, left_out: np.ndarray, is_replicated: np.ndarray) -> DigestRows:
        """Return what merges the rows of one step; it returns (stats, present, bad, bad_rows, odd_copies, has_rows).

        left_out: [tensors] bool, what has no statistics of its own; is_replicated: [copies + 1] bool. A call takes
        parts: the words of STEP_PART for each rank, in the order in which their rows count, of copies the first's; how
        many they are, and num_rows: how many rows in all. stats: [tensors] STATS; present, bad:
        [tensors] bool, whether there is a row that counts, and whether any row holds what is not finite; bad_rows: [bad]
        int64 numbers of those, all parts one behind the other; odd_copies: int64 replicated copies that came with
        different checksums; has_rows: [copies] bool, whether there is any row of it. A small step keeps the GIL.
        """
        num_tensors, num_copies = len(left_out), len(is_replicated) - 1
        left_out_at, is_replicated_at = left_out.ctypes.data, is_replicated.ctypes.data
        num_stats_bytes, num_out_bytes = STATS.itemsize * num_tensors, (STATS.itemsize + 2) * num_tensors
        num_scratch = 1 + 2 * (num_copies + 1)
        num_words = num_scratch + num_copies // 8 + 1
        with_gil, without_gil = self._digest_with_gil, self._digest

        def digest(parts: bytes, num_parts: int, num_rows: int, _kept: object = (left_out, is_replicated)) -> Digested:
            out, words = np.empty(num_out_bytes, np.uint8), np.empty(num_words + num_rows, np.int64)
            num_bad = (with_gil if num_rows < GIL_TENSORS else without_gil)(
                parts, num_parts, num_rows, left_out_at, is_replicated_at, num_tensors, num_copies, out.ctypes.data,
                words.ctypes.data,
            )  # fmt: skip
            flags = out[num_stats_bytes:].view(np.bool_)
            bad_rows = words[num_scratch : num_scratch + num_bad].copy() if num_bad else _NONE
            odd = np.flatnonzero(words[num_scratch + num_rows :].view(np.uint8)[:num_copies]) if words[0] else _NONE
            # Behind the number of odd copies: the rank that speaks for each copy, -1 where none does.
            has_rows = words[1 : num_copies + 1] >= 0
            return out[:num_stats_bytes].view(STATS), flags[:num_tensors], flags[num_tensors:], bad_rows, odd, has_rows

        return digest

    def take_rows(self, parts: bytes, num_parts: int, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the statistics of the rows that have an entry, [taken] STATS, their entries, [taken] int32, and how many
        each part has of them, [num_parts] int64.

        parts: the words of STEP_PART for each rank, whose `to_logical` gives the entry of each tensor id, -1: none.
        num_rows: of all of them. In order of parts and rows. Keeps the GIL.
        """
        stats, entries, counts = np.empty(num_rows, STATS), np.empty(num_rows, np.int32), np.empty(num_parts, np.int64)
        num = self._take_rows(parts, num_parts, stats.ctypes.data, entries.ctypes.data, counts.ctypes.data)
        return stats[:num], entries[:num], counts

    def take_rms(self, parts: bytes, num_parts: int, place: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the root mean square of each entry's row, [entries] float64, NaN: it has none, or it holds what is not
        finite, and its rows that hold any element, [entries] int64; None where an entry has several.

        parts: as of `take_rows`, with the number of the part's first entry in place of its rank. place: [entries] int64,
        where each is in what is returned. Keeps the GIL.
        """
        values, counts = np.full(len(place), np.nan), np.zeros(len(place), np.int64)
        is_several = self._take_rms(parts, num_parts, place.ctypes.data, values.ctypes.data, counts.ctypes.data)
        return None if is_several else (values, counts)

    def group_medians(self, values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each member the median of its group (NaN left out; NaN: none is known), and how many are known.

        values: [members] float64; group: [members] integers, at least 0.
        """
        values, group = np.ascontiguousarray(values, np.float64), np.ascontiguousarray(group, np.int64)
        num, num_groups = len(values), int(group.max(initial=-1)) + 1
        if len(group) != num or (num and int(group.min()) < 0):
            raise ValueError(f"expected a group of at least 0 for each of {num} members")
        median, words = np.empty(num), np.empty(2 * num + 2 * num_groups + 1, np.int64)
        at = words.ctypes.data
        begins, middles = at + 8 * num, at + 8 * (num + num_groups + 1)
        self._group_medians(
            values.ctypes.data, group.ctypes.data, num, num_groups, median.ctypes.data, at, begins, middles,
            middles + 8 * num_groups,
        )  # fmt: skip
        return median, words[:num]

    def crc32(self, data: bytes | bytearray | memoryview, value: int = 0, begin: int = 0, end: int | None = None) -> int:
        """Return the crc32 of data[begin:end] as zlib.crc32 gives it, three times as fast. Much data releases the GIL."""
        size = (data.nbytes if isinstance(data, memoryview) else len(data)) if end is None else end
        if isinstance(data, bytes) and size - begin < GIL_BYTES:
            found: int = self._crc32_of_bytes(data, begin, size - begin, value, 1)
            return found
        whole = np.frombuffer(data, np.uint8)
        return int(self._crc32(whole.ctypes.data, begin, size - begin, value, 1))
