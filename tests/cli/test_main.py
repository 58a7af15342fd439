"""The group of verbs: exit codes, help, and nothing loaded that is not needed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.cli.main import VERBS, run_cli
from sentinel.cli.places import find_run, run_name, runs_directory
from sentinel.cli.run import closing_line, make_report, report_lines
from sentinel.errors import ConfigError
from sentinel.store.journal import Commit, Journal
from sentinel.store.outbox_table import Outgoing
from sentinel.store.run_paths import RunPaths
from sentinel.version import VERSION


def test_version_and_help_list_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["--version"]) == 0
    assert VERSION in capsys.readouterr().out
    assert run_cli(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([verb, "--help"]) == 0
    assert "Usage: sentinel" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["srve"], ["serve", "--nonsense"], ["run"], ["serve", "/no/such/directory"]])
def test_bad_usage_is_2_and_said_on_stderr(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


def test_a_command_that_is_none_is_found_before_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", "--dir", str(tmp_path), "--", "no-such-program"]) == 127
    assert capsys.readouterr().err.startswith("sentinel: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_command_that_never_began_ends_as_a_shell_would_end_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.txt").write_text("no program")
    (tmp_path / "foreign").write_bytes(b"\x00no format that this machine runs")
    (tmp_path / "foreign").chmod(0o700)

    codes = {name: run_cli(["run", "--", name]) for name in ("no-such-command", "./no-such", "./plain.txt", "./foreign")}

    assert codes == {"no-such-command": 127, "./no-such": 127, "./plain.txt": 126, "./foreign": 126}
    said = capsys.readouterr().err.splitlines()
    assert 'sentinel: command "no-such-command": expected a program that we may run, found none' in said
    assert 'sentinel: command "./foreign": Exec format error' in said


def test_a_disk_that_says_no_is_a_message_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["status", "/dev/null/runs"]) == 2
    assert "/dev/null/runs" in capsys.readouterr().err


def test_a_torn_line_of_incidents_does_not_cost_the_report(tmp_path: Path) -> None:
    (tmp_path / "incidents.jsonl").write_bytes(b'{"id":"i1","rev')

    assert make_report(tmp_path, 0, True)["incidents"] == []


def test_a_broken_journal_hides_no_other_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "spool").mkdir(parents=True)
    (tmp_path / "a" / ".daemon").mkdir()
    (tmp_path / "a" / ".daemon" / "journal.sqlite").write_bytes(b"no database" * 1000)

    assert run_cli(["status", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("b: nothing judged")
    assert "the file is no journal" in captured.err and f"sentinel repair {tmp_path / 'a'} rebuilds it" in captured.err


def test_the_nearest_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    run_cli(["srve"])

    assert 'did you mean "serve"?' in capsys.readouterr().err


@pytest.mark.slow
def test_help_loads_neither_daemon_nor_torch() -> None:
    script = (
        "import sys\nfrom sentinel.cli.main import run_cli\nrun_cli(['--help'])\n"
        "heavy = {'torch', 'numpy', 'starlette', 'uvicorn', 'requests', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)

    assert result.returncode == 0, result.stderr


def test_runs_are_found_by_name_path_and_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name / "spool").mkdir(parents=True)
    import os

    os.utime(tmp_path / "a" / "spool", (2e9, 2e9))

    assert runs_directory() == tmp_path
    assert find_run("b") == tmp_path / "b"
    assert find_run(str(tmp_path / "b")) == tmp_path / "b"
    assert find_run(None) == tmp_path / "a"
    with pytest.raises(ConfigError, match="known: a, b"):
        find_run("c")


def test_a_run_without_a_name_is_called_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENTINEL_RUN", raising=False)

    assert run_name() != run_name()
    assert run_name("given") == "given"


def incident(name: str, revision: int, severity: str, state: str = "open") -> dict[str, object]:
    return {
        "id": name, "revision": revision, "run": "r", "attempt": 0, "state": state, "opened_step": 3, "last_step": 9,
        "severity": severity, "title": f"title of {name}", "root": None, "root_name": "blocks.2 (activation) rank 1",
        "verdict": "hardware",
    }  # fmt: skip


def test_the_report_says_the_newest_of_each_incident(tmp_path: Path) -> None:
    (tmp_path / "anomalies").mkdir()
    (tmp_path / "anomalies" / "000001.jsonl").write_text('{"event":"onset"}\n' * 3 + '{"event":"end"}\n')
    revisions = [incident("i1", 1, "warning"), incident("i2", 1, "info"), incident("i1", 2, "critical", "resolved")]
    (tmp_path / "incidents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in revisions))

    report = make_report(tmp_path, 0, True)
    lines = report_lines(report)

    assert report["num_anomalies"] == 3
    assert [(one["id"], one["revision"]) for one in report["incidents"]] == [("i1", 2), ("i2", 1)]
    assert "3 anomalies, 2 incidents" in lines[0]
    assert "CRITICAL title of i1 [resolved, i1]" in lines[1]
    assert "first cause: blocks.2 (activation) rank 1; suspected: hardware" in lines[2]


@pytest.mark.parametrize(
    ("severity", "outcomes", "said"),
    [
        ("critical", {},
         ["NOT SENT to anybody: no sink takes these incidents (notify.sinks in the daemon's configuration)"]),
        ("warning", {}, []),
        ("critical", {"pager": ["sent", "digested", "superseded", "silenced"]}, []),
        ("critical", {"mail": ["sent", "failed"], "pager": ["", "", "sent"]},
         ["NOT SENT mail: 1 failed", "NOT SENT pager: 2 waiting; what waits is sent by: sentinel serve RUN"]),
    ],
)  # fmt: skip
def test_the_report_says_what_nobody_was_sent(
    severity: str, outcomes: dict[str, list[str]], said: list[str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "incidents.jsonl").write_text(json.dumps(incident("i1", 1, severity)) + "\n")
    rows = [(f"alert:{sink}", outcome) for sink, all_of_it in outcomes.items() for outcome in all_of_it]
    with contextlib.closing(Journal(RunPaths.of(tmp_path).journal)) as journal:
        outbox = [Outgoing(key=str(at), topic=topic, body=b"") for at, (topic, _) in enumerate([*rows, ("escalation", "")])]
        journal.commit(Commit(judged=0, outbox=outbox))
        for at, (_, outcome) in enumerate(rows, 1):
            if outcome:
                journal.outbox.finish_delivery([at], outcome)

    lines = report_lines(make_report(tmp_path, 0, True))

    assert [line.strip().replace(str(tmp_path), "RUN") for line in lines if "NOT SENT" in line] == said


def test_where_retention_deleted_what_was_sent_nobody_is_said_to_have_heard_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "incidents.jsonl").write_text(json.dumps(incident("i1", 1, "critical")) + "\n")
    with contextlib.closing(Journal(RunPaths.of(tmp_path).journal)) as journal:
        journal.cut.put(10, 20, 0.0)

    report = make_report(tmp_path, 0, True)

    assert report["notifications"] is None
    assert not [line for line in report_lines(report) if "NOT SENT" in line]


def test_a_clean_run_has_a_clean_report(tmp_path: Path) -> None:
    assert report_lines(make_report(tmp_path, 0, True)) == [f"run {tmp_path.name}: 0 anomalies, 0 incidents"]


def test_check_config_tells_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, rules = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "rules.yaml"
    good.write_text("judging: {late_after_steps: 3}\n")
    bad.write_text("judging: {late_after_steps: -1}\nnotify: {}\n")
    rules.write_text("rules:\n  - name: x\n    detector: AnomalyNam\n")

    assert run_cli(["check-config", str(good)]) == 0
    assert run_cli(["check-config", str(bad)]) == 1
    assert "judging.late_after_steps must be at least 0, got -1" in capsys.readouterr().out
    assert run_cli(["check-config", str(rules)]) == 1
    assert 'did you mean "AnomalyNan"?' in capsys.readouterr().out


def test_doctor_finds_a_directory_that_others_may_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "spool").mkdir(parents=True)
    run.chmod(0o700)

    assert run_cli(["doctor", str(tmp_path), "--json"]) == 0
    run.chmod(0o777)
    assert run_cli(["doctor", str(tmp_path)]) == 1
    assert "chmod go-w" in capsys.readouterr().out


def test_a_run_ends_with_what_was_watched_and_what_to_type_next() -> None:
    watched = {"directory": "/runs/my run", "num_steps": 12, "num_ranks": 1, "num_tensors": 40}
    incidents = [
        {"state": "open", "severity": "critical"}, {"state": "ended", "severity": "warning"},
        {"state": "merged", "severity": "critical"},
    ]  # fmt: skip

    assert closing_line({**watched, "incidents": []}) == (
        "watched 12 steps, 1 rank, 40 tensors; 0 incidents; page: sentinel serve '/runs/my run'; "
        "next: sentinel status '/runs/my run'"
    )
    assert closing_line({**watched, "incidents": incidents}) == (
        "watched 12 steps, 1 rank, 40 tensors; 2 incidents (1 critical); page: sentinel serve '/runs/my run'; "
        "next: sentinel explain worst -d '/runs/my run'"
    )
    assert closing_line({"directory": "/r", "incidents": []}).startswith("watched nothing; 0 incidents; ")
