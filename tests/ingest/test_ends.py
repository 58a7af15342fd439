"""Who went first, by cause before by time; and what the table of processes tells of an incarnation."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from sentinel.decision import RankFacts
from sentinel.ingest.ends import Ends, left_early, run_end
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.memory_kills import MemoryKills
from sentinel.ingest.processes import GONE, RUNNING, STOPPED, UNSEEN, ProcessTable, Seen, status_words
from sentinel.ingest.witnesses import Witnesses
from sentinel.messages import Descriptor
from sentinel.process import ProcessId, own_process
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
from sentinel.testing import SyntheticRun
from sentinel.wire.witness import Witnessed


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
        ([killed(10.0), killed(10.3)], None),
        ([killed(10.0), killed(40.0)], 0),
        ([killed(10.0), terminated(10.1)], 0),
        ([killed(10.0), end(SIGNAL, 10.02, FOLLOWS, "without a word")], 0),
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


def facts_of(ends: list[RankEnd]) -> tuple[RankFacts, ...]:
    return tuple(
        RankFacts(rank=rank, incarnation=bytes([rank]), received_at=0.0, moved_at=0.0, end=one)
        for rank, one in enumerate(ends)
    )


@pytest.mark.parametrize(
    ("ends", "code", "first"),
    [
        ([terminated(10.1), end(GOODBYE, 10.0, detail="exit")], 1, 1),
        ([terminated(10.1), end(GOODBYE, 10.0, detail="exit")], 0, None),
        ([end(SIGNAL, 10.1, FOLLOWS, "SIGTERM", is_asked=True), end(GOODBYE, 10.0, detail="exit")], 143, None),
        ([terminated(20.0), end(GOODBYE, 10.0, detail="exit")], 1, None),
        ([terminated(10.0), end(GOODBYE, 12.0, detail="exit")], 1, None),
        ([terminated(10.1), end(GOODBYE, 10.0, detail="detached")], 1, None),
    ],
)
def test_who_left_as_the_command_failed_is_the_first_where_the_others_had_no_time_to_notice(
    ends: list[RankEnd], code: int, first: int | None
) -> None:
    named = {one.rank: one.end for one in left_early(facts_of(ends), code) if one.end is not None}

    assert first_to_go(named)[0] == first


def handled(time: float) -> RankEnd:
    return end(GOODBYE, time, detail="SIGTERM")


def test_ranks_that_lose_one_whose_handler_of_sigterm_left_in_order_were_asked_to_end() -> None:
    assert first_to_go({0: lost(10.5), 1: handled(10.0)}) == (None, None)
    assert first_to_go({0: killed(10.5), 1: handled(10.0)})[0] == 0
    assert first_to_go({0: raised(10.5), 1: handled(10.0)})[0] == 0


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([lost(10.5), handled(10.0)], (SIGNAL, None, "SIGTERM", True)),
        ([handled(10.1), handled(10.0)], (GOODBYE, None, "SIGTERM", False)),
        ([terminated(10.5), handled(10.0)], (SIGNAL, None, "SIGTERM", True)),
        ([killed(10.0), killed(10.3), lost(10.2)], (SIGNAL, None, "SIGKILL", False)),
        ([killed(10.0), killed(10.3), terminated(10.1)], (SIGNAL, None, "SIGKILL", False)),
        (
            [end(SIGNAL, 10.0, detail="a"), end(SIGNAL, 10.01, detail="b")],
            (SIGNAL, None, "without a word, all together, 2 ranks within 0.01 s of one another", False),
        ),
        (
            [end(SIGNAL, 10.0, detail="a"), end(SIGNAL, 10.01, detail="b"), end(SIGNAL, 13.0, detail="c")],
            (SIGNAL, None, "without a word, 3 ranks within 3 s of one another", False),
        ),
    ],
)
def test_how_a_run_ended_that_nobody_ended_first(ends: list[RankEnd], expected: tuple[Any, ...]) -> None:
    found = run_end(facts_of(ends), 20.0)

    assert found is not None
    assert (found.how, found.rank, found.detail, found.is_asked) == expected


OWN_PROCESS = ProcessId(host="here", pid=1, start=1, space="pid:[1]", boot="b")
RANK = ProcessId(host="here", pid=77, start=5000, space="pid:[1]", boot="b")


def table(tmp_path: Path, *, state: str = "R", start: int = 5000, status: int = 0, ignored: int = 0) -> ProcessTable:
    """Return a table that has one process, with a name that tries to be fields."""
    (tmp_path / "77").mkdir(parents=True)
    fields = ["0"] * 50
    fields[19], fields[30], fields[49] = str(start), str(ignored), str(status)
    (tmp_path / "77" / "stat").write_text(f"77 (py) S 1 (x) {state} {' '.join(fields[1:])}\n")
    return ProcessTable(tmp_path, own=lambda proc: OWN_PROCESS)


@pytest.mark.parametrize(
    ("state", "seen"), [("R", RUNNING), ("S", RUNNING), ("D", RUNNING), ("T", STOPPED), ("t", STOPPED), ("Z", GONE)]
)
def test_the_state_of_a_process_is_read(tmp_path: Path, state: str, seen: str) -> None:
    assert table(tmp_path, state=state).look(RANK).state == seen


def test_how_it_died_is_known_until_its_parent_asks(tmp_path: Path) -> None:
    seen = table(tmp_path, state="Z", status=int(signal.SIGKILL)).look(RANK)

    assert seen.status is not None
    assert status_words(seen.status) == ("SIGKILL", 0)
    assert status_words(3 << 8) == ("", 3)


@pytest.mark.parametrize(("ignored", "is_deaf"), [(0, False), (1 << 12, False), (1 << 14 | 1 << 12, True)])
def test_whether_a_process_ignores_sigterm_is_read(tmp_path: Path, ignored: int, is_deaf: bool) -> None:
    assert table(tmp_path, ignored=ignored).look(RANK).ignores_sigterm is is_deaf


def test_what_this_process_ignores_is_seen_in_the_table_of_its_kernel() -> None:
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watched = ProcessTable()
    try:
        is_deaf = watched.look(own_process()).ignores_sigterm
    finally:
        signal.signal(signal.SIGTERM, former)
        watched.close()

    assert is_deaf


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


class Lives:
    """Incarnations of one run whose processes and witnesses a test sets: rank -> what is known."""

    def __init__(self, tmp_path: Path, states: dict[int, Seen], seen: dict[int, list[Witnessed]], *, kills: int = 0) -> None:
        run = SyntheticRun(tmp_path / "run", dp=len(states), layers=1)
        run.write(3)
        self.now = 0.0
        follower = RunFollower(tmp_path / "run")
        follower.poll()
        self.incarnations = follower.incarnations
        self.processes = {
            incarnation.id: ProcessId(host="here", pid=70 + incarnation.rank, start=5, space="s", boot="b")
            for incarnation in self.incarnations.values()
        }
        table = cast(ProcessTable, self)
        (tmp_path / "vmstat").write_text("oom_kill 0\n")
        self.memory = MemoryKills(tmp_path, tmp_path)
        witnesses = Witnesses(lambda: self.incarnations, lambda incarnation: seen.get(incarnation.rank, []))
        self.states = dict.fromkeys(states, Seen(RUNNING, letter="R", resident_bytes=3 * 2**30))
        self.ends = Ends(table, lambda incarnation: 0, lambda incarnation: 3.0, witnesses, self.memory)
        self._settle()
        (tmp_path / "vmstat").write_text(f"oom_kill {kills}\n")
        self.states |= states
        self._settle()

    def sees(self, process: ProcessId) -> bool:
        return self.states[process.pid - 70].state != UNSEEN

    def look(self, process: ProcessId) -> Seen:
        return self.states[process.pid - 70]

    def _settle(self) -> None:
        for incarnation in self.incarnations.values():
            self.ends._process[incarnation.id] = self.processes[incarnation.id]
            incarnation.descriptor = msgspec.structs.replace(
                cast(Descriptor, incarnation.descriptor), environment=self.processes[incarnation.id].as_reported()
            )
        for _ in range(4):
            self.now += 0.6
            self.ends.look(self.incarnations.values(), (), self.now)

    def reported(self, asked: str = "") -> tuple[RankFacts, ...]:
        ranks = tuple(
            RankFacts(
                rank=incarnation.rank,
                incarnation=incarnation.id,
                received_at=self.now,
                moved_at=self.now,
                time=10.0,
                step=12,
            )
            for incarnation in sorted(self.incarnations.values(), key=lambda incarnation: incarnation.rank)
        )
        return self.ends.reported(ranks, self.incarnations, self.now, lambda time: asked)


KILL, TERM = Seen(GONE, int(signal.SIGKILL)), Seen(GONE, int(signal.SIGTERM))
SAW_1 = [Witnessed(pid=71, start=5, status=int(signal.SIGKILL))]


@pytest.mark.parametrize("nobody_notified", [Seen(GONE), Seen(UNSEEN)], ids=["found later", "another host"])
def test_what_another_rank_saw_tells_how_one_was_killed_and_that_it_was_first(tmp_path: Path, nobody_notified: Seen) -> None:
    one = Lives(tmp_path, {0: Seen(GONE), 1: nobody_notified}, {0: SAW_1}).reported()

    ended = run_end(one, 10.0)

    assert ended is not None
    assert (ended.how, ended.rank, ended.detail) == (SIGNAL, 1, "SIGKILL")


def test_ends_of_other_children_of_the_launcher_say_nothing(tmp_path: Path) -> None:
    one = Lives(tmp_path, {0: Seen(GONE), 1: Seen(GONE)}, {0: [Witnessed(pid=9999, start=5, status=9)]}).reported()

    ended = run_end(one, 10.0)

    assert ended is not None
    assert ended.rank is None and ended.detail.startswith("without a word, all together, 2 ranks within")


def test_a_kill_by_the_kernel_says_how_much_was_held(tmp_path: Path) -> None:
    (end, _) = (one.end for one in Lives(tmp_path, {0: KILL, 1: TERM}, {}, kills=1).reported())

    assert end is not None
    assert (end.how, end.cause) == (OUT_OF_MEMORY, OWN)
    assert end.detail == "the kernel killed for want of memory when process 70 on here, which held 3 GiB, went"


def test_a_kill_while_the_kernel_counts_none_is_not_for_want_of_memory(tmp_path: Path) -> None:
    (end, other) = (one.end for one in Lives(tmp_path, {0: KILL, 1: TERM}, {}).reported())

    assert end is not None and other is not None
    assert (end.how, end.detail, end.has_memory) == (SIGNAL, "SIGKILL", True)
    assert (other.detail, other.cause) == ("SIGTERM", FOLLOWS)
    assert not end.ignored_sigterm


def test_of_a_rank_that_was_killed_it_is_known_that_it_ignored_sigterm(tmp_path: Path) -> None:
    incarnations = Lives(tmp_path, {0: Seen(RUNNING, ignores_sigterm=True), 1: Seen(RUNNING)}, {})
    incarnations.states |= {0: KILL, 1: KILL}
    incarnations._settle()
    first, second = (one.end for one in incarnations.reported())

    assert first is not None and second is not None
    assert (first.ignored_sigterm, second.ignored_sigterm) == (True, False)


def test_what_ends_a_rank_that_was_asked_to_end_follows_from_that(tmp_path: Path) -> None:
    reported = Lives(tmp_path, {0: KILL, 1: TERM}, {}, kills=1).reported(asked="SIGTERM")

    ended = run_end(reported, 10.0)

    assert ended is not None
    assert (ended.rank, ended.is_asked) == (None, True)
    assert ended.detail.startswith("SIGTERM")


def test_a_stopped_process_is_there(tmp_path: Path) -> None:
    (one, other) = Lives(tmp_path, {0: Seen(STOPPED, letter="T"), 1: Seen(RUNNING, letter="S")}, {}).reported()

    assert (one.is_stopped, one.process_state, one.pid, one.host, one.end) == (True, "T", 70, "here", None)
    assert (other.is_stopped, other.process_state) == (False, "S")
