"""Gradients of healthy training are no warnings; what no batch, schedule or router explains still is one."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Pack
from sentinel.rules.watches.healthy_gradients import FAR, is_of_expert

WGRADS = [(f"layers.{i}.weight", "wgrad") for i in range(12)]
EXPERTS = [(f"mlp.experts.{i}.w{j}", "wgrad") for i in range(4) for j in range(3)]


def engine_of(*names):
    return Engine(Pack(rules=tuple(load_pack().rule(name) for name in names)))


def warmed(engine, run, rng, steps=80, scalars=None):
    for step in range(steps):
        norms = np.exp(0.05 * rng.standard_normal(len(run.tensors)))
        assert engine.judge(run.view(step, norms, scalars=scalars() if scalars else None)) == []
    return steps


def reported(found):
    return [a for a in found if a.event == "onset" and a.severity is not Severity.INFO]


@pytest.mark.parametrize(("times", "is_warning"), [(2.6, False), (20.0, True)])
def test_gradients_that_a_batch_lifts_together_are_told_where_they_are_far_out(paper_run, rng, times, is_warning):
    run = paper_run(WGRADS)
    engine = engine_of("turbulent-norm")
    step = warmed(engine, run, rng)

    found = engine.judge(run.view(step, np.full(len(WGRADS), times)))

    assert len(found) == len(WGRADS)
    assert (max(a.score for a in found) >= FAR) == is_warning
    assert bool(reported(found)) == is_warning


def test_activations_that_rise_together_a_little_are_told(paper_run, rng):
    run = paper_run([(f"layers.{i}", "activation") for i in range(12)])
    engine = engine_of("turbulent-norm")
    step = warmed(engine, run, rng)

    assert reported(engine.judge(run.view(step, np.full(12, 2.6))))


@pytest.mark.parametrize(("share", "is_warning"), [(1 / 3, False), (1 / 40, True), (0.0, True)])
def test_a_gradient_that_fades_as_a_model_learns_is_no_warning(paper_run, rng, share, is_warning):
    run = paper_run(WGRADS)
    engine = engine_of("turbulent-norm")
    step = warmed(engine, run, rng)

    found = [a for i in range(5) for a in engine.judge(run.view(step + i, np.full(len(WGRADS), share)))]

    assert found and bool(reported(found)) == is_warning


@pytest.mark.parametrize("tensors", [EXPERTS, WGRADS])
def test_an_expert_without_tokens_for_some_steps_is_no_warning(paper_run, rng, tensors):
    run = paper_run(tensors)
    engine = engine_of("turbulent-norm", "dead-gradient")
    step = warmed(engine, run, rng)
    norms = np.where(np.arange(12) < 3, 0.0, 1.0)

    away = [a for i in range(20) for a in engine.judge(run.view(step + i, norms))]
    back = [a for i in range(40) for a in engine.judge(run.view(step + 20 + i, np.ones(12)))]

    assert bool(reported(away)) == (tensors is WGRADS)
    assert not reported(back)


def test_an_expert_that_gets_no_token_any_more_is_told(paper_run, rng):
    run = paper_run(EXPERTS)
    engine = engine_of("dead-gradient")
    step = warmed(engine, run, rng)
    norms = np.where(np.arange(12) < 3, 0.0, 1.0)

    found = [a for i in range(80) for a in engine.judge(run.view(step + i, norms))]

    assert {a.tag_name for a in reported(found)} == {"mlp.experts.0.w0", "mlp.experts.0.w1", "mlp.experts.0.w2"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", True),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", True),
        ("blocks.1.expert_2.fc.weight", True),
        ("blocks.1.mlp.shared_expert.up.weight", False),
        ("blocks.1.mlp.experts.gate_up_proj", False),
        ("expertise.weight", False),
    ],
)
def test_an_expert_is_known_by_its_name(name, expected):
    assert is_of_expert(name) == expected


@pytest.mark.parametrize(
    ("kind", "times", "is_warning"), [("wgrad", 2.2, False), ("wgrad", 40.0, True), ("param", 2.2, True)]
)
def test_a_global_norm_alone_is_told_where_no_gradient_is_measured_or_it_is_far_out(paper_run, rng, kind, times, is_warning):
    run = paper_run([("layers.0.weight", kind)])
    engine = engine_of("grad-norm-spike")
    step = warmed(engine, run, rng, 200, lambda: {"grad_norm": float(np.exp(0.03 * rng.standard_normal()))})

    (found,) = engine.judge(run.view(step, np.ones(1), scalars={"grad_norm": times}))

    assert (found.severity is Severity.WARNING) == is_warning


@pytest.mark.parametrize(("num_elements", "is_warning"), [(1, False), (100, True)])
def test_the_state_of_one_element_that_passes_through_zero_is_no_lost_state(paper_run, rng, num_elements, is_warning):
    run = paper_run([(f"{name}.bias", "exp_avg") for name in "abcde"], num_elements=num_elements)
    engine = engine_of("optimizer-state")
    step = warmed(engine, run, rng)

    found = [a for i in range(5) for a in engine.judge(run.view(step + i, np.array([1.0, 1.0, 1.0, 1.0, 1 / 40])))]

    assert found
    assert bool(reported(found)) == is_warning


@pytest.mark.parametrize(("num_elements", "is_warning"), [(1, False), (100, True)])
def test_a_step_as_large_as_a_weight_of_one_element_is_no_fault(paper_run, rng, num_elements, is_warning):
    run = paper_run([("head.bias", "param"), ("head.bias", "update_ratio")], num_elements=num_elements)
    engine, found = engine_of("update-ratio"), []
    for step in range(90):
        ratio = 0.9 if step >= 80 else 0.01 * np.exp(0.1 * rng.standard_normal())

        def change(_rank, rows, ratio=ratio):
            rows["mean"] = ratio

        found += engine.judge(run.view(step, np.ones(2), change=change))

    assert found
    assert bool(reported(found)) == is_warning
