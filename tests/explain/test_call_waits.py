"""Who waited for whom: of each collective the rank that came last, and nobody where the group is not known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from sentinel.explain.call_waits import call_waits
from sentinel.messages import Descriptor, TensorInfo, Vector

from ..support.serving import small_run

SITE = "all_reduce@train.py:41"


def descriptors(tmp_path: Path, name: str = SITE) -> dict[int, Descriptor]:
    """Four ranks, 2 x 2, whose one tensor is a call."""
    source = small_run(tmp_path / "run")
    table = (TensorInfo(id=0, name=name, kind="comm"),)
    return {rank: msgspec.structs.replace(source.descriptor(rank), tensors=table) for rank in range(4)}


def calls(seconds: Sequence[float], size: int, waited: float = 1.0) -> tuple[Vector, ...]:
    values = np.array([[at, 100.0, one, size, waited] for at, one in enumerate(seconds)])
    return (
        Vector(
            tensor=0, statistic="calls", axis="call,field", dtype="<f8", shape=values.shape, values=values.tobytes()
        ),
    )  # fmt: skip


def test_who_took_the_least_time_came_last_and_the_others_waited_for_it(tmp_path: Path) -> None:
    seconds = {0: (0.2, 0.11), 1: (0.1, 0.11), 2: (0.21, 0.11), 3: (0.2, 0.11)}
    found = call_waits({rank: calls(one, 4) for rank, one in seconds.items()}, descriptors(tmp_path))

    assert [(one.rank, one.behind, one.num_calls) for one in found] == [(2, 1, 2), (0, 1, 2), (3, 1, 2)]
    assert [round(one.seconds, 6) for one in found] == [0.11, 0.1, 0.1]
    assert found[0].call == SITE


def test_a_group_along_one_axis_is_told_from_the_others_of_its_kind(tmp_path: Path) -> None:
    of_four = descriptors(tmp_path)
    # Both axes have two ranks, so that nobody can tell which one it was.
    two = {rank: calls((0.1 * rank,), 2) for rank in range(4)}
    assert call_waits(two, of_four) == []

    def turned(one: Descriptor, rank: int) -> Descriptor:
        place = msgspec.structs.replace(one.place, pp_size=1, pp_rank=0, cp_size=4, cp_rank=rank // 2, dp_rank=rank % 2)
        return msgspec.structs.replace(one, place=place)

    apart = {rank: turned(one, rank) for rank, one in of_four.items()}
    found = call_waits(two, apart)
    assert sorted((one.rank, one.behind, round(one.seconds, 6)) for one in found) == [(1, 0, 0.1), (3, 2, 0.1)]


def test_nothing_is_said_where_calls_do_not_match_or_are_messages_of_two_or_too_short(tmp_path: Path) -> None:
    of_all = descriptors(tmp_path)
    other = {rank: calls((0.1,) * (1 + rank), 4) for rank in range(4)}
    short = {rank: calls((1e-5 * rank,), 4) for rank in range(4)}
    broken = {rank: calls((float("nan"),), 4) for rank in range(4)}
    unseen = {rank: calls((0.1 * rank,), 4, waited=0.0) for rank in range(4)}
    message = descriptors(tmp_path, "recv@train.py:3")

    assert call_waits(other, of_all) == call_waits(short, of_all) == call_waits(broken, of_all) == []
    assert call_waits({rank: calls((0.1 * rank,), 4) for rank in range(4)}, message) == []
    assert call_waits(unseen, of_all) == call_waits({}, {}) == []
