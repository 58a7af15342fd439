"""One pass in C over the rows of a step against the same in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel import native
from sentinel.ingest.digest import digest, digest_in_numpy
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import Moments
from sentinel.place import Place
from sentinel.record import ROW_DTYPE, STATS_DTYPE
from sentinel.step_view import RankStep
from sentinel.version import VERSION

NUM_RANKS, NUM_TENSORS = 4, 30


def make_layout() -> ModelLayout:
    """Two data-parallel by two tensor-parallel ranks: copies, shards, summands, and what nobody may merge."""
    kinds = ("param", "wgrad", "activation", "dgrad")
    words = ("replicate", "shard", "partial", "unknown")
    tensors = tuple(
        TensorInfo(id=at + at // 10, name=f"t{at}", kind=kinds[at % 4], shape=(8,), placements={"tp": words[at // 4 % 4]})
        for at in range(NUM_TENSORS)
    )
    return ModelLayout(
        {
            rank: Descriptor(
                version=VERSION,
                place=Place(rank=rank, world_size=4, dp_rank=rank // 2, dp_size=2, tp_rank=rank % 2, tp_size=2),
                chunks=(ChunkInfo(vpp_stage=0, depth=0),), tensors=tensors, row_fields=(), row_bytes=ROW_DTYPE.itemsize,
            )
            for rank in range(NUM_RANKS)
        }
    )  # fmt: skip


def make_view(layout: ModelLayout, rng: np.random.Generator, step: int) -> ClosedStep:
    """Return rows in any order, some twice, some of unknown tensors, some without elements, some not finite."""
    parts = []
    for rank in range(NUM_RANKS):
        if rng.random() < 0.2:
            continue
        ids = rng.integers(0, NUM_TENSORS + 6, rng.integers(0, 60))
        rows = np.zeros(len(ids), ROW_DTYPE)
        rows["tensor"] = ids
        for row in rows:
            values = rng.standard_normal(rng.integers(0, 5)) * 10.0 ** rng.integers(-3, 4)
            if rng.random() < 0.1:
                values = np.append(values, [np.nan, np.inf, -np.inf][rng.integers(3)])
            for name in STATS_DTYPE.names:
                row[name] = Moments.of(values).stats[name][0]
        # Copies agree but for one in twenty.
        rows["checksum"] = ids + 1000 * (rng.random(len(ids)) < 0.05)
        if step % 2:
            rows = np.repeat(rows, 2)[::2]
        end = EndStep(step=step, num_rows=len(rows), num_calls=len(rows))
        parts.append(RankStep(rank=rank, descriptor=layout.descriptors[rank], rows=rows, end_step=end, time=float(step)))
    return ClosedStep(run="made", attempt=0, step=step, layout=layout, parts=parts)


@pytest.mark.slow
@pytest.mark.skipif(native.prepare_digest is None, reason="the C library was not built")
def test_c_and_numpy_make_the_same_of_a_step():
    layout, rng = make_layout(), np.random.default_rng(3)
    num_rows, num_bad, num_odd = 0, 0, 0
    for step in range(20):
        view = make_view(layout, rng, step)
        mine, expected = digest(view.parts, layout), digest_in_numpy(view.parts, layout)
        for name in ("present", "is_bad", "bad_rows", "odd_copies", "has_rows"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(expected, name), name)
        for name in STATS_DTYPE.names:
            np.testing.assert_allclose(mine.stats[name], expected.stats[name], rtol=1e-9, atol=1e-9, err_msg=name)
        num_rows, num_bad, num_odd = num_rows + view.num_rows, num_bad + len(mine.bad_rows), num_odd + len(mine.odd_copies)
    assert num_rows > 1000 and num_bad > 60 and num_odd > 15


def test_norms_are_scaled_for_missing_shards_alone():
    layout = make_layout()
    keys = [one.key for one in layout.tensors]
    share = dict(zip(keys, layout.held_share(frozenset({0, 2})), strict=True))

    assert share["t0/param"] == 1.0  # replicated over all: any rank has it whole
    assert share["t4/param"] == 0.5  # one of two tensor-parallel shards, twice
    assert share["t2/activation"] == 1.0  # of each data-parallel rank its own part; both are there
    assert share["t6/activation"] == 0.5
    assert dict(zip(keys, layout.held_share(frozenset({0})), strict=True))["t6/activation"] == 0.25
