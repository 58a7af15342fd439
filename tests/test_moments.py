"""Moments against slow, obvious arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.errors import UndefinedStatistic
from sentinel.moments import Moments
from sentinel.record import ROW_DTYPE, STATISTICS, STATS_DTYPE


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def obvious(x: np.ndarray) -> dict[str, float]:
    """Every statistic of STATISTICS, the slow way."""
    finite = [float(v) for v in x if math.isfinite(v)]
    n = len(finite)
    nan = math.nan
    if n == 0:
        found = dict.fromkeys(STATISTICS, nan)
        found["norm"] = 0.0 if len(x) == 0 else nan
    else:
        mean = math.fsum(finite) / n
        power = {k: math.fsum((v - mean) ** k for v in finite) / n for k in (2, 3, 4)}
        is_varied = n > 1 and min(finite) < max(finite)
        square = math.fsum(v * v for v in finite)
        found = {
            "mean": mean,
            "std": math.sqrt(power[2]),
            "var": power[2],
            "norm": math.sqrt(square),
            "rms": math.sqrt(square / n),
            "min": min(finite),
            "max": max(finite),
            "absmax": max(abs(v) for v in finite),
            "skew": power[3] / power[2] ** 1.5 if is_varied else nan,
            "kurtosis": power[4] / power[2] ** 2 if is_varied else nan,
        }
    found["nans"] = sum(math.isnan(v) for v in x)
    found["infs"] = sum(math.isinf(v) for v in x)
    found["zeros"] = sum(v == 0 for v in x) / len(x) if len(x) else nan
    return found


CASES = {
    "gaussian": np.random.default_rng(1).standard_normal(1000),
    "far from zero": np.random.default_rng(2).standard_normal(1000) + 1e4,
    "tiny": np.random.default_rng(3).standard_normal(1000) * 1e-30,
    "huge": np.random.default_rng(4).standard_normal(1000) * 1e30,
    "skewed": np.random.default_rng(5).exponential(size=1000),
    "sparse": np.where(np.random.default_rng(6).random(500) < 0.9, 0.0, 3.0),
    "constant": np.full(7, -2.5),
    "one element": np.array([4.0]),
    "two elements": np.array([1.0, 2.0]),
    "nothing": np.array([]),
    "only NaN": np.array([np.nan, np.nan]),
    "some of all": np.array([1.0, np.nan, -2.0, np.inf, 0.0, -np.inf, -np.inf, 5.0]),
}


@pytest.mark.parametrize("x", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", STATISTICS)
def test_statistic_is_the_obvious_one(name, x):
    expected = obvious(x)[name]

    (value,) = Moments.of(x).statistic(name)

    assert value == pytest.approx(expected, rel=1e-9, abs=1e-9 if name == "skew" else 0.0, nan_ok=True)


@pytest.mark.parametrize("mean_over_std", [0.0, 10.0, 1e4])
def test_kurtosis_of_merged_shards_matches_two_pass(mean_over_std, rng):
    x = rng.standard_normal(10_000) + mean_over_std
    centered = x - x.mean()

    merged = Moments.of(x[:3_000]).merge(Moments.of(x[3_000:]))

    assert merged.kurtosis() == pytest.approx((centered**4).mean() / (centered**2).mean() ** 2, rel=1e-6)


def test_gaussian_has_kurtosis_3_and_no_skew(rng):
    moments = Moments.of(rng.standard_normal(1_000_000))

    assert moments.kurtosis() == pytest.approx(3.0, abs=0.02)
    assert moments.skew() == pytest.approx(0.0, abs=0.01)


def test_shards_merge_to_the_whole(rng):
    shards = [rng.standard_normal(size) * spread + mean for size, spread, mean in [
        (100, 1.0, -50.0), (0, 1.0, 0.0), (7, 30.0, 400.0), (1, 1.0, 9e3), (0, 1.0, 0.0), (5000, 0.01, 3.0),
    ]]  # fmt: skip
    whole = np.concatenate(shards)
    expected = Moments.of(whole)

    merged = Moments.empty(1)
    for shard in shards:
        merged = merged.merge(Moments.of(shard))
    backwards = Moments.empty(1)
    for shard in reversed(shards):
        backwards = Moments.of(shard).merge(backwards)
    stats = np.concatenate([Moments.of(shard).stats for shard in shards])
    grouped = Moments.merge_groups(stats, np.zeros(len(shards), int), 1)

    for moments in (merged, backwards, grouped):
        assert moments.stats["count"] == len(whole)
        for name in STATISTICS:
            assert moments.statistic(name) == pytest.approx(expected.statistic(name), rel=1e-9), name


def test_merge_is_exact_against_rationals():
    a, b = [1, 2, 4, 7], [100, 103]
    whole = [Fraction(v) for v in a + b]
    mean = sum(whole) / len(whole)

    merged = Moments.of(a).merge(Moments.of(b)).stats[0]

    assert merged["mean"] == pytest.approx(float(mean), rel=1e-15)
    for name, power in (("m2", 2), ("m3", 3), ("m4", 4)):
        assert merged[name] == pytest.approx(float(sum((v - mean) ** power for v in whole)), rel=1e-13)


def test_merge_of_nothing_changes_nothing(rng):
    one = Moments.of([1.0, np.nan, 5.0])

    for merged in (one.merge(Moments.empty(1)), Moments.empty(1).merge(one)):
        np.testing.assert_array_equal(merged.stats, one.stats)


def test_counts_exact_above_2_24():
    stats = Moments.empty(2).stats
    stats["count"] = [2**24 + 1, 2**53 + 2**54]
    stats["num_zero"], stats["num_nan"] = stats["count"], 2**25 + 1
    stats["min"] = stats["max"] = 0.0

    doubled = Moments(stats).merge(Moments(stats))
    grouped = Moments.merge_groups(stats, np.array([0, 0]), 1)

    assert list(doubled.stats["count"]) == [2**25 + 2, 2**54 + 2**55]
    assert grouped.stats["count"] == 2**24 + 1 + 2**53 + 2**54
    assert grouped.stats["num_nan"] == 2**26 + 2


def test_checksums_add_modulo_2_64():
    stats = Moments.empty(2).stats
    stats["checksum"] = [2**64 - 1, 5]

    assert Moments.merge_groups(stats, np.array([0, 0]), 1).stats["checksum"] == 4
    assert Moments(stats[:1]).merge(Moments(stats[1:])).stats["checksum"] == 4


def test_merge_groups_leaves_out_negative_groups_and_fills_missing_ones():
    stats = np.concatenate([Moments.of([v]).stats for v in (1.0, 2.0, 3.0)])

    merged = Moments.merge_groups(stats, np.array([2, -1, 2]), 4)

    assert list(merged.stats["count"]) == [0, 0, 2, 0]
    assert merged.mean()[2] == 2.0
    assert np.isnan(merged.mean()[[0, 1, 3]]).all()
    assert list(merged.norm()[[0, 1, 3]]) == [0.0, 0.0, 0.0]


@settings(max_examples=80, deadline=None)
@given(
    scale=st.integers(-30, 30), mean_over_std=st.sampled_from([0.0, 10.0, 1e4]), seed=st.integers(0, 2**32),
    cuts=st.lists(st.integers(0, 400), max_size=5),
)  # fmt: skip
def test_any_cut_gives_the_same_statistics(scale, mean_over_std, seed, cuts):
    x = (np.random.default_rng(seed).standard_normal(400) + mean_over_std) * 10.0**scale
    expected = obvious(x)

    merged = Moments.empty(1)
    for shard in np.split(x, sorted(cuts)):
        merged = merged.merge(Moments.of(shard))

    for name in STATISTICS:
        tolerance = {"abs": 1e-6} if name == "skew" else {"rel": 1e-7, "abs": 0.0}
        assert merged.statistic(name)[0] == pytest.approx(expected[name], **tolerance), name


def test_scales_from_1e_30_to_1e30_do_not_overflow(rng):
    x = rng.standard_normal(1000)
    expected = obvious(x)

    for scale in 10.0 ** np.arange(-30, 31, 5):
        moments = Moments.of(x * scale)
        assert moments.kurtosis() == pytest.approx(expected["kurtosis"], rel=1e-12)
        assert moments.skew() == pytest.approx(expected["skew"], rel=1e-9)
        assert moments.norm() == pytest.approx(expected["norm"] * scale, rel=1e-12)


def test_what_float64_cannot_hold_is_nan_and_no_number():
    assert np.isnan(Moments.of([0.0, 1e200]).kurtosis())
    assert np.isnan(Moments.of([0.0, 1e-100]).kurtosis())


def test_raw_moments_are_sums_about_zero(rng):
    x = rng.standard_normal(100) + 2

    raw = Moments.of(x).raw_moments()

    assert raw["count"] == 100
    for power in (1, 2, 3, 4):
        assert raw[f"s{power}"] == pytest.approx((x**power).sum(), rel=1e-12)


def test_from_rows_copies(rng):
    rows = np.zeros(3, ROW_DTYPE)
    rows["count"], rows["mean"] = 2, 7.0

    moments = Moments.from_rows(rows)
    rows["mean"] = 0.0

    assert moments.stats.dtype == STATS_DTYPE
    assert list(moments.mean()) == [7.0] * 3
    assert len(moments[1:]) == 2


def test_every_statistic_is_float64_per_row():
    moments = Moments.empty(5)

    for name in STATISTICS:
        assert moments.statistic(name).shape == (5,)
        assert moments.statistic(name).dtype == np.float64


def test_unknown_statistic_names_the_nearest():
    with pytest.raises(UndefinedStatistic, match='unknown statistic "kurtosys"; did you mean "kurtosis"'):
        Moments.empty(1).statistic("kurtosys")
