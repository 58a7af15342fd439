"""The journal: one transaction a judgement, nothing twice, nothing lost, no network disk."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from sentinel.errors import StoreError
from sentinel.private_files import refuse_foreign
from sentinel.store.disk import file_system, refuse_network
from sentinel.store.found import FoundAnomaly, FoundIncident
from sentinel.store.journal import Commit, Journal
from sentinel.store.journal_file import SCHEMA_VERSION
from sentinel.store.lock import RunLock
from sentinel.store.outbox_table import Outgoing


def anomaly(number: int, step: int = 1) -> FoundAnomaly:
    return FoundAnomaly(id=f"{number:016x}", attempt=0, step=step, severity="warning", body=b'{"id":%d}' % number)


def incident(name: str, revision: int) -> FoundIncident:
    return FoundIncident(id=name, revision=revision, body=b'{"id":"%s","revision":%d}' % (name.encode(), revision))


@pytest.fixture
def journal(tmp_path: Path):
    opened = Journal(tmp_path / "state" / "journal.sqlite")
    yield opened
    opened.close()


def test_decisions_come_back_in_order_and_after_reopening(journal: Journal) -> None:
    written = [(number, "step", b"%d" % number) for number in range(1, 601)]

    journal.record(written[:1])
    journal.record(written[1:])
    journal.close()
    reopened = Journal(journal.path)

    assert list(reopened.decisions()) == written
    assert list(reopened.decisions(after=598, until=599)) == written[598:599]
    assert reopened.last_seq == 600
    assert reopened.judged == 0
    reopened.close()


def test_one_transaction_moves_everything_together(journal: Journal) -> None:
    journal.record([(1, "step", b"")])
    broken = Commit(judged=1, anomalies=[(1, anomaly(1))], incidents=[(1, incident("i", 1))], outbox=[None])  # type: ignore[list-item]

    with pytest.raises(AttributeError):
        journal.commit(broken)

    assert journal.judged == 0
    assert journal.found.count("anomalies") == journal.found.count("incidents") == 0
    whole = Commit(judged=1, anomalies=[(1, anomaly(1))], incidents=[(1, incident("i", 1))])
    whole.outbox.append(Outgoing(key="slack:i:1", topic="alert:slack", body=b"{}"))
    journal.commit(whole)
    assert journal.judged == 1
    assert [body for _, body in journal.found.bodies("anomalies")] == [b'{"id":1}']
    assert journal.outbox.num_waiting("alert:slack") == 1


def test_the_judged_offset_never_goes_back(journal: Journal) -> None:
    journal.commit(Commit(judged=5))

    with pytest.raises(StoreError, match="after decision 5, got 4"):
        journal.commit(Commit(judged=4))


def test_the_same_key_is_queued_once(journal: Journal) -> None:
    message = Outgoing(key="slack:i:1", topic="alert:slack", body=b"{}")

    journal.commit(Commit(judged=1, outbox=[message]))
    journal.commit(Commit(judged=2, outbox=[message]))

    assert journal.outbox.num_waiting("alert:slack") == 1


def test_a_delivery_begun_before_a_crash_is_known_afterwards(journal: Journal) -> None:
    journal.commit(Commit(judged=1, outbox=[Outgoing(key="a", topic="alert:slack", body=b"{}")]))
    [row] = journal.outbox.waiting("alert:slack", now=0.0)

    journal.outbox.begin_delivery({row.position: "m"})
    journal.close()
    reopened = Journal(journal.path)

    [again] = reopened.outbox.waiting("alert:slack", now=0.0)
    assert (row.tries, again.tries) == (0, 1)
    reopened.outbox.finish_delivery([again.position], "sent")
    assert reopened.outbox.waiting("alert:slack", now=0.0) == []
    reopened.close()


def test_postponed_deliveries_wait_until_they_are_due(journal: Journal) -> None:
    journal.commit(Commit(judged=1, outbox=[Outgoing(key="a", topic="t", body=b"{}")]))

    journal.outbox.postpone_delivery([1], due=100.0)

    assert journal.outbox.waiting("t", now=99.0) == []
    assert len(journal.outbox.waiting("t", now=100.0)) == 1


def test_two_snapshots_are_kept(journal: Journal) -> None:
    for seq in range(1, 5):
        journal.commit(Commit(judged=seq, snapshot=b"state %d" % seq))

    assert list(journal.snapshots()) == [(4, b"state 4"), (3, b"state 3")]
    journal.drop_snapshot(4)
    assert list(journal.snapshots()) == [(3, b"state 3")]


def test_newest_revision_of_each_incident(journal: Journal) -> None:
    revisions = [incident("a", 1), incident("b", 1), incident("a", 2)]
    journal.commit(Commit(judged=1, incidents=[(1, one) for one in revisions]))

    assert journal.found.newest_incidents(10) == [revisions[2].body, revisions[1].body]


def test_anomalies_page_backwards(journal: Journal) -> None:
    journal.commit(Commit(judged=1, anomalies=[(1, anomaly(number, step=number % 2)) for number in range(5)]))

    first = journal.found.newest_anomalies(2)
    second = journal.found.newest_anomalies(2, before=first[-1][0])

    assert [position for position, _ in first + second] == [5, 4, 3, 2]
    assert len(journal.found.newest_anomalies(10, step=1)) == 2


def test_audit_keeps_who_and_what(journal: Journal) -> None:
    journal.audit.add(1.0, "http", "enable", {"kinds": ["activation"]})
    journal.audit.add(2.0, "policy", "withdraw", {})

    assert [(one.actor, one.action) for one in journal.audit.newest()] == [("policy", "withdraw"), ("http", "enable")]
    assert journal.audit.newest()[1].details == {"kinds": ["activation"]}


def test_facts_and_packs_are_kept(journal: Journal) -> None:
    journal.values.put("log", "12")
    journal.keep_pack("abc", b"rules")

    assert journal.values.get("log") == "12"
    assert journal.values.get("other") is None
    assert journal.pack("abc") == b"rules"
    assert journal.pack("other") is None


def test_files_are_private(journal: Journal) -> None:
    journal.record([(1, "step", b"")])

    assert journal.path.stat().st_mode & 0o077 == 0
    assert journal.path.parent.stat().st_mode & 0o077 == 0


def test_a_newer_schema_is_refused(journal: Journal) -> None:
    journal.close()
    with sqlite3.connect(journal.path) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (SCHEMA_VERSION + 1,))

    with pytest.raises(StoreError, match="use a newer sentinel"):
        Journal(journal.path)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)

    with pytest.raises(
        StoreError, match=r"the file is no journal .*; sentinel repair .* rebuilds it from the run's spool and files"
    ):
        Journal(path)


def test_a_reader_meets_a_whole_journal_or_none(tmp_path: Path) -> None:
    met: list[str] = []
    make = sqlite3.connect

    def connected(database: str, **options: Any) -> sqlite3.Connection:
        if "mode=ro" not in database:
            try:
                Journal(tmp_path / "j.sqlite", read_only=True).close()
                met.append("whole")
            except StoreError as error:
                met.append(str(error))
        return make(database, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connected)
        Journal(tmp_path / "j.sqlite").close()

    assert ["got nothing" in words for words in met] == [True, False]
    assert met[1] == "whole"
    Journal(tmp_path / "j.sqlite", read_only=True).close()
    assert not list(tmp_path.glob("*.new*"))


def test_the_log_of_a_journal_that_was_moved_away_is_not_played_into_the_next(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    former = Journal(path)
    former.values.put("fact", "old")
    for end in ("", "-wal"):
        (tmp_path / f"kept{end}").write_bytes((tmp_path / f"j.sqlite{end}").read_bytes())
    former.close()
    path.unlink()
    (tmp_path / "j.sqlite-wal").write_bytes((tmp_path / "kept-wal").read_bytes())

    journal = Journal(path)

    assert journal.values.get("fact") is None
    journal.close()


def test_reading_only_changes_nothing_and_needs_a_journal(journal: Journal, tmp_path: Path) -> None:
    journal.record([(1, "step", b"x")])

    reader = Journal(journal.path, read_only=True)
    assert list(reader.decisions()) == [(1, "step", b"x")]
    with pytest.raises(sqlite3.OperationalError):
        reader.record([(2, "step", b"y")])
    reader.close()
    with pytest.raises(StoreError, match="has a daemon judged this run"):
        Journal(tmp_path / "none.sqlite", read_only=True)


def test_several_threads_share_a_journal(journal: Journal) -> None:
    journal.commit(Commit(judged=1, outbox=[Outgoing(key=str(n), topic="t", body=b"") for n in range(50)]))

    def deliver() -> None:
        for row in journal.outbox.waiting("t", 0.0):
            journal.outbox.begin_delivery({row.position: "m"})
            journal.outbox.finish_delivery([row.position], "sent")

    threads = [threading.Thread(target=deliver) for _ in range(4)]
    for thread in threads:
        thread.start()
    for seq in range(2, 30):
        journal.commit(Commit(judged=seq))
    for thread in threads:
        thread.join()

    assert journal.outbox.num_waiting("t") == 0
    assert journal.judged == 29


MOUNTS = """\
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:40 / {root}/nfs rw shared:7 - nfs4 server:/x rw
31 22 0:41 / {root}/sp\\040ace rw - lustre mgs:/x rw
32 22 0:42 / {root}/sshfs rw - fuse.sshfs host: rw
33 22 0:43 / {root}/overlay rw - fuse.fuse-overlayfs x rw
34 22 0:44 / {root}/cifs rw - cifs //x rw
"""


@pytest.mark.parametrize(
    ("folder", "kind", "is_refused"),
    [
        ("nfs/deep/down", "nfs4", True),
        ("sp ace", "lustre", True),
        ("sshfs", "fuse.sshfs", True),
        ("cifs", "cifs", True),
        ("overlay", "fuse.fuse-overlayfs", False),
        ("nfsx", "ext4", False),
    ],
)
def test_wal_is_refused_on_network_file_systems(tmp_path: Path, folder: str, kind: str, is_refused: bool) -> None:
    for name in ("nfs", "sp ace", "sshfs", "overlay", "cifs", "nfsx"):
        (tmp_path / name).mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(root=tmp_path))

    assert file_system(tmp_path / folder, mounts) == kind
    if is_refused:
        with pytest.raises(StoreError, match=rf"{kind}, a network file system.*--state-dir"):
            refuse_network(tmp_path / folder, mounts)
    else:
        refuse_network(tmp_path / folder, mounts)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)

    refuse_foreign(run)
    run.chmod(0o770)
    with pytest.raises(StoreError, match=r"mode 0770, which its group may write.*chmod go-w"):
        refuse_foreign(run)
    run.chmod(0o702)
    with pytest.raises(StoreError, match="which everybody may write"):
        refuse_foreign(run)
    run.chmod(0o700)
    with pytest.raises(StoreError, match="owned by user 12345"):
        refuse_foreign(run, user=12345)
    with pytest.raises(StoreError, match="expected a directory"):
        refuse_foreign(tmp_path / "none")


def test_a_run_is_locked_by_one(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "state", "run x")

    with pytest.raises(StoreError, match=r"run x: another daemon judges it \(process \d+ on"):
        RunLock(tmp_path / "state", "run x")
    first.close()
    RunLock(tmp_path / "state", "run x").close()


def test_a_full_disk_leaves_the_journal_as_it_was_and_usable(journal: Journal) -> None:
    journal.values.put("before", "kept")
    pages = journal._file.one("PRAGMA page_count")
    journal._file.db.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(sqlite3.OperationalError, match="full"):
        journal.record([(number, "step", bytes(4096)) for number in range(1, 100)])

    assert journal.last_seq == 0
    journal._file.db.execute("PRAGMA max_page_count = 1000000")
    journal.record([(1, "step", b"again")])
    assert journal.values.get("before") == "kept"


def test_a_commit_that_fails_is_taken_back(journal: Journal) -> None:
    class FailsAtCommit:
        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db

        def __getattr__(self, name: str) -> object:
            return getattr(self._db, name)

        def execute(self, statement: str, *values: object) -> object:
            if statement == "COMMIT":
                raise sqlite3.OperationalError("database or disk is full")
            return self._db.execute(statement, *values)

    db = journal._file.db
    journal._file.db = FailsAtCommit(db)  # type: ignore[assignment]
    with pytest.raises(sqlite3.OperationalError, match="full"):
        journal.values.put("lost", "never said")
    journal._file.db = db

    journal.values.put("next", "works")
    assert journal.values.get("lost") is None
