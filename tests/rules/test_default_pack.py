"""The default pack on paper: every rule about tensors is silent for 300 healthy steps, and finds its own fault."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack

HEALTHY_STEPS, FAULTY_STEPS = 300, 40

CASES: dict[str, tuple[str, str, float, object, int]] = {
    # rule: (kind, name, usual value, value `since` steps into the fault, steps within which it must be said)
    "vanishing-gradient": ("wgrad", "layers.0.w", 0.3, lambda since: 0.3 * 0.7**since, 25),
    "exploding-tensor": ("activation", "layers.1", 2.0, lambda since: 2.0 * 1.3**since, 20),
    "dead-gradient": ("wgrad", "layers.1.w", 0.3, lambda since: 0.0, 3),
    "frozen-weight": ("param", "layers.1.w", 4.0, lambda since: 4.04, 3),
    "gradient-jump": ("wgrad", "layers.3.w", 0.3, lambda since: 1.2 + 0.01 * since, 1),
    "optimizer-state": ("exp_avg", "layers.1.w", 0.1, lambda since: 0.01, 1),
    "repeated-input": ("activation_in", "layers.0.fc1", 2.0, lambda since: 2.02, 4),
    "update-ratio": ("update_ratio", "layers.2.w", 1e-3, lambda since: 1e-7, 1),
    "saturation": ("saturation", "layers.0.act:saturated", 0.3, lambda since: 0.98, 1),
    "precision-overflow": ("precision", "layers.0.fc1:dgrad.fp16_overflow", 0.0, lambda since: 1e-6, 1),
    "attention-entropy": ("attention", "layers.0.attn:entropy", 3.0, lambda since: 0.1, 1),
    "attention-logits": ("attention", "layers.0.attn:max_logit", 9.0, lambda since: 250.0, 1),
    "expert-imbalance": ("router", "layers.0.gate:balance", 0.05, lambda since: 2.0, 1),
    "dead-expert": ("router", "layers.0.gate:inactive", 0.0, lambda since: 0.5, 1),
}
INFOS = ("precision-overflow", "frozen-weight", "gradient-jump")
OTHERS = [(kind, f"layers.{i}.other") for kind in ("wgrad", "param", "update_ratio", "activation_in") for i in range(4)]


_said: list[tuple[list, Engine]] = []


@pytest.fixture
def said(paper_run):
    """Return all anomalies of a run that is healthy for 300 steps, then has every fault at once; and the engine."""
    if not _said:
        _said.append(judged(paper_run))
    return _said[0]


def judged(paper_run):
    tensors = [(name, kind) for kind, name, *_ in CASES.values()] + [(name, kind) for kind, name in OTHERS]
    usual = np.array([case[2] for case in CASES.values()] + [1e-3 if kind == "update_ratio" else 1.0 for kind, _ in OTHERS])
    run, engine, rng = paper_run(tensors), Engine(load_pack()), np.random.default_rng(5)
    found = []
    for step in range(HEALTHY_STEPS + FAULTY_STEPS):
        values = usual * np.exp(0.03 * rng.standard_normal(len(usual)))
        if step >= HEALTHY_STEPS:
            values[: len(CASES)] = [case[3](step - HEALTHY_STEPS) for case in CASES.values()]

        def tell(rank, rows, values=values):
            for name, reported in (
                ("count", 1),
                ("mean", values),
                ("min", values),
                ("max", values),
                ("m2", 0.0),
                ("m4", 0.0),
            ):
                rows[name] = reported

        found += engine.judge(run.view(step, change=tell))
    return found, engine


@pytest.mark.slow
def test_healthy_steps_are_silent_and_all_are_judged(said):
    found, engine = said

    assert [one for one in found if one.step < HEALTHY_STEPS] == []
    assert engine.num_rows_judged == (HEALTHY_STEPS + FAULTY_STEPS) * (len(CASES) + len(OTHERS))
    assert all(engine.num_points_judged[rule] >= HEALTHY_STEPS for rule in CASES)


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_finds_its_own_fault_and_nothing_else(said, rule):
    kind, name, _, _, within = CASES[rule]

    onsets = [one for one in said[0] if one.rule == rule and one.event == "onset"]

    own = [one for one in onsets if (one.kind, one.tag_name) == (kind, name)]
    # A gradient of nothing has vanished as well.
    others = {("wgrad", "layers.1.w")} if rule == "vanishing-gradient" else set()
    assert {(one.kind, one.tag_name) for one in onsets} - others == {(kind, name)}
    assert own[0].step < HEALTHY_STEPS + within
    # Alone it is `info` until it lasts three points.
    assert own[-1].severity is (Severity.INFO if rule in INFOS else Severity.WARNING)


def test_what_a_message_says(said):
    first = {rule: next(one.message for one in said[0] if one.rule == rule) for rule in CASES}

    entropy = first["attention-entropy"]
    assert entropy.startswith("mean of attention layers.0.attn:entropy is 0.1, 1/30.")
    assert entropy.endswith("; attention collapses onto few keys: logits too large (no QK norm, a high learning rate)?")
    assert "layers.0.attn:max_logit is 250, 27." in first["attention-logits"]
    assert "softmax saturates" in first["attention-logits"]
    assert "layers.0.fc1:dgrad.fp16_overflow is 1e-06, past the limit 0 (score 1," in first["precision-overflow"]
    assert "norm of param layers.1.w is 4.04, exactly what it was before" in first["frozen-weight"]
    assert "norm of wgrad layers.1.w is 0, its baseline 0." in first["dead-gradient"]
    assert "no optimizer steps it" in first["dead-gradient"]
