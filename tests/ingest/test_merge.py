"""Shards merge, replicas do not: from arrays, through spools of several ranks, to the logical tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import Moments
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, Kind
from sentinel.testing import FakeClock, Nan, SyntheticRun
from sentinel.wire.frame import FrameType, encode_message, row_fields, run_id_of
from sentinel.wire.spool import SpoolWriter, incarnation_folder

from ..support.closed_steps import FollowedRun

Held = Mapping[str, tuple[str, dict[str, str], np.ndarray]]
"""Name -> (kind, placements, the values that one rank holds)."""


def speak(
    run_dir: Path,
    place: Place,
    held: Held,
    *,
    step: int = 0,
    scalars: Mapping[str, float] | None = None,
    left_out: tuple[str, ...] = (),
) -> None:
    """Write what a rank would: a descriptor, the measured rows of what it holds, the end of the step.

    left_out: kinds that it holds and does not measure in this step.
    """
    rank = place.rank
    incarnation = rank.to_bytes(4, "big") * 4
    out = SpoolWriter(
        incarnation_folder(run_dir, rank, incarnation), incarnation, rank, run_id_of(run_dir.name), 0, clock=FakeClock()
    )
    tensors = tuple(
        TensorInfo(id=at, name=name, kind=kind, shape=values.shape, placements=placements, site_pos=at)
        for at, (name, (kind, placements, values)) in enumerate(held.items())
    )
    descriptor = Descriptor(
        version="0",
        place=place,
        chunks=(ChunkInfo(vpp_stage=0, depth=place.pp_rank, segments=("stem",), modules=("",)),),
        tensors=tensors,
        row_fields=row_fields(ROW_DTYPE),
        row_bytes=ROW_DTYPE.itemsize,
    )
    rows = np.zeros(len(held), ROW_DTYPE)
    rows["bad_call_id"] = NONE_ID
    for at, (_, (kind, _, values)) in enumerate(held.items()):
        rows[at]["tensor"], rows[at]["kind"], rows[at]["call_id"] = at, Kind.of(kind), at
        stats = Moments.of(values).stats[0]
        for name in STATS_DTYPE.names or ():
            rows[at][name] = stats[name]
        rows[at]["checksum"] = values.astype("<f8").view("<u8").sum(dtype=np.uint64) if values.size else 0
    rows = rows[~np.isin(rows["kind"], [Kind.of(kind) for kind in left_out])]
    out.append(FrameType.DESCRIPTOR, encode_message(descriptor))
    out.append_rows(rows, step=step)
    end = EndStep(step=step, num_rows=len(rows), num_calls=len(rows), scalars=dict(scalars or {}), left_out=left_out)
    out.append(FrameType.END_STEP, encode_message(end), step=step)
    out.close()


def only_view(run_dir: Path) -> ClosedStep:
    followed = FollowedRun(run_dir)
    followed.listen(final=True)
    followed.views += followed.assembler.finish(0.0)
    (view,) = followed.views
    return view


def named(view: ClosedStep, key: str) -> np.void:
    (tensor,) = [one for one in view.tensors if one.key == key]
    assert view.present[tensor.index]
    return view.stats[tensor.index]


def assert_is_whole(stats: np.void, whole: np.ndarray) -> None:
    expected = Moments.of(whole)

    found = Moments(np.array([stats]))
    for name in ("count", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "min", "max"):
        assert found.stats[name] == expected.stats[name], name
    for name in ("mean", "std", "norm", "skew", "kurtosis"):
        assert found.statistic(name) == pytest.approx(expected.statistic(name), rel=1e-9), name


@pytest.mark.parametrize("axis", ["dp", "tp", "cp", "ep"])
@pytest.mark.parametrize("cuts", [(300, 700), (0, 10), (0, 0), (999, 1000)])
def test_shards_merge_to_the_whole(run_dir: Path, axis: str, cuts: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    # Unequal means, an outlier, and shards that may be empty.
    whole = np.concatenate([rng.normal(5, 1, 400), rng.normal(-50, 0.1, 500), rng.normal(0, 10, 100)])
    whole[[3, 500, 998]] = [np.nan, np.inf, 0.0]
    for rank, values in enumerate(np.split(whole, cuts)):
        place = Place(**{"rank": rank, "world_size": 3, f"{axis}_rank": rank, f"{axis}_size": 3})
        speak(run_dir, place, {"w": ("param", {axis: "shard"}, values)})

    view = only_view(run_dir)

    assert len(view.tensors) == 1
    assert view.tensors[0].ranks == (0, 1, 2)
    assert_is_whole(named(view, "w/param"), whole)


@pytest.mark.parametrize("is_bad", [False, True])
def test_of_what_one_rank_left_out_for_its_cost_only_a_nan_is_judged(run_dir: Path, is_bad: bool) -> None:
    rng = np.random.default_rng(6)
    for rank in range(2):
        place = Place(rank=rank, world_size=2, dp_rank=rank, dp_size=2)
        gradient = rng.normal(0, 1, 50)
        gradient[7] = np.nan if is_bad else 0.0
        held = {"w": ("wgrad", {"dp": "shard"}, gradient), "v": ("param", {"dp": "shard"}, gradient[10:])}
        speak(run_dir, place, held, left_out=("wgrad",) if rank else ())

    view = only_view(run_dir)

    at = {tensor.key: tensor.index for tensor in view.tensors}
    assert view.present[at["v/param"]]
    assert view.stats["count"][at["v/param"]] == 80
    assert not view.present[at["w/wgrad"]]
    assert view.is_bad[at["w/wgrad"]] == is_bad
    assert view.num_rows == view.num_expected == 3, "nothing was lost"


def test_what_all_ranks_left_out_is_just_not_there(run_dir: Path) -> None:
    for rank in range(2):
        place = Place(rank=rank, world_size=2, dp_rank=rank, dp_size=2)
        held = {"w": ("wgrad", {}, np.ones(5)), "v": ("param", {}, np.ones(5))}
        speak(run_dir, place, held, left_out=("wgrad",))

    view = only_view(run_dir)

    assert [view.tensors[at].key for at in np.flatnonzero(view.present)] == ["v/param"]
    assert not view.differing


def test_replicas_are_not_summed(run_dir: Path) -> None:
    values = np.random.default_rng(2).normal(3, 1, 100)
    for rank in range(4):
        speak(run_dir, Place(rank=rank, world_size=4, dp_rank=rank, dp_size=4), {"w": ("wgrad", {}, values)})

    view = only_view(run_dir)

    assert_is_whole(named(view, "w/wgrad"), values)
    assert view.num_rows == 4, "each rank keeps its own row, to be judged alone"


def test_shards_of_replicas_are_merged_once(run_dir: Path) -> None:
    whole = np.random.default_rng(3).normal(0, 1, 101)
    halves = (whole[:40], whole[40:])
    for rank in range(4):
        place = Place(rank=rank, world_size=4, tp_rank=rank % 2, tp_size=2, dp_rank=rank // 2, dp_size=2)
        speak(run_dir, place, {"w": ("param", {"tp": "shard", "dp": "replicate"}, halves[rank % 2])})

    view = only_view(run_dir)

    assert_is_whole(named(view, "w/param"), whole)
    assert [(r.shard, [rank for rank, _ in r.holders]) for r in view.layout.shards.replicas] == [
        ((("tp", 0),), [0, 2]),
        ((("tp", 1),), [1, 3]),
    ]


def test_a_replica_speaks_for_one_that_is_missing(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(1)
    run.write(3, skip=[0])
    followed.listen()

    assert [part.rank for part in followed.views[1].parts] == [1]
    weights = [tensor.index for tensor in followed.views[1].tensors if tensor.kind == "param"]
    assert followed.views[1].present[weights].all()
    assert followed.views[1].stats["count"][weights].tolist() == followed.views[0].stats["count"][weights].tolist()


def test_what_no_placement_explains_stays_with_its_rank(run_dir: Path) -> None:
    rng = np.random.default_rng(4)
    parts = [rng.normal(rank, 1, 50) for rank in range(4)]
    for rank in range(4):
        place = Place(rank=rank, world_size=4, tp_rank=rank % 2, tp_size=2, dp_rank=rank // 2, dp_size=2)
        speak(
            run_dir,
            place,
            {
                "attn": ("activation", {}, parts[rank]),
                "mlp": ("activation", {"tp": "partial"}, parts[rank]),
                "norm": ("activation", {"tp": "replicate"}, parts[rank // 2]),
            },
        )

    view = only_view(run_dir)

    assert sorted(tensor.key for tensor in view.tensors) == [
        "attn/activation@tp0", "attn/activation@tp1", "mlp/activation@tp0", "mlp/activation@tp1", "norm/activation",
    ]  # fmt: skip
    # Over dp activations are parts of one batch, whatever tensor parallelism did to them.
    assert_is_whole(named(view, "attn/activation@tp1"), np.concatenate([parts[1], parts[3]]))
    assert_is_whole(named(view, "norm/activation"), np.concatenate([parts[0], parts[1]]))


def test_kinds_of_one_name_are_separate(run_dir: Path) -> None:
    a, b = np.ones(3), np.zeros(5)
    speak(run_dir, Place(), {"x": ("param", {}, a)} | {"y": ("wgrad", {}, b)})

    assert [tensor.key for tensor in only_view(run_dir).tensors] == ["x/param", "y/wgrad"]


def test_pipeline_stages_never_merge(run_dir: Path) -> None:
    for rank in range(2):
        place = Place(rank=rank, world_size=2, pp_rank=rank, pp_size=2)
        speak(run_dir, place, {"w": ("param", {}, np.full(3, float(rank)))})

    view = only_view(run_dir)

    assert [tensor.name for tensor in view.tensors] == ["stage0.w", "stage1.w"]
    assert [tensor.pp_stage for tensor in view.tensors] == [0, 1]


def test_copies_can_be_compared_by_checksum(run_dir: Path) -> None:
    values = np.random.default_rng(5).normal(3, 1, 100)
    for rank in range(3):
        own = values.copy()
        if rank == 2:
            own[17] = np.nextafter(own[17], 9.0)
        speak(run_dir, Place(rank=rank, world_size=3, dp_rank=rank, dp_size=3), {"w": ("param", {}, own)})

    (found,) = only_view(run_dir).differing

    assert (found.index, found.members) == (0, ((0,), (1,), (2,)))
    assert found.checksums[0] == found.checksums[1] != found.checksums[2]


def test_scalars_are_the_mean_over_the_ranks_that_report_them(run_dir: Path) -> None:
    for rank, scalars in enumerate([{"lr": 1.0}, {"lr": 1.0, "loss": 2.0}, {"lr": 1.0, "loss": 4.0}]):
        place = Place(rank=rank, world_size=3, dp_rank=rank, dp_size=3)
        speak(run_dir, place, {"w": ("param", {}, np.ones(1))}, scalars=scalars)

    scalars = only_view(run_dir).scalars

    assert scalars["loss"].mean == 3.0
    assert scalars["loss"].by_rank == {1: 2.0, 2: 4.0}
    assert scalars["lr"].mean == 1.0


def test_a_nan_is_found_on_the_row_of_its_rank(run_dir: Path) -> None:
    fault = Nan(step=1, module="layers.1.attn", rank=2, micro_step=1, phase="forward")
    run, followed = SyntheticRun(run_dir, dp=4, layers=2).plant(fault), FollowedRun(run_dir)
    run.write(2)
    followed.listen()

    view = followed.views[1]
    bad = view.rows[view.bad_rows]
    first = view.bad_rows[np.argmin(np.where(bad["kind"] == Kind.ACTIVATION, bad["call_id"], NONE_ID))]
    assert view.tensors[view.row_logical[first]].key == "layers.1.attn/activation"
    assert int(view.row_rank[first]) == 2
    assert int(view.rows[first]["bad_micro_step"]) == 1
    assert len(followed.views[0].bad_rows) == 0


def test_sites_stand_where_the_rows_of_the_step_say(run_dir: Path) -> None:
    """When monitoring goes off the sites are counted anew, and the descriptor may still tell the former count."""
    held = {name: ("activation", {}, np.ones(3)) for name in ("block", "head")}
    speak(run_dir, Place(), held)

    view = only_view(run_dir)

    assert [tensor.site_pos for tensor in view.tensors] == [0, 1]
    assert view.site_pos.tolist() == [0, 0]


def test_a_row_of_an_unknown_tensor_is_kept_apart(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir), FollowedRun(run_dir)
    rows, end = run.observe(0, 0)
    rows["tensor"][5] = 9999
    one = run._ranks[0]
    run._write_message(one, FrameType.ROWS, rows.tobytes(), 0, len(rows))
    run._write_message(one, FrameType.END_STEP, encode_message(end), 0, 0)
    followed.listen()

    view = followed.views[0]
    assert view.row_logical[5] == -1
    assert view.present.sum() == len(view.tensors) - 1


def test_a_newer_rank_with_a_wider_row_is_understood(run_dir: Path) -> None:
    wider = np.dtype([*ROW_DTYPE.descr, ("entropy", "<f8")])
    run, followed = SyntheticRun(run_dir), FollowedRun(run_dir)
    rows, end = run.observe(0, 0)
    wide = np.zeros(len(rows), wider)
    for name in ROW_DTYPE.names or ():
        wide[name] = rows[name]
    one = run._ranks[0]
    descriptor = run.descriptor(0)
    changed = Descriptor(
        version="9", place=descriptor.place, chunks=descriptor.chunks, tensors=descriptor.tensors,
        row_fields=row_fields(wider), row_bytes=wider.itemsize,
    )  # fmt: skip
    run._write_message(one, FrameType.DESCRIPTOR, encode_message(changed), -1, 0)
    run._write_message(one, FrameType.ROWS, wide.tobytes(), 0, len(wide))
    run._write_message(one, FrameType.END_STEP, encode_message(end), 0, 0)
    followed.listen()

    assert np.array_equal(followed.views[0].rows, rows)


def test_a_layout_is_built_once_for_a_set_of_descriptors(run_dir: Path) -> None:
    run, followed = SyntheticRun(run_dir, dp=2), FollowedRun(run_dir)
    run.write(4)
    followed.listen()

    assert len({id(view.layout) for view in followed.views}) == 1


def test_segments_name_where_a_tensor_was_made(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, pp=2, layers=4, kinds=(), ranks=[])
    layout = ModelLayout({rank: run.descriptor(rank) for rank in range(2)})

    made = {tensor.key: tensor.segment for tensor in layout.tensors}

    assert made == {
        "embed/activation": "stage0.stem", "embed/dgrad": "layers.0",
        "layers.0/activation": "layers.0", "layers.0/dgrad": "layers.1",
        "layers.1/activation": "layers.1", "layers.1/dgrad": "",
        "stage1/activation_in": "", "stage1/dgrad_in": "layers.2",
        "layers.2/activation": "layers.2", "layers.2/dgrad": "layers.3",
        "layers.3/activation": "layers.3", "layers.3/dgrad": "stage1.head",
        "head/activation": "stage1.head", "head/dgrad": "",
    }  # fmt: skip


def test_other_names_of_a_tensor_are_canonical(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, pp=2, layers=4, ranks=[])
    layout = ModelLayout({rank: run.descriptor(rank) for rank in range(2)})
    by_key = {tensor.key: tensor for tensor in layout.tensors}

    assert by_key["layers.2/activation"].consumers == ("layers.3", "layers.3.norm")
    assert by_key["stage1/activation_in"].consumers == ("layers.2", "layers.2.norm")
    assert by_key["head/activation"].also == ("model",)


@pytest.mark.parametrize(("tp", "coupled"), [(1, set()), (2, {"embed", "head", "attn", "mlp", "layers"})])
def test_modules_cut_over_the_tensor_group_communicate(run_dir: Path, tp: int, coupled: set[str]) -> None:
    run = SyntheticRun(run_dir, tp=tp, layers=1, ranks=[])
    layout = ModelLayout({rank: run.descriptor(rank) for rank in range(tp)})

    found = {tensor.name for tensor in layout.tensors if tensor.kind == "activation" and tensor.communicates}
    assert found == ({"embed", "head", "layers.0", "layers.0.attn", "layers.0.mlp"} if coupled else set())
