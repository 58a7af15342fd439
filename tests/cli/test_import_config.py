"""`sentinel import msprobe-config`: each key of msProbe's config is mapped, told, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel.cli.import_config_keys import _KEYS
from sentinel.cli.main import run_cli
from sentinel.monitor_config import load_config
from sentinel.rules.language.loader import load_pack


def mapped(tmp_path: Path, config: dict[str, Any], *arguments: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The config as the trainer reads it, and what was told of the other keys."""
    source = tmp_path / "config.json"
    source.write_text(json.dumps(config, indent=1))
    for made in tmp_path.glob("*.yaml"):
        made.unlink()
    assert run_cli(["import", "msprobe-config", str(source), "-o", str(tmp_path / "s.yaml"), *arguments]) == 0
    load_config(tmp_path / "s.yaml")
    text = (tmp_path / "s.yaml").read_text()
    reported = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    return yaml.safe_load(text), dict(line.split(": ", 1) for line in reported)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"kinds": []}),
        ({"wg_distribution": True}, {"kinds": ["wgrad_unreduced", "wgrad"]}),
        ({"wg_distribution": False, "mv_distribution": True}, {"kinds": ["exp_avg", "exp_avg_sq"]}),
        ({"param_distribution": True, "mg_direction": True}, {"kinds": ["param", "grad_momentum_alignment"]}),
        ({"xy_distribution": True}, {"kinds": ["activation_in", "activation", "dgrad_in", "dgrad"]}),
        ({"xy_distribution": True, "forward_only": True}, {"kinds": ["activation_in", "activation"]}),
        ({"xy_distribution": True, "backward_only": True}, {"kinds": ["dgrad_in", "dgrad"]}),
        (
            {"wg_distribution": True, "monitor_mbs_grad": True},
            {"kinds": ["wgrad_unreduced", "wgrad"], "per_micro_step": True},
        ),
        (
            {"ur_distribution": True},
            {"kinds": [], "probes": {"update": {"histogram": True}, "update_ratio": {"histogram": True}}},
        ),
        (
            {"start_step": 5, "step_interval": 10, "collect_times": 7, "module_ranks": [0, 3]},
            {"kinds": [], "start_step": 5, "step_interval": 10, "collect_times": 7, "ranks": [0, 3]},
        ),
        ({"collect_times": 100000000, "start_step": None}, {"kinds": []}),
        ({"collect_times": 0}, {"kinds": [], "enabled": False}),
        ({"eps": 1e-8}, {"kinds": [], "zero_eps": 1e-8}),
        ({"ops": ["norm", "zeros"]}, {"kinds": [], "zero_eps": 1e-8}),
        ({"print_struct": True}, {"kinds": [], "struct": True}),
        ({"stack_info": True, "print_struct": False}, {"kinds": [], "struct": True}),
        (
            {"recording_l2_features": True, "l2_targets": {"linear_hook": [], "attention_hook": ["0:layers.0.attn"]}},
            {"kinds": [], "probes": {"weight_spectrum": {}, "attention": {"targets": ["layers.0.attn"]}}},
        ),
        (
            {"cc_distribution": {"enable": True, "cc_codeline": [r"train\.py\[\d+\]"], "cc_log_only": True}},
            {"kinds": [], "probes": {"comm": {"targets": [r"re:.*(?:train\.py\[\d+\]).*"], "log_only": True}}},
        ),
        ({"cc_distribution": {"enable": False, "cc_log_only": True}}, {"kinds": []}),
    ],
)
def test_keys_become_ours(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert mapped(tmp_path, config)[0] == expected


def test_targets_are_the_modules_that_msprobe_takes(tmp_path: Path) -> None:
    targets = {"0:layers.1": {"input": "tensor"}, "layers.2.attn": {"output": "tuple[2]:1"}}

    found, reported = mapped(tmp_path, {"targets": targets, "xy_distribution": True, "wg_distribution": True})

    assert found["targets"] == [r"re:layers\.1", r"re:layers\.2\.attn:1"]
    assert found["probes"]["wgrad"] == {"targets": ["layers.1", "layers.2.attn"]}
    config = load_config(tmp_path / "s.yaml")
    from sentinel.target import Target, means

    parsed = [Target.parse(one) for one in config.targets]
    assert means(parsed, ["layers.1"], "") and means(parsed, ["layers.2.attn"], "1")
    assert not means(parsed, ["layers.10"], "") and not means(parsed, ["layers.1.mlp"], "")
    assert not means(parsed, ["layers.2.attn"], "")
    weights = [Target.parse(one) for one in config.probes["wgrad"].targets or ()]
    assert means(weights, ["layers.1.mlp.weight"]) and not means(weights, ["layers.10.mlp.weight"])
    everything, reported = mapped(tmp_path, {"targets": targets, "xy_distribution": True, "all_xy": True})
    assert "targets" not in everything and "all_xy takes every module" in reported["targets"]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("sa_order", "b,s,h,d", "order of dimensions is known"),
        ("format", "csv", "sentinel export"),
        ("ndigits", 16, "all digits"),
        ("step_count_per_record", 10, "--steps-per-file"),
        ("squash_name", True, "--squash-names"),
        ("append_output", ["Nov21_13-56-02", "Nov21_14-56-02"], "resumed run joins"),
        ("dynamic_on", True, "--dynamic"),
        ("ops", ["norm"], "every statistic is always there"),
    ],
)
def test_a_key_that_is_not_needed_says_why(tmp_path: Path, key: str, value: Any, why: str) -> None:
    found, reported = mapped(tmp_path, {key: value})

    assert why in reported[key] and set(found) == {"kinds"}


def test_every_key_of_msprobe_is_known() -> None:
    """Source: msProbe 26.2, TrainerMon.set_config and validate_config."""
    assert set(_KEYS) == {
        "start_step", "collect_times", "step_interval", "print_struct", "module_ranks", "format", "eps", "ops", "ndigits",
        "all_xy", "xy_distribution", "forward_only", "backward_only", "ur_distribution", "mv_distribution",
        "wg_distribution",
        "param_distribution", "mg_direction", "cc_distribution", "stack_info", "monitor_mbs_grad", "recording_l2_features",
        "sa_order", "alert", "step_count_per_record", "squash_name", "append_output", "targets", "l2_targets", "dynamic_on",
    }  # fmt: skip


def test_dynamic_on_switches_everything_where_it_was_dynamic(tmp_path: Path) -> None:
    for is_on in (True, False):
        found, _ = mapped(tmp_path, {"dynamic_on": is_on, "wg_distribution": True}, "--dynamic")
        assert found["enabled"] is is_on


def test_alert_rules_become_a_pack(tmp_path: Path) -> None:
    rules = [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}, {"rule_name": "AnomalyNan"},
             {"rule_name": "AnomalyNan", "args": {"threshold": 1e10}}]  # fmt: skip
    config = {"wg_distribution": True, "ops": ["min", "norm"], "alert": {"rules": rules, "dump": True}}

    mapped(tmp_path, config)

    pack = load_pack([tmp_path / "s-rules.yaml"])
    found = [(one.name, one.detector, one.args, one.match.statistic) for one in pack.rules]
    assert found == [
        ("msprobe-turbulence", "AnomalyTurbulence", {"compat": "msprobe", "threshold": 0.5}, ("norm",)),
        ("msprobe-nan", "AnomalyNan", {"compat": "msprobe"}, ("min", "norm")),
        ("msprobe-nan-2", "AnomalyNan", {"compat": "msprobe", "threshold": 1e10}, ("min", "norm")),
    ]
    assert all(one.match.kind == ("wgrad_unreduced", "wgrad") for one in pack.rules)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"xy_distribtion": true}', ':1: xy_distribtion: unknown key; did you mean "xy_distribution"?'),
        ('{"ops": ["norm"],\n "mg_distribution": true}', ":2: mg_distribution: unknown key; did you mean"),
        ('{"wg_distribution": "yes"}', 'wg_distribution: expected true or false, got "yes"'),
        ('{"wg_distribution": 1}', "wg_distribution: expected true or false, got 1"),
        ('{"start_step": -1}', "start_step: expected at least 0, got -1; msProbe takes its default for it"),
        ('{"step_interval": 0}', "step_interval: expected at least 1, got 0"),
        ('{"step_interval": true}', "step_interval: expected a whole number, got true"),
        ('{"ops": ["nrom"]}', 'ops[0]: unknown statistic "nrom"; did you mean "norm"?'),
        ('{"module_ranks": [0, "1"]}', "module_ranks[1]: expected a rank"),
        ('{"eps": 1}', "eps: expected a number like 1e-8, got 1"),
        ('{"targets": {"a": 1}}', "targets.a: expected an object like"),
        ('{"targets": {"x:a": {}}}', "expected a chunk before the colon"),
        ('{"targets": {"a": {"inptu": "tensor"}}}', "targets.a.inptu: unknown slot"),
        ('{"targets": {"a": {"input": "tuple2"}}}', "expected tensor, or tuple[2]:0"),
        ('{"l2_targets": {"linear": []}}', 'l2_targets.linear: unknown hook; did you mean "linear_hook"?'),
        ('{"cc_distribution": {"enabel": true}}', 'cc_distribution.enabel: unknown key; did you mean "enable"?'),
        ('{"cc_distribution": {"enable": true, "cc_codeline": ["("]}}', "not a regular expression"),
        ('{"alert": {"rules": [{"rule_name": "AnomalyNaN"}]}}', 'unknown rule "AnomalyNaN"; did you mean "AnomalyNan"?'),
        ('{"alert": {"rules": [{"rule_name": "AnomalyTurbulence"}]}}', "expected a threshold; msProbe leaves this rule out"),
        ('{"alert": {"rules": [{"rule_name": "AnomalyNan", "args": {"treshold": 1}}]}}', "unknown argument"),
        ('{"xy_distribution": true, "forward_only": true, "backward_only": true}', "expected not both"),
        ('{"ops": ["norm"], "ops": ["min"]}', "ops: is there twice"),
        ('{"eps": NaN}', "NaN is no number of JSON"),
        ('{"ndigits": -2}', "ndigits: expected at least 0, got -2"),
        ('{"step_count_per_record": 0}', "step_count_per_record: expected at least 1, got 0"),
        ('{"targets": {"a": {"input": "tuple[2]:7"}}}', 'expected an element below 2, got "tuple[2]:7"'),
        ('{"ops": ["norm"]', ":1: not JSON"),
        ("[]", "expected an object of keys, got list"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_what_msprobe_does_not_know_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, what: str
) -> None:
    (tmp_path / "config.json").write_text(text)

    assert run_cli(["import", "msprobe-config", str(tmp_path / "config.json"), "-o", str(tmp_path / "s.yaml")]) == 2

    assert what in capsys.readouterr().err
    assert not (tmp_path / "s.yaml").exists()


def test_a_file_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "s.yaml").write_text("mine")

    assert run_cli(["import", "msprobe-config", str(tmp_path / "config.json"), "-o", str(tmp_path / "s.yaml")]) == 2
    assert "expected no such file yet" in capsys.readouterr().err and (tmp_path / "s.yaml").read_text() == "mine"
    assert run_cli(["import", "msprobe-config", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_json_tells_config_rules_and_what_is_not_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"mv_distribution": True, "ndigits": 8, "alert": {"rules": [{"rule_name": "AnomalyNan"}]}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert run_cli(["import", "msprobe-config", str(tmp_path / "config.json"), "--json"]) == 0

    reported = json.loads(capsys.readouterr().out)
    assert reported["config"] == {"kinds": ["exp_avg", "exp_avg_sq"]}
    assert [rule["name"] for rule in reported["rules"]] == ["msprobe-nan"]
    assert reported["unneeded"] == [{"key": "ndigits", "reason": "all digits are kept"}]
