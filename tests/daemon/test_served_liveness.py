"""Ranks that fall silent, hang or leave, as a served run tells it: once, by name, across crashes, and alike on a replay."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.cli.status import run_status
from sentinel.daemon import serving
from sentinel.daemon.command_note import CommandNote, write_note
from sentinel.daemon.serving import ServedRun
from sentinel.decision import TICK
from sentinel.incident import Incident
from sentinel.judge.replay import replay
from sentinel.messages import Bye, Heartbeat
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths
from sentinel.testing import FakeClock, SyntheticRun

from ..support.results import result_bytes
from ..support.serving import served
from .test_serving import EVERY_STEP, Killed, abandon, kill_at

pytestmark = pytest.mark.slow

BEAT_S = 1.0


class Watched:
    """A run whose ranks beat as they are told, served by a daemon that lives on the same fake clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.directory = directory
        self.clock = FakeClock()
        monkeypatch.setattr(serving, "time", self.clock)
        self.source = SyntheticRun(directory, layers=2, d_model=16, elements=8, clock=self.clock, **options)
        self.at: dict[int, tuple[int, int, str]] = {}
        """Rank -> (call_id, is_waiting, activity) in the step that runs."""
        self.silent: set[int] = set()
        self.raised: dict[int, Bye] = {}
        """Rank -> what a cell of its notebook raised."""
        self.daemon: ServedRun | None = served(directory, EVERY_STEP)

    def train(self, num_steps: int, **options: Any) -> None:
        """Whole steps, a look of the daemon behind each."""
        for _ in range(num_steps):
            self.source.write(1, **options)
            self.look()

    def look(self) -> None:
        """Let the daemon do what there is to do."""
        while self.daemon is not None and self.daemon.turn(self.clock.time()):
            pass

    def wait(self, seconds: float, *, looks: int = 1, is_served: bool = True) -> None:
        """Let time pass: every second the ranks that are not silent beat, where they stand. looks: the daemon's a second."""
        for tick in range(round(seconds / BEAT_S) * looks):
            self.clock.advance(BEAT_S / looks)
            if tick % looks == 0:
                self.beat()
            if is_served:
                self.look()

    def beat(self, ranks: Collection[int] | None = None) -> None:
        for rank in range(self.source.num_ranks) if ranks is None else ranks:
            call_id, is_waiting, activity = self.at.get(rank, (30, 1, "train"))
            if rank not in self.silent:
                beat = Heartbeat(
                    step=self.source.step, call_id=call_id, activity=activity, module=f"layers.{rank % 2}.mlp",
                    phase="forward", micro_step=1, is_waiting=is_waiting, raised=self.raised.get(rank),
                )  # fmt: skip
                self.source.report(rank, beat)

    def restart(self) -> None:
        """A daemon that was away, or is killed now, is there again."""
        if self.daemon is not None:
            abandon(self.daemon)
        self.daemon = served(self.directory, EVERY_STEP)

    def stop(self, *, is_over: bool = False) -> None:
        assert self.daemon is not None
        assert self.daemon.finish(self.clock.time(), is_over=is_over, deadline=float("inf"))
        self.daemon.close()
        self.daemon = None

    @property
    def found(self) -> list[Anomaly]:
        return [msgspec.json.decode(line, type=Anomaly) for line in result_bytes(self.directory)[0].splitlines()]

    @property
    def incidents(self) -> list[Incident]:
        return [msgspec.json.decode(line, type=Incident) for line in result_bytes(self.directory)[1].splitlines()]

    def num_ticks(self) -> int:
        journal = Journal(RunPaths.of(self.directory).journal, read_only=True)
        try:
            return sum(kind == TICK for _, kind, _ in journal.decisions())
        finally:
            journal.close()

    def assert_replays(self, out: Path) -> None:
        replayed = replay(RunPaths.of(self.directory), out)
        assert (replayed.first_difference, replayed.num_incomplete) == (None, 0)
        assert result_bytes(out) == result_bytes(self.directory)
        assert replayed.num_anomalies == len(self.found)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    # Where a snapshot comes is of no account here, but how long the machine takes over one must not be either.
    monkeypatch.setattr("sentinel.daemon.snapshots.SNAPSHOT_SHARE", float("inf"))

    def make(**options: Any) -> Watched:
        return Watched(tmp_path / "run", monkeypatch, **{"dp": 4, **options})

    return make


def test_a_healthy_run_writes_one_tick_when_it_is_over(watched: Callable[..., Watched]) -> None:
    run = watched()
    for _ in range(10):
        run.train(4)
        run.wait(3)
    run.at = dict.fromkeys(range(4), (0, 0, "eval"))
    run.wait(130)
    run.train(5)
    assert run.num_ticks() == 0
    run.source.end()
    run.wait(130)

    assert run.found == []
    assert run.num_ticks() == 1, "that every rank left in order"


def test_who_dies_while_there_is_always_something_to_read_is_named(watched: Callable[..., Watched]) -> None:
    """No look of the daemon ever finds nothing new."""
    run = watched()
    for step in range(150):
        run.source.write(1, ranks=[0, 2, 3] if step >= 6 else None)
        assert run.daemon is not None
        assert run.daemon.turn(run.clock.time())
        run.clock.advance(0.5)

    (onset,) = [one for one in run.found if one.rule == "stale-rank"]
    assert (onset.ranks, onset.statistic) == ((1,), "silent_s")


def test_a_silent_rank_is_named_once_and_its_end_told(watched: Callable[..., Watched], tmp_path: Path) -> None:
    run = watched()
    run.train(20)
    run.wait(5)
    run.silent = {2}
    run.wait(90, looks=2)

    (onset,) = run.found
    assert (onset.rank, onset.ranks, onset.step, onset.micro_step, onset.call_id) == (2, (2,), 20, 1, 30)
    assert (onset.rule, onset.detector, onset.kind) == ("stale-rank", "StaleRank", "health")
    assert onset.severity is Severity.CRITICAL
    assert (onset.statistic, onset.baseline) == ("silent_s", 30.0)
    assert onset.value is not None and 30.0 <= onset.value <= 31.0
    assert onset.message == (
        "rank 2 is silent: nothing was heard for 30 s; gone, stopped, or its records cannot be written; "
        "last seen in step 20, micro-step 1, forward of layers.0.mlp, call 30; ranks 0, 1, 3 wait"
    )
    assert [(one.state, one.ranks, one.title) for one in run.incidents] == [("open", (2,), onset.message)]

    run.silent = set()
    run.wait(5)
    run.train(40)

    assert [(one.event, one.message) for one in run.found[1:]] == [("end", "rank 2: heard again")]
    assert run.incidents[-1].state == "resolved"
    assert run.num_ticks() == 2
    run.stop()
    run.assert_replays(tmp_path / "again")


RAISED = Bye(reason="exception", step=-1, error="ValueError", message="no such token: 50257")


def test_what_a_cell_raises_is_told_once_and_over_when_it_trains_again(
    watched: Callable[..., Watched], tmp_path: Path
) -> None:
    run = watched(dp=1)
    run.train(20)
    run.raised = {0: RAISED}
    run.wait(300)

    (onset,) = run.found
    assert (onset.rule, onset.rank, onset.step, onset.severity) == ("run-ended", 0, 20, Severity.CRITICAL)
    assert onset.message == (
        "rank 0, in step 20, raised ValueError: no such token: 50257; it stands at its prompt: read the traceback below the "
        "cell; what was trained so far is still in memory"
    )
    assert run.num_ticks() == 1

    run.raised = {}
    run.wait(2)
    run.train(40)
    assert [(one.event, one.message) for one in run.found[1:]] == [("end", "rank 0: heard again")]
    run.source.end()
    run.wait(5)

    assert len(run.found) == 2
    assert run_status(run.directory)["ended"]["how"] == "goodbye"
    run.stop()
    run.assert_replays(tmp_path / "again")


def test_the_first_to_hang_is_named_and_the_others_wait(watched: Callable[..., Watched], tmp_path: Path) -> None:
    run = watched()
    run.train(20)
    run.at = {1: (12, 0, "train")}
    run.wait(29, looks=2)
    assert run.found == []
    run.wait(100, looks=2)

    (onset,) = run.found
    assert (onset.rank, onset.step, onset.call_id, onset.statistic) == (1, 20, 12, "idle_s")
    assert onset.message == (
        "rank 1 hangs: no progress for 30 s (limit 30 s); "
        "last seen in step 20, micro-step 1, forward of layers.1.mlp, call 12; ranks 0, 2, 3 wait"
    )
    assert run.daemon is not None
    assert run.daemon.status.metrics().ranks == {"live": 3, "late": 0, "stale": 1, "missing": 0}

    run.at = {}
    run.wait(2)
    run.train(3)

    assert [(one.event, one.rank, one.message) for one in run.found[1:]] == [("end", 1, "rank 1: moves again, step 20")]
    run.stop()
    run.assert_replays(tmp_path / "again")


def test_a_rank_that_raised_is_named_and_not_those_it_left(watched: Callable[..., Watched], tmp_path: Path) -> None:
    run = watched()
    run.train(20)
    run.source.end(3, reason="exception")
    run.silent = {3}
    run.wait(100)

    (onset,) = run.found
    assert (onset.rule, onset.rank, onset.step) == ("run-ended", 3, 19)
    assert onset.message.startswith("rank 3, in step 19, raised an exception; it was the first to go")
    assert "ranks 0, 1, 2 were still there then" in onset.message

    run.source.end()
    run.wait(10)

    assert [(one.event, one.rank) for one in run.found] == [("onset", 3), ("end", 3)], "the run is over, once"
    assert run.incidents[-1].state == "ended"
    run.stop()
    run.assert_replays(tmp_path / "again")


@pytest.mark.parametrize(("code", "onsets"), [(1, [("run-ended", 3)]), (0, [("run-ended", None)])])
def test_who_made_the_command_fail_is_named_though_it_said_goodbye(
    watched: Callable[..., Watched], code: int, onsets: list[tuple[str, int | None]]
) -> None:
    run = watched()
    began = run.clock.time()
    run.train(20)
    run.source.end(3)
    for rank in range(3):
        run.source.end(rank, reason="exception", signal="SIGTERM")
    write_note(run.directory, CommandNote(pid=1, began=began, ended=run.clock.time() + 1, code=code))
    run.stop(is_over=True)

    assert [(one.rule, one.rank) for one in run.found] == onsets


def test_what_others_do_in_a_hang_is_no_news_and_ends_with_the_run(watched: Callable[..., Watched]) -> None:
    run = watched()
    run.train(20)
    run.at = {1: (12, 0, "train")}
    run.wait(60)
    run.source.end(0, reason="exception")
    run.source.end(2, reason="exception")
    run.silent = {0, 2}
    run.wait(60)
    assert [one.ranks for one in run.found] == [(1,)]

    run.silent |= {1, 3}
    run.wait(60)

    assert [(one.event, one.ranks) for one in run.found] == [("onset", (1,)), ("end", (1,))]
    assert run.found[1].message == "rank 1: the run is over"
    assert len({one.id for one in run.incidents}) == 1
    assert run.incidents[-1].state == "ended"


@pytest.mark.parametrize("activity", ["eval", "checkpoint", "init"])
def test_slow_on_purpose_is_no_hang(watched: Callable[..., Watched], activity: str) -> None:
    run = watched()
    run.train(20)
    run.at = {0: (30, 0, activity)}
    run.wait(150)
    assert run.found == []

    run.at = {0: (31, 0, "train")}
    run.wait(60)

    assert [one.step for one in run.found] == [20], "the control"


def test_a_daemon_that_was_away_accuses_nobody_for_that_time(watched: Callable[..., Watched]) -> None:
    run = watched()
    run.train(20)
    run.wait(5)
    run.stop()
    run.clock.advance(10_000.0)
    run.wait(10, is_served=False)
    run.restart()
    run.wait(20)
    assert run.found == []

    run.wait(60)

    assert [one.ranks for one in run.found] == [(0, 1, 2, 3)], "they stand at one place, seen for long enough now"


def test_a_daemon_that_was_stopped_or_asleep_accuses_nobody_for_that_time(watched: Callable[..., Watched]) -> None:
    run = watched()
    run.train(20)
    run.wait(5)
    for _ in range(20):
        run.clock.advance(3600.0)
        run.look()
        run.train(2)

    assert run.found == []


def test_a_dead_run_that_is_only_read_accuses_nobody(watched: Callable[..., Watched]) -> None:
    run = watched()
    assert run.daemon is not None
    run.stop()
    run.source.write(20)
    run.beat()
    run.restart()
    run.silent = {0, 1, 2, 3}
    run.wait(150)

    (onset,) = run.found
    assert (onset.rule, onset.rank, onset.step) == ("run-ended", None, 20), "found later, once: it said no goodbye"
    assert run.num_ticks() == 1


@pytest.mark.parametrize(("owner", "name"), [(Journal, "record"), (Journal, "commit")], ids=["record", "commit"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_kill_9_tells_nothing_twice(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: type, name: str, after: bool
) -> None:
    run = watched()
    run.train(20)
    run.wait(5)
    run.silent = {2}
    run.wait(24)
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, 1, after=after)
        with pytest.raises(Killed):
            run.wait(100)
    run.restart()
    run.wait(100)
    run.restart()
    run.wait(100)

    assert [(one.event, one.ranks) for one in run.found] == [("onset", (2,))]

    run.silent = set()
    run.wait(5)

    assert [(one.event, one.ranks) for one in run.found] == [("onset", (2,)), ("end", (2,))]
    run.stop()
    run.assert_replays(tmp_path / "again")


def test_a_replaced_rank_ends_the_episode(watched: Callable[..., Watched]) -> None:
    run = watched()
    run.train(20)
    run.wait(5)
    run.silent = {2}
    run.source.kill(2, in_frame=False)
    run.wait(60)
    run.silent = set()
    run.source.start(2)
    run.wait(5)

    assert [(one.event, one.message.partition(":")[2]) for one in run.found[1:]] == [("end", " replaced")]


def test_a_new_attempt_leaves_the_old_ranks_alone(watched: Callable[..., Watched]) -> None:
    """The job dies and starts anew, takes long to come up, and its old incarnations never said bye."""
    run = watched(attempt=None)
    run.train(20)
    run.wait(5)
    run.source.restart(10, attempt=None)
    run.at = dict.fromkeys(range(4), (0, 0, "init"))
    run.wait(150)
    run.at = {}
    run.train(20)
    run.wait(10)

    (onset,) = run.found
    assert (onset.rule, onset.attempt, onset.severity) == ("run-ended", 0, Severity.WARNING), "it goes on by itself"
    assert onset.message.endswith("a newer attempt has begun since")


def test_clocks_that_disagree_or_jump_do_not_matter(watched: Callable[..., Watched]) -> None:
    run = watched()
    offsets = iter([3600.0, -3600.0, 7200.0, 0.0] * 50)

    def wall_ns() -> int:
        return round((run.clock.time() + next(offsets, 0.0)) * 1e9)

    for rank in run.source._ranks:
        assert rank.spool is not None
        rank.spool._clock = type("Jumping", (), {"wall_ns": staticmethod(wall_ns), "mono_ns": run.clock.mono_ns})()
    run.train(20)
    run.wait(25)
    run.train(5)
    assert run.found == []
    run.silent = {3}
    run.wait(40)

    assert [one.ranks for one in run.found] == [(3,)], "the control"


def test_a_run_that_is_over_and_still_there_pages_nobody(watched: Callable[..., Watched]) -> None:
    run = watched()
    run.train(20)
    run.at = dict.fromkeys(range(4), (0, 0, "train"))
    run.wait(650)

    assert [(one.ranks, one.severity) for one in run.found] == [((0, 1, 2, 3), Severity.WARNING)]


def test_gauges_show_each_rank_in_one_state_and_when_the_quietest_was_heard(watched: Callable[..., Watched]) -> None:
    run = watched()
    run.train(5)
    run.wait(5)
    assert run.daemon is not None
    before = run.daemon.status.metrics()
    run.silent = {2}
    received = run.clock.time()
    run.wait(60)
    after = run.daemon.status.metrics()

    assert before.num_ranks_expected == after.num_ranks_expected == 4
    assert before.ranks == {"live": 4, "late": 0, "stale": 0, "missing": 0}
    assert after.ranks["missing"] == 1 and sum(after.ranks.values()) == 4
    assert before.quietest_received_time is not None and received - before.quietest_received_time <= 2.0
    assert after.quietest_received_time is not None and 0.0 <= received - after.quietest_received_time <= 2.0


def test_a_rank_that_dies_before_the_first_step_is_named(watched: Callable[..., Watched]) -> None:
    run = watched()
    run.at = dict.fromkeys(range(4), (0, 0, "init"))
    run.wait(5)
    run.silent = {1}
    run.wait(150)

    assert [(one.rank, one.step) for one in run.found] == [(1, 0)]
    assert run_status(run.directory)["step"] is None
    run.restart()
    assert run.daemon is not None and run.daemon.status.describe()["judged_step"] is None


def test_deciding_anew_finds_no_stale_rank(watched: Callable[..., Watched], tmp_path: Path) -> None:
    run = watched()
    run.train(10)
    run.wait(5)
    run.silent = {2}
    run.wait(60)
    run.stop()
    assert len(run.found) == 1

    replayed = replay(RunPaths.of(run.directory), tmp_path / "anew", recompute=True)

    assert (replayed.num_steps, replayed.num_anomalies) == (10, 0)
