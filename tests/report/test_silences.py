"""The file of silences: what holds, until when, and what becomes of a broken one."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.errors import ConfigError, StoreError
from sentinel.report.alert import Alert
from sentinel.report.silences import KEEP_S, MAX_SILENCES, SilenceBook, SilenceRequest, Silences

from ..support.anomalies import an_incident

ALERT = Alert(key="k", sink="s", change="opened", incident=an_incident(run="a"))


def asked(*matchers, now=100.0, for_s=60.0):
    return SilenceRequest(matchers=matchers or ("run=a",), why="known", who="ana", for_s=for_s).begun(now)


def test_a_silence_holds_from_its_beginning_to_its_end(tmp_path):
    book = SilenceBook(tmp_path / "state")
    book.add(asked(), 100.0)

    assert [book.until(ALERT, now) for now in (99.0, 100.0, 159.9, 160.0)] == [None, 160.0, 160.0, None]
    assert book.until(Alert(key="k", sink="s", change="opened", incident=an_incident(run="b")), 100.0) is None
    assert (tmp_path / "state" / "silences.json").stat().st_mode & 0o077 == 0


def test_another_process_sees_it_and_its_end(tmp_path):
    daemon, command = SilenceBook(tmp_path), SilenceBook(tmp_path)
    assert daemon.until(ALERT, 100.0) is None
    silence = asked()
    command.add(silence, 100.0)
    assert daemon.until(ALERT, 110.0) == 160.0

    ended = command.end(silence.id[:4], "bob", 120.0)

    assert (ended.until, ended.ended_by) == (120.0, "bob")
    assert daemon.until(ALERT, 121.0) is None


def test_what_ran_out_is_kept_for_a_while_and_then_forgotten(tmp_path):
    book = SilenceBook(tmp_path)
    book.add(asked(), 100.0)
    book.add(asked("run=b", now=200.0), 200.0)
    assert len(book.all()) == 2

    book.add(asked("run=c", now=161.0 + KEEP_S), 161.0 + KEEP_S)

    assert [one.matchers for one in book.all()] == [("run=b",), ("run=c",)]


def test_a_broken_file_silences_nobody_and_loses_nothing(tmp_path):
    book = SilenceBook(tmp_path)
    book.add(asked(), 100.0)
    whole = book.path.read_bytes()
    book.path.write_bytes(whole[:-20])

    assert book.until(ALERT, 110.0) is None
    assert "silences.json: expected silences, got something else" in book.problem
    with pytest.raises(StoreError, match="mend the file"):
        book.add(asked(), 110.0)
    assert book.path.read_bytes() == whole[:-20]

    book.path.write_bytes(whole)
    assert book.until(ALERT, 110.0) == 160.0
    assert book.problem == ""


def test_there_are_not_too_many(tmp_path):
    book = SilenceBook(tmp_path)
    book.path.write_bytes(msgspec.json.encode([asked(f"run={number}") for number in range(MAX_SILENCES)]))

    with pytest.raises(ConfigError, match=r"at most 500 silences at a time"):
        book.add(asked(), 100.0)


def test_books_of_several_directories_are_one(tmp_path):
    books = [SilenceBook(tmp_path / name) for name in ("a", "b")]
    silences = Silences(*books)
    assert silences.have_changed() and not silences.have_changed()
    for book, for_s in zip(books, (60.0, 90.0), strict=True):
        book.add(asked(for_s=for_s), 100.0)

    assert silences.have_changed()
    assert silences.until(ALERT, 110.0) == 190.0
    assert len(silences.active(170.0)) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"matchers": ()}, "which would silence everything"),
        ({"why": " "}, "why: expected a reason, got none"),
        ({"who": "x" * 501}, "who: expected at most 500 characters, got 501"),
        ({"for_s": 0.0}, "expected one of them"),
        ({"until": 500.0}, "expected one of them"),
        ({"for_s": 1e9}, "a time in the year ahead"),
        ({"for_s": float("nan")}, "a time in the year ahead"),
        ({"matchers": ("rnu=a",)}, 'did you mean "run"?'),
    ],
)
def test_what_cannot_be_silenced_is_said(fields, words):
    request = {"matchers": ("run=a",), "why": "known", "for_s": 60.0} | fields

    with pytest.raises(ConfigError) as caught:
        SilenceRequest(**request).begun(100.0)

    assert words in str(caught.value)


@pytest.mark.parametrize("who", ["", "ana"])
def test_who_is_the_user_unless_said(who):
    assert SilenceRequest(matchers=("run=a",), why="known", for_s=1.0, who=who).begun(0.0).who
