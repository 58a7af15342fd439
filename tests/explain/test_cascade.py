"""How an incident spread, in rows, legs and letters: one rank, four, and a thousand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sentinel.explain.cascade import MAX_ROWS, cascade_of
from sentinel.explain.drawing import draw, rank_words, spans, way

from ..support.anomalies import a_nan

GOLDEN = Path(__file__).parent / "golden"


def placed(kind, name, rank, *, step=7, dp=1, pp=1, tp=1, stage=0, **fields):
    """A NaN of a layout numbered tp fastest, then dp, then pp."""
    place = {} if rank is None else {"dp": rank // tp % dp, "pp": stage, "tp": rank % tp}
    mates = tuple(range(stage * dp * tp, (stage + 1) * dp * tp))
    usual = {
        "rank": rank, "ranks": (rank,) if rank is not None else mates, "group_mates": () if kind == "scalar" else mates,
        "micro_step": None, "pp_stage": stage, "depth": stage, "place": place, "dp_size": dp, "pp_size": pp, "tp_size": tp,
        "time": 0.0,
    }  # fmt: skip
    return a_nan(kind, name, step, **(usual | fields))


def fault(dp, pp, tp, stage, lane, micro_step=1):
    """A NaN born in forward at a stage, in one replica: all that a clipped, unskipped step makes of it, and the next one."""
    layout = {"dp": dp, "pp": pp, "tp": tp}

    def on(at, replica):
        return [(at * dp + replica) * tp + t for t in range(tp)]

    found = []
    for at in range(stage, pp):
        found += [
            placed("activation", f"blocks.{at}", r, stage=at, micro_step=micro_step, call_id=9, communicates=True, **layout)
            for r in on(at, lane)
        ]
    found.append(placed("scalar", "loss", None, **layout))
    for at in reversed(range(pp)):
        found += [
            placed("dgrad", f"blocks.{at}", r, stage=at, micro_step=micro_step, call_id=19, **layout) for r in on(at, lane)
        ]
    for step, kind in ((7, "wgrad"), (7, "update"), (8, "param")):
        for at in range(pp):
            found += [
                placed(kind, f"blocks.{at}.weight", r, step=step, stage=at, **layout)
                for replica in range(dp)
                for r in on(at, replica)
            ]
    found.append(placed("scalar", "grad_norm", None, **layout))
    causes = [one for one in found if one.kind == "activation" and one.pp_stage == stage]
    return found, causes


@pytest.mark.parametrize(
    ("name", "layout"), [("one", (1, 1, 1, 0, 0)), ("four", (2, 2, 1, 0, 1)), ("thousand", (32, 8, 4, 3, 5))]
)
def test_drawing(name, layout):
    members, causes = fault(*layout)
    mixed = random.Random(3).sample(members, len(members))

    cascade = cascade_of(mixed, causes)
    text = "\n".join([*way(cascade), "", *draw(cascade)]) + "\n"

    golden = GOLDEN / f"cascade_{name}.txt"
    assert text == golden.read_text()
    assert all(len(line) <= 100 for line in text.splitlines())
    assert len(cascade.rows) <= MAX_ROWS + 1
    assert {rank for row in cascade.rows for rank in row.ranks} == set(range(layout[0] * layout[1] * layout[2]))


def test_narrow_pages_put_steps_below_each_other():
    members, causes = fault(2, 2, 1, 0, 1)
    cascade = cascade_of(members, causes)

    wide, narrow = draw(cascade, 200), draw(cascade, 60)

    assert sum("step 7" in line and "step 8" in line for line in wide) == 1
    assert not any("step 7" in line and "step 8" in line for line in narrow)
    assert {"step 7", "step 8"} <= {line.strip(" |") for line in narrow}


def test_the_way_names_who_was_reached_by_what():
    members, causes = fault(2, 2, 1, 0, 1)
    legs = {wave.how: wave for wave in cascade_of(members, causes).waves}

    assert (legs["born"].ranks, legs["born"].depths) == ((1,), (0,))
    assert (legs["up"].ranks, legs["up"].depths) == ((3,), (1,))
    assert (legs["down"].ranks, legs["down"].depths) == ((), (1, 0))
    assert legs["reduced"].ranks == (0, 2), "the other replica has it from the reduction"
    assert legs["written"].num_anomalies == legs["read"].num_anomalies == 4
    assert legs["read"].step == 8


def test_steps_that_look_alike_are_drawn_once_and_recurrences_are_told():
    members, causes = fault(2, 1, 1, 0, 0)
    first = [one for one in members if one.step == 7 and one.kind in ("activation", "dgrad")]
    again = [
        placed(kind, "blocks.0", 0, step=step, dp=2, micro_step=1, call_id=9)
        for step in (11, 15, 20, 21, 30)
        for kind in ("activation", "dgrad")
    ]
    cascade = cascade_of([*first, *again], causes)

    lines = draw(cascade)
    assert cascade.again == (11, 15, 20, 30)
    assert cascade.hidden_steps == (21, 30)
    assert any("steps 11, 15, 20, each" in line for line in lines)
    assert "more steps with anomalies: 21, 30" in lines
    assert sum("seen again at step" in line for line in way(cascade)) == 4


def test_interleaved_chunks_have_a_row_each():
    """Depths 0 and 2 lie on stage 0."""
    chunks = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    members = [
        placed("activation", f"m{at}", stage, pp=2, stage=stage, depth=at, vpp_stage=chunk, micro_step=0, call_id=at)
        for at, stage, chunk in chunks
    ]
    cascade = cascade_of(members, members[:1])

    assert [row.chunks for row in cascade.rows] == [((stage, chunk),) for _, stage, chunk in reversed(chunks)]
    text = "\n".join([*way(cascade), *draw(cascade)])
    assert "stage 1.1  rank 1 | #m0" in text
    assert "forward, up through depths 1 to 3" in text


def test_health_alone_is_not_drawn():
    assert cascade_of([placed("health", "step", 0, value_text="", statistic="busy_s")], []) is None


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""), ([4], "rank 4"), ([3, 4], "ranks 3, 4"), ([0, 1, 2, 3, 8], "ranks 0-3, 8"),
        (range(1, 1024, 2), "ranks 1, 3, ... 1023 (512 of them)"),
        ([0, 1, 4, 5, 8, 9, 12, 13], "ranks 0, 1, 4, 5, ... 12, 13 (8 of them)"),
        ([0, 5, 6, 7, 19, 33], "ranks 0, 5-7, ... 33 (6 of them)"),
    ],
)  # fmt: skip
def test_ranks_are_folded_into_ranges(numbers, words):
    assert rank_words(list(numbers)) == words
    assert spans([7, 6, 5]) == "5-7"
