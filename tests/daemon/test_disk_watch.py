"""What the log says of a disk that answers slowly: once when it begins, once when it is over."""

from __future__ import annotations

import logging

from sentinel.daemon.disk_watch import DiskWatch


def test_a_slow_disk_is_said_once_and_its_end_too(caplog):
    problems = {"a": "", "b": ""}
    watch = DiskWatch(lambda: problems)
    with caplog.at_level(logging.INFO, logger="sentinel.daemon"):
        watch.look()
        for seconds in (6, 7, 8):
            problems["a"] = f"the disk of /a answers slowly: a write has been under way for {seconds} s"
            watch.look()
        problems["a"] = ""
        watch.look()
        watch.look()

    assert [record.getMessage() for record in caplog.records] == [
        "run a: the disk of /a answers slowly: a write has been under way for 6 s",
        "run a: its disk answers in time again",
    ]


def test_a_run_that_is_gone_is_forgotten(caplog):
    problems = {"a": "slow"}
    watch = DiskWatch(lambda: problems)
    watch.look()
    problems.clear()
    watch.look()
    problems["a"] = "slow"
    caplog.clear()
    watch.look()

    assert [record.getMessage() for record in caplog.records] == ["run a: slow"]


def test_it_ends_when_it_is_closed():
    watch = DiskWatch(dict)
    watch.start()

    watch.close()

    assert not watch._thread.is_alive()
