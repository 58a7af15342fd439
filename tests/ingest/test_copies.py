"""Copies that should be bit-identical: which ranks hold them, however they are cut, and when nobody may be accused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from sentinel.ingest.copies import added_copies, is_cut_once
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import Moments
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, Flag, Kind
from sentinel.step_view import NAN_CHECKSUM, Differing, RankStep

WHOLE = np.random.default_rng(3).normal(2.0, 1.0, 16)
N = len(WHOLE)


def word(values: np.ndarray) -> int:
    return int(values.astype("<f8").view("<u8").sum(dtype=np.uint64))


def flipped(values: np.ndarray, at: int = 0) -> np.ndarray:
    """The values with one exponent bit of one element flipped."""
    bits = values.copy().view("<u8")
    bits[at] ^= np.uint64(1 << 58)
    return bits.view("<f8")


class Piece:
    """What one rank holds of a weight."""

    def __init__(
        self,
        part: str = "",
        values: np.ndarray = WHOLE,
        placements: Mapping[str, str] | None = None,
        dtype: str = "float64",
        place: Place | None = None,
    ) -> None:
        self.part, self.values, self.dtype, self.place = part, values, dtype, place
        self.placements = dict(placements or {})


def flat(start: int, end: int, values: np.ndarray = WHOLE) -> Piece:
    return Piece(f"{start}:{end}", values[start:end], {"dp": "shard"})


def view_of(
    pieces: Sequence[Piece],
    *,
    kind: str = "param",
    missing: Sequence[int] = (),
    unended: Sequence[int] = (),
    change: Callable[[int, np.ndarray], None] | None = None,
    is_skipped: bool = False,
) -> ClosedStep:
    """A step in which rank i holds pieces[i] of the weight `w`."""
    descriptors, parts = {}, []
    for rank, piece in enumerate(pieces):
        place = piece.place or Place(rank=rank, world_size=len(pieces), dp_rank=rank, dp_size=len(pieces))
        info = TensorInfo(
            id=0, name="w", kind=kind, shape=(N,), dtype=piece.dtype, placements=piece.placements, part=piece.part
        )
        descriptors[rank] = Descriptor(
            version="0", place=place, chunks=(ChunkInfo(vpp_stage=0, depth=0),), tensors=(info,), row_fields=(),
            row_bytes=ROW_DTYPE.itemsize,
        )  # fmt: skip
        if rank in missing:
            continue
        rows = np.zeros(1, ROW_DTYPE)
        stats = Moments.of(piece.values).stats[0]
        for name in STATS_DTYPE.names or ():
            rows[name] = stats[name]
        rows["kind"], rows["bad_call_id"], rows["checksum"] = int(Kind.of(kind)), NONE_ID, word(piece.values)
        if change is not None:
            change(rank, rows)
        end = None if rank in unended else EndStep(step=0, num_rows=1, num_calls=1, is_skipped=is_skipped)
        parts.append(RankStep(rank=rank, descriptor=descriptors[rank], rows=rows, end_step=end, time=0.0))
    return ClosedStep(run="r", attempt=0, step=0, layout=ModelLayout(descriptors), parts=parts)


def reported(view: ClosedStep) -> list[tuple[str, dict[tuple[int, ...], int]]]:
    """(piece, ranks of each copy -> which of the different words it has) of each set of copies that differs."""
    found = []
    for one in view.differing:
        words = list(dict.fromkeys(one.checksums))
        found.append((one.shard, {ranks: words.index(w) for ranks, w in zip(one.members, one.checksums, strict=True)}))
    return found


BAD = flipped(WHOLE, 9)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([Piece(), Piece(values=BAD)], [("", {(0,): 0, (1,): 1})], id="two copies"),
        pytest.param([Piece(), Piece(), Piece(values=BAD)], [("", {(0,): 0, (1,): 0, (2,): 1})], id="three copies"),
        pytest.param(
            [flat(0, 8), flat(8, 16), flat(0, 8), flat(8, 16, BAD)],
            [("8:16", {(1,): 0, (3,): 1})],
            id="copies of flat shards (HSDP)",
        ),
        pytest.param(
            [Piece("dp_shard=0", WHOLE[:8], {"dp": "shard"}), Piece("dp_shard=1", WHOLE[8:], {"dp": "shard"}),
             Piece("dp_shard=0", WHOLE[:8], {"dp": "shard"}), Piece("dp_shard=1", BAD[8:], {"dp": "shard"})],
            [("dp_shard=1", {(1,): 0, (3,): 1})],
            id="copies of named shards (HSDP)",
        ),
        pytest.param(
            [flat(0, 8), flat(8, 16), flat(0, 16, BAD)], [("", {(0, 1): 0, (2,): 1})], id="two halves against a whole"
        ),
        pytest.param(
            [flat(0, 8), flat(8, 16, BAD), flat(0, 4), flat(4, 16), Piece()],
            [("", {(0, 1): 0, (2, 3): 1, (4,): 1})],
            id="three ways of cutting",
        ),
        pytest.param(
            [flat(0, 8), flat(8, 16, BAD), flat(0, 0), flat(0, 16)], [("", {(0, 1): 0, (3,): 1})], id="an empty shard"
        ),
        pytest.param(
            [Piece("dp_shard=0", WHOLE[:5], {"dp": "shard"}), Piece("dp_shard=1", BAD[5:], {"dp": "shard"}), Piece()],
            [("", {(0, 1): 0, (2,): 1})],
            id="named shards against a whole",
        ),
    ],
)  # fmt: skip
def test_copies_that_differ_are_found_however_they_are_cut(pieces: list[Piece], expected: object) -> None:
    healthy = [
        Piece(one.part, WHOLE[slice(*map(int, one.part.split(":")))] if ":" in one.part else one.values, one.placements)
        for one in pieces
        if one.values is not BAD or ":" in one.part
    ]

    assert reported(view_of(pieces)) == expected
    if all(":" in one.part for one in pieces):
        assert reported(view_of(healthy)) == []


def test_copies_cut_over_the_tensor_group_add_up_to_a_whole_one() -> None:
    def at(rank: int, tp_rank: int, tp_size: int, values: np.ndarray, placements: Mapping[str, str]) -> Piece:
        place = Place(rank=rank, world_size=3, tp_rank=tp_rank, tp_size=tp_size, dp_rank=rank // 2, dp_size=2)
        return Piece("", values, {"dp": "replicate", **placements}, place=place)

    cut = [at(0, 0, 2, WHOLE[:8], {"tp": "shard"}), at(1, 1, 2, WHOLE[8:], {"tp": "shard"})]

    assert reported(view_of([*cut, at(2, 0, 1, BAD, {})])) == [("", {(0, 1): 0, (2,): 1})]
    assert reported(view_of([*cut, at(2, 0, 1, WHOLE, {})])) == []


@pytest.mark.parametrize(
    ("pieces", "options"),
    [
        pytest.param([flat(0, 8), flat(8, 16, BAD)], {}, id="pure sharding"),
        pytest.param(
            [Piece(placements={"dp": "unknown"}), Piece(values=BAD, placements={"dp": "unknown"})], {}, id="unknown"
        ),
        pytest.param(
            [Piece(placements={"dp": "partial"}), Piece(values=BAD, placements={"dp": "partial"})], {}, id="partial"
        ),
        pytest.param([Piece(), Piece(values=BAD)], {"missing": [1]}, id="the other copy is late"),
        pytest.param([flat(0, 8), flat(8, 16, BAD), flat(0, 16)], {"missing": [0]}, id="a piece of a copy is late"),
        pytest.param([Piece(), Piece(values=BAD)], {"kind": "wgrad", "is_skipped": True}, id="gradients of a skipped step"),
        pytest.param([Piece(), Piece(values=BAD)], {"kind": "wgrad", "unended": [1]}, id="gradients of a broken-off step"),
        pytest.param([Piece(), Piece(values=BAD)], {"kind": "activation"}, id="activations"),
        pytest.param([Piece(), Piece(values=BAD)], {"kind": "wgrad_unreduced"}, id="gradients before their reduction"),
        pytest.param([Piece(), Piece(values=BAD, dtype="bfloat16")], {}, id="another type of numbers"),
        pytest.param([Piece(), Piece(values=BAD[:12])], {}, id="another number of elements"),
    ],
)
def test_what_cannot_be_compared_accuses_nobody(pieces: list[Piece], options: dict[str, object]) -> None:
    assert reported(view_of(pieces, **options)) == []


@pytest.mark.parametrize("kind", ["param", "wgrad", "exp_avg", "exp_avg_sq"])
def test_weights_gradients_and_optimizer_state_are_compared(kind: str) -> None:
    """The control of the test above."""
    assert len(reported(view_of([Piece(), Piece(values=BAD)], kind=kind))) == 1


def test_parameters_of_a_skipped_step_are_compared() -> None:
    assert len(reported(view_of([Piece(), Piece(values=BAD)], is_skipped=True))) == 1


def test_a_copy_of_zeros_has_a_checksum_and_one_that_was_not_asked_for_has_none() -> None:
    zeros = np.zeros(N)

    assert reported(view_of([Piece(values=zeros), Piece(values=zeros), Piece(values=flipped(zeros))])) == [
        ("", {(0,): 0, (1,): 0, (2,): 1})
    ]

    def unasked(rank: int, rows: np.ndarray) -> None:
        if rank:
            rows["checksum"] = 0

    assert reported(view_of([Piece(), Piece(), Piece()], change=unasked)) == []


def test_nan_on_all_copies_accuses_nobody_whatever_its_bits() -> None:
    def nan(ranks: Sequence[int]) -> Callable[[int, np.ndarray], None]:
        def change(rank: int, rows: np.ndarray) -> None:
            if rank in ranks:
                rows["num_nan"], rows["count"], rows["checksum"] = 4, N - 4, 1000 + rank

        return change

    assert reported(view_of([Piece(), Piece(), Piece()], change=nan([0, 1, 2]))) == []
    (one,) = view_of([Piece(), Piece(), Piece()], change=nan([1])).differing
    assert one == Differing(0, "", ((0,), (1,), (2,)), (word(WHOLE), NAN_CHECKSUM, word(WHOLE)))


def test_a_row_of_a_failed_hook_is_not_compared() -> None:
    def fail(rank: int, rows: np.ndarray) -> None:
        rows["flags"] = Flag.DEGRADED if rank == 1 else 0

    assert reported(view_of([Piece(), Piece(values=BAD)], change=fail)) == []


def test_tilings_find_all_whole_copies() -> None:
    def pieces(*stretches: tuple[int, int]) -> dict[tuple[tuple[str, str], ...], list[tuple[int, int]]]:
        found: dict[tuple[tuple[str, str], ...], list[tuple[int, int]]] = {}
        for rank, (start, end) in enumerate(stretches):
            found.setdefault((("part", f"{start}:{end}"),), []).append((rank, 0))
        return found

    one = added_copies(0, 12, pieces((0, 4), (4, 12), (0, 6), (6, 12), (0, 12), (4, 6)))

    assert one is not None
    assert [[rank for rank, _ in copy] for copy in one.copies] == [[0, 1], [2, 3], [4]]
    assert not is_cut_once(pieces((0, 4), (4, 12), (0, 12)), 12)
    assert is_cut_once(pieces((0, 4), (4, 12), (0, 4), (4, 12)), 12), "equal parts compare one by one"
    assert added_copies(0, 12, pieces((0, 4), (6, 12), (0, 12))) is None, "a gap"


def test_weights_that_nobody_has_a_copy_of_are_counted() -> None:
    assert view_of([flat(0, 8), flat(8, 16)]).layout.num_weights_compared == (0, 1)
    assert view_of([flat(0, 16), flat(0, 0), flat(0, 0)]).layout.num_weights_compared == (0, 1)
    assert view_of([Piece(), Piece()]).layout.num_weights_compared == (1, 1)
    assert view_of([flat(0, 8), flat(8, 16), Piece()]).layout.num_weights_compared == (1, 1)
