"""Rows merged machine by machine: what a machine comes to by itself, and how that becomes the tensors of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel import native
from sentinel.decision import Decision
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.node_share import NodeShare, by_machine
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import Moments
from sentinel.place import Place
from sentinel.record import ROW_DTYPE, STATS_DTYPE
from sentinel.step_view import RankStep
from sentinel.version import VERSION

from ..support.closed_steps import closed_steps
from ..support.serving import small_run

BY_MACHINE = Decision(seq=1, run="made", attempt=0, step=0, ranks=(), is_by_machine=True)
PARTS = ("", "0:8", "8:16", "0:4", "4:8", "12:16")
"""Pieces of a tensor of 16: those that several ranks hold are copies; some are cut otherwise than others."""
LAYOUTS = {
    "dp4": {"pp": 1, "dp": 4, "layers": 2},
    "tp2 dp2": {"pp": 1, "dp": 2, "tp": 2, "layers": 2},
    "pp4": {"pp": 4, "dp": 1},
    "pp2 dp2, numbered otherwise": {"shuffle": True},
    "pp2 dp2, micro-steps": {"per_micro_step": True},
}


def moved(view: ClosedStep, machines: Sequence[int], decision: Decision | None = BY_MACHINE) -> ClosedStep:
    """Return a step as if its ranks were on these machines. machines: by rank."""
    parts = []
    for part in view.parts:
        where = {**part.descriptor.environment, "host": f"machine{machines[part.rank]}"}
        parts.append(msgspec.structs.replace(part, descriptor=msgspec.structs.replace(part.descriptor, environment=where)))
    layout = ModelLayout({**view.layout.descriptors, **{part.rank: part.descriptor for part in parts}})
    return ClosedStep(run=view.run, attempt=0, step=view.step, layout=layout, parts=parts, decision=decision)


def one_by_one(view: ClosedStep) -> np.ndarray:
    """Return the statistics of each tensor in the obvious way: machine by machine, row by row."""
    found = Moments.empty(len(view.tensors)).stats
    flat = ClosedStep(run=view.run, attempt=0, step=view.step, layout=view.layout, parts=view.parts).stats
    for tensor in view.tensors:
        if tensor.is_partial:
            continue
        sums: dict[frozenset[int], np.ndarray] = {}
        for parts in by_machine(view.parts):
            first: dict[int, int] = {}
            rows = []
            for part in parts:
                logical = view.layout.logical_of(part.rank, part.rows["tensor"])
                copies = view.layout.copies_of(part.rank, part.rows["tensor"])
                for row in np.flatnonzero(logical == tensor.index).tolist():
                    if first.setdefault(int(copies[row]), part.rank) == part.rank:
                        rows.append(part.rows[row])
            if rows and frozenset(first) not in sums:
                sums[frozenset(first)] = merged(np.array(rows, ROW_DTYPE))
        if sum(map(len, sums)) != len(frozenset().union(*sums)):
            found[tensor.index] = flat[tensor.index]
        elif sums:
            found[tensor.index] = (
                merged(np.concatenate(list(sums.values()))) if len(sums) > 1 else next(iter(sums.values()))[0]
            )
    return found


def merged(rows: np.ndarray) -> np.ndarray:
    return native.merge_rows(rows, np.zeros(len(rows), np.int32), 1)


def alone(view: ClosedStep, parts: Sequence[RankStep]) -> NodeShare:
    """Return the share of a machine that knows its own ranks alone."""
    return NodeShare(ModelLayout({part.rank: part.descriptor for part in parts}), [part.rank for part in parts])


def assert_same(one: np.ndarray, other: np.ndarray) -> None:
    assert [name for name in STATS_DTYPE.names or () if one[name].tobytes() != other[name].tobytes()] == []


def assert_merged_alike(view: ClosedStep) -> None:
    """Hold a step against the obvious way, and the sums of each machine against those that it makes by itself."""
    assert_same(view.stats, one_by_one(view))
    for parts in by_machine(view.parts):
        mine, its = view.layout.share_of(tuple(part.rank for part in parts)), alone(view, parts)
        assert mine.key == its.key
        for one, other in zip(mine.sums(parts), its.sums(parts), strict=True):
            assert one.tobytes() == other.tobytes()
        assert mine.marks(parts).tobytes() == its.marks(parts).tobytes()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ClosedStep]:
    """One step of each layout."""
    found = {}
    for name, options in LAYOUTS.items():
        run = small_run(tmp_path_factory.mktemp("runs") / "run", **options)
        run.write(1)
        run.end()
        found[name] = closed_steps(run.directory)[0]
    return found


@pytest.mark.slow
@given(data=st.data(), name=st.sampled_from(sorted(LAYOUTS)), machines=st.lists(st.integers(0, 3), min_size=4, max_size=4))
@settings(max_examples=8, deadline=None)
def test_ranks_on_any_machines_are_merged_machine_by_machine(
    steps: Mapping[str, ClosedStep], data: st.DataObject, name: str, machines: list[int]
) -> None:
    assert_merged_alike(moved(steps[name], machines))


def made_step(rng: np.random.Generator, num_ranks: int = 6, num_tensors: int = 24) -> ClosedStep:
    """Return a step of tensors that are cut in any way; some rows are twice there, some not, some of unknown tensors."""
    kinds = ("param", "wgrad", "activation", "dgrad")
    descriptors = {
        rank: Descriptor(
            version=VERSION, place=Place(rank=rank, world_size=num_ranks, dp_rank=rank, dp_size=num_ranks),
            chunks=(ChunkInfo(vpp_stage=0, depth=0),), row_fields=(), row_bytes=ROW_DTYPE.itemsize,
            tensors=tuple(
                TensorInfo(id=at, name=f"t{at}", kind=kinds[at % 4], shape=(16,), part=PARTS[int(rng.integers(len(PARTS)))])
                for at in range(num_tensors)
            ),
        )
        for rank in range(num_ranks)
    }  # fmt: skip
    parts = []
    for rank, descriptor in descriptors.items():
        rows = np.zeros(int(rng.integers(0, 2 * num_tensors)), ROW_DTYPE)
        rows["tensor"] = rng.integers(0, num_tensors + 2, len(rows))
        for row in rows:
            stats = Moments.of(rng.standard_normal(int(rng.integers(0, 5)))).stats[0]
            for name in STATS_DTYPE.names or ():
                row[name] = stats[name]
        rows["checksum"] = rows["tensor"] + 1
        end = EndStep(step=0, num_rows=len(rows), num_calls=len(rows))
        parts.append(RankStep(rank=rank, descriptor=descriptor, rows=rows, end_step=end, time=0.0))
    return ClosedStep(run="made", attempt=0, step=0, layout=ModelLayout(descriptors), parts=parts)


@pytest.mark.slow
def test_tensors_cut_in_any_way_are_merged_machine_by_machine() -> None:
    num_unsplit = num_merged = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        view = moved(made_step(rng), rng.integers(0, 3, 6).tolist())
        assert_merged_alike(view)
        shares = [view.layout.share_of(tuple(part.rank for part in own)) for own in by_machine(view.parts)]
        merge = view.layout.node_merges.of(
            shares, [share.sums(own).has_rows for share, own in zip(shares, by_machine(view.parts), strict=True)]
        )
        num_unsplit += len(merge.unsplit)
        num_merged += len(merge._several_to)
    assert num_unsplit > 10 and num_merged > 10


def test_one_machine_is_merged_as_ever(steps: Mapping[str, ClosedStep]) -> None:
    for view in steps.values():
        assert view.decision is not None and view.decision.is_by_machine is msgspec.UNSET
        assert b"is_by_machine" not in msgspec.msgpack.encode(view.decision)
        assert_same(moved(view, [0] * 4).stats, moved(view, [0] * 4, decision=None).stats)


def test_a_step_of_several_machines_says_how_it_is_merged(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", ranks_per_host=2)
    run.write(1)
    run.end()
    (view,) = closed_steps(run.directory)
    assert view.decision is not None and view.decision.is_by_machine is True
    former = msgspec.structs.replace(view.decision, is_by_machine=msgspec.UNSET)
    # As an older version merged them, and as its journal has it.
    replayed = ClosedStep(run=view.run, attempt=0, step=view.step, layout=view.layout, parts=view.parts, decision=former)
    assert replayed.stats.tobytes() == moved(view, [0] * 4, decision=None).stats.tobytes()
    assert_same(view.stats, one_by_one(view))


def test_copies_on_two_machines_that_differ_have_other_marks(steps: Mapping[str, ClosedStep]) -> None:
    view = moved(steps["dp4"], [0, 0, 1, 1])
    parts = by_machine(view.parts)
    shares = [view.layout.share_of(tuple(part.rank for part in own)) for own in parts]
    merge = view.layout.node_merges.of(shares, [share.sums(own).has_rows for share, own in zip(shares, parts, strict=True)])
    assert not len(merge.unequal([share.marks(own) for share, own in zip(shares, parts, strict=True)]))

    rows = parts[1][0].rows.copy()
    changed = np.flatnonzero(rows["checksum"])[3]
    rows["checksum"][changed] ^= np.uint64(1 << 40)
    parts[1][0] = msgspec.structs.replace(parts[1][0], rows=rows)
    tensor = view.layout.logical_of(parts[1][0].rank, rows["tensor"][[changed]])
    assert merge.unequal([share.marks(own) for share, own in zip(shares, parts, strict=True)]).tolist() == tensor.tolist()
