"""The post-mortem that the daemon hands out: as `sentinel report` writes it, one at a time, ended when it takes too long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest

from sentinel.daemon import report_process
from sentinel.daemon.report_process import ReportQueries
from sentinel.daemon.series_api import Busy
from sentinel.daemon.serving import ServedRun
from sentinel.errors import NotThere, StoreError, TookTooLong
from sentinel.incident import Incident
from sentinel.report.links import MessageLinks
from sentinel.testing import Nan

from ..support.serving import catch_up, served, small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    run_dir = tmp_path_factory.mktemp("runs") / "-o evil"
    small_run(run_dir).plant(Nan(step=6, module="layers.1.attn")).write(8)
    with contextlib.closing(served(run_dir)) as one:
        catch_up(one)
        yield one


@pytest.mark.slow
def test_an_incident_is_told_whole_in_a_file_that_loads_nothing(run: ServedRun) -> None:
    [incident, *_] = [msgspec.json.decode(one, type=Incident) for one in run.journal.found.newest_incidents(10)]

    links = MessageLinks(runbook_url="https://wiki.example/{cause}", dashboard_url="https://graphs.example/{run}")
    found = ReportQueries().report(run, incident.id, links)

    text = found.body.decode()
    assert found.name == f"postmortem--o_evil-{incident.id}.html"
    assert text.startswith("<!doctype html>") and incident.id in text and "default-src &#39;none&#39;" in text
    assert "<script" not in text and "layers.1.attn" in text
    assert f"https://wiki.example/{incident.suspected}" in text and "https://graphs.example/-o%20evil" in text


@pytest.mark.parametrize("incident", ["worst", "--help", "i000000000000", ""])
def test_an_incident_is_named_by_its_id_alone(run: ServedRun, incident: str) -> None:
    with pytest.raises(NotThere, match='expected one of run "-o evil", got none'):
        ReportQueries().report(run, incident)


def test_one_is_written_at_a_time(run: ServedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_process, "WAIT_S", 0.0)
    queries = ReportQueries()
    with queries._asking, pytest.raises(Busy, match="another post-mortem"):
        queries.report(run, None)


@pytest.mark.slow
def test_what_takes_too_long_or_ends_without_a_file_is_said(run: ServedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = ReportQueries()
    monkeypatch.setattr(report_process, "_CODE", "import sys; print('no room\\x1b[2J', file=sys.stderr); sys.exit(3)")
    with pytest.raises(StoreError, match=r"ended with 3: no room\\u001b\[2J; sentinel report has no such limits"):
        queries.report(run, None)
    monkeypatch.setattr(report_process, "_CODE", "import time; time.sleep(60)")
    monkeypatch.setattr(report_process, "LIMIT_S", 0.01)
    with pytest.raises(TookTooLong, match=r"no post-mortem within 0\.01 s"):
        queries.report(run, None)
    assert not queries._asking.locked(), "the next one may ask"
