"""Strided, broadcast and converted tensors: every implementation against the elements that the view shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel import native
from sentinel.native import fallback, layout
from sentinel.record import STATS_DTYPE
from tests.native.test_measure import IMPLEMENTATIONS, LIBRARIES, implementations, reference, stored

BEST = list(IMPLEMENTATIONS.values())[-2 if LIBRARIES else -1]
FLOATS = {"f32": layout.F32, "f64": layout.F64, "bf16": layout.BF16, "f16": layout.F16}
INTEGERS = {
    np.dtype(np.bool_): layout.U8, np.dtype(np.uint8): layout.U8, np.dtype(np.int8): layout.I8,
    np.dtype(np.int16): layout.I16, np.dtype(np.uint16): layout.U16, np.dtype(np.int32): layout.I32,
    np.dtype(np.uint32): layout.U32, np.dtype(np.int64): layout.I64, np.dtype(np.uint64): layout.U64,
}  # fmt: skip
FP8 = {
    layout.E4M3FN: (253, 448.0), layout.E5M2: (247, 57344.0),
    layout.E4M3FNUZ: (255, 240.0), layout.E5M2FNUZ: (255, 57344.0),
}  # fmt: skip
"""Different finite values of each format, and the largest."""


def measured(library, view: np.ndarray, code: int, zero_eps: float = 0.0, num_threads: int = 1) -> np.void:
    """Return what `library` finds in a view of any strides, checksum included."""
    out = np.zeros(1, STATS_DTYPE)
    strides = [stride // view.itemsize for stride in view.strides]
    library.measure_one(
        view.ctypes.data, view.size, code, out.ctypes.data, zero_eps, True, False, num_threads, view.shape, strides
    )
    return out[0]


def assert_shows(stats: np.void, expected: dict[str, float], rel: float = 1e-5) -> None:
    for name in ("count", "min", "max", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "checksum"):
        assert stats[name] == expected[name], name
    n = max(expected["count"], 1)
    std = (expected["m2"] / n) ** 0.5
    assert stats["mean"] == pytest.approx(expected["mean"], abs=1e-6 * std, rel=1e-14)
    if expected["min"] == expected["max"]:
        assert stats["m2"] == stats["m3"] == stats["m4"] == 0.0
        return
    assert stats["m2"] == pytest.approx(expected["m2"], rel=rel)
    assert stats["m4"] == pytest.approx(expected["m4"], rel=rel)
    assert stats["m3"] == pytest.approx(expected["m3"], rel=rel, abs=rel * (expected["m4"] / n) ** 0.75 * n)


@st.composite
def views(draw, memory_of) -> np.ndarray:
    """A view of a fresh array: sliced with steps of either sign, permuted, broadcast, or overlapping itself."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    shape += draw(st.sampled_from([[], [1], [40], [700]]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    whole = memory_of(draw, rng, int(np.prod(shape, dtype=int))).reshape(shape)
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 1, 2, 3, -1, -2]) for _ in shape]))
    view = whole[(..., *(slice(None, None, step) for step in steps))]
    view = view.transpose(draw(st.permutations(range(view.ndim))))
    if draw(st.booleans()):
        view = np.broadcast_to(view[..., None], (*view.shape, draw(st.integers(1, 5))))
        view = view.transpose(draw(st.permutations(range(view.ndim))))
    if view.ndim and draw(st.integers(0, 9)) == 0:
        view = view[..., :0]
    return view


def floats(draw, rng: np.random.Generator, size: int) -> np.ndarray:
    dtype = draw(st.sampled_from(sorted(FLOATS)))
    x = rng.standard_normal(size) * draw(st.sampled_from([1.0, 1e-4])) + draw(st.sampled_from([0.0, 0.0, 3.0, -40.0]))
    x[rng.random(size) < draw(st.sampled_from([0.0, 0.4]))] = 0.0
    memory = stored(x, dtype)
    bad = stored(np.array([np.nan, np.inf, -np.inf]), dtype)
    memory[rng.random(size) < draw(st.sampled_from([0.0, 0.0, 0.05, 1.0]))] = bad[draw(st.integers(0, 2))]
    return memory


@implementations
@settings(max_examples=80, deadline=None)
@given(view=views(floats))
def test_views_are_measured_as_what_they_show(library, view):
    code = {np.float32: layout.F32, np.float64: layout.F64, np.uint16: layout.BF16, np.float16: layout.F16}[view.dtype.type]

    assert_shows(measured(library, view, code), reference(np.ascontiguousarray(view).ravel()))


def integers(draw, rng: np.random.Generator, size: int) -> np.ndarray:
    dtype = draw(st.sampled_from(sorted(INTEGERS, key=str)))
    if dtype == np.bool_:
        return rng.random(size) < 0.3
    reach = 2 ** draw(st.integers(1, 8 * dtype.itemsize - 1))
    return rng.integers(-reach if dtype.kind == "i" else 0, reach, size, endpoint=False, dtype=dtype)


def as_floats(view: np.ndarray) -> np.ndarray:
    """Return the type that integers are measured as."""
    return np.ascontiguousarray(view).ravel().astype(np.float32 if view.itemsize <= 2 else np.float64)


@implementations
@settings(max_examples=60, deadline=None)
@given(view=views(integers))
def test_integers_are_measured_as_floats(library, view):
    assert_shows(measured(library, view, INTEGERS[view.dtype]), reference(as_floats(view)))


@implementations
def test_extremes_of_integers(library):
    for dtype, code in INTEGERS.items():
        if dtype != np.bool_:
            info = np.iinfo(dtype)
            view = np.array([info.min, info.max, 0, 1, 1], dtype)
            assert_shows(measured(library, view, code), reference(as_floats(view)))


@implementations
@pytest.mark.parametrize("code", FP8)
def test_every_byte_of_fp8_is_read(library, code):
    values = fallback.fp8_values(code)
    finite = np.unique(values[np.isfinite(values)])
    assert (len(finite), finite.max()) == FP8[code]

    assert_shows(measured(library, np.arange(256, dtype=np.uint8), code), reference(values))
    assert_shows(measured(library, np.arange(256, dtype=np.uint8)[::-3], code), reference(values[::-3].copy()))


@pytest.mark.skipif(not LIBRARIES, reason="no compiler built the library")
def test_number_of_threads_changes_no_bit_of_views():
    x = np.random.default_rng(0).standard_normal((1200, 2600)).astype(np.float32) + 0.3
    x[700, 5] = np.nan
    for view in (x.T, x[:, ::2], x[::3, 5:2005], np.broadcast_to(x[:900, :800], (7, 900, 800)), x[:, ::2].T):
        rows = {measured(BEST, view, layout.F32, num_threads=n).tobytes() for n in (1, 2, 7)}

        assert len(rows) == 1


@pytest.mark.skipif(not LIBRARIES, reason="no compiler built the library")
def test_many_views_in_one_call_as_each_alone():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((900, 1100)).astype(np.float32)
    views = [x, x.T, x[:, ::3], x[0], x[:0], np.broadcast_to(x[3], (5, 1100)), rng.integers(0, 9, 70), x[5:6, 7:8]]
    codes = [layout.I64 if v.dtype == np.int64 else layout.F32 for v in views]
    layouts = native.pack_layouts(
        [None if v.flags.c_contiguous else (v.shape, [s // v.itemsize for s in v.strides]) for v in views]
    )

    for library in IMPLEMENTATIONS.values():
        for num_threads in (1, 3):
            out = np.zeros(len(views), STATS_DTYPE)
            library.measure(
                np.array([v.ctypes.data for v in views], np.uint64), np.array([v.size for v in views]), np.array(codes),
                out, 0.0, True, num_threads=num_threads, layouts=layouts,
            )  # fmt: skip

            for row, view, code in zip(out, views, codes, strict=True):
                assert row == measured(library, view, code)


@implementations
def test_a_broadcast_is_read_once_however_large(library):
    view = np.broadcast_to(np.arange(10, dtype=np.float32), (2**40, 10))

    stats = measured(library, view, layout.F32)

    assert stats["count"] == 10 * 2**40
    assert (stats["mean"], stats["m2"], stats["num_zero"]) == (4.5, 82.5 * 2**40, 2**40)
    assert stats["checksum"] == int(np.arange(10, dtype=np.float32).view(np.uint32).sum(dtype=np.uint64)) * 2**40 % 2**64


@pytest.mark.skipif(not LIBRARIES, reason="numpy would take minutes")
@pytest.mark.parametrize("isa", IMPLEMENTATIONS)
def test_strides_reach_beyond_2_31_elements(isa):
    memory = np.zeros(2**32 + 9, np.uint8)  # never written but at both ends: pages of zeros
    view = memory[:: 2**26]
    memory[0], memory[2**32], memory[2**31] = 3, 5, 7

    stats = measured(IMPLEMENTATIONS[isa], view, layout.U8)

    assert (stats["count"], stats["max"], stats["num_zero"]) == (65, 7.0, 62)
    assert stats["mean"] * 65 == pytest.approx(15.0)


@pytest.mark.skipif(not LIBRARIES, reason="numpy would take minutes")
def test_more_than_2_31_elements_of_a_view_are_read():
    row = np.random.default_rng(2).standard_normal(2**16 + 2**12).astype(np.float32)
    view = np.lib.stride_tricks.as_strided(row, (2**15 + 9, 2**16 + 3), (0, 4))
    shifted = np.lib.stride_tricks.as_strided(row, (2**11, 2**4, 2**16 + 3), (4, 0, 4))  # overlaps: nothing to fold away

    alone, repeated = measured(BEST, view[0], layout.F32), measured(BEST, view, layout.F32, num_threads=2)
    many = measured(BEST, shifted, layout.F32)

    assert view.size > 2**31 and shifted.size > 2**31
    assert repeated["count"] == view.size and many["count"] == shifted.size
    assert repeated["m4"] == alone["m4"] * (2**15 + 9)
    lengths = np.minimum(np.minimum(np.arange(1, 2**16 + 2**11 + 3), 2**11), np.arange(2**16 + 2**11 + 2, 0, -1)) * 2**4
    used = row[: len(lengths)].astype(np.float64)
    assert many["mean"] == pytest.approx((lengths * used).sum() / shifted.size, abs=1e-7)
    assert many["m2"] == pytest.approx((lengths * (used - many["mean"]) ** 2).sum(), rel=1e-6)


@implementations
def test_broken_layouts_are_refused(library):
    x = np.ones(4, np.float32)
    out = np.zeros(1, STATS_DTYPE)
    arguments = (np.array([x.ctypes.data], np.uint64), np.array([4]), np.zeros(1, np.uint8), out)

    for words in ([], [5], [1, 3, 2], [1, -1], [1, 65, *[1] * 130]):
        with pytest.raises(ValueError, match="pack_layouts"):
            library.measure(*arguments, layouts=np.array(words, np.int64))
    library.measure(*arguments, layouts=native.pack_layouts([([2, 2], [2, 1])]))

    assert out["count"] == 4
    with pytest.raises(ValueError, match="64"):
        native.pack_layouts([([1] * 65, [1] * 65)])
    if library is not IMPLEMENTATIONS["numpy"]:
        with pytest.raises(ValueError, match="64"):
            library.measure_one(x.ctypes.data, 1, 0, out.ctypes.data, shape=[1] * 65, strides=[1] * 65)
