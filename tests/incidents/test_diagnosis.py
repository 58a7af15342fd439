"""Verdicts: what is suspected, of what, and what is never suspected."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.incident import Incident
from sentinel.incidents.diagnosis.step_facts import (
    Divergence,
    FirstBad,
    Maker,
    OddWeight,
    Outlier,
    ReplicaDeviation,
    StepFacts,
    TensorReading,
    Upstream,
)
from sentinel.incidents.tracker import IncidentTracker
from sentinel.run_end import RunEnd

from ..support.anomalies import an_excursion

DP = 4
LANES = {rank: rank for rank in range(DP)}
WELL = Upstream(num_measured=12, num_blocks=2)


def on_all_replicas(kind: str, name: str, step: int, **fields: object) -> Anomaly:
    """A finite excursion that all replicas share, unless said."""
    return an_excursion(kind, name, step, **({"ranks": tuple(range(DP)), "dp_size": DP} | fields))


def loss(step: int, **fields: object) -> Anomaly:
    return on_all_replicas(
        "scalar", "loss", step,
        **({"rule": "loss-spike", "detector": "LossSpike", "statistic": "value", "severity": Severity.CRITICAL} | fields),
    )  # fmt: skip


def nan(name: str, step: int, lane: int = 1, **fields: object) -> Anomaly:
    """One NaN in the output of a module of one replica."""
    known: dict[str, object] = {
        "rank": lane, "place": {"dp": lane}, "statistic": "nans", "value": 1.0, "baseline": None, "score": None,
        "rule": "non-finite", "detector": "AnomalyNan", "severity": Severity.CRITICAL, "micro_step": 0, "call_id": 5,
        "segment": name.rpartition(".")[0], "dtype": "float32", "site_pos": 9,
    } | fields  # fmt: skip
    return on_all_replicas("activation", name, step, **known)


def diverged(step: int, **fields: object) -> Anomaly:
    return on_all_replicas(
        "param", "layers.1.mlp.weight", step,
        **(
            {"statistic": "checksum", "rule": "replica-divergence", "detector": "ReplicaDivergence", "rank": 2, "value": 1.0,
             "baseline": 4.0, "severity": Severity.CRITICAL, "message": "copies differ"} | fields
        ),
    )  # fmt: skip


def differing(**fields: object) -> Divergence:
    known: dict[str, object] = {
        "kind": "param", "name": "layers.1.mlp.weight", "accused": (2,), "num_copies": 4, "is_sure": True,
    } | fields  # fmt: skip
    return Divergence(**known)  # type: ignore[arg-type]


class Run:
    """A tracker fed step by step; episodes go on as said."""

    def __init__(self, *, dp: int = DP, healthy: int = 30, **facts: object) -> None:
        self.tracker = IncidentTracker()
        self.usual: dict[str, object] = {
            "lanes": {rank: rank for rank in range(dp)} if dp > 1 else {0: 0}, "num_lanes": dp,
            "num_compared": 40 if dp > 1 else 0, "num_weights": 40, "rates": {"lr": 1e-3},
        } | facts  # fmt: skip
        self.step = 0
        self.revisions: list[Incident] = []
        for _ in range(healthy):
            self.take()
        assert not self.revisions, "healthy steps brought an incident"

    def take(self, *anomalies: Anomaly, going: tuple[Anomaly, ...] = (), **facts: object) -> Incident | None:
        """Close a step; returns the newest revision so far."""
        of_step = [msgspec.structs.replace(one, step=self.step) for one in anomalies]
        notified = {**self.usual, "ongoing": frozenset(one.id for one in (*of_step, *going)), **facts}
        skipped = bool(facts.get("is_skipped"))
        self.revisions += self.tracker.update(
            self.step,
            of_step,
            time=float(self.step),
            is_skipped=skipped,
            facts=StepFacts(**notified),  # type: ignore[arg-type]
        )
        self.step += 1
        return self.revisions[-1] if self.revisions else None

    def well(self, num_steps: int = 6, **facts: object) -> Incident:
        """Close steps in which nothing is amiss; returns the newest revision."""
        for _ in range(num_steps):
            self.take(**facts)
        return self.revisions[-1]

    @property
    def ever(self) -> set[str]:
        """All verdicts that were given."""
        return {one.suspected for one in self.revisions}


def said(incident: Incident) -> str:
    return " ".join(incident.evidence)


def test_one_step_that_passes_is_the_batch_and_is_listed() -> None:
    run = Run()
    run.take(loss(30, moved_ranks=(0, 1, 2, 3)), samples={0: (7, 8), 1: ("a",)})
    assert run.revisions[-1].suspected == "unknown"

    found = run.well()

    assert (found.suspected, found.skip_steps, found.skip_ranks) == ("batch", (30,), ())
    assert found.skip_samples == (7, 8, "a")
    assert "all 4 data-parallel replicas moved alike" in said(found)
    assert "9 against 1" in said(found)


def test_one_replicas_part_of_a_batch_is_no_hardware() -> None:
    run = Run()
    run.take(loss(30, moved_ranks=(2,)), samples={rank: (f"s{rank}",) for rank in range(4)})

    found = run.well()

    assert (found.suspected, found.skip_ranks, found.skip_samples) == ("batch", (2,), ("s2",))
    assert "hardware" not in run.ever


def test_what_does_not_pass_is_the_model() -> None:
    run = Run()
    spike = loss(30, moved_ranks=(0, 1, 2, 3))
    run.take(spike)
    for _ in range(4):
        run.take(going=(spike,))

    assert run.revisions[-1].suspected == "model"
    assert run.well(5).suspected == "model", "that it ended later makes no batch of it"


@pytest.mark.parametrize(
    ("norms", "suspected", "skipped"),
    [
        ((9.0, 3.0, 2.0, 1.5, 1.2, 1.1), "batch", (30,)),  # the mark that a bad batch leaves
        ((9.0, 8.5, 3.0, 2.0, 1.5, 1.2), "batch", (30, 31)),
        ((9.0, 5.5, 5.6, 1.0, 1.0, 1.0), "batch", (30,)),
        ((9.0, 12.0, 17.0, 25.0, 40.0, 60.0), "model", ()),
        ((9.0, 8.5, 9.1, 8.7, 8.9, 9.0), "model", ()),
    ],
)
def test_aftermath_of_a_batch_fades_and_what_the_model_does_stays(
    norms: tuple[float, ...], suspected: str, skipped: tuple[int, ...]
) -> None:
    run = Run()
    spike = on_all_replicas(
        "scalar", "grad_norm", 30, rule="grad-norm-spike", detector="GradNormSpike", statistic="value", value=norms[0]
    )
    for at, norm in enumerate(norms * 2 if suspected == "model" else norms):
        going = (spike,) if norm > 1.4 and at else ()
        run.take(*((spike,) if not at else ()), going=going, results={"grad_norm": norm})
    found = run.well(results={"grad_norm": 1.0}) if suspected == "batch" else run.revisions[-1]

    assert (found.suspected, found.skip_steps) == (suspected, skipped)
    assert ({"batch", "model"} - {suspected}).isdisjoint(run.ever), "nothing else was said before"


def test_one_replica_that_keeps_moving_is_not_known() -> None:
    run = Run()
    spike = loss(30, moved_ranks=(1,))
    run.take(spike)
    for _ in range(6):
        run.take(going=(spike,))

    assert run.ever == {"unknown"}
    assert "its part of the data or its machine" in said(run.revisions[-1])


def test_a_jump_of_the_learning_rate_explains_what_follows() -> None:
    run = Run()
    run.take(rates={"lr": 0.1})

    run.take(loss(31), rates={"lr": 0.1})

    found = run.well()

    assert found.suspected == "model"
    assert "lr rose from 0.001 to 0.1 (100 times) at step 30" in said(found)


def test_what_a_raised_rate_brings_later_is_one_incident_until_it_is_put_back() -> None:
    run, raised = Run(), {"rates": {"lr": 0.1}}
    run.take(**raised)
    first = on_all_replicas("activation", "layers.2", 31, value=148.5, baseline=57.4, severity=Severity.CRITICAL)
    run.take(first, **raised)
    for _ in range(20):
        run.take(going=(first,), **raised)

    run.take(loss(52), going=(first,), **raised)
    run.well(6, **raised)

    assert len({one.id for one in run.revisions}) == 1
    assert {one.suspected for one in run.revisions[2:]} == {"model"}
    for _ in range(20):
        run.take(going=(first,))
    run.take(loss(80), going=(first,))
    assert len({one.id for one in run.revisions}) == 2, "under the rate of before it is news"


def test_warm_up_is_no_jump() -> None:
    run = Run(healthy=0)
    for step in range(30):
        run.take(rates={"lr": 1e-4 * (step + 1)})
    run.take(loss(30), rates={"lr": 3e-3})

    assert run.well().suspected == "batch"


@pytest.mark.parametrize(("score", "suspected"), [(1.4, "batch"), (0.2, "unknown"), (None, "batch")])
def test_reference_runs_convict_or_acquit_the_batch(score: float | None, suspected: str) -> None:
    run = Run()
    run.take(loss(30, reference_score=score))
    soon = run.well(2)

    found = run.well()

    assert found.suspected == suspected
    assert soon.suspected == ("batch" if score == 1.4 else "unknown")
    assert ("not the batch" in said(found)) is (score == 0.2)


def test_growth_then_nan_is_the_model() -> None:
    run = Run()
    run.take(loss(30))
    run.take(loss(31, value=30.0))
    run.take(*(nan("layers.2.mlp", 32, lane) for lane in range(4)), is_skipped=True)

    assert run.well().suspected == "model"


def test_copy_that_differs_from_all_others_is_hardware() -> None:
    run = Run()
    run.take(diverged(30), num_differing=1, divergences=(differing(),))
    found = run.well(num_differing=1, divergences=(differing(),))

    assert found.suspected == "hardware"
    assert "bit-identical on all 4 copies until step 29" in said(found)
    assert "rank 2 alone differs" in said(found)


@pytest.mark.parametrize(
    ("evidence", "facts"),
    [
        ("nobody has a majority", {"num_differing": 1, "divergences": (differing(is_sure=False, accused=(0, 1, 2, 3)),)}),
        ("rank 0 alone, and more than one element", {"num_differing": 1, "divergences": (differing(accused=(0,)),)}),
        ("a layer of one rank", {"num_differing": 4, "divergences": tuple(differing(name=f"l.2.w{i}") for i in range(4))}),
        ("reduced gradients alone", {"num_differing": 1, "divergences": (differing(kind="wgrad"),)}),
    ],
)
def test_copies_that_a_program_may_have_changed_are_not_hardware(evidence: str, facts: dict[str, object]) -> None:
    run = Run()
    kind = "wgrad" if "gradients" in evidence else "param"
    run.take(msgspec.structs.replace(diverged(30), kind=kind), **facts)
    run.well()

    assert run.ever == {"unknown"}, evidence
    assert len(said(run.revisions[-1])) > 40


def test_many_tensors_that_differ_at_once_are_the_programs() -> None:
    run = Run()
    of = tuple(differing(name=f"w{i}") for i in range(30))
    run.take(diverged(30), num_differing=30, divergences=of)
    found = run.well(num_differing=30, divergences=of)

    assert found.suspected == "program"
    assert "drain" in said(found) and "no machine need be drained" in said(found)


def test_reduced_gradients_that_differ_in_every_step_were_left_out_of_the_exchange() -> None:
    of = (differing(kind="wgrad", is_sure=False, accused=(0, 1, 2, 3)), differing(is_sure=False, accused=(0, 1, 2, 3)))
    run = Run()
    run.take(diverged(30), num_differing=2, divergences=of)
    found = run.well(num_differing=2, divergences=of)

    assert found.suspected == "program"
    assert "no_sync" in said(found)


@pytest.mark.parametrize(("is_before", "suspected"), [(False, "hardware"), (True, "program")])
def test_gradients_that_differ_behind_one_bit_of_a_weight_follow_from_it(is_before: bool, suspected: str) -> None:
    bit = differing(is_sure=False, accused=(0, 1), num_copies=2, change="bit", change_words="differ by one bit, 2**20")
    gradient = differing(kind="wgrad", name="pos.weight", is_sure=False, accused=(0, 1), num_copies=2)
    run = Run(dp=2)
    first = diverged(30)
    if is_before:
        run.take(msgspec.structs.replace(first, kind="wgrad"), num_differing=1, divergences=(gradient,))
        run.take(diverged(31), num_differing=1, divergences=(bit, gradient))
    else:
        run.take(first, num_differing=1, divergences=(bit, gradient))
    found = run.well(num_differing=9, divergences=(bit, gradient))

    assert found.suspected == suspected


@pytest.mark.parametrize(("number", "suspected"), [(1, "unknown"), (20, "program")])
def test_copies_that_never_were_alike_are_not_hardware(number: int, suspected: str) -> None:
    run = Run(healthy=0)
    of = tuple(differing(name=f"w{i}") for i in range(number))
    run.take(diverged(0), num_differing=number, divergences=of)
    run.well(num_differing=number, divergences=of)

    assert run.ever == {"unknown", suspected}


def test_one_bit_between_two_copies_is_hardware_of_either() -> None:
    two = differing(is_sure=False, accused=(0, 1), num_copies=2, change="bit", change_words="differ by one bit, 2**24")
    run = Run(dp=2)

    run.take(diverged(30), num_differing=1, divergences=(two,))
    found = run.well(num_differing=1, divergences=(two,))

    assert found.suspected == "hardware"
    assert "one of ranks 0, 1" in said(found)


def origin(run: Run, upstream: Upstream | None = WELL, **fields: object) -> None:
    one = nan("layers.2.mlp", run.step, **fields)
    one = msgspec.structs.replace(one, step=run.step)
    run.take(one, is_skipped=True, upstream={one.id: upstream} if upstream is not None else {})


@pytest.mark.parametrize(
    ("why", "make", "past", "facts"),
    [
        ("nothing was computed twice", {}, WELL, {}),
        ("there is one data-parallel replica", {"dp_size": 1, "place": {}}, WELL, {"dp": 1}),
        ("experts see few tokens", {"tag_name": "layers.2.moe.experts.1"}, WELL, {}),
        ("overflows on good machines", {"dtype": "float16"}, WELL, {}),
        ("was 90 against 3", {}, Upstream(num_measured=3, num_blocks=1, unlike="rms was 90 against 3"), {}),
        ("was not measured", {}, None, {}),
        ("roots and norms of zero", {"kind": "dgrad"}, WELL, {}),
        ("labels or masks", {"kind": "scalar", "tag_name": "loss"}, WELL, {}),
    ],
)  # fmt: skip
def test_a_nan_of_one_replica_is_never_hardware_and_the_next_experiment_is_named(
    why: str, make: dict[str, object], past: Upstream | None, facts: dict[str, object]
) -> None:
    run = Run(**facts)  # type: ignore[arg-type]
    one = msgspec.structs.replace(nan("layers.2.mlp", run.step), **make)
    run.take(one, is_skipped=True, upstream={one.id: past} if past is not None else {})
    run.well(30)

    assert "hardware" not in run.ever
    assert any(why in said(revision) for revision in run.revisions), said(run.revisions[-1])
    assert all("to do: " in said(revision) for revision in run.revisions)
    assert "train step 30 again from a checkpoint before it" in said(run.revisions[0])


def again(name: str, lane: int) -> FirstBad:
    return FirstBad(
        lane=lane, rank=lane, kind="activation", name=name, segment=name, border="", depth=0, dtype="float32", num_bad=1,
        is_inf=False, upstream=WELL,
    )  # fmt: skip


def test_nan_that_comes_again_in_the_same_place_is_no_machine() -> None:
    run = Run()
    origin(run)
    root = nan("layers.2.mlp", 30)
    run.take()
    run.take(going=(root,), is_skipped=True, first_bad=(again("layers.2.mlp", 1),))
    run.well(12)

    assert run.ever == {"unknown"}
    assert any("at 2 steps (30, 32)" in said(one) for one in run.revisions)


def test_nan_of_several_replicas_at_several_steps_is_the_model() -> None:
    run = Run()
    origin(run)
    for lane in (2, 3):
        run.take()
        origin(run, lane=lane)

    assert run.well(8).suspected == "model"
    assert "hardware" not in run.ever


def test_nan_on_every_replica_that_passes_is_the_batch() -> None:
    run = Run()
    run.take(*(nan("layers.2.mlp", 30, lane) for lane in range(4)), is_skipped=True)

    found = run.well()

    assert (found.suspected, found.skip_steps) == ("batch", (30,))


def test_infinities_of_half_precision_are_precision() -> None:
    run = Run(loss_scale=65536.0)
    run.take(nan("layers.2.mlp", 30, statistic="infs", dtype="float16"), is_skipped=True, upstream={}, has_narrow=True)
    found = run.well(loss_scale=65536.0)

    assert found.suspected == "precision"
    assert "before anything held a NaN" in said(found)


def test_infinities_of_bfloat16_are_not() -> None:
    run = Run()
    run.take(nan("layers.2.mlp", 30, statistic="infs", dtype="bfloat16"), is_skipped=True)
    run.well()

    assert "precision" not in run.ever


def test_loss_scale_that_keeps_falling_is_precision() -> None:
    run = Run(loss_scale=65536.0)
    spike = on_all_replicas("wgrad", "layers.0.weight", 30)
    run.take(spike, loss_scale=32768.0)
    for scale in (16384.0, 8192.0, 4096.0, 2048.0):
        run.take(going=(spike,), loss_scale=scale)

    assert run.revisions[-1].suspected == "precision"


def test_share_of_overflow_says_nothing_where_nobody_trains_in_that_format() -> None:
    for has_narrow, suspected in ((True, "precision"), (False, "model")):
        run = Run(has_narrow=has_narrow)
        share = on_all_replicas("precision", "fc1.fp16_overflow", 30, detector="PrecisionLoss", severity=Severity.INFO)
        spike = loss(30)
        run.take(share, spike)
        for _ in range(4):
            run.take(going=(spike,))

        assert run.revisions[-1].suspected == suspected


def test_slow_rank_is_never_called_hardware() -> None:
    run = Run()
    run.take(on_all_replicas("health", "step", 30, rank=3, detector="SlowRank", rule="slow-rank", message="rank 3 is slow"))
    run.well(30)

    assert run.ever == {"unknown"}
    assert "rank 3" in said(run.revisions[0])


def test_a_diagnosis_is_changed_by_evidence_once_and_says_why() -> None:
    run = Run()
    spike = loss(30)
    run.take(spike)
    run.well(6)
    assert run.revisions[-1].suspected == "batch"
    again = msgspec.structs.replace(loss(37), id="again")
    run.take(again)
    for _ in range(8):
        run.take(going=(again,))

    found = run.revisions[-1]
    assert (found.suspected, found.skip_steps) == ("model", ())
    assert found.evidence[0].startswith("batch -> model at step ")
    assert ", because " in found.evidence[0]
    assert sum(b.suspected != a.suspected for a, b in itertools.pairwise(run.revisions)) == 2


def test_a_diagnosis_that_comes_and_goes_is_not_told_each_time() -> None:
    """A loss that is no number in one step of ten: nothing, labels of a batch, nothing, and so on."""
    run = Run()
    root = msgspec.structs.replace(nan("loss", 30), kind="scalar", tag_name="loss", statistic="value", value_text="nan")
    for at in range(6):
        run.take(*(() if at else (root,)), going=(root,), is_skipped=True)
        run.well(9)

    changes = [b.suspected for a, b in itertools.pairwise(run.revisions) if a.suspected != b.suspected]
    assert len(changes) <= 2, changes


def test_the_end_of_an_incident_tells_what_was_not_held_for_long() -> None:
    run = Run()
    run.take(diverged(30), num_differing=1, divergences=(differing(),))
    assert run.revisions[-1].suspected == "unknown"
    assert "not settled yet: hardware: " in said(run.revisions[-1])

    (ended,) = run.tracker.update(31, [], ended=RunEnd(how="signal", rank=2))

    assert (ended.state, ended.suspected) == ("ended", "hardware")


def test_nothing_is_said_anew_while_nothing_changes() -> None:
    run = Run()
    spike = loss(30)
    run.take(spike)
    for _ in range(10):
        run.take(going=(spike,))

    assert len(run.revisions) <= 4


def test_verdicts_survive_a_snapshot_and_any_order() -> None:
    rng = random.Random(5)
    spread = [on_all_replicas("activation", f"layers.{i}", 30) for i in range(6)]
    plans: list[list[Anomaly]] = [[loss(30), *spread], [], [], [nan("layers.2.mlp", 33)], []]

    def judged(restart: bool, shuffle: bool) -> list[bytes]:
        run = Run()
        for plan in plans:
            one = list(plan)
            if shuffle:
                rng.shuffle(one)
            if restart:
                state = run.tracker.snapshot()
                run.tracker = IncidentTracker()
                run.tracker.restore(state)
            run.take(*one)
        return [msgspec.json.encode(one) for one in run.revisions]

    straight = judged(False, False)
    assert len(straight) >= 3
    assert judged(True, False) == straight
    assert judged(False, True) == straight


LOG = Maker(
    name="layers.2.mlp", functions=("log",), dtype="float32",
    inputs=(TensorReading(name="layers.2.norm", smallest=-0.9, largest=1.1, num_zero=0, is_bad=False),),
)  # fmt: skip
OF_INPUT = TensorReading(name="layers.2.norm", smallest=0.1, largest=1.1, num_zero=0, is_bad=False)


@pytest.mark.parametrize(
    ("suspected", "words", "maker", "fields"),
    [
        ("program", "layers.2.mlp computes log", LOG, {}),
        ("program", "clamp its argument", LOG, {}),
        ("program", "layers.2.mlp computes div", {"functions": ("div",)}, {}),
        ("program", "a row is -inf", {"functions": ("softmax",)}, {"value": 64.0}),
        ("program", "lay between -0.9 and 1.1",
         {"functions": ("log:layers.2.norm",), "arguments": {"layers.2.norm": LOG.inputs[0]}}, {}),
        ("unknown", "computes log, not defined everywhere",
         {"functions": ("log:layers.2.norm",), "arguments": {"layers.2.norm": OF_INPUT}}, {}),
        ("unknown", "computes softmax, not defined everywhere", {"functions": ("softmax",)}, {}),
        ("unknown", "computes div, not defined everywhere", {"functions": ("div",)}, {"border": "block_output"}),
        ("unknown", "computes sqrt, not defined everywhere", {"functions": ("sqrt'",)}, {}),
        ("unknown", "nothing was computed twice", {"functions": ()}, {}),
        ("unknown", "nothing was computed twice", {"functions": None}, {}),
    ],
)  # fmt: skip
def test_a_function_outside_its_domain_is_the_program_and_is_named(
    suspected: str, words: str, maker: Maker | dict[str, object], fields: dict[str, object]
) -> None:
    made = maker if isinstance(maker, Maker) else msgspec.structs.replace(LOG, **maker)
    run = Run()
    one = msgspec.structs.replace(nan("layers.2.mlp", 30), **fields)
    run.take(one, is_skipped=True, upstream={one.id: WELL}, makers={"1/activation/layers.2.mlp": made})
    found = run.well(4)

    assert found.suspected == suspected, said(found)
    assert words in said(found)


def test_an_infinity_is_not_called_a_square_root() -> None:
    run = Run()
    one = nan("layers.2.mlp", 30, statistic="infs", value_text="inf")
    made = msgspec.structs.replace(LOG, functions=("sqrt",), is_inf=True)
    run.take(one, is_skipped=True, upstream={one.id: WELL}, makers={"1/activation/layers.2.mlp": made})

    assert run.well().suspected == "unknown"


def test_weights_that_finite_gradients_made_no_numbers_are_the_update() -> None:
    for gradients, number, suspected in ((40, 64.0, "program"), (0, 64.0, "unknown"), (40, 1.0, "unknown")):
        run = Run(num_gradients=gradients)
        bad = on_all_replicas(
            "param", "layers.1.weight", 30, rank=0, statistic="nans", value=number, rule="non-finite", detector="AnomalyNan",
            severity=Severity.CRITICAL,
        )  # fmt: skip
        run.take(bad)
        for _ in range(4):
            run.take(going=(bad,), num_gradients=0)

        assert run.revisions[-1].suspected == suspected, said(run.revisions[-1])


def test_a_loss_that_is_back_at_once_was_its_batch_however_long_the_optimizer_remembers() -> None:
    run = Run()
    spike, gradient = loss(30, value=16.0, baseline=0.0014), on_all_replicas("wgrad", "layers.1.weight", 30)
    state = on_all_replicas("exp_avg_sq", "layers.1.weight", 30)
    for at in range(20):
        value = 0.0014 if at else 16.0
        run.take(*((spike, gradient, state) if not at else ()), going=(gradient, state), results={"loss": value})

    assert run.ever == {"unknown", "batch"}
    assert run.revisions[-1].skip_steps == (30,)


def test_gradients_of_a_young_run_alone_are_no_batch_to_skip() -> None:
    run = Run(results={"loss": 5.0})
    wide = [on_all_replicas("wgrad", f"layers.{at}.weight", 30, value=2.2) for at in range(8)]
    run.take(*wide, on_all_replicas("scalar", "grad_norm", 30, value=2.3))
    found = run.well()

    assert (found.suspected, found.skip_steps) == ("unknown", ())
    assert "ordinary of a run that is 30 steps old" in said(found)


def odd_weight(step: int, **fields: object) -> OddWeight:
    known: dict[str, object] = {
        "step": step, "name": "layers.1.mlp.weight", "rank": 0, "value": 3.4e36, "num_elements": 4096, "gradient": 0.2,
        "rate": 1e-3,
    } | fields  # fmt: skip
    return OddWeight(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("why", "odd", "facts"),
    [
        ("", {}, {}),
        ("", {"gradient": float("inf"), "value": -3e34}, {}),
        ("a second moment of almost nothing does that", {"value": 3e4}, {}),
        ("an update may come to so much", {"gradient": 1e37}, {}),
        ("an update may come to so much", {"value": 0.9}, {}),
        ("few elements", {"num_elements": 64}, {}),
        ("a narrow type", {}, {"has_narrow": True}),
        ("the rate jumped", {}, {"rates": {"lr": 0.1}}),
        ("the attempt is young", {}, {"healthy": 4}),
    ],
)
def test_one_element_that_no_update_makes_is_hardware_without_a_second_copy(
    why: str, odd: dict[str, object], facts: dict[str, object]
) -> None:
    run = Run(dp=1, healthy=int(facts.pop("healthy", 30)))  # type: ignore[call-overload]
    bad = nan("layers.1.mlp", run.step, dp_size=1, place={}, value=64.0)
    for at in range(4):
        run.take(*(() if at else (bad,)), going=(bad,), is_skipped=True, odd_weights=(odd_weight(run.step, **odd),), **facts)

    assert ("hardware" in run.ever) is (not why), (why, said(run.revisions[-1]))
    if not why:
        assert "no update reaches that" in said(run.revisions[-1])
        assert "drain the node of rank 0" in said(run.revisions[-1])


def test_a_weight_that_always_was_one_element_accuses_nobody() -> None:
    run = Run(dp=1, healthy=0)
    for step in range(30):
        run.take(odd_weights=(odd_weight(step),) if step % 16 == 0 else ())
    bad = nan("layers.1.mlp", run.step, dp_size=1, place={}, value=64.0)
    run.take(bad, is_skipped=True, odd_weights=(odd_weight(30), odd_weight(30, name="layers.2.mlp.weight", value=0.5)))
    run.well(8)

    assert "hardware" not in run.ever
    assert run.tracker.restore(run.tracker.snapshot()) is None


def outlier(**fields: object) -> Outlier:
    known: dict[str, object] = {
        "lane": 1, "rank": 1, "value": 1e8, "usual": 4.0, "is_alone": True, "is_whole": False, "num_before": 9,
        "upstream": WELL,
    } | fields  # fmt: skip
    return Outlier(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "facts", "words"),
    [
        ({}, {}, "nothing was computed twice"),
        ({"is_alone": False, "is_whole": True}, {}, "nothing was computed twice"),
        ({"functions": ("div:layers.1", "log")}, {}, "it computes div, log, whose results have no bound"),
        ({"usual": 0.0}, {"dp": 1}, "nothing was done twice"),
    ],
)
def test_an_output_out_of_nothing_is_neither_the_batch_nor_a_machine(
    fields: dict[str, object], facts: dict[str, object], words: str
) -> None:
    run = Run(**facts)  # type: ignore[arg-type]
    size = int(facts.get("dp", DP))  # type: ignore[call-overload]
    out = on_all_replicas("activation", "layers.2.mlp", 30, value=1e8, baseline=40.0, depth=0, site_pos=9, dp_size=size)
    run.take(out, loss(30, dp_size=size), outliers={"layers.2.mlp": outlier(**fields)})
    run.well(6)

    assert run.ever == {"unknown"}
    assert words in said(run.revisions[-1])
    assert "9 outputs measured before it were as ever" in " ".join(said(one) for one in run.revisions)


def test_an_output_of_nothing_but_zeros_is_the_model_once_it_stays() -> None:
    run = Run(dp=1)
    out = on_all_replicas("activation", "layers.2.mlp", 30, value=0.0, baseline=40.0, depth=0, site_pos=9, dp_size=1)
    run.take(out, outliers={"layers.2.mlp": outlier(value=0.0, usual=0.0, is_alone=False, lane=0, rank=0)})
    for _ in range(6):
        run.take(going=(out,))

    assert run.revisions[-1].suspected == "model"
    assert "exactly 0" in said(run.revisions[-1])


def odd_gradients(step: int, rank: int = 2) -> dict[str, object]:
    of = tuple(differing(kind="wgrad", name=f"layers.1.{part}.weight", accused=(rank,)) for part in ("attn", "mlp", "norm"))
    return {"num_differing": 3, "divergences": of}


def test_gradients_that_one_rank_got_wrong_once_are_the_exchange() -> None:
    weights = tuple(differing(name=f"layers.1.{part}.weight") for part in ("attn", "mlp", "norm"))
    first = msgspec.structs.replace(diverged(30), kind="wgrad")
    later = diverged(31)
    for rank, again, suspected in ((2, False, "hardware"), (3, False, "unknown"), (2, True, "unknown")):
        run = Run()
        run.take(first, **odd_gradients(30, rank))
        run.take(later, num_differing=3, divergences=weights)
        if again:  # Other ranks, too: a program that leaves them out.
            run.take(going=(later,), **odd_gradients(32, 1))
        for _ in range(4):
            run.take(going=(later,), num_differing=3, divergences=weights)

        assert run.revisions[-1].suspected == suspected, said(run.revisions[-1])
        assert ("hardware" in run.ever) is (suspected == "hardware")


@pytest.mark.parametrize("border", ["", "block_output"])
def test_whole_rows_that_went_bad_once_are_the_data(border: str) -> None:
    run = Run(dp=1)
    one = nan("layers.2.mlp", 30, dp_size=1, place={}, value=64.0, border=border)
    run.take(one, is_skipped=True, samples={0: ("a", "b")})
    assert run.well(3).suspected == "unknown"
    found = run.well(4)

    if border:
        assert run.ever == {"unknown"}, "behind a whole block one lost number is a row as well"
        return
    assert (found.suspected, found.skip_steps, found.skip_samples) == ("batch", (30,), ("a", "b"))
    assert "64 elements of layers.2" in said(found)


def test_what_is_made_of_the_data_first_tells_of_the_data() -> None:
    run = Run(dp=1)
    run.take(on_all_replicas("activation", "stem", 30, dp_size=1, depth=0, border="block_input", value=5.0))
    found = run.well()

    assert (found.suspected, found.skip_steps) == ("batch", (30,))
    assert "before the first block" in said(found)


@pytest.mark.parametrize(
    ("values", "suspected", "skipped"),
    [((9, 8.8, 9.1, 8.9, 1, 1), "batch", (30, 31, 32, 33)), ((9, 8.8, 8.9, 9, 8.7, 8.8, 8.9, 8.8), "model", ())],
)
def test_a_loss_that_comes_back_at_once_was_a_stretch_of_data(
    values: tuple[float, ...], suspected: str, skipped: tuple[int, ...]
) -> None:
    run = Run()
    spike = loss(30)
    for at, value in enumerate(values):
        run.take(*(() if at else (spike,)), going=(spike,) if value > 2 else (), results={"loss": value})
    found = run.well(3, results={"loss": values[-1]})

    assert (found.suspected, found.skip_steps) == (suspected, skipped)


@pytest.mark.parametrize(
    ("apart", "suspected"),
    [(None, "batch"), (ReplicaDeviation(name="embed", times=1.6, is_entry=True), "batch"),
     (ReplicaDeviation(name="layers.2", times=3.0, is_entry=False), "unknown")],
)  # fmt: skip
def test_one_replica_that_keeps_moving_while_its_forward_is_like_the_others_reads_other_data(
    apart: ReplicaDeviation | None, suspected: str
) -> None:
    run = Run()
    spike = loss(30, moved_ranks=(1,))
    run.take(spike, num_outputs=12, apart={1: apart} if apart is not None else {})
    for _ in range(6):
        run.take(going=(spike,), num_outputs=12)

    assert run.revisions[-1].suspected == suspected
    assert run.well(6).skip_steps == (tuple(range(30, 37)) if suspected == "batch" else ())


def test_gradients_of_a_narrow_type_that_are_zero_together_are_precision() -> None:
    for dtype, number, suspected in (("float16", 4, "precision"), ("float32", 4, "unknown"), ("float16", 1, "unknown")):
        run = Run()
        zero = [on_all_replicas("wgrad", f"layers.{at}.weight", 30, value=0.0, dtype=dtype) for at in range(number)]
        run.take(*zero)
        run.take(going=tuple(zero))
        run.take(going=tuple(zero))

        assert run.revisions[-1].suspected == suspected, (dtype, number)


def test_optimizer_state_that_falls_faster_than_a_mean_can_was_lost() -> None:
    for value, suspected in ((0.1, "model"), (0.8, "unknown")):
        run = Run()
        run.take(*(on_all_replicas("exp_avg_sq", f"layers.{at}.weight", 30, value=value) for at in range(3)))

        assert run.well(3).suspected == suspected
    assert Run().tracker.open_incidents == []


def test_each_verdict_says_what_to_do() -> None:
    run = Run()
    run.take(loss(30, moved_ranks=(2,)))
    assert "restart before step 30 without the batch of step 30 of rank 2" in said(run.well())
    run = Run()
    run.take(rates={"lr": 0.1})
    run.take(loss(31), rates={"lr": 0.1})
    assert "put lr back" in said(run.well())
    run = Run()
    run.take(diverged(30), num_differing=1, divergences=(differing(),))
    found = run.well(num_differing=1, divergences=(differing(),))
    assert "drain the node of rank 2 and test it; go on from a checkpoint before step 30" in said(found)


def test_a_rank_that_is_gone_is_not_called_late_nor_looked_into_with_a_debugger() -> None:
    gone = on_all_replicas(
        "health", "run", 40, statistic="ended", rule="run-ended", detector="RunEnded", rank=1, ranks=(1,), value=None,
        message="rank 1 was killed",
    )  # fmt: skip

    (incident,) = IncidentTracker().update(40, [gone])

    notified = " ".join(incident.evidence)
    assert "the process is gone" in notified
    assert "py-spy" not in notified and "late or silent" not in notified
