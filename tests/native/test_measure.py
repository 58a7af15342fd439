"""Every implementation of `measure` against a slow, obvious reference in float64."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel import native
from sentinel.native import fallback, layout
from sentinel.native.library import ISAS, Library, find_library
from sentinel.record import ROW_DTYPE, STATS_DTYPE, STATS_OFFSET

PATH = find_library()
LIBRARIES = {} if PATH is None else {isa: Library(PATH, isa) for isa in ISAS}
BEST = LIBRARIES[ISAS[-1]].implementation if LIBRARIES else ""
IMPLEMENTATIONS = {isa: library for isa, library in LIBRARIES.items() if library.implementation == isa}
IMPLEMENTATIONS["numpy"] = SimpleNamespace(
    measure=fallback.measure, measure_one=fallback.measure_one,
    count_below=fallback.count_below, add_channel_squares=fallback.add_channel_squares,
    fold_rows=fallback.fold_rows, merge_rows=fallback.merge_rows,
)  # fmt: skip

implementations = pytest.mark.parametrize("library", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
DTYPES = {"f32": native.F32, "f64": native.F64, "bf16": native.BF16, "f16": native.F16}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the elements as they lie in memory."""
    with np.errstate(over="ignore"):
        if dtype == "bf16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype({"f32": np.float32, "f64": np.float64, "f16": np.float16}[dtype])


def widened(memory: np.ndarray) -> np.ndarray:
    """Return the values of stored elements in float64."""
    if memory.dtype == np.uint16:
        with np.errstate(invalid="ignore"):
            return (memory.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return memory.astype(np.float64)


def reference(memory: np.ndarray, zero_eps: float = 0.0) -> dict[str, float]:
    """Return the statistics in two plain passes."""
    x = widened(memory)
    bits = memory.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[memory.itemsize])
    finite = x[np.isfinite(x)]
    mean = float(finite.mean()) if finite.size else 0.0
    d = finite - mean
    return {
        "count": finite.size,
        "mean": mean,
        "m2": float((d**2).sum()),
        "m3": float((d**3).sum()),
        "m4": float((d**4).sum()),
        "min": float(finite.min(initial=np.inf)),
        "max": float(finite.max(initial=-np.inf)),
        "num_nan": int(np.isnan(x).sum()),
        "num_pos_inf": int((x == np.inf).sum()),
        "num_neg_inf": int((x == -np.inf).sum()),
        "num_zero": int((np.abs(finite) <= zero_eps).sum()),
        "checksum": int(bits.sum(dtype=np.uint64)),
    }


def measured(library, memory: np.ndarray, dtype: str, zero_eps: float = 0.0, checksum: bool = True) -> np.void:
    out = np.zeros(1, STATS_DTYPE)
    library.measure_one(memory.ctypes.data, memory.size, DTYPES[dtype], out.ctypes.data, zero_eps, checksum)
    return out[0]


def assert_same(stats: np.void, expected: dict[str, float], rel: float = 1e-5) -> None:
    for name in ("count", "min", "max", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "checksum"):
        assert stats[name] == expected[name], name
    n = max(expected["count"], 1)
    if expected["min"] == expected["max"]:
        assert stats["mean"] == expected["min"]
        assert stats["m2"] == stats["m3"] == stats["m4"] == 0.0
        return
    std = (expected["m2"] / n) ** 0.5
    assert stats["mean"] == pytest.approx(expected["mean"], abs=1e-6 * std, rel=1e-14)
    assert stats["m2"] == pytest.approx(expected["m2"], rel=rel)
    assert stats["m3"] == pytest.approx(expected["m3"], rel=rel, abs=rel * (expected["m4"] / n) ** 0.75 * n)
    assert stats["m4"] == pytest.approx(expected["m4"], rel=rel)
    if n > 1:
        kurtosis = n * stats["m4"] / stats["m2"] ** 2
        assert kurtosis == pytest.approx(n * expected["m4"] / expected["m2"] ** 2, rel=1e-5)


@st.composite
def memories(draw) -> tuple[str, np.ndarray]:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    size = draw(st.one_of(st.integers(0, 70), st.integers(0, 9000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal(size) + draw(st.sampled_from([0.0, 1.0, -30.0, 1e3, 1e4]))
    if draw(st.booleans()):
        x = np.sign(x) * np.abs(x) ** draw(st.sampled_from([0.5, 2.0]))
    x *= 10.0 ** draw(st.integers(-4, 0) if dtype == "f16" else st.integers(-30, 30))
    if draw(st.booleans()):
        x[rng.random(size) < 0.3] = 0.0
    memory = stored(x, dtype)
    special = draw(st.sampled_from(["none", "some", "all"]))
    if special != "none" and size:
        bad = stored(np.array([np.nan, np.inf, -np.inf]), dtype)
        spots = slice(None) if special == "all" else rng.integers(0, size, draw(st.integers(1, 20)))
        memory[spots] = rng.choice(bad, memory[spots].shape)
    return dtype, memory


@implementations
@settings(max_examples=100, deadline=None)
@given(case=memories())
def test_measure_matches_two_pass_reference(library, case):
    dtype, memory = case

    assert_same(measured(library, memory, dtype), reference(memory))


@implementations
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
def test_denormals_are_measured(library, dtype):
    tiny = {"f32": 1e-41, "f64": 1e-60, "bf16": 1e-39, "f16": 1e-6}[dtype]
    memory = stored(np.random.default_rng(0).standard_normal(5000) * tiny, dtype)

    assert_same(measured(library, memory, dtype), reference(memory))


@implementations
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mean_over_std", [1e2, 1e3, 1e4])
def test_kurtosis_within_1e_5_far_from_zero(library, dtype, mean_over_std):
    memory = stored(np.random.default_rng(1).standard_normal(300_000) + mean_over_std, dtype)

    assert_same(measured(library, memory, dtype, checksum=False), reference(memory) | {"checksum": 0})


@implementations
@pytest.mark.parametrize(
    ("mean_over_std", "scale"), [(10.0, 1.0), (100.0, 1.0), (1e3, 1.0), (1e4, 1.0), (0.0, 1e-25), (1.0, 1e-25), (0.0, 1e12)]
)
def test_rows_of_the_field_notes(library, mean_over_std, scale):
    memory, expected = row_of_the_field_notes(mean_over_std, scale)

    assert_same(measured(library, memory, "f32"), expected)


@functools.cache
def row_of_the_field_notes(mean_over_std: float, scale: float) -> tuple[np.ndarray, dict[str, float]]:
    x = (np.random.default_rng(5).standard_normal(1_000_000) + mean_over_std) * scale
    memory = stored(x**2 / scale if scale == 1e-25 else x, "f32")
    return memory, reference(memory)


@st.composite
def stretches(draw) -> tuple[str, np.ndarray]:
    """Stretches of nothing alike: what was learned from one, or from a sample, misleads about the next."""
    dtype = draw(st.sampled_from(["f32", "f32", "bf16", "f64", "f16"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 500, 32_768, 40_000, 70_001]))
        mean = draw(st.sampled_from([0.0, 0.0, 1.0, -300.0, 1e4]))
        shape = draw(st.sampled_from(["normal", "constant", "ramp", "steps", "spikes", "zeros", "positive"]))
        part = {
            "normal": lambda n=size: rng.standard_normal(n),
            "constant": lambda n=size: np.full(n, 0.1),
            "ramp": lambda n=size: np.linspace(-3, 3, n),
            "steps": lambda n=size: np.repeat(rng.standard_normal(n // 500 + 1) * 100, 500)[:n],
            "spikes": lambda n=size: (rng.random(n) < 1e-3) * 100.0,
            "zeros": np.zeros,
            "positive": lambda n=size: rng.standard_normal(n) ** 2,
        }[shape]
        part = (part(size) if shape == "zeros" else part() + mean) * 10.0 ** draw(st.sampled_from([0, 0, -3, 2]))
        parts.append(part)
    x = np.concatenate(parts) * 10.0 ** (0 if dtype == "f16" else draw(st.sampled_from([0, -20, 12])))
    if draw(st.booleans()):
        x[:: x.size // 4 + 1] = 0.0
    memory = stored(x, dtype)
    for bad in draw(st.sets(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=2)):
        spots = slice(draw(st.integers(0, x.size - 1)), None, draw(st.sampled_from([1, 2, 5000, 10**9])))
        memory[spots] = stored(np.array([bad]), dtype)
    return dtype, memory


@implementations
@settings(max_examples=25, deadline=None)
@given(case=stretches())
def test_no_guess_misleads(library, case):
    dtype, memory = case

    assert_same(measured(library, memory, dtype), reference(memory))


@implementations
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
def test_checksum_of_every_size_and_of_extreme_patterns(library, dtype):
    """The sum is kept in parts, each modulo something: none may slip, whatever the patterns."""
    bits = {"f32": np.uint32, "f64": np.uint64, "bf16": np.uint16, "f16": np.uint16}[dtype]
    top = int(np.iinfo(bits).max)
    for pattern in ([0], [top], [0, top], [1], [top // 2 + 1], [top, top // 2]):
        words = np.resize(np.array(pattern, bits), 100_003)
        for size in (*range(70), 32_768, 100_003):
            memory = words[:size] if dtype in ("bf16",) else words[:size].view(stored(np.zeros(1), dtype).dtype)
            expected = int(words[:size].astype(np.uint64).sum(dtype=np.uint64))

            assert measured(library, memory, dtype)["checksum"] == expected


@implementations
def test_largest_finite_values_do_not_overflow(library):
    memory = np.full(10_000, np.finfo(np.float32).max, np.float32)
    memory[::2] *= -1

    assert_same(measured(library, memory, "f32"), reference(memory))


@implementations
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("zero_eps", [0.0, 1e-3, 0.1, 1e9])
def test_zero_eps_is_compared_exactly(library, dtype, zero_eps):
    near = np.float32(zero_eps) if zero_eps < 1e4 else 1.0
    values = np.concatenate([np.linspace(-0.2, 0.2, 4001), [0.0, -0.0, near, -near, np.nextafter(np.float32(near), 9)]])
    memory = stored(values, dtype)

    assert_same(measured(library, memory, dtype, zero_eps), reference(memory, zero_eps))


@implementations
def test_every_bit_pattern_of_the_half_types_is_read(library):
    bits = np.arange(2**16, dtype=np.uint16)

    for dtype, memory in (("bf16", bits), ("f16", bits.view(np.float16))):
        stats, expected = measured(library, memory, dtype), reference(memory)
        for name in ("count", "min", "max", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "checksum"):
            assert stats[name] == expected[name]
        assert stats["m2"] == pytest.approx(expected["m2"], rel=1e-6)


@implementations
def test_many_tensors_go_straight_into_rows(library):
    rng = np.random.default_rng(2)
    memories = [rng.standard_normal(size).astype(np.float32) for size in (0, 1, 31, 32, 33, 2047, 2048, 2049, 70_000)]
    rows = np.zeros(len(memories) + 2, ROW_DTYPE)
    rows["call_id"] = 7

    library.measure(
        np.array([m.ctypes.data for m in memories], np.uint64), np.array([m.size for m in memories]),
        np.zeros(len(memories), np.uint8), rows[1:-1], 0.0, True,
    )  # fmt: skip

    for row, memory in zip(rows[1:-1], memories, strict=True):
        assert_same(row, reference(memory))
        assert row["call_id"] == 7
    assert rows[0]["max"] == rows[-1]["max"] == 0.0


@implementations
def test_accumulate_merges_into_what_stands_there(library):
    memory = np.random.default_rng(3).standard_normal(10_000).astype(np.float32) + 5
    out = np.zeros(1, STATS_DTYPE)

    library.measure_one(memory.ctypes.data, 3000, native.F32, out.ctypes.data, 0.0, True)
    library.measure_one(memory[3000:].ctypes.data, 7000, native.F32, out.ctypes.data, 0.0, True, True)

    assert_same(out[0], reference(memory))


@pytest.mark.skipif(not LIBRARIES, reason="no compiler built the library")
def test_number_of_threads_changes_no_bit():
    memory = np.random.default_rng(4).standard_normal(3_000_000).astype(np.float32)
    out = np.zeros(3, STATS_DTYPE)

    for row, num_threads in enumerate((1, 2, 5)):
        LIBRARIES[ISAS[-1]].measure_one(
            memory.ctypes.data, memory.size, native.F32, out[row:].ctypes.data, 0.0, True, False, num_threads
        )

    assert out[0] == out[1] == out[2]


@implementations
def test_counts_exact_above_2_24(library):
    memory = np.zeros(2**24 + 3, np.uint16)
    memory[5:12] = stored(np.array([np.nan] * 5 + [1.0, 2.0]), "bf16")

    stats = measured(library, memory, "bf16", checksum=False)

    assert (stats["count"], stats["num_nan"], stats["num_zero"]) == (2**24 - 2, 5, 2**24 - 4)
    assert stats["mean"] * stats["count"] == pytest.approx(3.0, rel=1e-9)


@pytest.mark.skipif(not LIBRARIES, reason="numpy would take minutes")
def test_sizes_beyond_2_31():
    memory = np.zeros(2**31 + 5, np.uint16)  # never written: one page of zeros
    memory[-1:] = stored(np.array([np.inf]), "bf16")

    stats = measured(LIBRARIES[ISAS[-1]], memory, "bf16", checksum=False)

    assert (stats["count"], stats["num_pos_inf"], stats["num_zero"]) == (2**31 + 4, 1, 2**31 + 4)


@implementations
def test_unknown_dtype_code_is_refused(library):
    with pytest.raises(ValueError, match="unknown dtype code 99"):
        library.measure(np.zeros(1, np.uint64), np.zeros(1, np.int64), np.full(1, 99, np.uint8), np.zeros(1, STATS_DTYPE))


def test_layout_is_that_of_the_record():
    assert layout.STATS == STATS_DTYPE
    assert (ROW_DTYPE.itemsize, STATS_OFFSET) == (layout.ROW_BYTES, layout.ROW_STATS_OFFSET)


def test_implementation_says_what_runs():
    assert native.implementation == (BEST or "numpy")


@pytest.mark.skipif(not LIBRARIES, reason="no compiler built the library")
def test_a_library_of_other_sources_is_refused(monkeypatch):
    """Its functions would read other arguments than they are given."""
    Library(PATH)
    monkeypatch.setattr("sentinel.native.library._INTERFACE", -1)

    with pytest.raises(OSError, match="build it again"):
        Library(PATH)


def test_a_broken_library_is_refused(tmp_path):
    path = tmp_path / "_kernels.so"
    path.write_bytes(b"not a library")

    with pytest.raises(OSError):
        Library(path)
