"""Medians of small groups: the library gives what numpy gives, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel import native
from sentinel.detect.skew import medians_in_numpy


@pytest.mark.skipif(native.group_medians is None, reason="the C library was not built")
def test_medians_of_groups_are_numpys():
    rng = np.random.default_rng(0)
    for num in (1, 2, 7, 64, 600):
        group = rng.integers(0, max(num // 5, 1), num) * 2  # every other number stands for nobody
        values = np.where(rng.random(num) < 0.2, np.nan, np.round(rng.standard_normal(num), 1))
        values[rng.random(num) < 0.1] = np.inf
        for mine, expected in zip(native.group_medians(values, group), medians_in_numpy(values, group), strict=True):
            np.testing.assert_array_equal(mine, expected)
    # However many they are, and in whatever order.
    rising = np.arange(3001.0)
    orders = (rising, rising[::-1], np.abs(rising - 1500), rising % 7, 0 * rising, rng.permutation(rising), -(rising % 2))
    for values in orders:
        for group in (np.zeros(3001, np.int64), np.arange(3001) % 3, np.arange(3001) // 1000, np.arange(3001) // 25):
            for mine, expected in zip(native.group_medians(values, group), medians_in_numpy(values, group), strict=True):
                np.testing.assert_array_equal(mine, expected)
    with pytest.raises(ValueError, match="at least 0"):
        native.group_medians(np.zeros(2), np.array([0, -1]))
