"""Replica divergence as a rule: who is named, in which words, and one episode however long it lasts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.record import Kind
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack

TENSORS = [("w", "param"), ("w", "wgrad"), ("m", "activation")]


def checksums(wrong=None):
    """Return what gives every rank the same checksums, and those in `wrong` (rank -> word) another one of param w."""

    def change(rank, rows):
        rows["checksum"] = np.where(rows["kind"] == Kind.ACTIVATION, 0, 100 + rows["tensor"])
        if wrong and rank in wrong:
            rows["checksum"][0] = wrong[rank]

    return change


def judge(engine, run, steps, wrong=None, **options):
    found = []
    for step in steps:
        found += engine.judge(run.view(step, change=checksums(wrong), **options))
    return [one for one in found if one.rule == "replica-divergence"]


def test_the_minority_is_named_in_one_episode(paper_run, engine):
    run = paper_run(TENSORS, num_ranks=4)
    assert judge(engine, run, range(5)) == []

    (onset,) = judge(engine, run, range(5, 40), {2: 7})
    (end,) = judge(engine, run, range(40, 80))

    assert (onset.step, onset.rank, onset.ranks, onset.group_mates) == (5, 2, (2,), (0, 1, 2, 3))
    assert (onset.kind, onset.tag_name, onset.statistic) == ("param", "w", "checksum")
    assert (onset.severity, onset.value, onset.baseline, onset.score) == (Severity.CRITICAL, 1.0, 4.0, 1.0)
    assert onset.message == (
        "param w on rank 2 differs from its 3 copies that agree, on ranks 0, 1, 3: 0000000000000007 against 0000000000000064"
    )
    assert (end.event, end.onset_id, end.count, end.step) == ("end", onset.id, 35, 59)
    assert end.message == "param w is the same again on all that were compared; its copies differed in 35 steps"


def test_of_two_copies_one_of_these_is_wrong(paper_run, engine):
    (onset,) = judge(engine, paper_run(TENSORS, num_ranks=2), range(10), {1: 7})

    assert (onset.rank, onset.ranks) == (None, (0, 1))
    assert onset.message == (
        "param w differs between its two copies: one of these is wrong, rank 0 or rank 1: 0000000000000064, 0000000000000007"
    )


def test_two_wrong_ranks_are_both_named(paper_run, engine):
    (onset,) = judge(engine, paper_run(TENSORS, num_ranks=5), range(10), {1: 7, 3: 8})

    assert (onset.rank, onset.ranks) == (None, (1, 3))
    assert onset.message.startswith("param w on ranks 1, 3 differs from its 3 copies that agree, on ranks 0, 2, 4")


def test_another_rank_is_another_onset(paper_run, engine):
    run = paper_run(TENSORS, num_ranks=6)

    first = judge(engine, run, range(5), {2: 7})
    second = judge(engine, run, range(5, 10), {2: 7, 4: 8})
    third = judge(engine, run, range(10, 15), {4: 8})

    assert [one.ranks for one in first] == [(2,)]
    assert [(one.event, one.ranks) for one in second] == [("onset", (2, 4)), ("end", (2,))]
    assert third == []


def test_a_late_rank_makes_no_other_one_suspect(paper_run, engine):
    run = paper_run(TENSORS, num_ranks=3)
    (onset,) = judge(engine, run, range(5), {1: 7})
    view = run.view(5, change=checksums({1: 7}))
    without_two = type(view)(run="paper", attempt=0, step=5, layout=run.layout, parts=view.parts[:2])

    assert onset.ranks == (1,)
    assert [one for one in engine.judge(without_two) if one.rule == "replica-divergence"] == []
    assert judge(engine, run, range(6, 10), {1: 7}) == []


def test_one_of_two_that_turns_out_is_told_anew(paper_run, engine):
    run = paper_run(TENSORS, num_ranks=3)
    view = run.view(0, change=checksums({1: 7}))
    two = type(view)(run="paper", attempt=0, step=0, layout=run.layout, parts=view.parts[:2])

    unsure = [one for one in engine.judge(two) if one.rule == "replica-divergence"]
    sure = judge(engine, run, range(1, 5), {1: 7})

    assert [one.ranks for one in unsure] == [(0, 1)]
    assert [(one.event, one.ranks) for one in sure] == [("onset", (1,)), ("end", (0, 1))]


def test_other_kinds_are_not_compared_and_nothing_is_accused_when_all_is_well(paper_run, engine):
    def activations(rank, rows):
        rows["checksum"] = np.where(rows["kind"] == Kind.ACTIVATION, 100 + rank, 5)

    run = paper_run(TENSORS, num_ranks=4)

    assert [one for step in range(5) for one in engine.judge(run.view(step, change=activations))] == []


def test_a_restart_changes_no_anomaly(paper_run):
    run = paper_run(TENSORS, num_ranks=4)
    straight, stopped = Engine(load_pack()), Engine(load_pack())
    expected = judge(straight, run, range(5), {2: 7}) + judge(straight, run, range(5, 40))
    first = judge(stopped, run, range(5), {2: 7})
    resumed = Engine(load_pack())
    resumed.restore(stopped.snapshot())

    assert first + judge(resumed, run, range(5, 40)) == expected
    assert len(expected) == 2


def test_zero_quiet_steps_make_every_step_its_own_episode(paper_run, tmp_path):
    (tmp_path / "pack.yaml").write_text("rules: [{name: replica-divergence, episode_quiet_steps: 0}]")
    found = judge(Engine(load_pack([tmp_path / "pack.yaml"])), paper_run(TENSORS, num_ranks=3), range(4), {1: 7})

    assert [(one.event, one.step) for one in found] == [("onset", step) for step in range(4)]
    assert len({one.id for one in found}) == 4


def test_anomalies_are_strict_json(paper_run, engine):
    (onset,) = judge(engine, paper_run(TENSORS, num_ranks=3), [0], {1: 7})

    assert msgspec.json.decode(msgspec.json.encode(onset), type=type(onset)) == onset


MANY = [(f"w{n}", "param") for n in range(12)]


def own_models(rank, rows):
    """Every rank trains a model of its own."""
    rows["checksum"] = 1000 * (rank + 1) + rows["tensor"]


def same_models(rank, rows):
    rows["checksum"] = 1000 + rows["tensor"]


@pytest.mark.parametrize("num_weights", [12, 4, 2])
def test_ranks_that_train_models_of_their_own_are_told_once_and_not_accused(num_weights, paper_run, engine):
    """Or the stages of a pipeline that nobody declared: their layers have the same names."""
    run = paper_run(MANY[:num_weights], num_ranks=4)

    found = [one for step in range(30) for one in engine.judge(run.view(step, change=own_models))]

    (reported,) = [one for one in found if one.rule == "replica-divergence"]
    assert (reported.severity, reported.step, reported.rank) == (Severity.WARNING, 0, None)
    assert "never the same" in reported.message


def test_once_alike_they_are_compared_like_others(paper_run, engine):
    run = paper_run(MANY, num_ranks=4)

    found = [one for step in range(3) for one in engine.judge(run.view(step, change=own_models))]
    found += [one for step in range(3, 6) for one in engine.judge(run.view(step, change=same_models))]
    found += judge(engine, run, range(6, 8), {2: 7})

    accused = [one for one in found if one.severity is Severity.CRITICAL]
    assert [(one.step, one.ranks, one.tag_name) for one in accused] == [(6, (2,), "w0")]


def test_one_wrong_copy_at_the_very_first_step_is_accused(paper_run, engine):
    run = paper_run(MANY, num_ranks=4)

    (onset,) = judge(engine, run, range(5), {2: 7})

    assert (onset.step, onset.ranks, onset.severity) == (0, (2,), Severity.CRITICAL)
