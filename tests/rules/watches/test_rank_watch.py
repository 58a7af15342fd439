"""The slow rank as a rule: one episode that names it, its excess and who waits; and the steps that tell nothing."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.decision import RankFacts, Tick
from sentinel.ingest.merge import ClosedStep
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack


def judge(engine, run, steps, busy, *, step_s=None, activities=(), only=None, wait_known=True):
    """Return the anomalies of steps in which rank r works busy[r] seconds and waits for the longest to end."""
    found = []
    for step in steps:
        view = run.view(step)
        length = step_s or max(busy) + 0.05
        parts = [
            msgspec.structs.replace(
                part,
                end_step=msgspec.structs.replace(
                    part.end_step, step_time_s=length, wait_s=length - busy[part.rank] if wait_known else -1.0,
                    activities=tuple(activities),
                ),
            )
            for part in view.parts
            if only is None or part.rank in only
        ]  # fmt: skip
        found += engine.judge(ClosedStep(run="paper", attempt=0, step=step, layout=view.layout, parts=parts))
    return [one for one in found if one.rule == "slow-rank"]


WELL = [0.5] * 4
SLOW = [0.5, 0.5, 0.9, 0.5]


def test_the_slow_rank_is_named_with_its_excess_and_who_waits(paper_run, engine):
    run = paper_run([("w", "param")], num_ranks=4)

    assert judge(engine, run, range(20), WELL) == []
    (onset,) = judge(engine, run, range(20, 60), SLOW)
    (end,) = judge(engine, run, range(60, 100), WELL)

    assert (onset.rank, onset.ranks, onset.step, onset.group_mates) == (2, (2,), 22, (0, 1, 2, 3))
    assert (onset.kind, onset.statistic, onset.detector) == ("health", "busy_s", "SlowRank")
    assert onset.severity is Severity.WARNING
    assert onset.value == pytest.approx(0.9) and onset.baseline == pytest.approx(0.5)
    assert onset.message == (
        "rank 2 arrives last: it works 0.9 s of each step, 1.8 times the 0.5 s of its 3 peers; "
        "ranks 0, 1, 3 wait 0.45 s for it"
    )
    assert (end.event, end.onset_id, end.count) == ("end", onset.id, 38)
    assert end.message == "rank 2 no longer arrives last; it did in 38 steps"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"activities": ["eval"]}, id="evaluation"),
        pytest.param({"activities": ["checkpoint"]}, id="checkpoint"),
        pytest.param({"wait_known": False}, id="waits not known"),
        pytest.param({"only": [2]}, id="nobody else is there"),
    ],
)
def test_steps_that_tell_nothing(paper_run, engine, options):
    run = paper_run([("w", "param")], num_ranks=4)
    judge(engine, run, range(20), WELL)

    assert judge(engine, run, range(20, 40), SLOW, **options) == []
    assert len(judge(engine, run, range(40, 60), SLOW)) == 1, "the control"


@pytest.mark.parametrize("is_reported", [True, False], ids=["deadlock", "the control"])
def test_a_rank_that_waits_in_a_deadlock_is_not_slow(paper_run, engine, is_reported):
    run = paper_run([("w", "param")], num_ranks=4)
    judge(engine, run, range(20), WELL)
    facts = tuple(
        RankFacts(
            rank=rank,
            incarnation=bytes([rank]),
            received_at=60.0,
            moved_at=0.0,
            step=20,
            call_id=3,
            num_calls=9,
            is_waiting=1,
            waiting_at=0.0,
            world_size=4,
            process_state="S",
        )
        for rank in range(4)
    )
    if is_reported:
        [stale] = engine.judge_tick(Tick(seq=1, run="paper", attempt=0, step=19, now=60.0, ranks=facts))
        assert stale.message.startswith("ranks 0, 1, 2, 3 wait for each other: ")
        again = Engine(load_pack())
        again.restore(engine.snapshot())
        engine = again

    found = judge(engine, run, [20], [0.5, 0.5, 60.0, 0.5])

    assert [one.rank for one in found] == ([] if is_reported else [2])
    assert judge(engine, run, range(21, 40), WELL) == [] or not is_reported
    assert [one.rank for one in judge(engine, run, range(40, 60), SLOW) if one.severity is Severity.WARNING] == [2]


def test_all_slow_alike_is_nobodys_fault(paper_run, engine):
    run = paper_run([("w", "param")], num_ranks=4)
    judge(engine, run, range(20), WELL)

    assert judge(engine, run, range(20, 40), [1.5] * 4) == []


def test_a_world_of_another_size_begins_anew(paper_run, engine):
    judge(engine, paper_run([("w", "param")], num_ranks=4), range(20), WELL)
    smaller = paper_run([("w", "param")], num_ranks=3)

    assert judge(engine, smaller, range(20, 30), SLOW) == [], "its first steps"
    assert [one.rank for one in judge(engine, smaller, range(30, 40), SLOW)] == [2]


@pytest.mark.slow
def test_a_restart_changes_no_anomaly(paper_run):
    run = paper_run([("w", "param")], num_ranks=4)
    straight, stopped, resumed = Engine(load_pack()), Engine(load_pack()), Engine(load_pack())
    expected = judge(straight, run, range(21), WELL) + judge(straight, run, range(21, 60), SLOW)
    first = judge(stopped, run, range(21), WELL) + judge(stopped, run, range(21, 22), SLOW)
    resumed.restore(stopped.snapshot())

    assert first + judge(resumed, run, range(22, 60), SLOW) == expected
    assert len(expected) == 1


def test_a_slow_rank_that_becomes_several_times_slower_is_an_onset_of_its_own(paper_run, engine):
    run = paper_run([("w", "param")], num_ranks=4)
    judge(engine, run, range(20), WELL)
    (mild,) = judge(engine, run, range(20, 30), SLOW)

    worse, ended = judge(engine, run, range(30, 50), [0.5, 0.5, 6.0, 0.5])

    assert (worse.event, worse.rank, worse.step) == ("onset", 2, 30)
    assert worse.value == pytest.approx(6.0)
    assert (ended.event, ended.onset_id) == ("end", mild.id)
    assert judge(engine, run, range(50, 60), [0.5, 0.5, 7.0, 0.5]) == [], "no news"
