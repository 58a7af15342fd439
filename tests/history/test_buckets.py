"""Buckets of steps against a slow reading of every step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sentinel.history.buckets import buckets_of, merged
from sentinel.history.table_schemas import STATISTICS, WIDTHS, Columns, in_order, rounded


def rows_of(rng: np.random.Generator, num_series: int, num_steps: int) -> Columns:
    """Return moments rows with holes, NaN elements, undefined statistics and two attempts."""
    series, step = (one.ravel() for one in np.meshgrid(np.arange(1, num_series + 1), np.arange(num_steps)))
    rows: Columns = {
        "series": series.astype(np.int32),
        "attempt": (step >= num_steps // 2).astype(np.int32),
        "step": step.astype(np.int64),
        "nans": rng.integers(0, 2, len(step)) * rng.integers(0, 5, len(step)),
        "pos_infs": rng.integers(0, 10, len(step)) // 9,
        "neg_infs": rng.integers(0, 10, len(step)) // 9,
    }
    for name in STATISTICS:
        values = rng.standard_normal(len(step)) * 10.0 ** rng.integers(-30, 30, len(step))
        rows[name] = np.where(rng.random(len(step)) < 0.3, np.nan, values)
    kept = rng.random(len(step)) < 0.8
    return in_order("moments", {name: values[kept] for name, values in rows.items()})


def slowly(rows: Columns, width: int) -> dict[tuple[int, int, int], dict[str, float]]:
    found: dict[tuple[int, int, int], list[dict[str, float]]] = {}
    for at in range(len(rows["step"])):
        row = {name: values[at].item() for name, values in rows.items()}
        found.setdefault((row["series"], row["attempt"], row["step"] // width * width), []).append(row)
    buckets = {}
    for key, members in found.items():
        bucket: dict[str, float] = {
            "last_step": max(one["step"] for one in members),
            "num_steps": len(members),
            "nans": sum(one["nans"] for one in members),
            "infs": sum(one["pos_infs"] + one["neg_infs"] for one in members),
            "bad_steps": sum(one["nans"] + one["pos_infs"] + one["neg_infs"] > 0 for one in members),
        }
        for name in STATISTICS:
            values = [one[name] for one in members if not math.isnan(one[name])]
            bucket[f"{name}_num"] = len(values)
            for of, value in (
                ("min", min(values, default=math.nan)), ("max", max(values, default=math.nan)),
                ("last", values[-1] if values else math.nan),
                ("avg", math.fsum(values) / len(values) if values else math.nan),
            ):  # fmt: skip
                bucket[f"{name}_{of}"] = value
        buckets[key] = bucket
    return buckets


def as_mapping(buckets: Columns) -> dict[tuple[int, int, int], dict[str, float]]:
    rows = [
        dict(zip(buckets, one, strict=True)) for one in zip(*(values.tolist() for values in buckets.values()), strict=True)
    ]
    return {(one.pop("series"), one.pop("attempt"), one.pop("step")): one for one in rows}


@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_those_of_a_slow_reading_at_every_width(seed: int) -> None:
    rows = rows_of(np.random.default_rng(seed), 3, 700)
    parts = buckets_of(rows, WIDTHS[0])

    for width in WIDTHS:
        parts = merged(parts, width)
        found, expected = as_mapping(parts), slowly(rows, width)
        assert found.keys() == expected.keys()
        for key, bucket in expected.items():
            scale = max(abs(bucket[f"{name}_{of}"]) for name in STATISTICS for of in ("min", "max") if bucket[f"{name}_num"])
            for name, value in bucket.items():
                near = pytest.approx(value, rel=1e-9, abs=1e-12 * scale, nan_ok=True) if name.endswith("_avg") else value
                assert found[key][name] == near or (math.isnan(value) and math.isnan(found[key][name])), (key, name)


def test_a_spike_and_a_nan_of_one_step_are_seen_at_every_width() -> None:
    step = np.arange(10_000)
    rows: Columns = {
        "series": np.ones(len(step), np.int32), "attempt": np.zeros(len(step), np.int32), "step": step,
        **{name: np.zeros(len(step), np.int64) for name in ("nans", "pos_infs", "neg_infs")},
        **{name: np.ones(len(step)) for name in STATISTICS},
    }  # fmt: skip
    rows["max"][5003], rows["min"][5004], rows["nans"][7000] = 1e6, -1e6, 1

    for width in WIDTHS:
        found = buckets_of(rows, width)
        assert found["max_max"][5003 // width] == 1e6 and found["min_min"][5004 // width] == -1e6
        assert found["bad_steps"][7000 // width] == found["nans"][7000 // width] == 1
        assert found["bad_steps"].sum() == 1 and (found["max_max"] > 1).sum() == (found["min_min"] < 1).sum() == 1


def test_no_rows_have_no_buckets() -> None:
    rows = rows_of(np.random.default_rng(0), 1, 0)

    assert all(len(values) == 0 for values in merged(buckets_of(rows, 16), 256).values())


def test_values_are_kept_to_24_binary_digits_in_the_range_of_float64() -> None:
    values = np.array([1.0, -0.1, 1e-300, 1e300, np.pi, np.inf, -np.inf, 0.0, np.nan, np.finfo(np.float64).max])

    kept = rounded(values)

    finite = np.isfinite(values)
    assert (np.abs(kept[finite] - values[finite]) <= 2.0**-24 * np.abs(values[finite])).all()
    np.testing.assert_array_equal(kept[~finite], values[~finite])
