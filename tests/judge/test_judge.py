"""The judge: pure, ordered, capped after ordering, and the same after a snapshot."""

from __future__ import annotations

import random

import msgspec
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.steps import StepAssembler
from sentinel.judge.judge import Judge, Judgement, truncate
from sentinel.order.causal import sort_key
from sentinel.rules.language.loader import load_pack
from sentinel.testing import LossJump, Nan, SyntheticRun

from ..support.anomalies import an_excursion


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> list[ClosedStep]:
    source = SyntheticRun(tmp_path_factory.mktemp("runs") / "run", pp=2, dp=2, layers=4, d_model=16, elements=8)
    source.plant(Nan(step=12, module="layers.2"), LossJump(step=40)).write(50)
    source.end()
    follower = RunFollower(source.directory)
    assembler = StepAssembler("run")
    found: list[ClosedStep] = []
    while records := follower.poll(final=True):
        assembler.take(records, 0.0)
        found += assembler.close(0.0, follower.behind)
    return found


def judge_all(judge: Judge, views: list[ClosedStep]) -> list[Judgement]:
    judgements = []
    for view in views:
        assert view.decision is not None
        judgements.append(judge.judge(view.decision, view))
    return judgements


@pytest.mark.slow
def test_the_same_steps_give_the_same_verdicts(views: list[ClosedStep]) -> None:
    first, second = (judge_all(Judge(load_pack()), views) for _ in range(2))

    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    assert sum(len(one.anomalies) for one in first) > 10
    assert any(one.proposal is not None for one in first)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 13, 25, 41])
def test_a_restored_judge_goes_on_as_the_other_would(views: list[ClosedStep], at: int) -> None:
    whole = judge_all(Judge(load_pack()), views)
    former = Judge(load_pack())
    judge_all(former, views[:at])

    later = Judge(load_pack())
    later.restore(former.snapshot())

    assert msgspec.json.encode(judge_all(later, views[at:])) == msgspec.json.encode(whole[at:])
    assert later.snapshot() == later.snapshot()


def test_anomalies_come_in_total_order_with_the_records_time(views: list[ClosedStep]) -> None:
    for view, judgement in zip(views, judge_all(Judge(load_pack()), views), strict=True):
        assert list(judgement.anomalies) == sorted(judgement.anomalies, key=sort_key)
        times = {part.time for part in view.parts}
        assert all(min(times) <= one.time <= max(times) for one in judgement.anomalies)


@pytest.mark.slow
def test_the_same_rules_again_change_nothing(views: list[ClosedStep]) -> None:
    whole = judge_all(Judge(load_pack()), views)
    judge = Judge(load_pack())

    found = judge_all(judge, views[:20])
    judge.reload(load_pack())

    assert msgspec.json.encode(found + judge_all(judge, views[20:])) == msgspec.json.encode(whole)


def numbered(number: int, severity: Severity) -> Anomaly:
    return an_excursion(
        "activation", f"layers.{number}", 3, id=f"{number:016x}", rank=number % 4, call_id=number, severity=severity,
        time=float(number),
    )  # fmt: skip


def test_a_cap_applies_after_ordering_and_hides_nothing_worse() -> None:
    flood = [numbered(number, Severity.INFO) for number in range(50)]
    flood[47] = numbered(47, Severity.CRITICAL)

    *kept, note = truncate(flood, 10)

    assert [one.call_id for one in kept] == [*range(9), 47]
    assert (note.event, note.count, note.rule, note.severity) == ("truncated", 40, "truncated", Severity.INFO)
    assert note.time == 49.0
    assert "40 more anomalies of step 3 were not written" in note.message


def test_nothing_is_said_when_nothing_is_left_out() -> None:
    few = [numbered(number, Severity.INFO) for number in range(10)]
    random.Random(0).shuffle(few)

    assert truncate(few, 10) == few
    assert truncate([], 10) == []


def test_a_capped_step_has_one_truncated_record(views: list[ClosedStep]) -> None:
    judgements = judge_all(Judge(load_pack(), max_anomalies=3), views)

    for judgement in judgements:
        *kept, last = judgement.anomalies or (None,)
        if last is not None and last.event == "truncated":
            assert len(kept) == 3
        assert sum(one.event == "truncated" for one in judgement.anomalies) <= 1
        assert len(judgement.anomalies) <= 4
    assert any(one.event == "truncated" for judgement in judgements for one in judgement.anomalies)
