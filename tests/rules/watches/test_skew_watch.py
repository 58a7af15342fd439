"""RankSkew as a rule: which ranks are held against which, what the record says, restarts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.place import Place
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Match, Pack, Rule
from sentinel.rules.watches import skew_watch

NUM_RANKS = 4


def engine_of(*kinds: str, statistic: tuple[str, ...] = ("norm",), **more: object) -> Engine:
    match = Match(kind=kinds, statistic=() if kinds == ("scalar",) else statistic, **more)
    return Engine(Pack(rules=(Rule(name="skew", detector="RankSkew", match=match),)))


def judge(engine, run, steps, rng, *, factor=None, scalars=("loss",), scale=None, layout=None):
    """Return the anomalies of steps in which rank r's loss is larger by factor[r], its rows by scale[r]."""
    found = []
    for step in steps:
        noise = np.exp(0.03 * rng.standard_normal((2, NUM_RANKS)))
        loss = (3.0 * noise[0] * np.array(factor or [1.0] * NUM_RANKS)).tolist()
        sizes = noise[1] * np.array(scale or [1.0] * NUM_RANKS)

        def grow(rank, rows, sizes=sizes):
            for name, power in (("m2", 2), ("m4", 4), ("min", 1), ("max", 1)):
                rows[name] *= sizes[rank] ** power

        view = run.view(step, scalars=dict.fromkeys(scalars, loss), change=grow)
        if layout is not None:
            parts = [msgspec.structs.replace(part, descriptor=layout.descriptors[part.rank]) for part in view.parts]
            view = ClosedStep(run="paper", attempt=0, step=step, layout=layout, parts=parts)
        found += engine.judge(view)
    return found


def test_the_default_pack_names_the_rank_whose_loss_is_away(paper_run, rng):
    run = paper_run([("w", "param")], num_ranks=NUM_RANKS)
    engine = Engine(load_pack())

    before = judge(engine, run, range(30), rng)
    reported = [one for one in judge(engine, run, range(30, 60), rng, factor=[1, 1, 2.5, 1]) if one.rule == "rank-skew"]
    (end,) = [one for one in judge(engine, run, range(60, 90), rng) if one.rule == "rank-skew"]

    assert before == []
    alone, onset, merged = reported
    assert (alone.rank, alone.step, alone.severity, alone.event) == (2, 30, Severity.INFO, "onset"), (
        "one step is written down"
    )
    assert (merged.event, merged.onset_id, merged.step) == ("end", alone.id, 32), "and goes on as the graver record"
    assert (onset.rank, onset.ranks, onset.step, onset.group_mates) == (2, (2,), 32, (0, 1, 2, 3))
    assert (onset.kind, onset.tag_name, onset.statistic, onset.detector) == ("scalar", "loss", "value", "RankSkew")
    assert onset.severity is Severity.WARNING and onset.moved_ranks == (2,)
    assert onset.value == pytest.approx(7.5, rel=0.2) and onset.baseline == pytest.approx(3.0, rel=0.2)
    assert "loss of rank 2 is 7." in onset.message and "of ranks 0, 1, 3, which do the same work" in onset.message
    assert (end.event, end.onset_id, end.count) == ("end", onset.id, 30)
    assert end.message.startswith("loss of rank 2 is back to normal")
    assert engine.num_points_judged["rank-skew"] == 90 * NUM_RANKS


def test_gradients_before_they_are_averaged_are_one_number_a_rank(paper_run, rng):
    run = paper_run([("a", "wgrad_unreduced"), ("b", "wgrad_unreduced"), ("c", "wgrad")], num_ranks=NUM_RANKS)
    engine = engine_of("wgrad_unreduced")

    assert judge(engine, run, range(30), rng) == []
    _, onset, _ = judge(engine, run, range(30, 40), rng, scale=[1, 6, 1, 1])

    assert (onset.rank, onset.tag_name, onset.kind, onset.statistic) == (1, "all gradients", "wgrad_unreduced", "norm")
    assert onset.baseline == pytest.approx(2**0.5, rel=0.2)
    assert engine.num_points_judged["skew"] == 40 * NUM_RANKS


def test_activations_are_compared_site_by_site(paper_run, rng):
    run = paper_run([("a", "activation"), ("b", "activation")], num_ranks=NUM_RANKS)
    engine = engine_of("activation", statistic=("rms",), name=("a",))

    assert judge(engine, run, range(30), rng) == []
    _, onset, _ = judge(engine, run, range(30, 40), rng, scale=[1, 1, 1, 0.1])

    assert (onset.rank, onset.tag_name, onset.kind) == (3, "a", "activation") and onset.score >= 1.0
    assert engine.num_points_judged["skew"] == 40 * NUM_RANKS, "b is not asked for"


def test_what_is_judged_in_blocks_is_judged_as_one(paper_run, monkeypatch):
    run = paper_run([(name, "activation") for name in "abcdef"], num_ranks=NUM_RANKS)

    def judged():
        engine, rng = engine_of("activation", "scalar", statistic=("rms",)), np.random.default_rng(3)
        found = judge(engine, run, range(30), rng) + judge(engine, run, range(30, 40), rng, scale=[1, 1, 1, 0.1])
        other = judge(engine, run, range(40, 50), rng, factor=[1, 9, 1, 1])
        return found + other, engine.snapshot()

    expected = judged()
    assert {one.tag_name for one in expected[0]} == {*"abcdef", "loss"} and {one.rank for one in expected[0]} == {1, 3}
    for most in (1, NUM_RANKS + 1, 3 * NUM_RANKS):
        monkeypatch.setattr(skew_watch, "BLOCK_ENTRIES", most)
        assert judged() == expected


def test_ranks_of_other_stages_and_other_parts_of_a_sequence_are_no_peers(paper_run, rng):
    """Two stages of two: ranks 0 and 1 on the first. What differs between stages is nobody's fault."""
    run = paper_run([("w", "param")], num_ranks=NUM_RANKS)
    places = [
        Place(rank=r, world_size=4, dp_rank=r % 2, dp_size=2, pp_rank=r // 2, pp_size=2, schedule="1f1b") for r in range(4)
    ]
    layout = ModelLayout({rank: msgspec.structs.replace(one, place=places[rank]) for rank, one in run.descriptors.items()})
    engine = engine_of("scalar", name=("loss",))

    assert judge(engine, run, range(40), rng, factor=[1, 1, 9, 9], layout=layout) == []
    _, onset, _ = judge(engine, run, range(40, 45), rng, factor=[1, 1, 9, 30], layout=layout)

    assert onset.rank == 3 and onset.group_mates == (2, 3)


def test_a_step_alone_is_written_down_once_and_the_next_like_it_is_not_news(paper_run, rng):
    run = paper_run([("w", "param")], num_ranks=NUM_RANKS)
    engine = engine_of("scalar")

    assert judge(engine, run, range(30), rng) == []
    first = judge(engine, run, range(30, 31), rng, factor=[1, 4, 1, 1])
    after = judge(engine, run, range(31, 60), rng)
    again = judge(engine, run, range(60, 61), rng, factor=[1, 3, 1, 1])
    farther = judge(engine, run, range(61, 62), rng, factor=[1, 9, 1, 1])

    assert [(one.rank, one.severity) for one in first + farther] == [(1, Severity.INFO)] * 2
    assert [one.event for one in after] == ["end"] and again == []


TWINS = Pack(
    rules=(
        Rule(
            name="same-data",
            detector="DuplicateRanks",
            match=Match(kind=("activation", "wgrad_unreduced"), statistic=("rms",)),
        ),
        Rule(name="same-loss", detector="DuplicateRanks", match=Match(kind=("scalar",), name=("loss",))),
    )
)


def test_two_ranks_that_begin_to_read_the_same_data_are_named_together(paper_run, rng):
    run = paper_run([("a", "activation"), ("b", "activation")], num_ranks=NUM_RANKS)
    engine = Engine(TWINS)

    def same(step, duplicates):
        noise = np.exp(0.03 * rng.standard_normal(NUM_RANKS))
        noise[list(duplicates)] = noise[duplicates[0]]

        def grow(rank, rows):
            rows["m2"] *= noise[rank] ** 2

        return engine.judge(run.view(step, scalars={"loss": (3.0 * noise).tolist()}, change=grow))

    assert [one for step in range(30) for one in same(step, (0,))] == []
    found = [one for step in range(30, 36) for one in same(step, (1, 3))]

    onsets = [(one.rule, one.step - 30, one.severity.value) for one in found if one.event == "onset"]
    assert onsets == [("same-data", 0, "info"), ("same-data", 2, "warning"), ("same-loss", 2, "warning")]
    assert all(one.group_mates == one.moved_ranks == (1, 3) for one in found)
    assert "a is" in found[0].message and "on each of ranks 1, 3, to the last bit: they read the same" in found[0].message
    assert engine.num_points_judged == {"same-data": 36 * 2 * NUM_RANKS, "same-loss": 36 * NUM_RANKS}


def test_ranks_that_read_the_same_data_from_the_start_are_told_and_what_training_moves_alike_is_not(paper_run, rng):
    """`a` is drawn anew each step, alike on all ranks: the data are. `b` is a learned position: it walks."""
    run = paper_run([("a", "activation"), ("b", "activation")], num_ranks=NUM_RANKS)
    engine, found, level = Engine(TWINS), [], 1.0

    for step in range(120):
        level *= np.exp(0.01 * rng.standard_normal())
        sizes = np.array([np.exp(0.03 * rng.standard_normal()), level])

        def grow(rank, rows, sizes=sizes):
            rows["m2"] *= sizes**2

        # What is logged may be the mean over ranks: alike on all, and no fault.
        found += engine.judge(run.view(step, scalars={"loss": [3.0 * float(sizes[0])] * NUM_RANKS}, change=grow))

    assert [(one.rule, one.tag_name, one.group_mates) for one in found] == [("same-data", "a", (0, 1, 2, 3))]


@pytest.mark.parametrize("wrong", [1.1, 1.0])
def test_a_module_that_makes_another_size_of_its_input_is_found_beneath_the_scatter_of_the_data(paper_run, rng, wrong):
    """Inputs scatter by 20 %, outputs with them; on rank 1 the product is off by 10 %."""
    run = paper_run([("a", "activation_in"), ("a", "activation"), ("b", "activation")], num_ranks=NUM_RANKS)
    engine = Engine(Pack(rules=(Rule(name="gain", detector="GainSkew", match=Match(kind=("activation",))),)))
    found = []

    for step in range(60):
        size = np.exp(0.2 * rng.standard_normal(NUM_RANKS))
        gain = np.exp(0.005 * rng.standard_normal(NUM_RANKS))
        gain[1] *= wrong if step >= 40 else 1.0

        def grow(rank, rows, size=size, gain=gain):
            rows["m2"] *= np.array([size[rank], size[rank] * gain[rank], 1.0]) ** 2

        found += engine.judge(run.view(step, change=grow))

    onsets = [(one.rank, one.tag_name, one.statistic, one.step, one.severity.value) for one in found if one.event == "onset"]
    assert onsets == ([(1, "a", "gain", 40, "info"), (1, "a", "gain", 42, "warning")] if wrong > 1 else [])
    assert engine.num_points_judged["gain"] == 60 * NUM_RANKS
    assert all("gain of a (its output's rms over its input's) of rank 1 is 1." in one.message for one in found[:1])


def test_one_rank_alone_and_what_is_not_logged_tell_nothing(paper_run, rng):
    alone = paper_run([("w", "param")], num_ranks=1)
    engine = engine_of("scalar")

    for step in range(40):
        assert engine.judge(alone.view(step, scalars={"loss": 3.0 + 9.0 * (step > 30)})) == []
    assert engine.num_points_judged["skew"] == 0


def test_a_restart_changes_no_anomaly(paper_run):
    run = paper_run([("w", "param")], num_ranks=NUM_RANKS)
    engines = [engine_of("scalar") for _ in range(3)]

    def part(engine, steps, seed, factor):
        return judge(engine, run, steps, np.random.default_rng(seed), factor=factor)

    away = [1, 5, 1, 1]
    expected = part(engines[0], range(25), 1, None) + part(engines[0], range(25, 27), 2, away)
    expected += part(engines[0], range(27, 40), 3, away)
    first = part(engines[1], range(25), 1, None) + part(engines[1], range(25, 27), 2, away)
    engines[2].restore(engines[1].snapshot())

    assert first + part(engines[2], range(27, 40), 3, away) == expected
    assert [one.event for one in expected] == ["onset", "onset", "end"]
