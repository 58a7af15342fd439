"""Statistics that probes form themselves, against Moments.of in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sentinel.collect.probes.prepared_rows import device_shares, moments_words, share_words
from sentinel.moments import Moments
from sentinel.record import STATS_DTYPE

from ...support.truth import assert_row_of


def stats(words: torch.Tensor) -> np.ndarray:
    return words.numpy().view(STATS_DTYPE).reshape(-1)


@pytest.mark.parametrize(("hits", "total"), [(0, 7), (3, 7), (7, 7), (0, 0), (1, 2**40)])
def test_a_share_is_the_mean_of_ones_and_zeros(hits: int, total: int) -> None:
    (row,) = stats(share_words(torch.tensor([hits]), total))
    (other,) = stats(device_shares(torch.tensor([hits]), torch.tensor(total)))

    assert row == other
    if total < 100:
        assert_row_of(row, np.array([1.0] * hits + [0.0] * (total - hits)))
    else:
        assert (row["count"], row["num_zero"], row["min"], row["max"]) == (total, total - 1, 0.0, 1.0)
        assert row["mean"] == hits / total


def test_shares_of_uneven_shards_merge_to_the_share_of_the_whole() -> None:
    parts = stats(share_words(torch.tensor([3]), 10)), stats(share_words(torch.tensor([90]), 1000))

    merged = Moments(parts[0]).merge(Moments(parts[1]))

    assert_row_of(merged.stats[0], np.array([1.0] * 93 + [0.0] * 917))


def test_moments_of_the_elements_that_count() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(501, generator=generator) + 30.0
    values[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    counts = torch.rand(501, generator=generator) > 0.3
    counts[:4] = True

    assert_row_of(stats(moments_words(values, counts))[0], values[counts], rel=1e-6)
    assert_row_of(stats(moments_words(values))[0], values, rel=1e-6)
    for nothing in (moments_words(torch.empty(0)), moments_words(values, torch.zeros(501, dtype=torch.bool))):
        assert_row_of(stats(nothing)[0], np.empty(0))
