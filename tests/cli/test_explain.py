"""`sentinel explain`: finds the run, the incident and the alerts."""

from __future__ import annotations

import json

import msgspec
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.cli.main import run_cli
from sentinel.incidents.tracker import IncidentTracker
from sentinel.report.alert import Alert
from sentinel.store.journal import Commit, Journal
from sentinel.store.outbox_table import Outgoing


def write_run(home, name, step):
    """Write a run with one incident, and return that incident."""
    run = home / name
    (run / "spool").mkdir(parents=True)
    (run / "anomalies").mkdir()
    anomaly = Anomaly(
        id=f"a-{name}", run=name, attempt=0, rank=0, step=step, micro_step=0, pp_stage=0, vpp_stage=0, call_id=3,
        tag_name="fc1", kind="activation", statistic="nans", rule="nan", detector="AnomalyNan", severity=Severity.CRITICAL,
        value=None, value_text="nan", message="", time=float(step),
    )  # fmt: skip
    (incident,) = IncidentTracker().update(step, [anomaly])
    (run / "anomalies" / "000001.jsonl").write_bytes(msgspec.json.encode(anomaly) + b"\n")
    (run / "incidents.jsonl").write_bytes(msgspec.json.encode(incident) + b"\n")
    return incident


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    return tmp_path


def test_explains_an_incident_of_any_run(home, capsys):
    one, two = write_run(home, "one", 41), write_run(home, "two", 43)

    assert run_cli(["explain", one.id]) == 0
    assert capsys.readouterr().out.startswith("NaN born in fc1 (forward) on rank 0, micro_step 0, step 41\n")
    assert run_cli(["explain", "latest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["incident"]["id"] == two.id
    assert run_cli(["explain", "latest", "-d", "one"]) == 0
    assert "step 41" in capsys.readouterr().out
    assert run_cli(["explain", "-d", "one"]) == 0
    assert "step 41" in capsys.readouterr().out, "the latest is the default"


def test_says_who_was_told(home, capsys):
    incident = write_run(home, "one", 41)
    journal = Journal(home / "one" / ".daemon" / "journal.sqlite")
    alert = Alert(key="slack:one:i:1", sink="slack", change="opened", incident=incident, is_page=True)
    journal.commit(Commit(judged=0, outbox=[Outgoing(key=alert.key, topic=alert.topic, body=alert.body)]))
    journal.outbox.finish_delivery([1], "sent")
    journal.close()

    run_cli(["explain", "latest"])

    assert "  slack: opened (revision 1, a page): sent\n" in capsys.readouterr().out


def test_wrong_incidents_are_usage_errors(home, capsys):
    assert run_cli(["explain", "latest"]) == 2
    write_run(home, "one", 41)
    write_run(home, "two", 43)

    assert run_cli(["explain", "nope"]) == 2
    assert "known: i" in capsys.readouterr().err
    assert run_cli(["explain", "i"]) == 2
    assert "2 runs have such an incident: one, two" in capsys.readouterr().err
