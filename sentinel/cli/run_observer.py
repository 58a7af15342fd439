"""RunObserver: reads what a run's ranks and its daemon write, as they write it, and pictures the run; writes nothing."""

from __future__ import annotations

import json
import sqlite3
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sentinel.cli.course import Course, course_of
from sentinel.cli.recent_findings import RecentFindings
from sentinel.cli.recent_scalars import RecentScalars
from sentinel.cli.run_picture import ALIVE, ENDED, GONE, LATE, RUNNING, SILENT, WAITING, RankPicture, RunPicture
from sentinel.cli.status import judged_step, recorded_losses
from sentinel.cli.time_lengths import duration_words
from sentinel.daemon.live_ranks import LIVE_S
from sentinel.daemon.notes import Notes, note_lines
from sentinel.decision import RankFacts
from sentinel.errors import SentinelError
from sentinel.ingest.closing import LATE_AFTER_S, LATE_AFTER_STEPS
from sentinel.ingest.ends import end_by_words, run_end
from sentinel.ingest.processes import GONE as PROCESS_GONE
from sentinel.ingest.processes import ProcessTable
from sentinel.ingest.rank_tails import RankTail, RankTails
from sentinel.run_end import SIGNAL, RankEnd, end_words
from sentinel.store.journal import Journal
from sentinel.store.lock import holder
from sentinel.store.run_paths import RunPaths
from sentinel.wire.frame import NO_ATTEMPT

MOST_SHOWN = 16
"""Slow ranks, hot layers and newest anomalies in a picture."""
GONE_AFTER_S = 3.0
"""Seconds of silence from which a rank's process is looked for. Heartbeats are a second apart."""
QUIET_STEPS = 5.0
"""Times its usual duration that the running step must take for a rate of 0 to be told, LATE_AFTER_S at least."""


class RunObserver:
    """Of one run directory, which may be empty, begin anew or disappear."""

    def __init__(self, run_dir: Path, processes: ProcessTable | None = None) -> None:
        self._run_dir = run_dir
        self._tails = RankTails(run_dir)
        self._findings = RecentFindings(run_dir)
        self._judgement = JudgementLook(run_dir)
        self._processes = processes or ProcessTable()
        self._scalars = RecentScalars()
        self._attempt = NO_ATTEMPT
        self._written = LastMoves()
        self._moved = LastMoves()

    def look(self, now: float, mono: float) -> RunPicture:
        """Return the run as it is. now: seconds since the epoch; mono: monotonic seconds."""
        tails = self._newest_attempt()
        self._findings.look()
        judged = self._judgement.look()
        ended_steps = [tail.steps[-1] for tail in tails if tail.steps]
        newest = max(ended_steps, key=lambda one: one.step, default=None)
        quiet_s = 0.0 if newest is None else self._moved.age("", (newest.step, newest.wall_s), newest.wall_s, now, mono)
        ends = {tail.rank: self._end_of(tail, now, mono) for tail in tails}
        ranks = tuple(self._rank(tail, ends[tail.rank], tails, now, mono) for tail in tails)
        world_size = max((tail.world_size for tail in tails), default=0)
        num_missing = max(0, world_size - len(tails) - self._tails.num_unread)
        daemon = holder(self._run_dir / ".daemon")
        course = self._course(judged.course, ranks, {} if daemon or num_missing else ends, now)
        attempt = max(judged.attempt or 0, 0 if self._attempt == NO_ATTEMPT else self._attempt)
        step = newest.step if newest is not None else None
        is_there = bool(tails) or judged.step is not None
        return RunPicture(
            run=self._run_dir.name, directory=str(self._run_dir), time=now,
            state=WAITING if not is_there else RUNNING if course.ended is None else ENDED,
            note="" if is_there else "no rank has written anything yet",
            attempt=attempt, step=step, steps_per_s=_rate(tails, quiet_s), quiet_s=quiet_s, judged_step=judged.step,
            daemon=daemon, course=course,
            loss=self._scalars.of("loss"), grad_norm=self._scalars.of("grad_norm"), lr=self._scalars.of("lr"),
            incidents=self._findings.open_incidents(), ranks=ranks, num_ranks_unread=self._tails.num_unread,
            num_ranks_missing=num_missing, slowest=_slowest(ranks),
            hottest=self._findings.hottest(MOST_SHOWN, attempt, max(step or 0, judged.step or 0)),
            anomalies=self._findings.newest(MOST_SHOWN), problems=judged.problems,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for no process any more."""
        self._processes.close()

    def _newest_attempt(self) -> list[RankTail]:
        """Read what is new, and return the ranks of the newest attempt."""
        found = self._tails.look()
        attempt = max((tail.attempt for tail, _ in found if tail.attempt != NO_ATTEMPT), default=NO_ATTEMPT)
        if attempt != self._attempt:
            # The same step of a former attempt is another moment.
            self._attempt, self._scalars = attempt, RecentScalars()
        mine = [(tail, ended) for tail, ended in found if tail.written_at and tail.attempt in (attempt, NO_ATTEMPT)]
        last = max((tail for tail, _ in mine if tail.world_size), key=lambda tail: tail.last_wall_s, default=None)
        mine = [(tail, ended) for tail, ended in mine if last is None or tail.rank < last.world_size]
        for tail, ended in mine:
            self._scalars.take(tail.rank, ended)
        return [tail for tail, _ in mine]

    def _end_of(self, tail: RankTail, now: float, mono: float) -> RankEnd | None:
        if tail.bye is not None:
            return end_by_words(tail.bye, tail.last_wall_s, None)
        is_due = self._silence_s(tail, now, mono) >= GONE_AFTER_S
        if is_due and self._processes.look(tail.process).state == PROCESS_GONE:
            step = -1 if tail.newest_step is None else tail.newest_step
            return RankEnd(how=SIGNAL, detail="without a word", time=tail.last_wall_s, step=step)
        return None

    def _silence_s(self, tail: RankTail, now: float, mono: float) -> float:
        return self._written.age(str(tail.rank), tail.written_at, tail.written_at, now, mono)

    def _rank(self, tail: RankTail, end: RankEnd | None, tails: Sequence[RankTail], now: float, mono: float) -> RankPicture:
        silent_s = self._silence_s(tail, now, mono)
        step = tail.newest_step
        behind = 0 if step is None else max(one.newest_step or 0 for one in tails) - step
        if end is not None:
            health, words = GONE, end_words(end)
        elif silent_s >= LIVE_S:
            health, words = SILENT, f"nothing was heard for {duration_words(silent_s)}"
        elif behind >= LATE_AFTER_STEPS:
            health, words = LATE, f"{behind:,} steps behind the newest"
        else:
            health, words = ALIVE, ""
        times = [one.time_s for one in tail.steps if one.time_s > 0]
        busy = [one.time_s - one.wait_s for one in tail.steps if one.time_s > 0 and one.wait_s >= 0]
        return RankPicture(
            rank=tail.rank, health=health, words=words, step=step, silent_s=silent_s,
            step_time_s=statistics.median(times) if times else None, busy_s=statistics.median(busy) if busy else None,
        )  # fmt: skip

    @staticmethod
    def _course(judged: Course, ranks: Sequence[RankPicture], ends: Mapping[int, RankEnd | None], now: float) -> Course:
        """Return the course with how the run ended: by the daemon's word, else by its ranks.

        ends: of all ranks, where these alone tell; none where a daemon is about to say it, or ranks have not begun.
        """
        if any(one.health in (ALIVE, LATE) for one in ranks):
            return msgspec.structs.replace(judged, ended=None)
        if judged.ended is not None:
            return judged
        facts = [
            RankFacts(rank=rank, incarnation=b"", received_at=0.0, moved_at=0.0, end=end)
            for rank, end in sorted(ends.items())
        ]
        num_ranks = judged.num_ranks or len(ranks)
        return msgspec.structs.replace(judged, num_ranks=num_ranks, ended=run_end(facts, now) if facts else None)


class LastMoves:
    """When something changed last. By our own clock as soon as it was seen to: those of others may be wrong."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, float, bool]] = {}
        """Name -> (value, monotonic seconds since when we know it, whether we saw it change)."""

    def age(self, name: str, value: object, time: float, now: float, mono: float) -> float:
        """Return the seconds since a value changed.

        time: when it did by somebody else's clock, seconds since the epoch, as `now` is. mono: monotonic seconds.
        """
        known = self._known.get(name)
        if known is None or known[0] != value:
            known = self._known[name] = (value, mono, known is not None)
        _, since, was_seen = known
        return mono - since if was_seen else max(0.0, now - time, mono - since)


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's journal says of it."""

    attempt: int | None = None
    step: int | None = None
    course: Course = Course()
    problems: tuple[str, ...] = ()


class JudgementLook:
    """Reads the journal of a run again when it has changed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._seen: object = None
        self._judged = Judged()

    def look(self) -> Judged:
        """Return what the journal says now; what cannot be read is among the problems."""
        try:
            path = RunPaths.of(self._run_dir).journal
            seen = [_signature(path.with_name(path.name + end)) for end in ("", "-wal")]
            if seen != self._seen:
                self._judged = _read(path) if path.exists() else Judged()
                self._seen = seen
        except (SentinelError, sqlite3.Error, msgspec.MsgspecError, ValueError, OSError) as error:
            # What was read before may still hold, and the next look may be luckier.
            return msgspec.structs.replace(self._judged, problems=(str(error),))
        return self._judged


def _read(path: Path) -> Judged:
    journal = Journal(path, read_only=True)
    try:
        attempt, step = judged_step(journal)
        losses = recorded_losses(journal)
        config = json.loads(journal.values.get("config") or "null")
        problems = [f"lost: {losses.words}"] if losses.words else []
        if config and config["problem"]:
            problems.append(f"config: the newest edit is not in force: {config['problem']}")
        problems += note_lines(Notes.recalled(journal))
        return Judged(attempt=attempt, step=step, course=course_of(journal), problems=tuple(problems))
    finally:
        journal.close()


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


def _rate(tails: Sequence[RankTail], quiet_s: float) -> float | None:
    """Return the steps a second of the rank that is furthest."""
    furthest = max((tail for tail in tails if tail.steps), key=lambda tail: tail.steps[-1].step, default=None)
    if furthest is None:
        return None
    times = [one.time_s for one in furthest.steps]
    if quiet_s > max(LATE_AFTER_S, QUIET_STEPS * statistics.median(times)):
        return 0.0
    first, last = furthest.steps[0], furthest.steps[-1]
    is_forward = last.step > first.step and last.wall_s > first.wall_s
    return (last.step - first.step) / (last.wall_s - first.wall_s) if is_forward else None


def _slowest(ranks: Sequence[RankPicture]) -> tuple[RankPicture, ...]:
    busy = [one for one in ranks if one.busy_s is not None]
    if busy:
        found = sorted(busy, key=lambda one: (-(one.busy_s or 0.0), one.rank))
    else:
        timed = [one for one in ranks if one.step_time_s is not None]
        found = sorted(timed, key=lambda one: (-(one.step_time_s or 0.0), one.rank))
    return tuple(found[:MOST_SHOWN]) if len(found) > 1 else ()
