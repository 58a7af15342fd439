"""Threshold as a rule of the user's own: on logged values, on tensors, refused when it can never fire."""

from __future__ import annotations

import pytest

from sentinel.anomaly import Severity
from sentinel.errors import RuleError
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack


def pack_of(tmp_path, match: str, args: str):
    file = tmp_path / "own.yaml"
    rule = f"  - name: own\n    detector: Threshold\n    match: {match}\n    args: {args}\n"
    file.write_text(f"builtin: false\nrules:\n{rule}")
    return load_pack([file])


def test_a_logged_value_below_its_limit_is_told_when_it_lasts(paper_run, tmp_path):
    run = paper_run([("w", "param")])
    engine = Engine(pack_of(tmp_path, "{kind: scalar, name: throughput}", "{below: 100, lasting: 3}"))

    views = [run.view(step, scalars={"throughput": 40.0 if step > 9 else 120.0}) for step in range(20)]
    found = [one for view in views for one in engine.judge(view)]

    onset = next(one for one in found if one.event == "onset")
    assert onset.step == 12 and onset.baseline == 100.0 and onset.severity is Severity.WARNING
    assert onset.message.startswith("throughput is 40, past the limit 100 (score 1,")
    assert engine.num_points_judged["own"] == 20


def test_any_statistic_of_any_tensor_has_its_limit(paper_run, tmp_path):
    run = paper_run([("a", "param"), ("b", "param")])
    engine = Engine(pack_of(tmp_path, "{kind: param, statistic: rms}", "{above: 0.5, after: 5}"))

    found = [one for step in range(20) for one in engine.judge(run.view(step, [1.0, 8.0 if step > 9 else 1.0]))]

    assert {(one.tag_name, one.statistic) for one in found} == {("b", "rms")}
    assert found[0].step == 10 and "rms of param b is 0.8, past the limit 0.5" in found[0].message


def test_a_threshold_without_a_limit_is_an_error_with_its_line(tmp_path):
    with pytest.raises(RuleError, match=r"own\.yaml:\d+: .*above or below is needed"):
        pack_of(tmp_path, "{kind: scalar}", "{lasting: 3}")
