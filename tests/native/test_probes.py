"""Counts below bounds, and squares of channels, against the obvious."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.native import fallback, layout
from tests.native.test_measure import DTYPES, implementations, memories, stored, widened
from tests.native.test_strided import FP8, INTEGERS, integers, views

TINY = 5e-324
BOUNDS = [0.0, -1.0, np.nan, TINY, 2.0**-24, 6.1e-5, 2.0**-126, 0.1, 1.0, 448.0, np.nextafter(65504.0, 1e9), 3e38, np.inf]


def below(x: np.ndarray, bounds: list[float]) -> list[int]:
    with np.errstate(invalid="ignore"):
        return [int(np.count_nonzero(np.abs(x) < bound)) for bound in bounds]


@implementations
@settings(max_examples=60, deadline=None)
@given(case=memories(), own=st.lists(st.floats(0, 1e35), max_size=3))
def test_counts_below_bounds(library, case, own):
    dtype, memory = case
    x = widened(memory)
    bounds = [*BOUNDS, *own, *np.abs(x[:3])]  # bounds that are elements: not below themselves

    found = library.count_below(memory.ctypes.data, memory.size, DTYPES[dtype], bounds)

    assert found.tolist() == below(x, bounds)


@implementations
def test_every_half_is_counted(library):
    bits = np.arange(2**16, dtype=np.uint16)
    for dtype, memory in (("bf16", bits), ("f16", bits.view(np.float16))):
        bounds = [*BOUNDS, *np.abs(widened(memory[0x3C00:0x3C20:7]).astype(float)), 0.300001, 65519.0]

        found = library.count_below(memory.ctypes.data, memory.size, DTYPES[dtype], bounds)

        assert found.tolist() == below(widened(memory), bounds)


@implementations
@settings(max_examples=30, deadline=None)
@given(view=views(integers))
def test_counts_of_views_of_integers(library, view):
    strides = [stride // view.itemsize for stride in view.strides]
    bounds = [TINY, 2.0, 100.0, np.inf]

    found = library.count_below(view.ctypes.data, view.size, INTEGERS[view.dtype], bounds, view.shape, strides)

    assert found.tolist() == below(view.astype(np.float64), bounds)


@implementations
def test_counts_of_fp8_and_of_broadcasts(library):
    every = np.arange(256, dtype=np.uint8)
    for code in FP8:
        found = library.count_below(every.ctypes.data, 256, code, BOUNDS, (4, 256), (0, 1))

        assert found.tolist() == [4 * n for n in below(fallback.fp8_values(code).astype(np.float64), BOUNDS)]


@implementations
def test_shares_lost_by_a_format_follow_from_counts(library):
    """fp16: what is not zero vanishes below half its smallest number, what is finite overflows from 65520 on."""
    x = np.array([0.0, -0.0, 1e-9, 2.0**-25, 2.0**-24, 1.0, -65504.0, 65519.0, 65520.0, -1e30, np.inf, np.nan], np.float32)

    zeros, small, fitting, finite = library.count_below(x.ctypes.data, x.size, layout.F32, [TINY, 2.0**-25, 65520.0, np.inf])

    assert (small - zeros, finite - fitting) == (1, 2)


@implementations
@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from(sorted(DTYPES)), rows=st.integers(0, 40), channels=st.sampled_from([0, 1, 5, 33, 300, 5000]),
    gap=st.sampled_from([0, 0, 3]), scale=st.integers(-30, 30), seed=st.integers(0, 2**32), bad=st.booleans(),
)  # fmt: skip
def test_squares_of_channels(library, dtype, rows, channels, gap, scale, seed, bad):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, channels + gap)) * 10.0 ** (0 if dtype == "f16" else scale)
    if bad and x.size:
        x[rng.random(x.shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
    memory = stored(x, dtype)
    values = widened(memory)[:, :channels]
    sums = np.full(channels, 2.5)

    library.add_channel_squares(memory.ctypes.data, rows, channels, DTYPES[dtype], sums, channels + gap)

    np.testing.assert_allclose(sums, 2.5 + (np.where(np.isfinite(values), values, 0.0) ** 2).sum(axis=0), rtol=1e-12)


@implementations
def test_wrong_arguments_of_probes_are_refused(library):
    x = np.ones(4, np.float32)

    with pytest.raises(ValueError, match="64 bounds"):
        library.count_below(x.ctypes.data, 4, layout.F32, np.ones(65))
    with pytest.raises(ValueError, match="unknown dtype code 99"):
        library.count_below(x.ctypes.data, 4, 99, [1.0])
    with pytest.raises(ValueError, match="of a float, got 8"):
        library.add_channel_squares(x.ctypes.data, 2, 2, layout.I32, np.zeros(2))
    for sums in (np.zeros(3), np.zeros(2, np.float32), np.zeros(4)[::2]):
        with pytest.raises(ValueError, match=r"\[2\] float64"):
            library.add_channel_squares(x.ctypes.data, 2, 2, layout.F32, sums)
