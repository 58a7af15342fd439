"""Where a journal begins: what goes, what stays, and that its file is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.errors import ConfigError
from sentinel.store.found import FoundAnomaly, FoundIncident
from sentinel.store.journal import Commit, Journal
from sentinel.store.journal_cut import AUDIT_LINES, ROWS_PER_TURN
from sentinel.store.outbox_table import Outgoing
from sentinel.store.retention import RetentionConfig


def filled(path: Path, num_steps: int, *, body_bytes: int = 100) -> Journal:
    """Return a journal with a step, an anomaly and a message each, and a snapshot of the last."""
    journal = Journal(path / "journal.sqlite")
    fill(journal, num_steps, body_bytes=body_bytes)
    return journal


def fill(journal: Journal, num_steps: int, *, body_bytes: int = 100) -> None:
    first = journal.last_seq + 1
    seqs = range(first, first + num_steps)
    journal.record([(seq, "tick" if seq % 10 == 0 else "step", bytes(body_bytes)) for seq in seqs])
    anomalies = [
        (seq, FoundAnomaly(id=f"a{seq}", attempt=0, step=seq, severity="info", body=b'{"event":"onset"}')) for seq in seqs
    ]
    outbox = [Outgoing(key=f"hook:run:i{seq}:1", topic="alert:hook", body=b"{}") for seq in seqs]
    incidents = [(seq, FoundIncident(id=f"i{seq}", revision=1, body=b"{}")) for seq in seqs if seq % 100 == 0]
    commit = Commit(judged=seqs[-1], anomalies=anomalies, incidents=incidents, outbox=outbox, num_onsets=seqs[-1])
    commit.snapshot = b"state" + bytes(100)
    journal.commit(commit)


def cut_twice(journal: Journal) -> None:
    """Cut where the newest snapshot is, add as much again, and delete what lies before."""
    journal.cut.advance(journal.judged, 1.0)
    fill(journal, journal.last_seq)
    journal.outbox.finish_delivery([row.position for row in journal.outbox.waiting("alert:hook", 1.0, 10**6)], "sent")
    journal.cut.advance(journal.judged, 2.0)


def delete(journal: Journal, evidence: set[str] = frozenset(), num_anomalies: int = 10**9) -> int:
    turns = 0
    while journal.cut.work(evidence, num_anomalies=num_anomalies):
        turns += 1
    return turns


def test_what_lies_before_the_cut_goes_and_what_lies_behind_it_stays(tmp_path):
    journal = filled(tmp_path, 200)
    cut_twice(journal)

    delete(journal)

    assert journal.cut.seq == 200
    assert [seq for seq, _, _ in journal.decisions()] == list(range(200, 401))
    assert [position for position, _ in journal.found.bodies("anomalies")] == list(range(201, 401))
    assert journal.last_seq == 400
    assert journal.num_steps == 360
    assert journal.found.num_onsets() == 400
    assert [seq for seq, _ in journal.snapshots()] == [400, 200]
    journal.close()


def test_evidence_stays_and_so_does_what_is_not_yet_in_its_file(tmp_path):
    journal = filled(tmp_path, 200)
    cut_twice(journal)

    delete(journal, {"a7", "a9"}, num_anomalies=100)

    assert [position for position, _ in journal.found.bodies("anomalies")] == [7, 9, *range(101, 401)]
    journal.close()


def test_positions_and_keys_go_on_after_everything_was_deleted(tmp_path):
    journal = filled(tmp_path, 200)
    cut_twice(journal)
    journal.cut.advance(journal.judged, 3.0)
    delete(journal)
    journal.close()

    journal = Journal(tmp_path / "journal.sqlite")
    fill(journal, 1)

    assert [position for position, _ in journal.found.bodies("anomalies")][-1] == 401
    assert [row.position for row in journal.outbox.waiting("alert:hook", 1.0)] == [401]
    assert journal.num_steps == 361
    journal.close()


def test_a_message_that_waits_stays_however_old(tmp_path):
    journal = filled(tmp_path, 50)
    journal.outbox.finish_delivery([1, 2, 3], "sent")
    for now in (1.0, 2.0, 3.0):
        journal.cut.advance(journal.judged, now)

    delete(journal)

    assert [row.position for row in journal.outbox.waiting("alert:hook", 1.0)] == list(range(4, 51))
    journal.close()


@pytest.mark.slow
def test_a_turn_deletes_so_much_and_a_restart_goes_on_with_it(tmp_path):
    journal = filled(tmp_path, 2 * ROWS_PER_TURN)
    cut_twice(journal)
    assert journal.cut.work(frozenset(), num_anomalies=10**9)
    journal.close()

    journal = Journal(tmp_path / "journal.sqlite")
    assert 0 < delete(journal) < 8

    assert next(seq for seq, _, _ in journal.decisions()) == 2 * ROWS_PER_TURN
    assert journal.num_steps == 4 * ROWS_PER_TURN * 9 // 10
    journal.close()


def test_the_file_stays_as_large_as_what_is_kept(tmp_path):
    journal = filled(tmp_path, 500)
    sizes = []
    for number in range(8):
        fill(journal, 500)
        journal.outbox.finish_delivery([row.position for row in journal.outbox.waiting("alert:hook", 1.0, 10**6)], "sent")
        journal.cut.advance(journal.judged, float(number))
        delete(journal)
        sizes.append(journal._file.one("PRAGMA page_count"))

    assert max(sizes[4:]) <= max(sizes[:4])
    assert len(list(journal.decisions())) < 3 * 500
    journal.close()


def test_what_was_large_once_gives_its_room_back(tmp_path):
    journal = filled(tmp_path, 2000, body_bytes=3000)
    large = journal.path.stat().st_size
    for now in (1.0, 2.0):
        fill(journal, 10)
        journal.cut.advance(journal.judged, now)
    fill(journal, 10)
    delete(journal)
    journal.close()

    assert (tmp_path / "journal.sqlite").stat().st_size < large / 2


def test_the_bytes_since_the_mark_survive_a_restart(tmp_path):
    journal = filled(tmp_path, 100, body_bytes=500)
    counted = journal.cut.num_bytes
    journal.close()

    journal = Journal(tmp_path / "journal.sqlite")

    assert counted > 100 * 500
    assert journal.cut.num_bytes >= 100 * 500
    journal.close()


def test_an_audit_keeps_its_newest_lines(tmp_path, monkeypatch):
    assert AUDIT_LINES >= 10_000
    monkeypatch.setattr("sentinel.store.journal_cut.AUDIT_LINES", 5)
    journal = filled(tmp_path, 20)
    for number in range(12):
        journal.audit.add(float(number), "policy", "command", {})
    cut_twice(journal)

    delete(journal)

    assert [entry.time for entry in journal.audit.newest()] == [11.0, 10.0, 9.0, 8.0, 7.0]
    journal.close()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("age_days", -1.0, "retention.age_days must be at least 0 and finite, got -1.0"),
        ("age_days", float("inf"), "retention.age_days must be at least 0 and finite, got inf"),
        ("journal_bytes", 5000, r"retention.journal_bytes must be 0 \(no limit\) or at least 1048576, got 5000"),
        ("incidents_bytes", -1, r"retention.incidents_bytes must be 0 \(no limit\) or at least 65536, got -1"),
    ],
)
def test_nonsense_is_refused_by_name(field, value, words):
    with pytest.raises(ConfigError, match=words):
        RetentionConfig(**{field: value})
