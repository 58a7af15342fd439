"""The alerts that come with Sentinel: each fires and is quiet in cases of its own, and has a page for whoever it wakes."""

import re
from pathlib import Path

import pytest
import yaml

from sentinel.cli.serve import serve
from sentinel.fleet.subjects import NUM_PARTITIONS
from sentinel.report.metrics import MetricsSnapshot
from sentinel.report.prometheus_page import MetricsCollector

from ..support.servers import need, run_tool
from ..support.snapshots import a_worker, full_run, full_snapshot

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = [
    rule for group in yaml.safe_load((PROMETHEUS / "sentinel.rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
CASES = yaml.safe_load((PROMETHEUS / "sentinel.rules.test.yml").read_text())["tests"]


@pytest.mark.server
def test_the_rules_hold_their_cases():
    need("promtool")

    code, text = run_tool("promtool", "test", "rules", "sentinel.rules.test.yml", cwd=PROMETHEUS)

    assert code == 0, text


@pytest.mark.server
def test_prometheus_takes_configuration_and_rules():
    need("promtool")

    code, text = run_tool("promtool", "check", "config", "prometheus.yml", cwd=PROMETHEUS)

    assert code == 0, text


def test_the_port_that_is_scraped_is_the_one_that_the_daemon_listens_on():
    [scrape] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    [listen] = [option.default for option in serve.params if option.name == "listen"]

    assert scrape["static_configs"] == [{"targets": [listen]}]
    assert scrape["job_name"] == "sentinel"


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(alert):
    asked = [one for case in CASES for one in case["alert_rule_test"] if one["alertname"] == alert]

    assert any(one.get("exp_alerts") for one in asked)
    # The watchdog is there to fire always.
    assert alert == "Watchdog" or any(not one.get("exp_alerts") for one in asked)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_quiet_case_looks_at_what_the_alert_is_about(alert):
    quiet = [
        case for case in CASES for one in case["alert_rule_test"] if one["alertname"] == alert and not one.get("exp_alerts")
    ]
    about = set(re.findall(r"\b(?:sentinel_\w+|process_\w+|up)\b", str(ALERTS[alert]["expr"])))
    recorded = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
    for name, expression in recorded.items():
        if name in ALERTS[alert]["expr"]:
            about |= set(re.findall(r"\bsentinel_\w+", expression))

    given = {re.match(r"\w+", one["series"])[0] for case in quiet for one in case["input_series"]}

    assert alert == "Watchdog" or given & about


def test_partitions_are_missed_where_there_are_fewer_than_there_are():
    assert ALERTS["SentinelPartitionsFree"]["expr"].endswith(f" < {NUM_PARTITIONS}")


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_says_what_is_wrong_and_leads_to_its_page(alert):
    rule = ALERTS[alert]
    notes = rule["annotations"]

    assert rule["labels"]["severity"] in {"critical", "warning", "info", "none"}
    assert notes.keys() == {"summary", "description", "runbook_url"}
    assert len(notes["summary"]) < 110 and not notes["summary"].endswith(".")
    assert notes["description"].endswith(".")
    assert notes["runbook_url"] == f"https://sentinel.example.org/runbooks/{alert}/"
    assert (ROOT / "docs" / "runbooks" / f"{alert}.md").is_file()


def test_every_metric_in_the_rules_exists():
    snapshots = (full_snapshot((full_run(),)), MetricsSnapshot(worker=a_worker()))
    shown = [MetricsCollector(lambda one=one: one).render()[0].decode() for one in snapshots]
    names = {line.split("{")[0].split()[0] for body in shown for line in body.splitlines() if not line.startswith("#")}
    recorded = {rule["record"] for rule in RULES if "record" in rule}

    for rule in RULES:
        used = set(re.findall(r"(?<![:\w])(?:sentinel|process)_\w+(?![:\w])", rule["expr"]))
        assert used <= names, rule
        assert set(re.findall(r"\w+:\w+:\w+", rule["expr"])) <= recorded, rule
