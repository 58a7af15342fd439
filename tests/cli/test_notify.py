"""`sentinel notify preview`: what would be sent, and nothing is sent."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from sentinel.cli.notify import notify
from sentinel.command import EnableMonitoring
from sentinel.control.command_status import CommandStatus
from sentinel.daemon.commanding import COMMANDS_FACT
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan

from ..support.serving import judge_run, small_run

CONFIG = """
notify:
  external_url: https://s.example
  runbook_url: https://w/{detector}
  sinks:
  - {type: slack, url_env: SLACK}
  - {type: slack-bot, token_env: TOKEN, channel: C1}
  - {type: pagerduty, routing_key_env: KEY}
  - {type: webhook, url: "https://hooks.example/secret-path", secret_env: KEY}
  - {type: email, host: mail.example, sender: s@example.org, to: [oncall@example.org]}
  - {type: discord, url_env: SLACK}
  - {type: teams, url_env: SLACK}
  - {type: alertmanager}
  - {type: console, route: {changes: [opened]}}
"""
ENVIRON = {"SLACK": "https://hooks.slack.example/secret-path", "TOKEN": "xoxb-secret", "KEY": "secret-key"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    source = small_run(folder).plant(Nan(step=5, module="layers.2"))
    source.write(12)
    source.end()
    judge_run(folder)
    return folder


def asked(*arguments: str, environ: dict[str, str] = ENVIRON) -> tuple[int, str]:
    result = CliRunner().invoke(notify, ["preview", *arguments], env=environ, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


@pytest.fixture
def config(tmp_path) -> str:
    (tmp_path / "d.yaml").write_text(CONFIG)
    return str(tmp_path / "d.yaml")


def test_without_sinks_the_message_is_shown_as_text(run_dir: Path) -> None:
    code, text = asked("--run", str(run_dir))

    assert code == 0 and text.splitlines()[0].startswith("CRITICAL: run run: ")
    lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    assert "node0" in lines["machines"] and lines["since"].endswith("UTC, step 5")


def test_every_sink_shows_what_it_would_send_and_no_secret(run_dir: Path, config: str) -> None:
    code, text = asked("--run", str(run_dir), "--config", config)

    assert code == 0 and "secret-path" not in text and "xoxb" not in text and "secret-key" not in text
    named = [line.removeprefix("--- ") for line in text.splitlines() if line.startswith("--- ")]
    assert named == ["slack", "slack-bot", "pagerduty", "webhook", "email", "discord", "teams", "alertmanager", "console"]
    assert text.count("CRITICAL: run run") >= len(named)
    assert '"routing_key": "(secret)"' in text and "Subject: CRITICAL: run run" in text
    assert "https://w/AnomalyNan" in text


def test_one_sink_as_json(run_dir: Path, config: str) -> None:
    _, text = asked("--run", str(run_dir), "--config", config, "--sink", "pagerduty", "--json")

    shown = json.loads(text)
    assert (shown["sink"], shown["would_be_sent"]) == ("pagerduty", True)
    assert shown["sendings"][0]["body"]["payload"]["severity"] == "critical"


def test_what_was_ordered_is_read_from_the_journal_and_nothing_is_written(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    journal = Journal(RunPaths.of(copy).journal)
    command = EnableMonitoring(id="c", seq=1, at_step=5, kinds=("activation",), for_steps=9)
    journal.values.put(COMMANDS_FACT, msgspec.json.encode([CommandStatus(command=command, state="applied")]).decode())
    journal.close()
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file() and "journal" not in path.name}

    _, text = asked("--run", str(copy))

    assert "done: monitoring of activation is on, steps 5 to 13, all ranks" in text
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path in before}


def test_a_sink_without_its_secret_is_told_and_the_others_are_shown(run_dir: Path, config: str) -> None:
    code, text = asked("--run", str(run_dir), "--config", config, environ={**ENVIRON, "TOKEN": ""})

    assert code == 1 and "d.yaml:7: notify.sinks.slack-bot.token_env" in text and "--- pagerduty" in text


def test_a_sink_that_is_none_is_told_with_the_nearest(run_dir: Path, config: str) -> None:
    with pytest.raises(Exception, match=re.escape('--sink "pagerdty": unknown; did you mean "pagerduty"?')):
        asked("--run", str(run_dir), "--config", config, "--sink", "pagerdty")
    with pytest.raises(Exception, match="known: none, name a configuration with --config"):
        asked("--run", str(run_dir), "--sink", "slack")
