"""Of a tensor that is not finite on thousands of ranks the first are recorded, and the others are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.ingest.merge import ClosedStep
from sentinel.judge.judge import Judge, Judgement
from sentinel.rules.language.loader import load_pack
from sentinel.rules.watches import row_watch
from sentinel.testing import Nan, SyntheticRun

from ...support.closed_steps import closed_steps


def a_run(where: Path, *faults: Nan, dp: int = 8, steps: int = 6) -> list[ClosedStep]:
    run = SyntheticRun(where / "run", pp=1, dp=dp, layers=2, d_model=16, elements=8, micro_steps=1)
    run.plant(*faults)
    run.write(steps)
    run.end()
    return closed_steps(run.directory)


def judged(views: Sequence[ClosedStep], most: int = 10**6) -> list[Judgement]:
    judge = Judge(load_pack(), max_anomalies=most)
    return [judge.judge(one.decision, one) for one in views]


def onsets(one: Judgement) -> list[Anomaly]:
    return [anomaly for anomaly in one.anomalies if anomaly.rule == "non-finite" and anomaly.event == "onset"]


def notes(one: Judgement) -> list[Anomaly]:
    return [anomaly for anomaly in one.anomalies if anomaly.event == "truncated"]


def test_the_first_of_each_tensor_are_recorded_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = a_run(tmp_path, Nan(step=2, module="layers.1.mlp", rank=5, is_skipped=False))
    every = judged(views)
    monkeypatch.setattr(row_watch, "MAX_PLACES", 3)
    some = judged(views)

    for step, (whole, few) in enumerate(zip(every, some, strict=True)):
        known = {(one.kind, one.tag_name, one.rank): one for one in onsets(whole)}
        kept = {(one.kind, one.tag_name, one.rank): one for one in onsets(few)}
        assert kept.items() <= known.items()
        of_tensor = Counter((kind, name) for kind, name, _ in kept)
        of_every = Counter((kind, name) for kind, name, _ in known)
        if step < 3:
            # From the next step on tensors are bad of which some are open already.
            assert of_tensor == {key: min(3, number) for key, number in of_every.items()}
        assert all(number <= 3 for number in of_tensor.values())
        left_out = len(known) - len(kept)
        assert bool(notes(few)) == bool(left_out and kept) and not notes(whole)
        if step == 2:
            assert [note.count for note in notes(few)] == [left_out] and notes(few)[0].severity is Severity.CRITICAL
            assert notes(few)[0].message == (
                f"{left_out} more anomalies of step 2 were not written: at most 1000000 are, and of one tensor the first "
                "ranks and micro-steps, at most 3"
            )
            # The one that came first is among them, and so the incident names the same cause.
            assert min(onsets(whole), key=lambda one: one.call_id or 0).rank == 5
            assert [one.first_causes for one in whole.incidents] == [one.first_causes for one in few.incidents]
            assert [one.title for one in whole.incidents] == [one.title for one in few.incidents]
        if step > 3:
            assert not onsets(few) and not notes(few), "told once"


def test_where_many_tensors_are_bad_fewer_of_each_are_recorded_and_the_first_of_each_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = a_run(tmp_path, Nan(step=2, module="layers.0.mlp", rank=5, is_skipped=False))
    every = judged(views)
    for most in (1, 60, 10**6):
        monkeypatch.setattr(row_watch, "MAX_FRESH", most)
        some = judged(views)
        for whole, few in zip(every, some, strict=True):
            assert len(onsets(few)) <= max(most, len({(one.kind, one.tag_name) for one in onsets(whole)}))
            assert [one.title for one in whole.incidents] == [one.title for one in few.incidents]
        known, kept = onsets(every[2]), onsets(some[2])
        assert {(one.kind, one.tag_name) for one in kept} == {(one.kind, one.tag_name) for one in known}
        assert sum(note.count for note in notes(some[2])) == len(known) - len(kept)
        assert (kept == known) == (most == 10**6)


def test_a_place_that_is_well_again_is_free_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_watch, "MAX_PLACES", 1)
    module = "layers.1.mlp"
    faults = [Nan(step=step, module=module, rank=rank) for step, rank in ((2, 3), (3, 3), (3, 1), (60, 1))]
    views = a_run(tmp_path, *faults, steps=64)
    found = {
        view.step: [one.rank for one in onsets(of) if (one.kind, one.tag_name) == ("activation", module)]
        for view, of in zip(views, judged(views), strict=True)
    }
    # Rank 1 of step 3 has no place beside rank 3; once that is over it has one.
    assert {step: ranks for step, ranks in found.items() if ranks} == {2: [3], 60: [1]}


def test_a_small_run_is_recorded_rank_by_rank(tmp_path: Path) -> None:
    views = a_run(tmp_path, Nan(step=2, module="layers.1.mlp", rank=5, is_skipped=False))
    for view, of in zip(views, judged(views), strict=True):
        assert not notes(of)
        if view.step == 2:
            bad = view.rows[view.bad_rows]
            ranks = view.row_rank[view.bad_rows].tolist()
            of_rows = [one for one in onsets(of) if one.kind != "scalar"]
            assert len(of_rows) == len(set(zip(bad["tensor"].tolist(), ranks, strict=True))) > 64
