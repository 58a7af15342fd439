import math

import msgspec
import numpy as np
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Match, Pack, Rule

TENSORS = [(f"layers.{i}.mlp", kind) for i in range(12) for kind in ("param", "wgrad", "activation", "dgrad")]


def rule(name, detector, kind, *, names=("*",), statistic=(), **more):
    return Rule(name=name, detector=detector, match=Match(kind=kind, name=names, statistic=statistic), **more)


NORMS = rule("norms", "AnomalyTurbulence", ("wgrad", "activation", "dgrad"), severity=Severity.CRITICAL)


def noisy(rng, n=None):
    return np.exp(0.05 * rng.standard_normal(len(TENSORS) if n is None else n))


def warmed(engine, run, rng, steps=60, **scalars):
    for step in range(steps):
        logged = {name: make(step) for name, make in scalars.items()}
        assert engine.judge(run.view(step, noisy(rng), scalars=logged)) == []
    return steps


def test_nan_names_rank_micro_step_and_call(paper_run, with_nan):
    run = paper_run(TENSORS, num_ranks=4)
    engine = Engine(load_pack())

    def spoil(rank, rows):
        if rank == 2:
            rows["micro_step"][6] = -1
            with_nan(rows, 6, micro_step=3, call_id=17)

    (anomaly,) = engine.judge(run.view(5, change=spoil))

    assert (anomaly.rank, anomaly.micro_step, anomaly.call_id) == (2, 3, 17)
    assert (anomaly.tag_name, anomaly.kind, anomaly.statistic, anomaly.value) == ("layers.1.mlp", "activation", "nans", 3.0)
    assert anomaly.severity is Severity.CRITICAL
    assert anomaly.place == {"dp": 2} and anomaly.group_mates == (0, 1, 2, 3)
    assert anomaly.time == 1005.0
    assert anomaly.message == "activation layers.1.mlp holds 3 NaN of 100 values on rank 2, micro-step 3"


def test_infinities_fire_without_a_threshold(paper_run):
    run = paper_run(TENSORS)

    def spoil(rank, rows):
        rows["num_neg_inf"][0], rows["count"][0] = 2, 98

    (anomaly,) = Engine(load_pack()).judge(run.view(0, change=spoil))

    assert (anomaly.statistic, anomaly.value) == ("infs", 2.0)


@pytest.mark.parametrize(
    ("kind", "field", "severity"),
    [
        ("activation", "num_neg_inf", Severity.INFO),
        ("activation", "num_pos_inf", Severity.CRITICAL),
        ("activation", "num_nan", Severity.CRITICAL),
        ("dgrad", "num_neg_inf", Severity.CRITICAL),
        ("wgrad", "num_neg_inf", Severity.CRITICAL),
    ],
)
def test_minus_infinity_alone_in_an_activation_pages_nobody(paper_run, kind, field, severity):
    run = paper_run([("attn.scores", kind)])

    def mask(rank, rows):
        rows[field][0], rows["count"][0] = 40, 60

    (anomaly,) = Engine(load_pack()).judge(run.view(0, change=mask))

    assert anomaly.severity is severity


def test_several_rules_all_kept(paper_run, rng):
    run = paper_run(TENSORS)
    rules = [
        rule("norm-a", "AnomalyTurbulence", ("wgrad",), statistic=("norm", "max")),
        rule("norm-b", "AnomalyTurbulence", ("wgrad",), statistic=("norm",), args={"compat": "msprobe", "threshold": 0.5}),
        rule("limit", "AnomalyNan", ("wgrad",), statistic=("norm",), args={"threshold": 50.0}),
    ]
    engine = Engine(Pack(rules=tuple(rules)))
    step = warmed(engine, run, rng)
    norms = noisy(rng)
    norms[5] *= 1e6

    found = engine.judge(run.view(step, norms))

    assert sorted((a.rule, a.statistic) for a in found) == [
        ("limit", "norm"),
        ("norm-a", "max"),
        ("norm-a", "norm"),
        ("norm-b", "norm"),
    ]
    assert len({a.id for a in found}) == 4
    assert all(a.value == pytest.approx(norms[5]) and a.tag_name == "layers.1.mlp" for a in found)


def test_a_lone_excursion_is_info_until_it_lasts(paper_run, rng):
    run = paper_run(TENSORS)
    engine = Engine(Pack(rules=(NORMS,)))
    step = warmed(engine, run, rng)

    def next_step(step):
        norms = noisy(rng)
        norms[5] *= 40.0
        return engine.judge(run.view(step, norms))

    (first,) = next_step(step)
    second = next_step(step + 1)
    raised, ended = next_step(step + 2)
    after = next_step(step + 3)

    assert (first.severity, first.event) == (Severity.INFO, "onset")
    assert second == [] and after == []
    assert (raised.severity, raised.event) == (Severity.CRITICAL, "onset")
    assert (ended.event, ended.onset_id, ended.count) == ("end", first.id, 3)
    assert raised.id in ended.message


def test_three_tensors_of_one_step_agree(paper_run, rng):
    run = paper_run(TENSORS)
    engine = Engine(Pack(rules=(NORMS,)))
    step = warmed(engine, run, rng)
    norms = noisy(rng)
    norms[[5, 9, 13]] *= 40.0

    found = engine.judge(run.view(step, norms))

    assert [a.severity for a in found] == [Severity.CRITICAL] * 3


def test_what_falls_silent_must_last(paper_run, rng):
    run = paper_run(TENSORS)
    engine = Engine(Pack(rules=(NORMS,)))
    step = warmed(engine, run, rng)
    norms = noisy(rng)
    norms[[5, 9, 13]] = 0.0

    steps = [engine.judge(run.view(step + i, norms)) for i in range(3)]
    severities = [sorted(a.severity.value for a in found if a.event == "onset") for found in steps]

    assert severities == [["info"] * 3, [], ["critical"] * 3]


def test_level_shift_fires_once(paper_run, rng):
    run = paper_run(TENSORS)
    engine = Engine(Pack(rules=(NORMS,)))
    step = warmed(engine, run, rng)
    found, settled = [], []
    for later in range(step, step + 200):
        norms = noisy(rng)
        norms[5] *= 40.0
        found += engine.judge(run.view(later, norms))
        settled += engine.settled

    onsets = [a for a in found if a.event == "onset" and a.severity is Severity.CRITICAL]
    ends = [a for a in found if a.event == "end" and a.severity is Severity.CRITICAL]
    assert len(onsets) == len(ends) == 1
    assert ends[0].onset_id == onsets[0].id and settled == [onsets[0].id]
    assert ends[0].count == 20 and "settled" in ends[0].message
    assert len(found) == 4


def test_an_episode_has_one_onset_and_one_end(paper_run, with_nan):
    run = paper_run(TENSORS)
    engine = Engine(load_pack())
    found = []
    for step in range(60):
        found += engine.judge(run.view(step, change=(lambda _, rows: with_nan(rows, 3)) if 10 <= step < 15 else None))

    assert [(a.event, a.step) for a in found] == [("onset", 10), ("end", 34)]
    assert found[1].count == 5 and found[1].onset_id == found[0].id
    assert found[1].message == "dgrad layers.0.mlp is back to normal; it was anomalous in 5 steps"


def test_nan_on_another_rank_or_micro_step_is_a_new_onset(paper_run, with_nan):
    run = paper_run(TENSORS, num_ranks=2)
    engine = Engine(load_pack())

    def at(rank, micro_step):
        def change(one, rows):
            rows["micro_step"] = -1
            if one == rank:
                with_nan(rows, 3, micro_step=micro_step)

        return change

    onsets = [engine.judge(run.view(step, change=at(*where))) for step, where in enumerate([(0, 1), (0, 1), (1, 1), (0, 2)])]

    assert [[(a.rank, a.micro_step) for a in found] for found in onsets] == [[(0, 1)], [], [(1, 1)], [(0, 2)]]


def test_zero_quiet_steps_make_every_step_its_own_episode(paper_run, with_nan):
    run = paper_run(TENSORS)
    engine = Engine(Pack(rules=(rule("nan", "AnomalyNan", ("dgrad",), episode_quiet_steps=0),)))

    found = [engine.judge(run.view(step, change=lambda _, rows: with_nan(rows, 3))) for step in range(5)]

    assert [[a.event for a in one] for one in found] == [["onset"]] * 5


def test_loss_spike_pages_when_far_or_lasting(paper_run, rng):
    run = paper_run(TENSORS)
    engine = Engine(load_pack())
    step = warmed(engine, run, rng, loss=lambda step: 3.0 + 0.02 * math.sin(step * 1.7))

    (small,) = engine.judge(run.view(step, scalars={"loss": 3.5}))
    engine.judge(run.view(step + 1, scalars={"loss": 3.0}))
    far = engine.judge(run.view(step + 2, scalars={"loss": 9.0}))

    assert small.severity is Severity.WARNING
    assert [a.severity for a in far if a.event == "onset" and a.rule == "loss-spike"] == [Severity.CRITICAL]
    assert far[0].baseline == pytest.approx(3.0, rel=0.02)
    assert f"loss is 9, {9.0 / far[0].baseline:.4g} times its baseline" in far[0].message


def test_a_nan_loss_is_critical_and_escalates(paper_run):
    run = paper_run(TENSORS, num_ranks=3)
    engine = Engine(load_pack())

    (anomaly,) = engine.judge(run.view(0, scalars={"loss": [1.0, math.nan, 1.0]}))

    assert anomaly.severity is Severity.CRITICAL and anomaly.rule in engine.escalating
    assert (anomaly.value, anomaly.value_text, anomaly.rank) == (None, "nan", 1)
    assert anomaly.message == "loss is nan on rank 1"


def test_a_loss_scaler_finding_its_scale_is_written_down_and_a_later_overflow_warns(paper_run):
    run = paper_run([*TENSORS, ("all_reduce@train.py:41:in", "comm")])

    def overflow(_, rows):
        for at in (1, len(TENSORS)):
            rows["num_pos_inf"][at], rows["count"][at] = 5, 95

    def skipped(step, **scalars):
        said = {"loss": 2.0, "loss_scale": 65536.0, "grad_norm": math.inf} | scalars
        return run.view(step, change=overflow, is_skipped=True, scalars=said)

    def of(engine, view):
        return {a.severity for a in engine.judge(view) if a.event == "onset"}

    searching, taken, ill = Engine(load_pack()), Engine(load_pack()), Engine(load_pack())
    for step in range(3):
        assert of(searching, skipped(step)) <= {Severity.INFO}
        taken.judge(run.view(step, scalars={"loss": 2.0, "loss_scale": 65536.0, "grad_norm": 1.0}))

    assert of(taken, skipped(3)) == {Severity.WARNING}
    assert Severity.CRITICAL in of(ill, skipped(0, loss=math.nan)), "a loss that is no number is no matter of the scale"


def test_a_raise_of_the_loss_scale_may_cost_a_skip_and_no_more(paper_run):
    run = paper_run(TENSORS)

    def judged(engine, step, scale, *, is_skipped=False):
        def overflow(_, rows):
            rows["num_pos_inf"][1], rows["count"][1] = (5, 95) if is_skipped else (0, 100)

        said = {"loss": 2.0, "loss_scale": scale, "grad_norm": math.inf if is_skipped else 1.0}
        view = run.view(step, change=overflow, is_skipped=is_skipped, scalars=said)
        return {a.severity for a in engine.judge(view) if a.event == "onset"}

    steady, raised = Engine(load_pack()), Engine(load_pack())
    for step in range(30):
        judged(steady, step, 32768.0)
        judged(raised, step, 16384.0 if step < 10 else 32768.0)

    assert judged(raised, 30, 32768.0, is_skipped=True) <= {Severity.INFO}, "a scale that was raised lately"
    assert judged(raised, 31, 16384.0) == set()
    assert judged(steady, 30, 32768.0, is_skipped=True) == {Severity.WARNING}, "a scale that had held from the first step on"


def test_a_loss_scale_that_keeps_falling_after_a_raise_is_told(paper_run):
    run = paper_run([(f"layers.{at}.w", "wgrad") for at in range(6)])
    engine = Engine(load_pack())
    for step in range(30):
        engine.judge(run.view(step, scalars={"loss": 2.0, "loss_scale": 2.0 ** (14 + step // 10), "grad_norm": 1.0}))

    reported = []
    for step in range(30, 36):

        def overflow(_, rows, at=step % 6):
            rows["num_pos_inf"][at], rows["count"][at] = 5, 95

        said = {"loss": 2.0, "loss_scale": 2.0 ** (46 - step), "grad_norm": math.inf}
        found = engine.judge(run.view(step, change=overflow, is_skipped=True, scalars=said))
        reported.append(any(a.severity is not Severity.INFO for a in found if a.event == "onset"))

    assert reported[:2] == [False, False] and any(reported[2:])


def test_a_search_for_the_loss_scale_survives_a_snapshot(paper_run):
    run = paper_run(TENSORS)
    view = run.view(0, is_skipped=True, scalars={"loss": 2.0, "loss_scale": 65536.0, "grad_norm": math.inf})
    engine, other = Engine(load_pack()), Engine(load_pack())
    engine.judge(view)

    other.restore(engine.snapshot())

    again = run.view(1, is_skipped=True, scalars={"loss": math.inf, "loss_scale": 65536.0, "grad_norm": math.inf})
    assert [a.severity for a in other.judge(again)] == [a.severity for a in engine.judge(again)]


def test_a_rank_missing_from_a_step_is_no_excursion(paper_run, rng):
    run = paper_run([("x", "activation"), ("y", "activation"), ("z", "activation")], num_ranks=8)
    engine = Engine(Pack(rules=(NORMS,)))
    for step in range(60):
        view = run.view(step, noisy(rng, 3))
        if step > 50:
            del view.parts[1:]
            first = view.row_rank == 0
            view.rows, view.row_rank, view.row_logical = view.rows[first], view.row_rank[first], view.row_logical[first]
        assert engine.judge(view) == []


def test_layers_10_is_not_layers_1(paper_run, rng):
    run = paper_run(TENSORS)
    engine = Engine(Pack(rules=(rule("one", "AnomalyTurbulence", ("wgrad",), names=("layers.1.*",)),)))
    step = warmed(engine, run, rng)

    found = engine.judge(run.view(step, noisy(rng) * 100.0))

    assert [a.tag_name for a in found] == ["layers.1.mlp"]
    assert engine.num_points_judged == {"one": step + 1}


def test_every_row_is_counted(paper_run, rng):
    run = paper_run(TENSORS, num_ranks=2)
    engine = Engine(load_pack())

    views = [run.view(step, noisy(rng)) for step in range(7)]
    for view in views:
        engine.judge(view)

    assert engine.num_rows_judged == sum(view.num_expected for view in views) == 7 * 2 * len(TENSORS)


def eventful(run, rng, with_nan, steps=160):
    """Steps with excursions, shifts, gaps, NaN, a second attempt: everything that makes state."""
    for step in range(steps):
        norms = noisy(rng)
        if step % 31 == 30:
            norms[rng.integers(len(norms))] *= 50.0
        if step >= 90:
            norms[5] *= 30.0
        loss = math.nan if step == 70 else 9.0 if step in (60, 100, 101, 102) else 3.0 + 0.01 * rng.standard_normal()
        bad = (lambda _, rows: with_nan(rows, 7)) if step in (40, 41, 75) else None
        keep = [i for i in range(len(norms)) if i % 4 or step % 10 == 0]
        scalars = {"loss": loss, "grad_norm": float(norms.mean())}
        yield run.view(step, norms, scalars=scalars, change=bad, keep=keep, attempt=int(step >= 130))


def encode(found):
    return [msgspec.json.encode(a) for a in found]


@pytest.mark.slow
def test_replay_is_identical(paper_run, with_nan):
    def whole():
        engine = Engine(load_pack())
        rng = np.random.default_rng(5)
        return [encode(engine.judge(view)) for view in eventful(paper_run(TENSORS), rng, with_nan)]

    first = whole()

    assert first == whole()
    assert sum(map(len, first)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 35, 61, 92, 101, 131])
def test_a_restart_changes_no_anomaly(paper_run, with_nan, cut):
    views = list(eventful(paper_run(TENSORS), np.random.default_rng(5), with_nan))
    straight = Engine(load_pack())
    expected = [encode(straight.judge(view)) for view in views]

    engine = Engine(load_pack())
    for view in views[:cut]:
        engine.judge(view)
    again = Engine(load_pack())
    again.restore(engine.snapshot())
    fresh_views = list(eventful(paper_run(TENSORS), np.random.default_rng(5), with_nan))
    found = [encode(again.judge(view)) for view in fresh_views[cut:]]

    assert found == expected[cut:]
    assert again.snapshot() == straight.snapshot()
    assert again.num_rows_judged == straight.num_rows_judged


def test_reload_keeps_the_state_of_what_did_not_change(paper_run, rng):
    run = paper_run(TENSORS)
    other = rule("kurtosis", "KurtosisSpike", ("activation",))
    engine = Engine(Pack(rules=(NORMS, other)))
    step = warmed(engine, run, rng)

    milder = msgspec.structs.replace(NORMS, severity=Severity.WARNING)
    changed = msgspec.structs.replace(other, args={"k": 20.0})
    engine.reload(Pack(rules=(milder, changed)))
    norms = noisy(rng)
    norms[[5, 9, 13]] *= 40.0
    found = engine.judge(run.view(step, norms, kurtosis=np.full(len(TENSORS), 500.0)))

    assert {(a.rule, a.severity) for a in found} == {("norms", Severity.WARNING)}


def test_a_new_layout_keeps_the_series_it_knows(paper_run, rng):
    engine = Engine(Pack(rules=(NORMS,)))
    step = warmed(engine, paper_run(TENSORS), rng)
    larger = paper_run([("extra", "wgrad"), *reversed(TENSORS)])
    norms = noisy(rng, len(TENSORS) + 1)
    at = 1 + list(reversed(TENSORS)).index(("layers.1.mlp", "wgrad"))
    norms[0], norms[at] = 1e9, 40.0

    (anomaly,) = engine.judge(larger.view(step, norms))

    assert anomaly.tag_name == "layers.1.mlp"


def test_a_new_attempt_ends_episodes(paper_run, with_nan):
    run = paper_run(TENSORS)
    engine = Engine(load_pack())
    engine.judge(run.view(9, change=lambda _, rows: with_nan(rows, 3)))

    (ended,) = engine.judge(run.view(5, attempt=1))

    assert (ended.event, ended.attempt, ended.step) == ("end", 1, 5)


def test_anomalies_are_strict_json(paper_run, with_nan):
    engine = Engine(load_pack())
    for view in eventful(paper_run(TENSORS), np.random.default_rng(5), with_nan):
        for anomaly in engine.judge(view):
            text = msgspec.json.encode(anomaly)
            assert b"NaN" not in text.replace(b" NaN of", b"") and b"Infinity" not in text
            assert msgspec.json.decode(text, type=Anomaly) == anomaly


def test_a_lasting_excursion_past_an_absolute_limit_is_raised(paper_run):
    run = paper_run(TENSORS)
    limit = rule("limit", "AnomalyNan", ("wgrad",), args={"threshold": 50.0}, severity=Severity.CRITICAL)
    engine = Engine(Pack(rules=(limit,)))
    norms = np.ones(len(TENSORS))
    norms[5] = 60.0

    onsets = [[a.severity for a in engine.judge(run.view(step, norms)) if a.event == "onset"] for step in range(4)]

    assert onsets == [[Severity.INFO], [], [Severity.CRITICAL], []]


def test_msprobe_pack_sees_what_msprobe_sees(paper_run, with_nan):
    run = paper_run(TENSORS)
    engine = Engine(load_pack(["msprobe"]))
    first = engine.judge(run.view(0))
    norms = np.ones(len(TENSORS))
    norms[5] = 1.51

    turbulent = engine.judge(run.view(1, norms))
    bad = engine.judge(run.view(2, change=lambda _, rows: with_nan(rows, 6)))

    assert first == []
    # It looks at min and max too, which rose as much, and records only norm and mean.
    assert {(a.tag_name, a.statistic) for a in turbulent} == {("layers.1.mlp", "norm")}
    assert {a.rule for a in bad} == {"msprobe-nan"}


def test_healthy_runs_page_nobody(paper_run, rng):
    """Heavy tails, decays and schedules over 2.9 M series-steps: nothing above info, and hardly any of that."""
    run = paper_run(TENSORS)
    engine = Engine(load_pack())
    above, info = [], 0
    scale = np.exp(2.0 * rng.standard_normal(len(TENSORS)))
    for step in range(600):
        trend = (0.05 + math.exp(-step / 30.0)) * (0.2 + min(step / 100.0, 1.0))
        norms = scale * trend * np.exp(0.1 * rng.laplace(size=len(TENSORS)))
        kurtosis = 3.0 + rng.pareto(3, size=len(TENSORS))
        loss = (2.0 + 8.0 * math.exp(-step / 50.0)) * (1.0 + 0.02 * rng.laplace())
        scalars = {"loss": loss, "grad_norm": float(norms.mean())}
        found = engine.judge(run.view(step, norms, kurtosis=kurtosis, scalars=scalars))
        above += [a for a in found if a.severity is not Severity.INFO and a.event == "onset"]
        info += len(found)

    assert not [a for a in above if a.severity is Severity.CRITICAL]
    assert len(above) <= 3
    assert info <= 20


def test_an_episode_that_grows_several_times_worse_is_an_onset_of_its_own(paper_run, rng):
    engine, run = Engine(load_pack()), paper_run([("w", "param")])
    losses = 2.0 + 0.02 * rng.standard_normal(150)
    losses[130:] += 2.0  # a level that lasts, told at once
    losses[134:] += 300.0
    found = [a for step, loss in enumerate(losses) for a in engine.judge(run.view(step, scalars={"loss": float(loss)}))]

    onsets = [a for a in found if a.event == "onset" and a.rule == "loss-spike"]

    assert [a.step for a in onsets] == [130, 134]
    assert onsets[1].value == pytest.approx(304.0, rel=0.01)
    assert next(a.onset_id for a in found if a.event == "end" and a.rule == "loss-spike") == onsets[0].id


def test_an_episode_that_only_goes_on_is_told_once(paper_run, rng):
    engine, run = Engine(load_pack()), paper_run([("w", "param")])
    losses = 2.0 + 0.02 * rng.standard_normal(150)
    losses[130:] += 2.0 + 0.5 * rng.standard_normal(20)
    found = [a for step, loss in enumerate(losses) for a in engine.judge(run.view(step, scalars={"loss": float(loss)}))]

    assert [a.step for a in found if a.event == "onset" and a.rule == "loss-spike"] == [130]


@pytest.mark.parametrize(("is_finite", "severity"), [(True, Severity.INFO), (False, Severity.WARNING)])
def test_a_loss_of_zero_hides_no_nan_where_all_gradients_were_finite(is_finite, severity, paper_run, rng):
    run = paper_run([("w", "wgrad")] if is_finite else [("a", "activation")])
    engine = Engine(load_pack())
    for step in range(40):
        engine.judge(run.view(step, scalars={"loss": 2.0 + 0.1 * float(rng.standard_normal())}))

    (found,) = [one for one in engine.judge(run.view(40, scalars={"loss": 0.0})) if one.rule == "hidden-nan"]

    assert found.severity is severity
    assert found.message.endswith("were finite") is is_finite


@pytest.mark.parametrize(("loss", "severity"), [(0.0, Severity.INFO), (1.0, Severity.WARNING)])
def test_gradients_of_a_loss_of_zero_are_zero_by_right(loss, severity, paper_run, rng):
    run = paper_run([("w", "wgrad"), ("v", "wgrad")])
    engine = Engine(load_pack())

    def zero(_, rows):
        for name in ("mean", "m2", "m3", "m4", "min", "max"):
            rows[name] = 0.0
        rows["num_zero"] = rows["count"]

    for step in range(40):
        engine.judge(run.view(step, noisy(rng, 2), scalars={"loss": 1.0 + 0.1 * float(rng.standard_normal())}))
    found = [one for step in range(40, 46) for one in engine.judge(run.view(step, change=zero, scalars={"loss": loss}))]

    reported = [one.severity for one in found if one.rule == "dead-gradient" and one.event == "onset"]
    assert max(reported, key=lambda one: one.level) is severity
