"""Of copies that differ the minority is named; where there is none, all are and none for sure."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.detect import ReplicaDivergence

BIG = 2**64 - 1


@pytest.mark.parametrize(
    ("words", "accused", "is_sure"),
    [
        ([5, 5, 5], [], None),
        ([5, 6], [0, 1], False),
        ([5, 6, 5], [1], True),
        ([5, 5, 6, 6], [0, 1, 2, 3], False),
        ([5, 6, 7], [0, 1, 2], False),
        ([5, 5, 6, 7], [2, 3], True),
        ([5, 5, 5, 6, 6], [3, 4], True),
        ([BIG, BIG, BIG - 1], [2], True),
        ([0, 0, BIG], [2], True),
        ([7], [], None),
    ],
)
def test_the_minority_is_named(words, accused, is_sure):
    found = ReplicaDivergence().score({"checksum": np.array(words, np.uint64)}, np.zeros(len(words), np.int64), {})

    assert np.flatnonzero(found.score >= 1.0).tolist() == accused
    if accused:
        assert set(found.evidence["is_sure"][accused].tolist()) == {is_sure}
