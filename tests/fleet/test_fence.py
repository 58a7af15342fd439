"""A join that another has taken over from writes nothing more and tells nobody, wherever it was stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sentinel.daemon.outboxes import Outboxes
from sentinel.daemon.run_turns import PlainTurns
from sentinel.daemon.served_runs import ServedRuns
from sentinel.daemon.serving import ServedRun
from sentinel.errors import StoreError
from sentinel.fleet.known_epochs import highest_epoch
from sentinel.store.journal import Commit, Journal
from sentinel.store.lease_fence import FencedOff, LeaseFence
from sentinel.store.lock import LockHeld, RunLock
from sentinel.store.outbox_table import Outgoing
from sentinel.store.run_paths import RunPaths

from ..support.fleet_parts import CONFIG, assert_same_results, nan_on
from ..support.results import decisions, result_bytes
from ..support.serving import NOW, judge_run, loaded_packs, small_run

pytestmark = pytest.mark.slow


def under(epoch: int, run_dir: Path) -> ServedRun:
    """Return a run as a join with the lease of an epoch serves it."""
    return ServedRun(RunPaths.of(run_dir), CONFIG, loaded_packs(), epoch=epoch)


def num_found(run_dir: Path) -> int:
    """Return how many anomalies were committed, each as often as it was."""
    with contextlib.closing(sqlite3.connect(RunPaths.of(run_dir).journal)) as db:
        return int(db.execute("SELECT count(*) FROM anomalies").fetchone()[0])


def stopped_in_its_commit(run: ServedRun, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Judge a turn, and have something happen when the lease was looked at, all is judged, and nothing is committed."""
    commit = run.journal.commit

    def late(one: Commit) -> None:
        monkeypatch.setattr(run.journal, "commit", commit)
        meanwhile()
        commit(one)

    monkeypatch.setattr(run.journal, "commit", late)
    run.turn(NOW)


@pytest.mark.parametrize("has_fence", [True, False], ids=["fenced", "control: no fence"])
def test_a_join_stopped_before_its_commit_leaves_all_to_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_fence: bool
) -> None:
    run = small_run(tmp_path / "run")
    run.plant(nan_on(run, 2))
    run.write(12)
    run.end()
    golden = small_run(tmp_path / "golden" / "run")
    golden.plant(nan_on(golden, 2))
    golden.write(12)
    golden.end()
    judge_run(golden.directory, CONFIG, is_over=True)
    if not has_fence:
        monkeypatch.setattr(LeaseFence, "is_passed", lambda fence, known: False)
    former, successors = under(1, run.directory), list[ServedRun]()
    refused: StoreError | None = None
    try:
        stopped_in_its_commit(former, monkeypatch, lambda: successors.append(under(2, run.directory)))
    except StoreError as error:
        refused = error
    former.close()
    while successors[0].turn(NOW):
        pass
    successors[0].finish(NOW, is_over=True, deadline=float("inf"))
    successors[0].close()

    if has_fence:
        assert isinstance(refused, FencedOff) and "another process has taken over" in str(refused)
        assert_same_results(golden.directory, run.directory)
        assert num_found(run.directory) == num_found(golden.directory)
    else:
        assert refused is None and num_found(run.directory) > num_found(golden.directory)


def test_who_was_stopped_between_commit_and_files_writes_the_same_bytes_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path / "run")
    run.plant(nan_on(run, 2))
    run.write(12)
    run.end()
    former = under(1, run.directory)
    append = former._files.append
    successors = []

    def late(one: Commit) -> None:
        if one.anomalies and not successors:
            successors.append(under(2, run.directory))
            successors[0].finish(NOW, is_over=True, deadline=float("inf"))
            successors[0].close()
            before.append(result_bytes(run.directory))
        append(one)

    before: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(former._files, "append", late)
    with pytest.raises(FencedOff):
        while former.turn(NOW):
            pass
        former.finish(NOW, is_over=True, deadline=float("inf"))
    former.close()

    assert len(before) == 1
    assert result_bytes(run.directory) == before[0]


def test_who_serves_a_run_that_is_anothers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        run = small_run(tmp_path / name)
        run.write(3)
    judge_run(tmp_path / "a", CONFIG, is_over=False)
    fenced = list[str]()
    runs = ServedRuns(
        tmp_path, None, PlainTurns(), is_owned=False, serve=lambda paths: under(2, paths.run_dir), joined=lambda run: None,
        left=lambda run: None, fenced=lambda: fenced.append("fenced"),
    )  # fmt: skip
    runs.discover(NOW)
    assert not fenced and len(list(runs)) == 2
    # Another takes one over while it is served, and again before it is opened anew.
    successor = Journal(RunPaths.of(tmp_path / "b").journal, epoch=3)
    run.write(3)
    while runs.turn(lambda: NOW):
        pass
    assert fenced == ["fenced"] and "start it anew" in runs.problems["b"] and [one.name for one in runs] == ["a"]
    runs.discover(NOW + 1e9)
    assert fenced == ["fenced"] * 2
    successor.close()
    runs.close()


def test_every_transaction_is_fenced_and_epochs_never_go_back(tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal.sqlite"
    former = Journal(path, epoch=3)
    former.commit(Commit(judged=0, outbox=[Outgoing(key="k", topic="alert:x", body=b"{}")]))
    newer = Journal(path, epoch=4)
    writes: dict[str, Callable[[], None]] = {
        "record": lambda: former.record([(1, "step", b"x")]),
        "commit": lambda: former.commit(Commit(judged=1)),
        "begin a delivery": lambda: former.outbox.begin_delivery({1: "m"}),
        "finish it": lambda: former.outbox.finish_delivery([1], "sent"),
        "a value": lambda: former.values.put("a", "b"),
        "the audit": lambda: former.audit.add(0.0, "daemon", "reload", {}),
        "a pack": lambda: former.keep_pack("h", b"x"),
        "open again": lambda: Journal(path, epoch=3).close(),
    }
    for name, write in writes.items():
        with pytest.raises(FencedOff, match="got 4"):
            write()
            pytest.fail(name)
    assert (former.is_fenced_off, newer.is_fenced_off, newer.epoch) == (True, False, 4)
    assert (newer.last_seq, newer.judged, newer.outbox.waiting("alert:x", 0.0)[0].tries) == (0, 0, 0)
    former.close()
    newer.close()


def test_a_new_join_begins_behind_all_epochs_that_its_directory_knows(tmp_path: Path) -> None:
    for number, name in ((7, "a"), (2, "b")):
        (tmp_path / name / "spool").mkdir(parents=True)
        Journal(RunPaths.of(tmp_path / name).journal, epoch=number).close()
    (tmp_path / "c" / "spool").mkdir(parents=True)
    (tmp_path / "d" / "spool").mkdir(parents=True)
    RunPaths.of(tmp_path / "d").journal.parent.mkdir()
    RunPaths.of(tmp_path / "d").journal.write_bytes(b"no journal")

    assert highest_epoch(tmp_path) == 7


def test_a_lock_is_taken_from_who_had_the_lease_before_and_from_nobody_else(tmp_path: Path) -> None:
    former = RunLock(tmp_path, "run", epoch=1)
    for epoch in (0, 1):
        with pytest.raises(LockHeld, match="epoch 1"):
            RunLock(tmp_path, "run", epoch=epoch)
    newer = RunLock(tmp_path, "run", epoch=2)
    assert newer.former == f"{os.getpid()} on {os.uname().nodename}, epoch 1"
    former.close()
    with pytest.raises(LockHeld, match="epoch 2"):
        RunLock(tmp_path, "run", epoch=2)
    newer.close()
    daemon = RunLock(tmp_path, "run")
    with pytest.raises(LockHeld):
        RunLock(tmp_path, "run", epoch=99)
    daemon.close()


def test_a_message_of_a_run_that_was_let_go_of_is_not_sent(tmp_path: Path) -> None:
    journal, outboxes = Journal(tmp_path / "state" / "journal.sqlite"), Outboxes()
    journal.commit(Commit(judged=0, outbox=[Outgoing(key="k", topic="alert:x", body=b"{}")]))
    outboxes.join(journal.outbox)
    row = outboxes.waiting("alert:x", 0.0)[0]
    outboxes.leave(journal.outbox)

    with pytest.raises(StoreError, match="not served here any more"):
        outboxes.begin_delivery({row.position: "m"})
    journal.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the write lock of a journal, and is stopped."""
    path = tmp_path / "run" / ".daemon" / "journal.sqlite"
    Journal(path).close()
    held = f"import sqlite3, sys; db = sqlite3.connect({str(path)!r}, isolation_level=None); db.execute('BEGIN IMMEDIATE'); "
    code = held + "print('held', flush=True); sys.stdin.read(); db.execute('ROLLBACK')"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process
    process.kill()
    process.communicate()


def test_a_process_stopped_in_its_transaction_is_named_and_what_ends_it_too(
    tmp_path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *names, **options: connect(*names, **{**options, "timeout": 0.1}))
    (tmp_path / "run" / "spool").mkdir()
    with pytest.raises(StoreError) as refused:
        under(2, tmp_path / "run")
    assert f"process {holder.pid}, which is stopped" in str(refused.value)
    assert f"kill -9 {holder.pid}" in str(refused.value)

    holder.kill()
    holder.wait()
    under(2, tmp_path / "run").close()
    assert decisions(tmp_path / "run") == []
