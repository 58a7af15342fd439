"""The loop over many runs: what is wrong with one of them is said, and the others are judged on."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sqlite3
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.cli.status import run_status
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.daemon import Daemon, ServeOptions
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.daemon_api import Unavailable
from sentinel.daemon.serving import ServedRun
from sentinel.ingest import follow
from sentinel.report.heartbeat import HeartbeatConfig
from sentinel.store.audit import Audit
from sentinel.store.run_paths import write_whole
from sentinel.testing import SyntheticRun

from ..support.ports import free_port
from ..support.waiting import wait_for


def write_run(directory: Path) -> None:
    source = SyntheticRun(directory, layers=1, d_model=8, elements=8, micro_steps=1)
    source.write(3)
    source.end()
    directory.chmod(0o700)


@contextmanager
def daemon(
    directory: Path, config: DaemonConfig | None = None, *, port: int = 0, options: ServeOptions | None = None
) -> Iterator[Daemon]:
    directory.chmod(0o700)
    options = options or ServeOptions(
        directory=directory, config=config or DaemonConfig(), http=HttpConfig(port=port), drain_s=2.0
    )
    one = Daemon(options, {}, io.StringIO())
    thread = threading.Thread(target=one.run)
    # Signal handlers belong to the main thread; here nobody sends signals.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sentinel.daemon.loop_requests.signal.signal", lambda number, handler: None)
        thread.start()
        try:
            yield one
        finally:
            one.stop()
            thread.join(200)
    assert not thread.is_alive()


def judged(one: Daemon) -> dict[str, int | None]:
    return {run["run"]: run["judged_step"] for run in one.api.runs()}


def url(directory: Path) -> str:
    path = directory / ".daemon" / "http.json"
    return str(wait_for(lambda: path.exists() and json.loads(path.read_text())["url"]))


def test_a_heartbeat_that_nobody_takes_is_said_and_holds_up_no_judging(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    heartbeat = HeartbeatConfig(url=f"http://127.0.0.1:{free_port()}/secret")

    with daemon(tmp_path, DaemonConfig(heartbeat=heartbeat)) as one:
        wait_for(lambda: judged(one).get("run") == 2 and one.api.health()["problems"])
        [problem] = one.api.health()["problems"]
        metrics, _ = one.api.metrics("")

    assert problem.startswith("heartbeat: http://127.0.0.1:") and "secret" not in problem
    assert b'sentinel_heartbeats_total{outcome="failed"} 1.0' in metrics
    assert b"sentinel_problems 1.0" in metrics


def test_a_daemon_that_stands_by_or_ends_says_to_no_dead_mans_switch_that_it_works(tmp_path: Path) -> None:
    one = Daemon(ServeOptions(directory=tmp_path, http=None), {}, io.StringIO())

    at_first = one.api.state.is_at_work()
    one.api.publish([], {}, {"run": "4711"}, is_caught_up=True)
    on_standby = one.api.state.is_at_work()
    one.api.publish([], {}, {}, is_caught_up=True)
    alone = one.api.state.is_at_work()
    one.api.state.is_stopping = True

    assert (at_first, on_standby, alone, one.api.state.is_at_work()) == (True, False, True, False)


def test_a_run_that_began_just_before_the_end_is_judged_too(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sentinel.daemon.daemon.DISCOVER_S", 1e9)
        with daemon(tmp_path) as one:
            wait_for(one.api.is_ready)
            write_run(tmp_path / "late")

    assert run_status(tmp_path / "late")["step"] == 2


@pytest.mark.parametrize("name", [b"a\nb", b"not-utf8-\xff", b"red\x1b[31m"])
def test_a_run_with_an_unprintable_name_is_refused_and_hides_no_other(tmp_path: Path, name: bytes) -> None:
    write_run(tmp_path / "good")
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    (strange / "spool").mkdir(parents=True)

    with daemon(tmp_path) as one:
        wait_for(lambda: judged(one).get("good") == 2 and one.api.health()["problems"])
        for path in ("/", "/metrics", "/api/v1/runs", "/healthz"):
            with urllib.request.urlopen(url(tmp_path) + path, timeout=10) as answer:
                body = answer.read().decode()
        assert list(judged(one)) == ["good"]

    [problem] = json.loads(body)["problems"]
    assert "expected visible characters in UTF-8" in problem
    assert problem.isprintable()


def test_a_spool_of_ours_that_others_may_write_is_taken_from_them_and_judged(tmp_path: Path) -> None:
    write_run(tmp_path / "open")
    (tmp_path / "open" / "spool").chmod(0o777)

    with daemon(tmp_path) as one:
        wait_for(lambda: judged(one).get("open") == 2)

    assert (tmp_path / "open" / "spool").stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_spool_of_another_user_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    write_run(tmp_path / "foreign")
    os.chown(tmp_path / "foreign" / "spool", 12345, 12345)

    with daemon(tmp_path) as one:
        wait_for(lambda: judged(one).get("good") == 2 and one.api.health()["problems"])
        assert list(judged(one)) == ["good"]
        [problem] = one.api.health()["problems"]

    assert "foreign/spool: expected a directory owned by user" in problem


@pytest.mark.parametrize(
    "where", ["spool", "anomalies", "incidents.jsonl", ".daemon", "anomalies/x.jsonl", ".daemon/state.json"]
)
def test_a_run_with_a_link_in_it_is_refused_and_nothing_is_written_behind_it(tmp_path: Path, where: str) -> None:
    for name in ("good", "planted"):
        write_run(tmp_path / "runs" / name)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = tmp_path / "runs" / "planted" / where
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        path.rename(elsewhere / "former")
    path.symlink_to(elsewhere / "former" if where == "spool" else elsewhere)
    before = sorted(elsewhere.rglob("*"))

    with daemon(tmp_path / "runs") as one:
        wait_for(lambda: judged(one).get("good") == 2 and one.api.health()["problems"])
        assert list(judged(one)) == ["good"]
        [problem] = one.api.health()["problems"]

    assert f"planted/{where}: expected a plain file or a directory, got a link" in problem
    assert sorted(elsewhere.rglob("*")) == before


def test_a_run_that_alone_says_where_its_journal_lies_is_refused(tmp_path: Path) -> None:
    for name in ("good", "planted"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "planted" / ".daemon").mkdir(mode=0o700)
    (tmp_path / "runs" / "planted" / ".daemon" / "state.json").write_text(json.dumps({"state": str(tmp_path / "mine")}))

    with daemon(tmp_path / "runs") as one:
        wait_for(lambda: judged(one).get("good") == 2 and one.api.health()["problems"])
        [problem] = one.api.health()["problems"]

    assert "where nothing says that it belongs to this run" in problem
    assert not (tmp_path / "mine").exists()


def test_what_breaks_one_run_leaves_the_others_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "bad")
    write_run(tmp_path / "good")
    turn = ServedRun.turn

    def stumble(self: ServedRun, now: float) -> bool:
        if self.name == "bad":
            raise ValueError("never seen before")
        return turn(self, now)

    monkeypatch.setattr(ServedRun, "turn", stumble)
    with daemon(tmp_path) as one:
        wait_for(lambda: judged(one).get("good") == 2 and one.api.health()["problems"])
        [problem] = one.api.health()["problems"]

    assert "ValueError: never seen before" in problem


@pytest.mark.slow
@pytest.mark.parametrize(("drain_s", "code"), [(0.0, 1), (60.0, 0)])
def test_a_run_that_is_not_judged_to_its_end_is_said_and_judged_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, drain_s: float, code: int
) -> None:
    monkeypatch.setattr(follow, "POLL_BYTES", 2**14)
    monkeypatch.setattr(follow, "MIN_WINDOW_BYTES", 2**13)
    monkeypatch.setattr(follow, "WINDOW_BYTES", 2**13)
    source = SyntheticRun(tmp_path, layers=1, d_model=8, elements=8, micro_steps=1, dp=4)
    source.write(200)
    source.end()
    tmp_path.chmod(0o700)
    options = ServeOptions(directory=tmp_path, is_owned=True, drain_s=drain_s)
    ended = Daemon(options, {}, io.StringIO())
    ended.stop()

    assert ended.run() == code
    assert ("was not judged to its end within 0 s (--drain-s); sentinel serve" in caplog.text) == bool(code)
    again = Daemon(msgspec.structs.replace(options, drain_s=60.0), {}, io.StringIO())
    again.stop()
    assert again.run() == 0
    assert run_status(tmp_path)["ended"]["how"] == "goodbye"
    assert run_status(tmp_path)["num_steps"] == 200


def test_a_reload_on_a_full_disk_does_not_end_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    is_full = True

    def audit(self: Audit, *arguments: Any) -> None:
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Audit, "add", audit)
    monkeypatch.setattr("sentinel.daemon.served_runs.RETRY_RUN_S", 0.1)
    with daemon(tmp_path) as one:
        wait_for(lambda: judged(one).get("run") == 2)
        assert one.api.reload()["outcome"] == "ok"
        assert "disk is full" in one.api.health()["problems"][0]
        is_full = False
        wait_for(lambda: judged(one).get("run") == 2 and not one.api.health()["problems"])


def test_a_second_daemon_stands_by_and_lives_through_a_full_disk_as_it_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "run")
    write_run(tmp_path / "other")
    is_full = True

    def write(path: Path, text: str) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_whole(path, text)

    with daemon(tmp_path) as first, pytest.MonkeyPatch.context() as patch:
        wait_for(lambda: judged(first).get("run") == 2 and judged(first).get("other") == 2)
        with daemon(tmp_path) as second:
            wait_for(lambda: second.api.health()["status"] == "standby")
            assert (second.api.is_ready(), second.api.runs(), second.api.health()["problems"]) == (False, [], [])
            shutil.move(tmp_path / "other", tmp_path.parent / f"{tmp_path.name}-gone")
            wait_for(lambda: list(second._runs.held) == ["run"])
            address = url(tmp_path)
            patch.setattr("sentinel.daemon.page_address.write_whole", write)
            first.stop()
            wait_for(lambda: judged(second).get("run") == 2 and second.api.is_ready())
            wait_for(lambda: "cannot be left where commands look for it" in caplog.text)
            is_full = False
            wait_for(lambda: url(tmp_path) != address)
            assert second.api.health()["standby_of"] == []


def test_a_daemon_that_is_told_of_another_judges_nothing_whatever_is_free(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    others = ["a on b"]
    options = ServeOptions(directory=tmp_path, http=None, standby_of=lambda: others[0])

    with daemon(tmp_path, options=options) as one:
        wait_for(lambda: one.api.health()["status"] == "standby")
        assert (one.api.health()["standby_of"], one.api.is_ready(), one.api.runs()) == (["a on b"], False, [])
        others[0] = ""
        wait_for(lambda: judged(one).get("run") == 2 and one.api.is_ready())
        assert one.api.health()["status"] == "ok"
        others[0] = "a on b"
        write_run(tmp_path / "later")
        wait_for(lambda: one._runs.held)
        assert judged(one) == {"run": 2}


def test_a_run_in_which_a_reload_raises_is_let_go_of_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "other"):
        write_run(tmp_path / name)
    note = ServedRun.note_reload

    def may_raise(self: ServedRun, *arguments: Any) -> None:
        if self.name == "run":
            raise ZeroDivisionError("a defect")
        note(self, *arguments)

    monkeypatch.setattr("sentinel.daemon.served_runs.RETRY_RUN_S", 1e6)
    with daemon(tmp_path) as one:
        wait_for(lambda: judged(one).get("run") == 2 and judged(one).get("other") == 2)
        monkeypatch.setattr(ServedRun, "note_reload", may_raise)

        one.api.reload()

        wait_for(lambda: judged(one) == {"other": 2})
        [problem] = one.api.health()["problems"]
        assert "run run is not served: " in problem and "a defect of Sentinel" in problem


def test_an_order_that_no_journal_takes_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    audit, is_full = Audit.add, False

    def may_be_full(self: Audit, *arguments: Any) -> None:
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")
        audit(self, *arguments)

    monkeypatch.setattr(Audit, "add", may_be_full)
    with daemon(tmp_path) as one:
        wait_for(lambda: judged(one).get("run") == 2)
        assert one.api.control("run", "enable", {})["command"]["type"] == "EnableMonitoring"
        is_full = True
        with pytest.raises(Unavailable, match="nothing can be written: database or disk is full"):
            one.api.control("run", "enable", {})
        is_full = False


def test_the_port_is_taken_before_the_runs_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    bound: list[bool] = []
    discover = Daemon._discover

    def discover_late(self: Daemon, now: float) -> None:
        bound.append(self._http is not None and self._http.port > 0)
        discover(self, now)

    monkeypatch.setattr(Daemon, "_discover", discover_late)
    with daemon(tmp_path) as one:
        wait_for(lambda: judged(one).get("run") == 2)

    assert bound[0]
