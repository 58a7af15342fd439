"""Who went first, by cause before by time; and what the table of processes tells of a life."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sentinel.ingest.processes import GONE, LIVES, STOPPED, UNSEEN, ProcessTable, status_words
from sentinel.process import ProcessId
from sentinel.run_end import (
    EXCEPTION,
    FOLLOWS,
    GOODBYE,
    LEFT_EARLY,
    OUT_OF_MEMORY,
    OWN,
    SIGNAL,
    SILENCE,
    UNEXPLAINED,
    RankEnd,
    first_to_go,
)


def end(how: str, time: float, cause: int = UNEXPLAINED, detail: str = "", *, is_asked: bool = False) -> RankEnd:
    return RankEnd(how=how, time=time, cause=cause, detail=detail, is_asked=is_asked)


def raised(time: float) -> RankEnd:
    return end(EXCEPTION, time, OWN, "ValueError: no such token")


def lost(time: float) -> RankEnd:
    return end(EXCEPTION, time, FOLLOWS, "RuntimeError: Connection closed by peer")


def killed(time: float) -> RankEnd:
    return end(SIGNAL, time, UNEXPLAINED, "SIGKILL")


def terminated(time: float) -> RankEnd:
    return end(SIGNAL, time, FOLLOWS, "SIGTERM")


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([lost(10.1), killed(10.0), lost(10.2)], 1),
        ([lost(9.9), killed(10.0), terminated(10.3)], 1),
        ([terminated(10.2), raised(10.0), terminated(10.1)], 1),
        ([lost(9.0), raised(10.0)], 1),
        ([end(SIGNAL, 9.5), raised(10.0)], 1),
        ([end(SIGNAL, 5.0), raised(10.0)], 0),
        ([end(SILENCE, 10.0), lost(10.5)], 0),
        ([end(OUT_OF_MEMORY, 10.0, OWN), lost(10.5)], 0),
        ([end(SIGNAL, 10.0), end(SIGNAL, 10.3)], 0),
        ([end(SIGNAL, 10.0), end(SIGNAL, 10.01)], None),
        ([terminated(10.0), terminated(10.5)], None),
        ([terminated(10.0)], 0),
        ([lost(10.2), lost(10.0)], 1),
        ([end(SIGNAL, 10.0, is_asked=True), lost(9.0)], None),
        ([end(GOODBYE, 10.0, detail="exit"), end(GOODBYE, 11.0, detail="exit")], None),
        ([end(GOODBYE, 10.0, detail="detached"), killed(20.0)], 1),
    ],
)
def test_the_first_to_go_is_found_by_cause_before_by_time(ends: list[RankEnd], first: int | None) -> None:
    assert first_to_go(dict(enumerate(ends)))[0] == first


def test_who_left_before_the_others_lost_it_is_the_first_though_it_said_goodbye() -> None:
    first, how = first_to_go({0: lost(10.5), 1: end(GOODBYE, 10.0, detail="exit")})

    assert first == 1 and how is not None
    assert (how.how, how.detail) == (EXCEPTION, LEFT_EARLY)


def test_who_left_after_the_others_lost_somebody_is_not_blamed() -> None:
    assert first_to_go({0: lost(9.5), 1: end(GOODBYE, 10.0, detail="exit")})[0] == 0


OWN_PROCESS = ProcessId(host="here", pid=1, start=1, space="pid:[1]", boot="b")
RANK = ProcessId(host="here", pid=77, start=5000, space="pid:[1]", boot="b")


def table(tmp_path: Path, *, state: str = "R", start: int = 5000, status: int = 0) -> ProcessTable:
    """Return a table that has one process, with a name that tries to be fields."""
    (tmp_path / "77").mkdir(parents=True)
    fields = ["0"] * 50
    fields[19], fields[49] = str(start), str(status)
    (tmp_path / "77" / "stat").write_text(f"77 (py) S 1 (x) {state} {' '.join(fields[1:])}\n")
    return ProcessTable(tmp_path, own=lambda proc: OWN_PROCESS)


@pytest.mark.parametrize(
    ("state", "seen"), [("R", LIVES), ("S", LIVES), ("D", LIVES), ("T", STOPPED), ("t", STOPPED), ("Z", GONE)]
)
def test_the_state_of_a_process_is_read(tmp_path: Path, state: str, seen: str) -> None:
    assert table(tmp_path, state=state).look(RANK).state == seen


def test_how_it_died_is_known_until_its_parent_asks(tmp_path: Path) -> None:
    seen = table(tmp_path, state="Z", status=int(signal.SIGKILL)).look(RANK)

    assert seen.status is not None
    assert status_words(seen.status) == ("SIGKILL", 0)
    assert status_words(3 << 8) == ("", 3)


def test_another_process_with_its_number_is_not_it(tmp_path: Path) -> None:
    assert table(tmp_path, start=6000).look(RANK).state == GONE


@pytest.mark.parametrize(
    "rank",
    [
        ProcessId(host="here", pid=77, start=5000, space="pid:[2]", boot="b"),
        ProcessId(host="there", pid=77, start=5000, space="pid:[1]", boot="c"),
        ProcessId(host="here", pid=77),
        ProcessId(),
    ],
    ids=["another container", "another machine", "an older Sentinel", "nothing said"],
)
def test_what_is_not_in_this_table_is_not_gone(tmp_path: Path, rank: ProcessId) -> None:
    assert table(tmp_path).look(rank).state == UNSEEN


def test_a_process_that_is_not_there_is_gone(tmp_path: Path) -> None:
    assert ProcessTable(tmp_path, own=lambda proc: OWN_PROCESS).look(RANK).state == GONE


