"""Passes of micro-steps: the order in which each rank ran them is found in its rows, and drawn as the pipeline allows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from sentinel.explain.pass_order import ALL, RankOrder, RankOrders, places_of, words_of
from sentinel.record import Kind
from sentinel.step_view import RankStep
from sentinel.testing.schedules import program_order

from ..support.recorded_step import read_step
from ..support.serving import small_run


def parts_of(run_dir: Path, **options: object) -> tuple[RankStep, ...]:
    small_run(run_dir, **{"micro_steps": 4, "per_micro_step": True, **options}).write(2)
    return read_step(run_dir, 1).parts


@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2)])
def test_the_order_of_each_rank_is_that_in_which_its_schedule_ran(tmp_path: Path, schedule: str, vpp: int) -> None:
    # Rows are written in no order, and tensors are numbered otherwise on each rank.
    parts = parts_of(tmp_path / "run", pp=4, dp=1, layers=8, schedule=schedule, vpp=vpp, shuffle=True)
    expected = program_order(schedule, 4, vpp, 4)

    orders = [RankOrders().of(part) for part in parts]

    assert [one.pp_stage for one in orders] == [0, 1, 2, 3]
    for one, ran in zip(orders, expected, strict=True):
        assert [(p.way == "F", p.vpp_stage, p.micro_step) for p in one.passes] == [tuple(p) for p in ran]
        assert not one.is_folded


def test_passes_stand_behind_what_they_need_and_never_two_of_a_rank_at_once(tmp_path: Path) -> None:
    orders = [RankOrders().of(part) for part in parts_of(tmp_path / "run", pp=4, dp=1, schedule="1f1b")]

    places = places_of(orders)

    assert [words_of(one.passes) for one in orders][3] == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert places[3] == (3, 4, 5, 6, 7, 8, 9, 10)
    at = {
        (one.rank, own.way, own.micro_step): place
        for one in orders
        for own, place in zip(one.passes, places[one.rank], strict=True)
    }
    for micro_step in range(4):
        ups = [at[stage, "F", micro_step] for stage in range(4)]
        downs = [at[stage, "B", micro_step] for stage in (3, 2, 1, 0)]
        assert sorted(ups + downs) == ups + downs
    assert all(len(set(one)) == len(one) for one in places.values())


def test_ranks_of_other_lanes_stand_alike_and_what_is_missing_is_not_waited_for(tmp_path: Path) -> None:
    orders = [RankOrders().of(part) for part in parts_of(tmp_path / "run", pp=2, dp=2, schedule="1f1b")]

    places = places_of(orders)
    alone = places_of([orders[3]])

    assert places[0] == places[1] and places[2] == places[3] and places[2][0] == 1
    assert alone[3] == tuple(range(8))


def test_folded_rows_say_that_the_order_of_micro_steps_is_not_known(tmp_path: Path) -> None:
    [first, *_] = parts_of(tmp_path / "run", per_micro_step=False)

    order = RankOrders().of(first)

    assert order.is_folded and {one.micro_step for one in order.passes} == {ALL} and words_of(order.passes) == "F* B*"


def test_weight_gradients_alone_are_a_pass_of_their_own_and_those_among_data_gradients_are_not(
    tmp_path: Path,
) -> None:
    part = parts_of(tmp_path / "run")[0]
    rows = np.zeros(6, part.rows.dtype)
    dgrad, wgrad = int(Kind.DGRAD), int(Kind.WGRAD_UNREDUCED)
    rows["kind"] = [dgrad, wgrad, dgrad, dgrad, wgrad, wgrad]
    rows["micro_step"] = [0, 0, 0, 1, 0, 0]
    rows["call_id"] = np.arange(6)

    order = RankOrders().of(msgspec.structs.replace(part, rows=rows))

    assert words_of(order.passes) == "B0 B1 W0"


def test_orders_that_contradict_each_other_are_drawn_all_the_same(tmp_path: Path) -> None:
    [a, b] = [RankOrders().of(part) for part in parts_of(tmp_path / "run", pp=2, dp=1, micro_steps=2)]
    # The second stage claims to have run its backwards before any forward.
    turned = msgspec.structs.replace(b, passes=tuple(sorted(b.passes, key=lambda one: one.way)))

    places = places_of([a, turned])

    assert [len(places[0]), len(places[1])] == [4, 4]
    assert all(sorted(one) == list(one) and len(set(one)) == 4 for one in places.values())


def test_a_rank_without_rows_has_no_pass() -> None:
    empty = RankOrder(rank=0, lane=(), pp_stage=0, depths=(), passes=())

    assert places_of([empty]) == {0: ()} and words_of(()) == ""
