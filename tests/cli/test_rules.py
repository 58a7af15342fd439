import json

import pytest

from sentinel.cli.main import run_cli
from sentinel.testing import SyntheticRun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("rules: [{name: a, detector: AnomalyNan}]", 0),
        ("rules: [{name: a, detector: AnomalyNam}]", 1),
        ("rules: [{name: a, detector: AnomalyNan, severity: critical, actions: []}]", 3),
    ],
)
def test_check_exit_codes(tmp_path, capsys, text, code):
    pack = tmp_path / "mine.yaml"
    pack.write_text(text)

    assert run_cli(["rules", "check", str(pack), "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert bool(result["errors"]) == (code == 1) and bool(result["lint"]) == (code == 3)


def test_check_names_file_and_line(tmp_path, capsys):
    pack = tmp_path / "mine.yaml"
    pack.write_text("rules:\n  - name: a\n    detector: AnomalyNam")

    run_cli(["rules", "check", str(pack)])

    assert f'{pack}:3: rule "a": unknown detector "AnomalyNam"; did you mean "AnomalyNan"?' in capsys.readouterr().out


def test_bad_usage_is_2(tmp_path, capsys):
    assert run_cli(["rules", "list", str(tmp_path / "nothing.yaml")]) == 2
    assert run_cli(["rules", "check", "--nonsense"]) == 2


def test_list_is_one_object_a_line(capsys):
    assert run_cli(["rules", "list", "--json"]) == 0
    names = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    assert "loss-spike" in names

    assert run_cli(["rules", "list", "--detectors", "--json"]) == 0
    assert "KurtosisSpike" in capsys.readouterr().out


def limit(statistic, args, detector="Threshold"):
    return f"{{name: a, detector: {detector}, match: {{kind: wgrad, statistic: {statistic}}}, args: {{{args}}}}}"


LINT = {
    "a share above one": (limit("zeros", "above: 1.0"), "never fires"),
    "a norm below zero": (limit("norm", "below: 0"), "never fires"),
    "a norm above -1": (limit("norm", "above: -1"), "at every point"),
    "a NaN limit": (limit("zeros", "threshold: 2", "AnomalyNan"), "never fires"),
    "another's work": (
        '{name: a, detector: AnomalyNan, match: {kind: "*"}, severity: critical, actions: [notify, escalate]}',
        'does what rule "non-finite"',
    ),
    "in another's place": (
        "{name: loss-spike, detector: Threshold, match: {kind: scalar, name: loss}, args: {above: 9}}",
        "replaces the rule of that name of the default pack, whose detector is LossSpike",
    ),
    "a regular expression": (r"{name: a, detector: AnomalyNan, match: {name: 'layers\.\d+'}}", "no regular expression"),
    "an open bracket": ("{name: a, detector: AnomalyNan, match: {name: 'layers.[0'}}", 'has a "[" without "]"'),
    "a blank": ('{name: a, detector: AnomalyNan, match: {kind: wgrad, name: "head "}}', "begins or ends with a blank"),
}  # fmt: skip


@pytest.mark.parametrize("case", LINT)
def test_what_is_probably_not_meant_is_lint_with_file_and_line(case, tmp_path, capsys):
    rule, words = LINT[case]
    pack = tmp_path / "mine.yaml"
    pack.write_text(f"rules:\n  - {rule}\n")

    assert run_cli(["rules", "check", str(pack)]) == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{pack}:2: rule ") and words in line and line.endswith("(lint)")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "tiny"
    SyntheticRun(run, layers=2).write(3)
    return run


def test_globs_of_the_packs_that_come_with_sentinel_are_never_blamed_on_a_file_that_changes_their_rules(
    recorded, tmp_path, capsys
):
    pack = tmp_path / "mine.yaml"
    pack.write_text("rules:\n  - {name: loss-spike, severity: warning}\n  - {name: expert-imbalance, actions: [notify]}\n")

    assert run_cli(["rules", "check", "moe", str(pack), "--run", str(recorded)]) == 0
    assert capsys.readouterr().out == ""


def test_a_glob_of_ones_own_is_blamed_where_it_was_written(recorded, tmp_path, capsys):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("rules:\n  - name: loss-spike\n    match: {kind: scalar, name: los}\n")
    second.write_text("rules: [{name: loss-spike, severity: warning}]")

    assert run_cli(["rules", "check", str(first), str(second), "--run", str(recorded)]) == 3
    assert capsys.readouterr().out.startswith(f'{first}:3: rule "loss-spike": match.name "los" matches no name of scalar')


def test_a_limit_that_can_be_passed_is_no_lint(tmp_path, capsys):
    pack = tmp_path / "mine.yaml"
    pack.write_text("rules: [{name: a, detector: Threshold, match: {kind: wgrad, statistic: zeros}, args: {above: 0.9}}]")

    assert run_cli(["rules", "check", str(pack)]) == 0


def test_a_rule_to_change_that_is_not_there_is_guessed(tmp_path, capsys):
    pack = tmp_path / "mine.yaml"
    pack.write_text("rules: [{name: los-spike, args: {k: 3}}]")

    assert run_cli(["rules", "check", str(pack)]) == 1
    assert 'there is no such rule to change; did you mean "loss-spike"?' in capsys.readouterr().out


def test_detectors_are_told_with_what_their_arguments_mean(capsys):
    assert run_cli(["rules", "list", "--detectors", "LossSpike"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("LossSpike: ") and "settle_after: 20   Consecutive flagged points" in out

    assert run_cli(["rules", "list", "--detectors", "--json"]) == 0
    reported = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(reported) > 20 and all(one["args_doc"][key] for one in reported for key in one["args"])
    assert run_cli(["rules", "list", "--detectors", "LosSpike"]) == 2
