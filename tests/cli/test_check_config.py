"""`sentinel check-config`: whose file it is, what is wrong with it, and what in it does not resolve here and now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, LINT_ONLY, run_cli

SLACK = "notify:\n  sinks:\n  - type: slack\n"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("https://hooks.example.org/x\n")
    path.chmod(0o600)
    return path


def checked(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    path = tmp_path / "daemon.yaml"
    path.write_text(text)
    code = run_cli(["check-config", str(path)])
    return code, capsys.readouterr().out.replace(str(path), "F")


def test_a_configuration_whose_secrets_are_there_is_clean(
    secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "https://hooks.example.org/y")
    text = f"{SLACK}    url_file: {secret}\n  - {{type: webhook, url_env: HOOK}}\n  - {{type: console}}\n"

    assert checked(text, tmp_path, capsys) == (CLEAN, "F: ok, for the daemon\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SLACK, "F:3: notify.sinks.slack.url: expected "),
        (f"{SLACK}    url_file: /nowhere/url\n", "F:4: notify.sinks.slack.url_file: /nowhere/url: No such file"),
        (f"{SLACK}    url_env: NOT_SET\n", "F:4: notify.sinks.slack.url_env: expected the environment variable"),
        (f"{SLACK}    url_env: A\n    url_file: b\n", "F:3: notify.sinks.slack.url: expected one of"),
        ("notify:\n  sinks:\n  - type: webhook\n", "F:3: notify.sinks.webhook.url: expected url, url_file"),
        ("notify:\n  sinks:\n  - type: webhook\n    url: ftp://x\n", "F:4: notify.sinks.webhook.url must be an http or"),
        ("notify:\n  sinks:\n  - type: webhook\n    url: http://x\n    secret_env: NOT_SET\n",
         "F:5: notify.sinks.webhook.secret_env: expected the environment variable"),
        ("notify:\n  sinks:\n  - type: alertmanager\n    bearer_file: /nowhere/b\n", "F:4: notify.sinks.alertmanager"),
        ("notify:\n  ca_file: /nowhere/ca\n  sinks: [{type: console}]\n", "F:2: notify.ca_file: /nowhere/ca: expected"),
        ("notify:\n  sinks: [{type: console}]\n  escalate:\n  - {after_s: 60, sinks: [consol]}\n",
         'F:4: notify.escalate[0].sinks: unknown sink "consol"; did you mean "console"?'),
        ("notify:\n  sinks: [{type: console}]\n  maintenance:\n  - {phases: [eval]}\n  - {hours: 'Mom 09:00-10:00'}\n",
         'F:5: notify.maintenance.hours: unknown day "Mom"; did you mean "Mon"?'),
        ("notify:\n  sinks: [{type: console}]\n  inhibit:\n  - {source: ['rnu=x'], target: ['run=y']}\n",
         'F:4: notify.inhibit.source: unknown name "rnu"; did you mean "run"?'),
        ("notify:\n  sinks:\n  - {type: console, route: {hours: ['9-18']}}\n", "F:3: notify.sinks.route.hours must be like"),
        ("notify:\n  hold_s: {critical: -1}\n  sinks: [{type: console}]\n", "F:2: notify.hold_s.critical must be in"),
    ],
)  # fmt: skip
def test_what_a_daemon_would_refuse_here_and_now_is_an_error(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = checked(text, tmp_path, capsys)

    assert (code, out.count("\n")) == (FOUND, 1)
    assert out.startswith(message)


def test_a_sink_for_escalations_alone_is_not_suspicious(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "notify:\n  escalate: [{after_s: 60, sinks: [console]}]\n  sinks: [{type: console, route: {changes: []}}]\n"

    assert checked(text, tmp_path, capsys) == (CLEAN, "F: ok, for the daemon\n")


def test_every_secret_that_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = checked(f"{SLACK}    url_env: NOT_A\n  - {{type: webhook, url_env: NOT_B}}\n", tmp_path, capsys)

    assert code == FOUND
    assert "NOT_A" in out and "NOT_B" in out


def test_an_empty_secret_and_one_that_is_no_text_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in ((b" \n", "expected a secret, got an empty file"), (b"\xff\xfe", "expected text in UTF-8")):
        (tmp_path / "s").write_bytes(content)
        code, out = checked(f"{SLACK}    url_file: {tmp_path / 's'}\n", tmp_path, capsys)
        assert code == FOUND and message in out


@pytest.mark.parametrize(("mode", "who"), [(0o602, "everybody"), (0o620, "its group")])
def test_a_secret_that_others_may_write_is_suspicious(
    mode: int, who: str, secret: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret.chmod(mode)

    code, out = checked(f"{SLACK}    url_file: {secret}\n", tmp_path, capsys)

    assert code == LINT_ONLY
    assert f"F:4: notify.sinks.slack.url_file: {secret}: {who} may write it, mode {mode:04o}; run: chmod go-w" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("notify:\n  sinks:\n  - type: console\n    route:\n      changes: []\n", "F:5: notify.sinks.console.route.changes"),
        ("notify:\n  sinks:\n  - type: console\n    route: {detectors: [LossSpyke]}\n",
         'F:4: notify.sinks.console.route.detectors[0]: unknown detector "LossSpyke"; did you mean "LossSpike"?'),
        ("notify:\n  retry_s: 2\n", "F:1: notify.sinks: there are none, so that nobody is notified"),
    ],
)  # fmt: skip
def test_a_sink_that_no_route_reaches_is_suspicious(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = checked(text, tmp_path, capsys)

    assert code == LINT_ONLY
    assert out.startswith(message) and "(suspicious)" in out


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("kinds: [param]\n", "trainer"),
        ("kinds: [param]\nblack_box: true\nnotify: {}\n", "trainer"),
        ("judging: {}\n", "daemon"),
        ("", "daemon"),
        ("rules: []\n", "rules"),
        ("rules: [a.yaml]\ntests: []\n", "rule-tests"),
    ],
)
def test_whose_file_it_is_is_told_from_its_keys(
    text: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.yaml").write_text(text)

    run_cli(["check-config", "--json", str(tmp_path / "f.yaml")])

    assert json.loads(capsys.readouterr().out)["for"] == kind


@pytest.mark.slow
def test_a_file_that_nests_3000_levels_is_told_so_and_nothing_else_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = checked("notify: " + "[" * 3000, tmp_path, capsys)

    assert (code, out) == (FOUND, "F:1: nested too deeply: expected at most 32 levels\n")


def test_a_file_that_is_not_there_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["check-config", str(tmp_path / "no.yaml")]) == BAD_USAGE
    assert "cannot be read: No such file or directory" in capsys.readouterr().out


def test_a_directory_of_rule_packs_is_checked_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("rules:\n- name: loss-spike\n  severity: critical\n")

    assert run_cli(["check-config", str(tmp_path)]) == CLEAN
    assert "ok, for the rules" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["serve", "{runs}", "--no-http", "--config"], ["notify", "test", "--config"]])
def test_a_secret_that_is_missing_is_told_with_its_line_by_whoever_needs_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir(mode=0o700)
    path = tmp_path / "daemon.yaml"
    path.write_text(f"# comment\n{SLACK}    url_env: NOT_SET\n")

    code = run_cli([*(word.format(runs=tmp_path / "runs") for word in words), str(path)])

    assert code == BAD_USAGE
    assert f"{path}:5: notify.sinks.slack.url_env: expected the environment variable NOT_SET" in capsys.readouterr().err


def test_what_is_only_suspicious_in_a_rule_pack_is_told_as_rules_check_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "rules:\n- name: a\n  detector: Threshold\n  match: {kind: wgrad, statistic: zeros}\n  args: {above: 2}\n"
    )

    assert run_cli(["check-config", str(path)]) == LINT_ONLY
    assert f'{path}:2: rule "a": never fires: ' in capsys.readouterr().out
    assert run_cli(["rules", "check", str(path)]) == LINT_ONLY


def test_a_policy_about_a_detector_that_does_not_exist_is_hardly_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "control:\n  policies:\n  - name: p\n    detectors: [AnomalyNaN]\n"

    code, out = checked(text, tmp_path, capsys)

    assert code == LINT_ONLY
    assert 'F:4: control.policies[0].detectors[0]: unknown detector "AnomalyNaN"' in out
    assert "AnomalyNan" in out.partition("did you mean")[2]


POLICY = "control:\n  policies:\n  - name: p\n    rules: [{rules}]\n    action: nothing\n"


@pytest.mark.parametrize("rules", ["loss-spike", '"loss-*"', '"*"'])
def test_a_policy_about_rules_that_exist_is_clean(rules: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = checked(POLICY.format(rules=rules), tmp_path, capsys)

    assert code == CLEAN, out


def test_a_policy_about_a_rule_that_does_not_exist_is_hardly_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = checked(POLICY.format(rules='loss-spike, loss-spik, "lost-*"'), tmp_path, capsys)

    assert code == LINT_ONLY
    assert 'F:4: control.policies[0].rules[1]: no rule is called "loss-spik"; did you mean "loss-spike"?' in out
    assert 'control.policies[0].rules[2]: no rule is called "lost-*"' in out
    assert "control.policies[0].rules[0]" not in out


def test_a_policy_about_a_rule_of_a_pack_that_is_named_beside_it_is_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "daemon.yaml").write_text(POLICY.format(rules="mine"))
    match = "detector: Threshold\n  match: {kind: wgrad, statistic: norm}\n  args: {above: 2}\n"
    (tmp_path / "pack.yaml").write_text(f"rules:\n- name: mine\n  {match}")

    assert run_cli(["check-config", str(tmp_path / "daemon.yaml")]) == LINT_ONLY
    assert "where a pack of yours has it, name that too" in capsys.readouterr().out
    assert run_cli(["check-config", str(tmp_path / "daemon.yaml"), str(tmp_path / "pack.yaml")]) == CLEAN
