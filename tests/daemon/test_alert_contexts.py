"""What an alert that a daemon commits says beside the judgement: when it began, and on which machines."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.http.daemon_api import UnknownIncident
from sentinel.daemon.http.incident_page import render_incident
from sentinel.daemon.notifying import Notifying
from sentinel.daemon.served_api import ServedApi
from sentinel.incident import Incident
from sentinel.report.alert import Alert
from sentinel.report.links import MessageLinks
from sentinel.report.silences import Silences
from sentinel.report.sinks.console import ConsoleConfig
from sentinel.report.sinks.sink_table import NotifyConfig
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan

from ..support.serving import judge_run, loaded_packs, served, small_run

TELLING = DaemonConfig(notify=NotifyConfig(sinks=(ConsoleConfig(),)))


def alerts_of(run_dir: Path) -> list[Alert]:
    journal = Journal(RunPaths.of(run_dir).journal)
    try:
        return [Alert.read(row.body) for row in journal.outbox.waiting("alert:console", 1e12, 100)]
    finally:
        journal.close()


def test_alerts_name_the_machines_of_the_incident_and_when_it_opened(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run").plant(Nan(step=5, module="layers.2"))
    source.write(12)
    source.end()

    judge_run(tmp_path / "run", TELLING)

    (first, *more) = alerts_of(tmp_path / "run")
    lines = (tmp_path / "run" / "incidents.jsonl").read_bytes().splitlines()
    opened = next(one for one in (msgspec.json.decode(line, type=Incident) for line in lines) if one.id == first.incident.id)
    assert all(one.context.opened == opened.time > 0 for one in (first, *more))
    assert [one.host for one in first.context.ranks] == ["node0"] * len(first.context.ranks) and first.context.ranks
    assert {one.rank for one in first.context.ranks} <= set(first.incident.ranks or range(4))


def test_what_is_judged_says_nothing_of_machines(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run").plant(Nan(step=5, module="layers.2"))
    source.write(12)
    source.end()

    judge_run(tmp_path / "run", TELLING)

    assert b"node0" not in (tmp_path / "run" / "incidents.jsonl").read_bytes()


def test_the_page_of_an_incident_is_made_from_the_journal_also_when_it_is_over(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run").plant(Nan(step=5, module="layers.2"))
    source.write(12)
    source.end()
    judge_run(tmp_path / "run", TELLING, is_over=True)
    run = served(tmp_path / "run", TELLING)
    notifying = Notifying(TELLING.notify, {}, io.StringIO())
    api = ServedApi(loaded_packs(), ConfigInForce(TELLING, None, None, 0.0), notifying, Silences(), lambda: None)
    api.links = MessageLinks(runbook_url="https://w/{incident}")
    api.publish([run], {}, {}, is_caught_up=True)
    (first, *_) = alerts_of(tmp_path / "run")

    shown = api.incident(None, first.incident.id)
    page = render_incident(shown)
    with pytest.raises(UnknownIncident, match='incident "i0" of the runs that are served here: there is none'):
        api.incident(None, "i0")
    run.close()

    assert [one.revision for one in shown.revisions] == list(range(1, len(shown.revisions) + 1))
    assert shown.revisions[-1].state == "ended" and "node0" in page
    assert f"https://w/{first.incident.id}" in page
