"""Rules on groups of tensors: one series a group, exact, corroborated, kept over snapshots, reloads and layouts."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from sentinel.aggregate import Aggregate
from sentinel.anomaly import Anomaly, Severity
from sentinel.control.proposal import propose
from sentinel.detect import DETECTORS
from sentinel.order.causal import happens_before, sort_key
from sentinel.order.causes import leading_causes
from sentinel.order.origin import origin
from sentinel.place import Place
from sentinel.rules.engine import Engine
from sentinel.rules.language.building import is_series_detector
from sentinel.rules.language.schema import Match, Pack, Rule
from sentinel.rules.watches.aggregate_watch import MAX_MEMBERS, MAX_SETS

TENSORS = [
    (f"layers.{i}.{part}", kind) for i in (0, 1, 2, 10) for part in ("attn.w", "mlp.w") for kind in ("wgrad", "activation")
]


def group_rule(
    *aggregates: str, detector: str = "AnomalyTurbulence", kind: tuple[str, ...] = ("wgrad",), **more: Any
) -> Rule:
    names = more.pop("names", ("*",))
    statistic = more.pop("statistic", ("norm",))
    match = Match(kind=kind, name=names, statistic=statistic, aggregate=tuple(map(Aggregate.parse, aggregates)))
    return Rule(name=more.pop("name", "groups"), detector=detector, match=match, **{"severity": Severity.CRITICAL, **more})


def engine_of(*rules: Rule) -> Engine:
    return Engine(Pack(rules=rules))


def noisy(rng: np.random.Generator, n: int = len(TENSORS)) -> np.ndarray:
    return np.exp(0.05 * rng.standard_normal(n))


def at_of(name: str, kind: str = "wgrad") -> int:
    return TENSORS.index((name, kind))


def warmed(engine: Engine, run: Any, rng: np.random.Generator, steps: int = 60, **more: Any) -> int:
    for step in range(steps):
        assert engine.judge(run.view(step, noisy(rng, len(run.tensors)), **more)) == []
    return steps


def test_a_group_is_one_series_named_by_it(paper_run, rng):
    run = paper_run(TENSORS, num_ranks=2)
    engine = engine_of(group_rule("global_grad_norm=*"))
    step = warmed(engine, run, rng)
    norms = noisy(rng)
    norms[at_of("layers.1.mlp.w")] *= 1e4

    (anomaly,) = engine.judge(run.view(step, norms))

    members = sorted(name for name, kind in TENSORS if kind == "wgrad")
    expected = math.sqrt(sum(norms[at_of(name)] ** 2 for name in members))
    assert (anomaly.tag_name, anomaly.kind, anomaly.statistic) == ("global_grad_norm", "wgrad", "norm")
    assert anomaly.value == pytest.approx(expected, rel=1e-12)
    assert anomaly.baseline == pytest.approx(math.sqrt(len(members)), rel=0.1)
    assert (anomaly.num_members, anomaly.members, anomaly.members_id) == (8, tuple(members), "")
    assert anomaly.rank is None and anomaly.ranks == (0, 1)
    assert anomaly.message.startswith("norm of wgrad global_grad_norm (8 tensors) is ")
    assert engine.num_points_judged == {"groups": 61}
    assert origin(anomaly).name == "global_grad_norm" and origin(anomaly).module == ""


def test_a_group_sees_what_no_single_tensor_shows(paper_run, rng):
    """Each of a thousand tensors creeps up within what is normal for it; together they do not."""
    tensors = [(f"layers.{i}.w", "wgrad") for i in range(400)]
    run = paper_run(tensors)
    alone = Rule(name="alone", detector="AnomalyTurbulence", match=Match(kind=("wgrad",), statistic=("norm",)))
    engine = engine_of(alone, group_rule("*", args={"threshold": 0.1}))
    for step in range(60):
        norms = np.exp(0.2 * rng.standard_normal(400))
        assert [one for one in engine.judge(run.view(step, norms)) if one.rule == "groups"] == []

    found = engine.judge(run.view(60, 1.5 * np.exp(0.2 * rng.standard_normal(400))))

    assert [one.tag_name for one in found if one.rule == "groups"] == ["*"]
    assert [one for one in found if one.rule == "alone" and one.severity is not Severity.INFO] == []


def test_a_capture_makes_one_series_a_value(paper_run, rng):
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("layer{}=layers.{}.*"))
    step = warmed(engine, run, rng)
    norms = noisy(rng)
    norms[at_of("layers.1.attn.w")] *= 1e4

    (anomaly,) = engine.judge(run.view(step, norms))

    assert anomaly.tag_name == "layer1"
    assert anomaly.members == ("layers.1.attn.w", "layers.1.mlp.w")
    assert anomaly.value == pytest.approx(math.hypot(norms[at_of("layers.1.attn.w")], norms[at_of("layers.1.mlp.w")]))
    assert engine.num_points_judged == {"groups": 4 * 61}


def test_members_must_match_the_name_besides(paper_run, rng):
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("layers.{}.*", names=("*.mlp.*",), detector="AnomalyNan", args={"threshold": 2.0}))
    norms = np.ones(len(TENSORS))
    norms[at_of("layers.1.attn.w")] = norms[at_of("layers.2.mlp.w")] = 1e3

    (anomaly,) = engine.judge(run.view(0, norms))

    assert (anomaly.tag_name, anomaly.members, anomaly.value) == ("layers.2.*", ("layers.2.mlp.w",), 1e3)


def test_a_lone_group_is_info_until_it_lasts_and_three_that_rise_agree(paper_run, rng):
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("layers.{}.*"))
    step = warmed(engine, run, rng)

    def next_step(step: int, *layers: int) -> list[Anomaly]:
        norms = noisy(rng)
        for layer in layers:
            norms[at_of(f"layers.{layer}.mlp.w")] *= 40.0
        return engine.judge(run.view(step, norms))

    (first,) = next_step(step, 1)
    assert first.severity is Severity.INFO
    assert next_step(step + 1, 1) == []
    raised, ended = next_step(step + 2, 1)
    assert (raised.severity, raised.event, ended.event) == (Severity.CRITICAL, "onset", "end")
    engine = engine_of(group_rule("layers.{}.*"))
    found = next_step(warmed(engine, run, rng), 0, 2, 10)
    assert {one.severity for one in found} == {Severity.CRITICAL}
    assert {one.tag_name for one in found} == {"layers.0.*", "layers.2.*", "layers.10.*"}


def test_what_a_detector_vouches_for_is_certain_alone(paper_run, rng):
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("global_grad_norm=*", detector="GradNormSpike"))
    step = warmed(engine, run, rng)

    (anomaly,) = engine.judge(run.view(step, noisy(rng) * 30))

    assert anomaly.severity is Severity.CRITICAL


def test_a_group_with_a_bad_value_is_no_sample_of_a_baseline(paper_run, with_nan, rng):
    run = paper_run(TENSORS, num_ranks=2)
    engine = engine_of(group_rule("*"), group_rule("g=*", name="bad", detector="AnomalyNan", statistic=("absmax",)))
    step = warmed(engine, run, rng)
    before = engine.snapshot()

    def spoil(rank: int, rows: np.ndarray) -> None:
        if rank == 1:  # a replica that does not speak for the tensor
            with_nan(rows, at_of("layers.2.mlp.w"))
        rows["m2"][at_of("layers.2.mlp.w")] = 1e30

    found = engine.judge(run.view(step, noisy(rng), change=spoil))

    assert [one.rule for one in found if one.rule == "groups"] == []
    state = [one["state"] for one in msgspec.msgpack.decode(engine.snapshot())["watches"].values()]
    former = [one["state"] for one in msgspec.msgpack.decode(before)["watches"].values()]
    assert state == former, "nothing was learned"
    # The positive control: the same excursion without the NaN is found.
    (excursion,) = [one for one in engine.judge(run.view(step + 1, noisy(rng) * 100)) if one.rule == "groups"]
    assert excursion.tag_name == "*"


def test_an_absolute_rule_takes_bad_values_of_groups(paper_run, with_nan, rng):
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("layers.{}.*", detector="AnomalyNan", statistic=("absmax",)))

    (anomaly,) = engine.judge(run.view(0, change=lambda rank, rows: with_nan(rows, at_of("layers.10.mlp.w"))))

    assert (anomaly.tag_name, anomaly.value, anomaly.value_text) == ("layers.10.*", None, "nan")
    assert anomaly.severity is Severity.CRITICAL
    assert anomaly.message == "largest absolute value of wgrad layers.10.* (2 tensors) is nan"


def test_a_group_measured_with_other_members_is_another_series(paper_run, rng):
    """Monitoring goes on, and the norm of all activations with it: nobody is told."""
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("*", kind=("activation",)))
    few = [at for at, (name, kind) in enumerate(TENSORS) if "attn" in name or kind == "wgrad"]
    for phase, kept in enumerate([few, None, few, None]):
        for step in range(40):
            assert engine.judge(run.view(phase * 40 + step, noisy(rng) * (1 if kept else 10), keep=kept)) == []

    # And either series knows its level from before.
    (anomaly,) = engine.judge(run.view(160, noisy(rng) * 100, keep=few))
    assert anomaly.baseline == pytest.approx(2, rel=0.3)
    (anomaly,) = engine.judge(run.view(161, noisy(rng) * 1000))
    assert anomaly.baseline == pytest.approx(10 * math.sqrt(8), rel=0.3)


def test_ever_changing_members_cost_bounded_memory_and_are_judged_in_the_end(paper_run, rng):
    """Experts that at times get no token: each step another set of gradients."""
    tensors = [(f"experts.{i}.w", "wgrad") for i in range(40)]
    run = paper_run(tensors)
    engine = engine_of(group_rule("*"))
    (watch,) = engine._watches
    for step in range(200):
        keep = np.flatnonzero(rng.random(40) < 0.8)
        assert engine.judge(run.view(step, noisy(rng, 40), keep=keep)) == []

    assert watch.num_series == MAX_SETS + 1
    (anomaly,) = engine.judge(run.view(200, noisy(rng, 40) * 100, keep=np.flatnonzero(rng.random(40) < 0.8)))
    assert anomaly.baseline == pytest.approx(math.sqrt(32), rel=0.3)


def test_a_group_without_one_of_its_shards_is_not_judged(paper_run, rng):
    run = paper_run(TENSORS, num_ranks=4, placements={"dp": "shard"})
    engine = engine_of(group_rule("*"))
    step = warmed(engine, run, rng)
    view = run.view(step, noisy(rng) * 1e3)
    without = type(view)(
        run="paper", attempt=0, step=step, layout=run.layout, parts=[part for part in view.parts if part.rank != 2]
    )

    assert engine.judge(without) == []
    assert len(engine.judge(run.view(step + 1, noisy(rng) * 1e3))) == 1


def test_the_order_puts_a_group_behind_its_members(paper_run, rng):
    run = paper_run(TENSORS)
    alone = Rule(
        name="alone", detector="AnomalyTurbulence", severity=Severity.CRITICAL,
        match=Match(kind=("wgrad", "activation"), statistic=("norm",)),
    )  # fmt: skip
    engine = engine_of(group_rule("*", kind=("wgrad", "activation")), alone)
    step = warmed(engine, run, rng)
    norms = noisy(rng)
    norms[[at for at, (name, _) in enumerate(TENSORS) if "mlp" in name]] *= 1e4

    found = sorted(engine.judge(run.view(step, norms)), key=sort_key)

    groups = {one.kind: one for one in found if one.num_members}
    singles = [one for one in found if not one.num_members]
    assert len(groups) == 2 and len(singles) == 8
    assert all(happens_before(one, groups["wgrad"]) for one in singles)
    assert not any(happens_before(groups["wgrad"], one) for one in found)
    assert leading_causes(found) and not found[leading_causes(found)[0]].num_members
    for one in singles:
        if one.kind == "activation" and one.tag_name != "layers.10.mlp.w":
            assert sort_key(one) < sort_key(groups["activation"])


def test_a_group_says_nothing_about_where_to_look(paper_run, rng):
    """It may span all stages: escalation asks all ranks, unless something else says where."""
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("*", detector="AnomalyNan", args={"threshold": 1.0}))
    (anomaly,) = engine.judge(run.view(0, np.full(len(TENSORS), 9.0)))
    places = {rank: Place(rank=rank, world_size=4, pp_rank=rank, pp_size=4) for rank in range(4)}
    anomaly = msgspec.structs.replace(anomaly, severity=Severity.CRITICAL)
    single = msgspec.structs.replace(anomaly, num_members=0, pp_stage=1, pp_size=4, segment="layers.1")

    def asked(*anomalies: Anomaly) -> tuple[int, ...]:
        proposal = propose(anomalies, {"groups": ("escalate",)}, places)
        assert proposal is not None
        return proposal.ranks

    assert asked(anomaly) == ()
    assert asked(anomaly, single) == (1,)


def test_what_cannot_be_merged_is_said(paper_run):
    whole = paper_run([("a.w", "wgrad")], num_ranks=2)
    apart = paper_run([("a.w", "wgrad"), ("b.w", "wgrad")], num_ranks=2, placements={"dp": "unknown"})
    engine = engine_of(group_rule("*", "a.*", "c.*", detector="AnomalyNan", args={"threshold": 0.1}))

    assert len(engine.judge(whole.view(0))) == 2
    assert engine.blind_groups == []
    assert engine.judge(apart.view(1)) == []

    assert engine.blind_groups == [
        'rule "groups": wgrad *, wgrad a.*: their tensors have no known placement and stay with their ranks, so no group is '
        "judged"
    ]
    engine.judge(whole.view(2))
    assert engine.blind_groups == []


def test_a_long_list_of_members_is_an_id_and_a_size(paper_run):
    for count in (MAX_MEMBERS, MAX_MEMBERS + 1):
        run = paper_run([(f"w.{i}", "wgrad") for i in range(count)])
        engine = engine_of(group_rule("*", detector="AnomalyNan", args={"threshold": 1.0}))

        (anomaly,) = engine.judge(run.view(0))

        assert anomaly.num_members == count
        assert bool(anomaly.members) != bool(anomaly.members_id) and bool(anomaly.members) == (count == MAX_MEMBERS)


def test_kinds_and_statistics_are_series_of_their_own(paper_run, rng):
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("*", kind=("wgrad", "activation"), statistic=("norm", "max")))
    step = warmed(engine, run, rng)

    found = engine.judge(run.view(step, noisy(rng) * 1e3))

    assert sorted((one.kind, one.statistic) for one in found) == [
        ("activation", "max"), ("activation", "norm"), ("wgrad", "max"), ("wgrad", "norm"),
    ]  # fmt: skip
    assert len({one.id for one in found}) == 4


# -- state ------------------------------------------------------------------------------------------------------------


def drive(engine: Engine, run: Any, seed: int, first: int, last: int) -> list[Anomaly]:
    found = []
    for step in range(first, last):
        rng = np.random.default_rng([seed, step])
        norms = noisy(rng)
        if step % 37 == 36:
            norms[rng.integers(0, len(TENSORS))] *= 1e3
        keep = None if step % 50 < 40 else np.flatnonzero(np.arange(len(TENSORS)) % 8 != 3)
        found += engine.judge(run.view(step, norms, keep=keep))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 30, 59, 77, 111, 149])
def test_a_restored_engine_goes_on_exactly(paper_run, cut):
    run = paper_run(TENSORS)
    rules = (group_rule("layers.{}.*", "*"), group_rule("*", name="spike", detector="GradNormSpike"))
    whole = engine_of(*rules)
    drive(whole, run, 1, 0, cut)
    snapshot = whole.snapshot()
    rest = drive(whole, run, 1, cut, 160)

    other = engine_of(*rules)
    other.restore(snapshot)

    assert drive(other, paper_run(TENSORS), 1, cut, 160) == rest
    assert other.snapshot() == whole.snapshot()


def test_the_same_steps_give_the_same_anomalies(paper_run):
    found = [drive(engine_of(group_rule("layers.{}.*", "*")), paper_run(TENSORS), 2, 0, 160) for _ in range(2)]

    assert found[0] == found[1] != []


def test_a_reload_keeps_the_state_of_groups_that_stay(paper_run, rng):
    run = paper_run(TENSORS)
    engine = engine_of(group_rule("mlp=layers.*.mlp.*", "attn=layers.*.attn.*"))
    step = warmed(engine, run, rng)

    # `attn` now means something else, `all` is new, `mlp` stays.
    engine.reload(Pack(rules=(group_rule("all=*", "attn=layers.1.attn.*", "mlp=layers.*.mlp.*"),)))
    (anomaly,) = engine.judge(run.view(step, noisy(rng) * 1e3))

    assert (anomaly.tag_name, anomaly.baseline) == ("mlp", pytest.approx(2.0, rel=0.2))


def test_a_layout_that_grows_keeps_what_a_group_knows(paper_run, rng):
    small, large = paper_run(TENSORS), paper_run([("head.w", "param"), *TENSORS, ("new.w", "wgrad")])
    engine = engine_of(group_rule("layers.{}.*"))
    step = warmed(engine, small, rng)
    for at in range(3):
        assert engine.judge(large.view(step + at, noisy(rng, len(TENSORS) + 2))) == []

    found = engine.judge(large.view(step + 3, noisy(rng, len(TENSORS) + 2) * 1e3))

    assert {one.tag_name for one in found} == {f"layers.{i}.*" for i in (0, 1, 2, 10)}
    assert all(one.baseline == pytest.approx(math.sqrt(2), rel=0.2) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("detector", [name for name, cls in DETECTORS.items() if is_series_detector(cls)])
def test_every_series_detector_judges_groups(paper_run, with_nan, rng, detector):
    """The battery: any detector, healthy, bad and absent groups; finite scores, snapshots exact, bounded series."""
    run = paper_run(TENSORS)
    args = {"above": 10.0} if detector == "Threshold" else {}
    rule = group_rule("layers.{}.*", "*", detector=detector, statistic=("norm", "kurtosis"), args=args)
    engine, twin = engine_of(rule), engine_of(rule)
    for step in range(64):
        norms = noisy(rng) * (1e3 if step == 56 else 1)
        spoil = (lambda rank, rows: with_nan(rows, 2)) if step in (48, 49, 50) else None
        keep = [] if step == 53 else None
        view = run.view(step, norms, change=spoil, keep=keep)
        found = engine.judge(view)
        if step % 10 == 0:
            other = engine_of(rule)
            other.restore(twin.snapshot())
            twin = other
        assert twin.judge(view) == found
        assert all(one.score is None or math.isfinite(one.score) for one in found)
        assert all(one.tag_name == "*" or one.tag_name.startswith("layers.") for one in found)
    assert all(watch.num_series <= 5 for watch in engine._watches)
    assert engine.snapshot() == twin.snapshot()


def test_a_thousand_groups_cost_one_merge(paper_run, monkeypatch):
    import sentinel.aggregate

    calls = []
    real = sentinel.aggregate.merge_rows
    monkeypatch.setattr(sentinel.aggregate, "merge_rows", lambda *a: calls.append(1) or real(*a))
    run = paper_run([(f"layers.{i}.experts.{e}.w", "wgrad") for i in range(10) for e in range(100)])
    rule = group_rule("layers.{}.experts.{}.*", statistic=("norm", "mean", "kurtosis"))
    engine = engine_of(rule)

    engine.judge(run.view(0))
    engine.judge(run.view(1))

    assert engine.num_points_judged == {"groups": 2 * 3 * 1000}
    assert len(calls) == 2
