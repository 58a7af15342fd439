"""Routes, inhibition and texts that come for Alertmanager, before the real amtool."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel.report.alert import Alert, alerts_for
from sentinel.report.links import MessageLinks
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.alertmanager import AlertmanagerConfig, AlertmanagerSink, identity

from ..support.anomalies import an_incident
from ..support.ports import free_port
from ..support.servers import get, get_json, need, program, run_tool
from ..support.waiting import wait_for
from .test_prometheus_rules import ALERTS

FOLDER = Path(__file__).parents[2] / "deploy" / "alertmanager"
LINKS = MessageLinks(external_url="https://s.example.org", runbook_url="https://d.example.org/runbooks/diagnosis-{cause}/")
RECEIVERS = {"critical": "pager", "warning": "chat", "info": "nobody"}
CONFIG = yaml.safe_load((FOLDER / "alertmanager.yml").read_text())


@pytest.mark.server
def test_alertmanager_takes_the_configuration():
    need("amtool")

    code, text = run_tool("amtool", "check-config", "alertmanager.yml", cwd=FOLDER)

    assert code == 0, text


@pytest.mark.server
@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ({"alertname": "SentinelIncident", "page": "yes", "severity": "critical"}, "pager"),
        ({"alertname": "SentinelIncident", "page": "no", "severity": "critical"}, "chat"),
        ({"alertname": "SentinelIncident", "page": "no", "severity": "warning"}, "chat"),
        ({"alertname": "Watchdog", "severity": "none"}, "dead-mans-switch"),
        ({"alertname": "SomebodyElses", "severity": "critical"}, "chat"),
        *(
            ({"alertname": name, **rule["labels"]}, RECEIVERS[rule["labels"]["severity"]])
            for name, rule in ALERTS.items()
            if name != "Watchdog"
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "-".join(one.values()),
)
def test_each_alert_reaches_whom_its_severity_is_for(labels, receiver):
    need("amtool")
    words = [f"{name}={value}" for name, value in labels.items()]

    code, text = run_tool("amtool", "config", "routes", "test", "--config.file=alertmanager.yml", *words, cwd=FOLDER)

    assert (code, text.splitlines()[0]) == (0, receiver)


MUTED = [
    {"alertname": "SentinelRunSilent", "instance": "a", "run": "r"},
    {"alertname": "SentinelIncidentOpen", "instance": "a", "run": "r"},
    {"alertname": "SentinelDiskLow", "instance": "a", "directory": "runs"},
]
HEARD = [
    {"alertname": "SentinelDown", "instance": "a"},
    {"alertname": "SentinelIncident", "run": "r", "incident": "i1", "page": "yes", "severity": "critical"},
    {"alertname": "SentinelDiskRefuses", "instance": "a", "run": "r"},
    # Another daemon, another run, and what a daemon that is down does not explain.
    {"alertname": "SentinelRunSilent", "instance": "b", "run": "s"},
    {"alertname": "SentinelIncidentOpen", "instance": "b", "run": "s"},
    {"alertname": "SentinelBlind", "instance": "a", "run": "r"},
    {"alertname": "Watchdog"},
]


@pytest.mark.server
@pytest.mark.slow
def test_a_real_alertmanager_mutes_what_follows_and_nothing_else(tmp_path):
    need("prometheus-alertmanager")
    url = f"http://127.0.0.1:{free_port()}"
    arguments = [
        shutil.which("prometheus-alertmanager"), f"--config.file={FOLDER / 'alertmanager.yml'}",
        f"--storage.path={tmp_path / 'am'}", "--cluster.listen-address=",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]  # fmt: skip

    with program(arguments, f"{url}/-/ready", tmp_path / "log"):
        get(f"{url}/api/v2/alerts", json.dumps([{"labels": labels} for labels in (*MUTED, *HEARD)]).encode())
        wait_for(lambda: len(get_json(f"{url}/api/v2/alerts")) == len(MUTED) + len(HEARD))
        found = {
            tuple(sorted(one["labels"].items())): bool(one["status"]["inhibitedBy"])
            for one in get_json(f"{url}/api/v2/alerts")
        }

    expected = {tuple(sorted(labels.items())): labels in MUTED for labels in (*MUTED, *HEARD)}
    assert found == expected


def test_inhibition_names_alerts_that_there_are():
    known = {*ALERTS, "SentinelIncident"}
    for rule in CONFIG["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            name, operator, value = matcher.partition("=~" if "=~" in matcher else "=")
            if name != "alertname":
                continue
            assert (operator == "=" and value.strip('"') in known) or any(matches(value, one) for one in known), matcher


def matches(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern.strip('"'), name) is not None


def sent(alert: Alert) -> dict[str, Any]:
    """Return an alert as Alertmanager hands it to a template."""
    sink = AlertmanagerSink(AlertmanagerConfig(urls=("http://h",)), None, {}, MessageWriter(LINKS))
    return sink.alert(alert, identity(alert.incident), 1000.0)


def rendered(tmp_path, template, *alerts, status="firing"):
    data = {
        "receiver": "chat", "status": status, "alerts": [{"status": status, **one} for one in alerts],
        "groupLabels": {}, "commonLabels": {}, "commonAnnotations": {}, "externalURL": "",
    }  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps(data))

    code, text = run_tool(
        "amtool", "template", "render", "--template.glob=sentinel.tmpl", f"--template.data={tmp_path / 'data.json'}",
        f'--template.text={{{{ template "{template}" . }}}}', cwd=FOLDER,
    )  # fmt: skip

    assert code == 0, text
    return text.strip()


def an_alert(**changes) -> Alert:
    routes = [("alertmanager", AlertmanagerConfig(urls=("http://h",)).route)]
    [alert] = alerts_for(None, an_incident(**changes), routes, 1000.0)
    return alert


@pytest.mark.server
def test_an_incident_reads_as_a_person_needs_it(tmp_path):
    need("amtool")
    body = sent(an_alert(module="layers.3.mlp", ranks=(3, 5)))

    title, text = (rendered(tmp_path, name, body) for name in ("sentinel.title", "sentinel.text"))

    assert title == body["annotations"]["summary"]
    assert text.splitlines()[0] == title
    assert "module: layers.3.mlp" in text and "ranks: 3, 5" in text
    assert body["generatorURL"] in text.splitlines() and "https://d.example.org/runbooks/diagnosis-" in text
    assert rendered(tmp_path, "sentinel.link", body) == body["generatorURL"] != ""
    assert "<no value>" not in text and "\n\n\n" not in text


@pytest.mark.server
def test_what_was_not_ended_by_sentinel_is_no_all_clear(tmp_path):
    need("amtool")
    body = sent(an_alert())

    silent = rendered(tmp_path, "sentinel.text", body, status="resolved")
    by_sentinel = {**body, "annotations": {**body["annotations"], "resolution": "resolved"}}
    ended = rendered(tmp_path, "sentinel.text", by_sentinel, status="resolved")

    assert "NO ALL-CLEAR: Sentinel has fallen silent" in silent
    assert "NO ALL-CLEAR" not in ended and "resolved" in ended.splitlines()


@pytest.mark.server
def test_an_alert_of_prometheus_reads_with_its_page_and_its_end_is_an_all_clear(tmp_path):
    need("amtool")
    notes = ALERTS["SentinelDown"]["annotations"]
    body = {"labels": {"alertname": "SentinelDown"}, "annotations": notes, "generatorURL": "http://p/graph"}

    text = rendered(tmp_path, "sentinel.text", body)
    link = rendered(tmp_path, "sentinel.link", body)
    over = rendered(tmp_path, "sentinel.text", body, status="resolved")

    assert text.splitlines() == [notes["summary"], notes["description"], "http://p/graph", notes["runbook_url"]]
    assert link == notes["runbook_url"]
    assert "over" in over.splitlines() and "ALL-CLEAR" not in over
