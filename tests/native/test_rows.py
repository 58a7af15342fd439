"""Folding and merging rows: every implementation against Moments, one row after the other."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.moments import Moments
from sentinel.native import fallback
from sentinel.native.library import Library, find_library
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, Flag, Kind

PATH = find_library()
IMPLEMENTATIONS = {"numpy": fallback} if PATH is None else {"c": Library(PATH), "numpy": fallback}
implementations = pytest.mark.parametrize("library", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())


def rows_of(observations) -> np.ndarray:
    """observations: (tensor, kind, micro_step, values); call_ids count up."""
    rows = np.zeros(len(observations), ROW_DTYPE)
    for call_id, (row, (tensor, kind, micro_step, values)) in enumerate(zip(rows, observations, strict=True)):
        for name in STATS_DTYPE.names:
            row[name] = Moments.of(values).stats[name][0]
        row["tensor"], row["kind"], row["micro_step"], row["call_id"] = tensor, kind, micro_step, call_id
        row["site_pos"], row["num_folded"] = tensor, 1
        row["bad_call_id"] = row["max_call_id"] = NONE_ID
        row["bad_micro_step"] = row["max_micro_step"] = -1
    return rows


def assert_close(stats: np.ndarray, expected: np.ndarray) -> None:
    for name in ("count", "min", "max", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "checksum"):
        np.testing.assert_array_equal(stats[name], expected[name], name)
    size = np.sqrt(np.maximum(expected["m2"], 0) / np.maximum(expected["count"], 1)) + 1e-12
    np.testing.assert_allclose(stats["mean"], expected["mean"], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(stats["m2"], expected["m2"], rtol=1e-10, atol=1e-20)
    np.testing.assert_allclose(stats["m3"] / size**3, expected["m3"] / size**3, rtol=1e-8, atol=1e-6)
    np.testing.assert_allclose(stats["m4"], expected["m4"], rtol=1e-10, atol=1e-20)


@implementations
def test_fold_keeps_one_row_per_tensor_and_kind_in_order_of_appearance(library):
    rng = np.random.default_rng(0)
    observations = [(t, k, m, rng.standard_normal(50) * (t + m + 1)) for m in range(3) for t in (4, 2) for k in (5, 4)]
    rows = rows_of(observations)

    left = library.fold_rows(rows, len(rows))

    assert left == 4
    folded = rows[:left]
    assert list(zip(folded["tensor"], folded["kind"], strict=True)) == [(4, 5), (4, 4), (2, 5), (2, 4)]
    assert list(folded["call_id"]) == [0, 1, 2, 3]
    assert (folded["micro_step"] == -1).all() and (folded["num_folded"] == 3).all()
    assert (folded["flags"] == Flag.FOLDED).all()
    for row in folded:
        whole = np.concatenate([v for t, k, _, v in observations if (t, k) == (row["tensor"], row["kind"])])
        assert_close(np.array([tuple(row[n] for n in STATS_DTYPE.names)], STATS_DTYPE), Moments.of(whole).stats)


@implementations
def test_fold_points_at_first_non_finite_and_at_largest(library):
    rows = rows_of([
        (1, 4, 0, [1.0, 2.0]),
        (1, 4, 1, [np.nan, 1.0]),
        (1, 4, 2, [-9.0, np.inf]),
        (1, 4, 3, [9.0, 0.0]),
    ])  # fmt: skip

    assert library.fold_rows(rows, 4) == 1

    row = rows[0]
    assert (row["bad_call_id"], row["bad_micro_step"]) == (1, 1)
    assert (row["max_call_id"], row["max_micro_step"]) == (2, 2)


@implementations
def test_rows_of_no_micro_step_are_not_folded(library):
    rows = rows_of([(1, Kind.PARAM, -1, [1.0]), (1, Kind.WGRAD, -1, [2.0]), (1, Kind.PARAM, -1, [3.0]), (2, 4, 0, [4.0])])

    assert library.fold_rows(rows, 4) == 4

    assert list(rows["mean"]) == [1.0, 2.0, 3.0, 4.0]
    assert list(rows["micro_step"]) == [-1, -1, -1, 0]
    assert not rows["flags"].any()


@implementations
def test_a_folded_row_folds_again(library):
    observations = [(1, 4, m, [float(m), m + 0.5]) for m in range(5)]
    rows, half = rows_of(observations), rows_of(observations)

    library.fold_rows(rows, 5)
    kept = library.fold_rows(half, 3)
    half[kept : kept + 2] = rows_of(observations)[3:]
    library.fold_rows(half, kept + 2)

    assert half[0]["num_folded"] == 5
    for name in ROW_DTYPE.names:
        assert half[0][name] == pytest.approx(rows[0][name], rel=1e-12)


@implementations
def test_folding_nothing_is_nothing(library):
    assert library.fold_rows(np.zeros(3, ROW_DTYPE), 0) == 0


@implementations
def test_fold_refuses_what_is_not_rows(library):
    with pytest.raises(TypeError, match="136 bytes"):
        library.fold_rows(np.zeros(3, STATS_DTYPE), 3)
    with pytest.raises(ValueError, match="num_rows"):
        library.fold_rows(np.zeros(3, ROW_DTYPE), 4)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(0, 60), num_groups=st.integers(1, 6), offset=st.sampled_from([0.0, 1e4]))
def test_all_merges_agree(seed, num, num_groups, offset):
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal(rng.integers(0, 40)) * rng.uniform(0.1, 10) + offset for _ in range(num)]
    rows = rows_of([(0, 4, 0, part) for part in parts])
    group = rng.integers(-1, num_groups, num).astype(np.int32)

    expected = np.concatenate([
        Moments.of(np.concatenate([[], *(p for p, at in zip(parts, group, strict=True) if at == g)])).stats
        for g in range(num_groups)
    ])  # fmt: skip

    for library in IMPLEMENTATIONS.values():
        assert_close(library.merge_rows(rows, group, num_groups), expected)
    assert_close(Moments.merge_groups(rows, group, num_groups).stats, expected)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(0, 40))
def test_all_folds_agree(seed, num):
    rng = np.random.default_rng(seed)
    choices = np.array([np.nan, np.inf, -np.inf, *range(-3, 4)])
    observations = [
        (rng.integers(3), 4 + rng.integers(2), rng.integers(-1, 3), rng.choice(choices, rng.integers(4))) for _ in range(num)
    ]
    results = []
    for library in IMPLEMENTATIONS.values():
        rows = rows_of(observations)
        results.append(rows[: library.fold_rows(rows, num)])

    for result in results[1:]:
        assert len(result) == len(results[0])
        for name in ROW_DTYPE.names:
            np.testing.assert_allclose(result[name], results[0][name], rtol=1e-9, atol=1e-9, err_msg=name)


@implementations
def test_rows_name_their_own_observation_where_they_name_none(library):
    rows = rows_of([(0, 4, 1, [1.0, np.nan]), (1, 4, 0, [2.0, -3.0]), (2, 4, 0, []), (3, 4, 2, [np.inf, 5.0])])
    rows["call_id"], rows["num_folded"][1] = [10, 11, 12, 13], 0
    rows["max_call_id"][3], rows["max_micro_step"][3] = 7, 1
    untouched = rows[3:].copy()

    library.point_at_own(rows, 3)

    assert rows["num_folded"][:3].tolist() == [1, 1, 1]
    assert rows["bad_call_id"][:3].tolist() == [10, NONE_ID, NONE_ID]
    assert rows["bad_micro_step"][:3].tolist() == [1, -1, -1]
    assert rows["max_call_id"][:3].tolist() == [10, 11, NONE_ID]
    assert rows[3:].tobytes() == untouched.tobytes()
    library.point_at_own(rows, 4)
    assert (rows["bad_call_id"][3], rows["max_call_id"][3], rows["max_micro_step"][3]) == (13, 7, 1)


@implementations
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_hold_anything_not_finite_are_noticed(library, bad):
    rows = rows_of([(0, 4, 0, [1.0]), (1, 4, 0, [1.0, bad]), (2, 4, 0, [])])

    assert not library.has_nonfinite(rows, 0)
    assert not library.has_nonfinite(rows, 1)
    assert library.has_nonfinite(rows, 2)
    with pytest.raises(ValueError, match=r"num_rows must be in \[0, 3\], got 4"):
        library.has_nonfinite(rows, 4)


@implementations
def test_merge_refuses_a_group_out_of_range(library):
    with pytest.raises(ValueError, match="below num_groups 2"):
        library.merge_rows(np.zeros(1, STATS_DTYPE), np.array([2]), 2)


@pytest.mark.skipif(PATH is None, reason="the C library was not built")
def test_crc32_is_zlibs():
    library = Library(PATH)
    data = np.random.default_rng(0).bytes(5000)
    for size in (*range(200), 1000, 4097, 4990):
        for value in (0, 0xDEADBEEF):
            expected = zlib.crc32(data[3 : 3 + size], value)
            for one in (data, bytearray(data), memoryview(data)):
                assert library.crc32(one, value, 3, 3 + size) == expected == fallback.crc32(one, value, 3, 3 + size)
    assert library.crc32(data) == zlib.crc32(data)
