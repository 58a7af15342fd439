"""What was found and ordered, in a history: each row once, whatever happened to the daemon, the history or the journal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sentinel.anomaly import Anomaly
from sentinel.history import compaction, writer
from sentinel.history.config import HistoryConfig
from sentinel.history.manifest import read_manifest
from sentinel.store.found import FoundAnomaly, FoundIncident
from sentinel.store.journal import Commit, Journal

from ..support.anomalies import a_nan, an_incident
from ..support.merged_steps import FlatLayout, merged_step
from ..support.waiting import wait_for
from .test_writer import QUICK, answer, write, writing

LAYOUT = FlatLayout(3)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    (tmp_path / "state").mkdir(mode=0o700)
    with_it = Journal(tmp_path / "state" / "journal.sqlite")
    yield with_it
    with_it.close()


def kept(one: Anomaly) -> FoundAnomaly:
    body = msgspec.json.encode(one)
    return FoundAnomaly(id=one.id, attempt=one.attempt, step=one.step, severity=one.severity.value, body=body)


def commit(journal: Journal, *anomalies: Anomaly, revisions: int = 0) -> None:
    """Commit one decision that brought these, with so many revisions of one incident."""
    seq = journal.last_seq + 1
    journal.record([(seq, "step", b"")])
    found = [an_incident(revision=number) for number in range(1, revisions + 1)]
    incidents = [FoundIncident(id=one.id, revision=one.revision, body=msgspec.json.encode(one)) for one in found]
    journal.commit(
        Commit(judged=seq, anomalies=[(seq, kept(one)) for one in anomalies], incidents=[(seq, one) for one in incidents])
    )


def test_what_was_found_and_ordered_is_asked_in_sql(tmp_path: Path, journal: Journal) -> None:
    commit(journal, a_nan(step=7, id="a"), a_nan(step=7, id="b"), revisions=3)
    journal.audit.add(5.0, "policy", "enable", {"command": "c1", "kinds": ["activation"]})

    with writing(tmp_path / "run", journal=journal.path) as one:
        write(one, 1, 3)
        commit(journal, a_nan(step=9, id="c", value=None, value_text="nan"))
        one.flush()

    rows = answer(tmp_path / "run", "SELECT id, event, step, value, value_text FROM anomalies ORDER BY step, id")
    assert rows == [("a", "onset", 7, None, "nan"), ("b", "onset", 7, None, "nan"), ("c", "onset", 9, None, "nan")]
    assert answer(tmp_path / "run", "SELECT revision, state FROM incidents ORDER BY 1") == [
        (1, "open"), (2, "open"), (3, "open"),
    ]  # fmt: skip
    assert answer(tmp_path / "run", "SELECT actor, action, time, json FROM commands") == [
        ("policy", "enable", 5.0, '{"command":"c1","kinds":["activation"]}')
    ]
    (whole,) = answer(tmp_path / "run", "SELECT json FROM anomalies WHERE id = 'c'")[0]
    assert msgspec.json.decode(whole, type=Anomaly) == a_nan(step=9, id="c", value=None, value_text="nan")


@pytest.mark.slow
def test_each_row_is_there_once_whatever_kills_the_writer(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is copied before each file and each manifest that is written: so a kill there would leave it."""
    run, copies = tmp_path / "run", []

    def copying(function):
        def copied(*arguments, **options):
            copies.append(tmp_path / f"killed{len(copies)}")
            shutil.copytree(run, copies[-1])
            return function(*arguments, **options)

        return copied

    (run / "history").mkdir(parents=True, mode=0o700)
    run.chmod(0o700)
    for module, name in ((writer, "write_file"), (compaction, "write_file"), (writer, "publish")):
        monkeypatch.setattr(module, name, copying(getattr(module, name)))
    with writing(run, journal=journal.path) as one:
        for at in range(20):
            commit(journal, a_nan(step=at, id=f"a{at}"))
            write(one, at + 1, at + 1)
    monkeypatch.undo()

    assert len(copies) > 60
    for copy in copies[::9]:
        with writing(copy, journal=journal.path) as again:
            write(again, 1, 20)
        assert answer(copy, "SELECT id FROM anomalies ORDER BY step") == [(f"a{at}",) for at in range(20)]


@pytest.mark.parametrize("num_again", [4, 9])
def test_a_journal_that_was_made_anew_adds_what_is_new_alone(tmp_path: Path, journal: Journal, num_again: int) -> None:
    """num_again: anomalies of the new journal, of which the first are those of the old one."""
    for at in range(6):
        commit(journal, a_nan(step=at, id=f"a{at}"))
    with writing(tmp_path / "run", journal=journal.path) as one:
        write(one, 1, 6)
    anew = Journal(tmp_path / "state" / "other.sqlite")
    # Of what the old one held the oldest is gone by its age.
    for at in range(2, num_again):
        commit(anew, a_nan(step=at, id=f"a{at}"))

    for _ in range(2):
        with writing(tmp_path / "run", journal=anew.path) as one:
            write(one, 7, 8)
    anew.close()

    expected = [(f"a{at}",) for at in range(max(6, num_again))]
    assert answer(tmp_path / "run", "SELECT id FROM anomalies ORDER BY step") == expected


def test_what_lies_about_anomalies_stays_also_behind_a_restart(tmp_path: Path, journal: Journal) -> None:
    config = HistoryConfig(enabled=True, flush_s=0.05, full_steps=40, around_steps=3)
    commit(journal, a_nan(step=10, id="a"), a_nan(step=30, id="b", event="end"))
    with writing(tmp_path, config, journal=journal.path) as one:
        write(one, 1, 30)
    with writing(tmp_path, config, after=30, journal=journal.path) as one:
        write(one, 31, 201)
        wait_for(lambda: read_manifest(tmp_path / "history").full_from > 100)

    steps = [step for (step,) in answer(tmp_path, "SELECT DISTINCT step FROM moments ORDER BY 1")]
    assert steps[:7] == list(range(7, 14)) and 100 < steps[7] <= 161
    assert steps[7:] == list(range(steps[7], 201))
    assert read_manifest(tmp_path / "history").full_from == steps[7]
    assert answer(tmp_path, "SELECT sum(num_steps), sum(bad_steps) FROM moments_256 WHERE kind = 'wgrad'") == [(603, 1)]


def test_without_a_journal_the_tables_are_there_and_empty(tmp_path: Path) -> None:
    with writing(tmp_path, QUICK) as one:
        one.take(merged_step(LAYOUT, 1))

    for table in ("anomalies", "incidents", "commands"):
        assert answer(tmp_path, f"SELECT count(*) FROM {table}") == [(0,)]
