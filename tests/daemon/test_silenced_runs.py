"""A daemon whose people silence something: what it sends, what it writes down, what it says of a broken file."""

from __future__ import annotations

import time
from pathlib import Path

from sentinel.report.silences import SilenceBook, SilenceRequest

from ..support.servers import Receiver
from ..support.waiting import wait_for
from .test_reload import reloadable, webhook


def asked(for_s: float = 3600.0) -> SilenceRequest:
    return SilenceRequest(matchers=("run=it",), why="a bad node", who="ana", for_s=for_s)


def test_what_is_silenced_is_sent_when_the_silence_is_ended_and_both_are_audited(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir(mode=0o700)
    book = SilenceBook(tmp_path / "it" / ".daemon")
    silence = asked().begun(time.time())
    book.add(silence, time.time())
    with Receiver().running() as receiver, reloadable(tmp_path, webhook(receiver.url)) as (daemon, _):
        wait_for(lambda: any(daemon.api._notifying.notifier.pending().values()), "an alert that waits")
        assert [one.id for one in daemon.api.silences()] == [silence.id]
        wait_for(lambda: not any(daemon.api._notifying.notifier.sendable().values()), "a look at it")
        assert receiver.bodies() == []

        daemon.api.end_silence(silence.id, "bob")
        wait_for(lambda: receiver.bodies(), "the message")
        both = {("ana", "silence"), ("bob", "end silence")}
        wait_for(lambda: both <= {(one["actor"], one["action"]) for one in daemon.api.audit(None, limit=50)}, "the audit")
        assert daemon.api.silences() == []


def test_a_broken_file_of_silences_is_a_problem_and_silences_nobody(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir(mode=0o700)
    (tmp_path / "it" / ".daemon").mkdir(mode=0o700)
    (tmp_path / "it" / ".daemon" / "silences.json").write_text("[{")
    with Receiver().running() as receiver, reloadable(tmp_path, webhook(receiver.url)) as (daemon, _):
        wait_for(lambda: receiver.bodies(), "the message")
        wait_for(lambda: daemon.api.health()["problems"], "the problem")

        [problem] = daemon.api.health()["problems"]
        assert "silences.json: expected silences, got something else" in problem
