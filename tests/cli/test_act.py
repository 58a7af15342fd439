"""`sentinel ack`, `resolve`, `reopen`: taken by the run's judge, journalled, told once, refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.cli import act as verb
from sentinel.cli.act import parse_until
from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, run_cli
from sentinel.errors import ConfigError
from sentinel.incident import Incident
from sentinel.judge.replay import replay
from sentinel.recorded_incidents import incident_revisions, newest_revisions
from sentinel.store.run_paths import RunPaths

from ..daemon.test_serving import EVERY_STEP, planted_run, queued
from ..support.results import result_bytes
from ..support.serving import NOW, catch_up, served

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    source = planted_run(tmp_path / "run")
    source.write(50)
    return tmp_path / "run"


def worst(run_dir: Path) -> Incident:
    newest = newest_revisions(incident_revisions(run_dir)).values()
    return max(newest, key=lambda one: (one.state == "open", one.severity.level))


def test_people_are_obeyed_journalled_and_replayed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = served(run_dir, EVERY_STEP)
    catch_up(run)
    # The judge's turn comes while the command waits for it.
    monkeypatch.setattr(verb.time, "sleep", lambda _: (setattr(run._acts, "due", 0.0), run.turn(NOW)))
    incident = worst(run_dir)
    num_reported = len(queued(run_dir))

    for words in (["ack", incident.id[:8], "--until", "4h"], ["resolve", incident.id], ["reopen", incident.id]):
        code = run_cli([*words, "-d", str(run_dir), "--who", "ana", "--why", "node 7 is drained"])
        assert code == CLEAN, capsys.readouterr().err

    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        f"{incident.id} {did} by ana" for did in ("acknowledged", "closed", "reopened")
    ]
    now = worst(run_dir)
    assert (now.id, now.state, [one.act for one in now.acts]) == (incident.id, "open", ["ack", "resolve", "reopen"])
    assert any("closed by ana: node 7 is drained" in line for line in now.evidence)
    assert list((run_dir / "acts").iterdir()) == []
    assert len(queued(run_dir)) == num_reported, "this configuration has no sink"
    run.finish(NOW, is_over=False, deadline=float("inf"))
    run.close()
    assert replay(RunPaths.of(run_dir), tmp_path / "again").first_difference is None
    assert (tmp_path / "again" / "incidents.jsonl").read_bytes() == result_bytes(run_dir)[1]


def test_a_restart_between_act_and_judge_takes_it_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = served(run_dir, EVERY_STEP)
    catch_up(run)
    monkeypatch.setattr(verb, "WAIT_S", 0.0)
    assert run_cli(["ack", "-d", str(run_dir), "--who", "ana"]) == FOUND
    run.close()
    (waiting,) = (run_dir / "acts").iterdir()
    body = waiting.read_bytes()

    for _ in range(2):
        run = served(run_dir, EVERY_STEP)
        catch_up(run)
        run._acts.due = 0.0
        catch_up(run)
        run.close()
        waiting.write_bytes(body)  # as a crash before its removal leaves it
        waiting.chmod(0o600)

    assert [one.act for one in worst(run_dir).acts] == ["ack"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["resolve", "i"], BAD_USAGE, "several incident"),
        (["resolve", "nosuch"], BAD_USAGE, "no incident has an id that begins so; known: i"),
        (["resolve"], BAD_USAGE, "Missing argument 'INCIDENT'"),
        (["reopen", "worst"], BAD_USAGE, "expected one that is over, this one is open"),
        (["ack", "--until", "yesterday"], BAD_USAGE, '--until: expected 30min, 4h, 2d or 2026-11-22T18:00, got "yesterday"'),
        (["ack", "--until", "5 parsecs"], BAD_USAGE, 'unknown unit "parsecs"; known: s, m, min, h, d'),
    ],
)
def test_what_cannot_be_is_said(
    run_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    run = served(run_dir, EVERY_STEP)
    catch_up(run)
    run.close()

    assert run_cli([*words, "-d", str(run_dir)]) == code
    assert says in capsys.readouterr().err
    assert not (run_dir / "acts").exists()


def test_json_is_the_incident(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = served(run_dir, EVERY_STEP)
    catch_up(run)
    monkeypatch.setattr(verb.time, "sleep", lambda _: (setattr(run._acts, "due", 0.0), run.turn(NOW)))

    assert run_cli(["ack", "-d", str(run_dir), "--who", "ana", "--json"]) == CLEAN

    assert json.loads(capsys.readouterr().out)["acts"][0]["who"] == "ana"
    run.close()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30min", 1800.0), ("30m", 1800.0), ("4h", 14400.0), ("1.5d", 129600.0), ("1970-01-01T00:01", 60.0),
     ("1970-01-01T00:01+00:00", 60.0)],
)  # fmt: skip
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_until(text, 0.0) == pytest.approx(seconds)


def test_an_unknown_time_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_until("soon", 0.0)
