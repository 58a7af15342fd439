"""How long writes take, asked while one is under way."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from sentinel.store.journal import Commit, Journal
from sentinel.store.write_clock import WriteClock


class HandClock:
    """Seconds that are set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand() -> HandClock:
    return HandClock()


def test_a_write_that_takes_long_is_said_while_it_lasts_and_until_one_is_quick_again(hand):
    writes = WriteClock("/state", hand)
    said = []
    with writes.writing():
        said.append(writes.problem)
        hand.now += 4.9
        said.append(writes.problem)
        hand.now += 3.1
        said.append(writes.problem)
    said.append(writes.problem)
    with writes.writing():
        hand.now += 0.01
        said.append(writes.problem)
    said.append(writes.problem)

    assert said == [
        "", "",
        "the disk of /state answers slowly: a write has been under way for 8 s",
        "the disk of /state answers slowly: the last write took 8 s",
        "the disk of /state answers slowly: the last write took 8 s",
        "",
    ]  # fmt: skip
    assert (writes.num_slow, writes.slowest_s) == (1, 8.0)


def test_writes_that_are_quick_say_nothing(hand):
    writes = WriteClock("/state", hand)
    for _ in range(10):
        with writes.writing():
            hand.now += 5.0

    assert (writes.problem, writes.num_slow) == ("", 0)


def test_a_write_that_fails_is_no_longer_under_way(hand):
    writes = WriteClock("/state", hand)
    with pytest.raises(OSError), writes.writing():
        hand.now += 7.0
        raise OSError("disk failed")

    assert writes.under_way_s == 0.0
    assert writes.problem == "the disk of /state answers slowly: the last write took 7 s"


class HungConnection:
    """A connection whose next COMMIT waits until it is let go."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement == "COMMIT":
            self.has_begun.set()
            assert self.may_go_on.wait(60)
        return self._db.execute(statement, *values)

    def __getattr__(self, name: str) -> object:
        return getattr(self._db, name)


def test_a_commit_that_hangs_is_seen_from_another_thread_and_is_whole_in_the_end(tmp_path: Path, hand: HandClock):
    journal = Journal(tmp_path / "journal.sqlite")
    journal._file.writes._clock = hand
    hung = HungConnection(journal._file.db)
    journal._file.db = hung
    journal_thread = threading.Thread(target=journal.commit, args=(Commit(judged=7),))
    journal_thread.start()
    assert hung.has_begun.wait(60)
    hand.now += 60.0

    said = journal.writes.problem
    hung.may_go_on.set()
    journal_thread.join(60)

    assert said == f"the disk of {tmp_path} answers slowly: a write has been under way for 60 s"
    assert journal.judged == 7
    journal.close()
