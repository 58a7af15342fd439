"""Ends: how each rank of an attempt ended, by its bye, the table of processes, other ranks, or its silence; and the run.

What is known comes late and in any order: a rank that is killed says nothing, those that were connected to it raise, and the
launcher ends the others a moment later. So nothing is decided before the first end is `SETTLE_S` old, and the first to go is
found by cause before it is found by time.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from sentinel.decision import RankFacts
from sentinel.ingest.incarnation import Incarnation
from sentinel.ingest.memory_kills import MemoryKills
from sentinel.ingest.processes import GONE, RUNNING, STOPPED, UNSEEN, ProcessTable, Seen, status_words
from sentinel.ingest.witnesses import LONG_SILENT_S, Witnesses
from sentinel.messages import Bye
from sentinel.process import ProcessId
from sentinel.run_end import (
    ALL_TOGETHER,
    CLEAR_S,
    CRASHES,
    EXCEPTION,
    EXIT,
    FOLLOWS,
    GOODBYE,
    LEFT_EARLY,
    OUT_OF_MEMORY,
    OWN,
    SIGNAL,
    SILENCE,
    TOGETHER_S,
    UNEXPLAINED,
    RankEnd,
    RunEnd,
    first_to_go,
    was_asked,
)

LOOK_S = 0.05
"""Least seconds between two looks at the processes: a launcher asks for its dead ten times a second, and then nobody else
can know how they died."""
MANY_INCARNATIONS = 256
"""Incarnations up to which all are looked at each time; more are looked at proportionally less often, a bound on time."""
READ_S = 0.2
"""Seconds after a rank was found gone in which what it wrote at its end is read."""
SETTLE_S = 2.0
"""Seconds from the first end until the first rank to go is named. Too small: what the others write at their end, within a
second, is not read yet; too large: the message is late (2.2 s in benchmarks/results/2026-11-22-ends.md)."""
LEAVE_S = 4.0
"""Seconds that a process has from its goodbye to its exit code before ranks that lost it are judged. Too small: a process
that still unloads its libraries is read as a healthy end; too large: messages about the others are late."""
SILENT_S, QUIET_S = 30.0, 120.0
"""Seconds without a frame after which a rank that trains, or does something else, is gone where its process is not seen."""
SILENT_TOGETHER_S = 2.5
"""Ranks that fall silent within so many seconds fell silent together: heartbeats are a second apart."""
REPLACED_S = 5.0
"""An incarnation is over when a newer attempt trains and it was silent for so long before."""

ASKED_S = 300.0
"""Seconds after a request to end in which any end of the rank follows from it. Too small: launchers and schedulers kill
half a minute later; too large: a failure of a rank that took the request for a notice, and trained on, is excused."""

_ASKED = {"SIGINT"}
_ASKED_ERRORS = ("SIGTERMException", "SignalException")
"""What Lightning and torch's elastic agent raise when they are sent SIGTERM."""


@dataclasses.dataclass(slots=True)
class _ProcessState:
    """What the table of processes showed of one incarnation."""

    at: float
    """Seconds watched when it was found gone, or when it left."""
    status: int | None = None
    is_gone: bool = False
    is_memory: bool = False
    """The kernel killed a process for want of memory at about that time."""
    has_memory: bool = False
    """The kernel's counters show that it killed no process for want of memory at that time."""
    is_after: bool = False
    """The incarnation recorded the bad end of another rank, so it was still running then."""
    time: float = 0.0


class Ends:
    """Collects how incarnations ended. Its results are journalled as RankFacts and RunEnd, which a replay reads instead."""

    def __init__(
        self,
        processes: ProcessTable,
        pulse_ns: Callable[[Incarnation], int],
        silence_s: Callable[[bytes], float],
        witnesses: Witnesses,
        memory_kills: MemoryKills,
    ) -> None:
        """pulse_ns: wall clock, in ns, of an incarnation's newest sign that it runs; 0: not known. silence_s: seconds since
        its newest frame came."""
        self._processes = processes
        self._pulse_ns, self._silence_s = pulse_ns, silence_s
        self._witnesses = witnesses
        self._memory_kills = memory_kills
        self._found: dict[bytes, _ProcessState] = {}
        self._seen: dict[bytes, Seen] = {}
        """The last look at each incarnation that is there."""
        self._due = -1.0
        self._process: dict[bytes, ProcessId] = {}

    def look(
        self, incarnations: Collection[Incarnation], behind: Collection[bytes], now: float, *, is_forced: bool = False
    ) -> None:
        """Look at the processes of incarnations that are not over, and note who has left. now: seconds watched.

        behind: incarnations with more on disk than was read. is_forced: however short a time ago the last look was.
        """
        if now < self._due and not is_forced:
            return
        self._due = now + LOOK_S * max(1.0, len(incarnations) / MANY_INCARNATIONS)
        self._memory_kills.look(now)
        for incarnation in incarnations:
            found = self._found.get(incarnation.id)
            if found is not None and found.is_gone and not incarnation.has_left and incarnation.id not in behind:
                # All that it wrote is read: no step waits for it any more.
                incarnation.has_left = now - found.at >= READ_S
            if found is not None and ((found.is_gone and found.status is not None) or now - found.at > LEAVE_S):
                continue
            process = self._process_of(incarnation)
            seen = self._processes.look(process)
            if seen.state in (RUNNING, STOPPED):
                self._seen[incarnation.id] = seen
                self._memory_kills.add(process)
            elif (
                seen.state == UNSEEN
                and incarnation.id not in behind
                and LONG_SILENT_S[0] <= self._silence_s(incarnation.id) <= LONG_SILENT_S[1]
            ):
                seen = self._witnessed(process, now)
            if found is None and (incarnation.has_left or seen.state == GONE):
                found = self._found[incarnation.id] = _ProcessState(now)
            if found is not None and seen.state == GONE:
                self._note_gone(incarnation, process, found, seen, now)

    def _note_gone(self, incarnation: Incarnation, process: ProcessId, found: _ProcessState, seen: Seen, now: float) -> None:
        if seen.status is None:
            seen = self._witnessed(process, now)
        if not found.is_gone:
            found.is_memory = self._processes.sees(process) and self._memory_kills.near(process, now)
            found.has_memory = not found.is_memory and self._memory_kills.denies(process, now)
            found.time = max(self._pulse_ns(incarnation), incarnation.last_wall_ns) / 1e9
        found.is_gone, found.is_after = True, found.is_after or self._witnesses.has_seen(incarnation.id)
        found.status = seen.status if seen.status is not None else found.status

    def _witnessed(self, process: ProcessId, now: float) -> Seen:
        """Return what other ranks recorded of the end of a process that this host's table does not show."""
        status = self._witnesses.status(process, now)
        return Seen(UNSEEN) if status is None else Seen(GONE, status)

    def reported(
        self,
        ranks: Sequence[RankFacts],
        incarnations: Mapping[bytes, Incarnation],
        now: float,
        asked_by: Callable[[float], str],
    ) -> tuple[RankFacts, ...]:
        """Return the facts with the end of each rank, where it is known.

        asked_by: name of the signal that was sent to the whole command on purpose before a time, seconds since the epoch;
        empty: none was.
        """
        reported = []
        for one in ranks:
            incarnation, found = incarnations.get(one.incarnation), self._found.get(one.incarnation)
            end = None if incarnation is None else self._end_of(incarnation, one, found, now, asked_by)
            at = found.at if found is not None else now if end is not None else 0.0
            if found is None and end is not None and end.is_at_prompt:
                at = one.moved_at
            seen = None if found is not None and found.is_gone else self._seen.get(one.incarnation)
            if end is not None or seen is not None:
                process = self._process.get(one.incarnation)
                one = msgspec.structs.replace(
                    one, end=end, ended_at=at, is_stopped=seen is not None and seen.state == STOPPED,
                    process_state=seen.letter if seen is not None else "",
                    pid=process.pid if process is not None else 0, host=process.host if process is not None else "",
                )  # fmt: skip
            reported.append(one)
        return tuple(reported)

    def by_code(self, one: RankFacts, incarnation: Incarnation, pid: int, code: int) -> RankFacts:
        """Return the end of a rank by the exit code of the command that started it, or that it is itself."""
        end = one.end
        is_open = end is None or (end.how == SIGNAL and end.cause == UNEXPLAINED and not end.detail.startswith("SIG"))
        process = self._process_of(incarnation)
        if process.pid == pid and self._processes.sees(process) and (is_open or (end is not None and end.detail == "exit")):
            time = end.time if end is not None else max(self._pulse_ns(incarnation), incarnation.last_wall_ns) / 1e9
            reason = end.detail if end is not None and end.how == GOODBYE else ""
            end = _end_by_code(code, reason, time, one.step if end is None else end.step)
        elif end is None and not self.is_here(incarnation):
            how, words = (GOODBYE, "") if code == 0 else (SIGNAL, "without a word, and ")
            end = RankEnd(how=how, detail=f"{words}the command ended with exit code {code}", time=one.time, step=one.step)
        return msgspec.structs.replace(one, end=end)

    def is_here(self, incarnation: Incarnation) -> bool:
        """Return whether the table shows an incarnation's process while it runs: then silence is no sign of its end."""
        return self._processes.look(self._process_of(incarnation)).state in (RUNNING, STOPPED)

    def _process_of(self, incarnation: Incarnation) -> ProcessId:
        found = self._process.get(incarnation.id)
        if found is None:
            if incarnation.descriptor is None:
                return ProcessId()
            found = self._process[incarnation.id] = ProcessId.reported_by(incarnation.descriptor.environment)
        return found

    def _end_of(
        self,
        incarnation: Incarnation,
        one: RankFacts,
        found: _ProcessState | None,
        now: float,
        asked_by: Callable[[float], str],
    ) -> RankEnd | None:
        if incarnation.has_left and incarnation.bye is not None:
            time = incarnation.last_wall_ns / 1e9
            end = end_by_words(incarnation.bye, time, found.status if found is not None else None)
            end = msgspec.structs.replace(end, is_between=incarnation.bye.is_between)
            return end if end.how == GOODBYE else _after_asking(end, asked_by(time))
        if found is not None and found.is_gone:
            return self._end_by_table(incarnation, one, found, asked_by(found.time))
        raised = incarnation.heartbeat.raised if incarnation.heartbeat is not None else None
        if raised is not None:
            end = end_by_words(raised, incarnation.last_wall_ns / 1e9, None)
            return msgspec.structs.replace(end, step=one.step, is_at_prompt=True)
        return None

    def silenced(
        self, ranks: tuple[RankFacts, ...], incarnations: Mapping[bytes, Incarnation], now: float
    ) -> tuple[RankFacts, ...]:
        """Return the facts with the end by silence of those that nothing else tells of, where that leaves nobody; else as
        they are: while others live, a rank that is silent may be stopped.
        """
        silent = []
        for one in ranks:
            incarnation = incarnations.get(one.incarnation)
            if one.end is None and incarnation is not None and not self.is_here(incarnation):
                limit = SILENT_S if one.activity == "train" else QUIET_S
                silent.append((now - one.received_at, limit))
        num_open = sum(one.end is None for one in ranks)
        is_over = len(silent) == num_open and all(silence >= limit - SILENT_TOGETHER_S for silence, limit in silent)
        if not is_over or not any(silence >= limit for silence, limit in silent):
            return ranks
        reported = []
        for one in ranks:
            if one.end is None:
                time = max(self._pulse_ns(incarnations[one.incarnation]) / 1e9, one.time)
                words = f"nothing was heard for {now - one.received_at:.0f} s"
                end = RankEnd(how=SILENCE, detail=words, time=time, step=one.step)
                one = msgspec.structs.replace(one, end=end, ended_at=now)
            reported.append(one)
        return tuple(reported)

    def _end_by_table(self, incarnation: Incarnation, one: RankFacts, found: _ProcessState, asked: str) -> RankEnd:
        process = self._process_of(incarnation)
        where = f"process {process.pid} on {process.host}"
        name, code = status_words(found.status) if found.status is not None else (asked, 0)
        if found.is_memory and name in ("", "SIGKILL") and not code and not asked:
            detail = self._memory_words(incarnation, process, where)
            return RankEnd(how=OUT_OF_MEMORY, detail=detail, time=found.time, step=one.step, cause=OWN)
        if found.status is None and not asked:
            detail = f"without a word ({where}): killed by a signal, or crashed"
            cause = FOLLOWS if found.is_after else UNEXPLAINED
            return RankEnd(how=SIGNAL, detail=detail, time=found.time, step=one.step, cause=cause)
        end = _end_by_signal(name, found.time, one.step) if name else _end_by_code(code, "", found.time, one.step)
        if end.detail == "SIGKILL":
            seen = self._seen.get(incarnation.id)
            end = msgspec.structs.replace(
                end, has_memory=found.has_memory, ignored_sigterm=seen is not None and seen.ignores_sigterm
            )
        return end if end.how == GOODBYE else _after_asking(end, asked)

    def _memory_words(self, incarnation: Incarnation, process: ProcessId, where: str) -> str:
        seen, limit = self._seen.get(incarnation.id), self._memory_kills.limit(process)
        held = f", which held {size(seen.resident_bytes)}" if seen is not None and seen.resident_bytes else ""
        group = f"; its memory group (cgroup) may hold {size(limit)}" if limit is not None else ""
        return f"the kernel killed for want of memory when {where}{held}, went{group}"


def left_early(ranks: tuple[RankFacts, ...], code: int) -> tuple[RankFacts, ...]:
    """Return the facts with the end of a rank that made the command fail, though it said goodbye.

    code: exit code of the command. Of `raise SystemExit(3)` Python tells nobody the code; a launcher that sees it ends the
    others within a moment, often before they notice that they lost it.
    """
    ends = [one.end for one in ranks if one.end is not None]
    bad = [end for end in ends if end.how != GOODBYE]
    if code == 0 or not bad or any(end.detail != "SIGTERM" or end.is_asked for end in bad):
        return ranks
    sent = min(end.time for end in bad)
    left = [end for end in ends if end.detail == EXIT and end.how == GOODBYE and abs(sent - end.time) < TOGETHER_S]
    if not left:
        return ranks
    first = min(left, key=lambda end: end.time)
    named = msgspec.structs.replace(first, how=EXCEPTION, detail=LEFT_EARLY, cause=OWN)
    return tuple(msgspec.structs.replace(one, end=named) if one.end is first else one for one in ranks)


def size(num_bytes: int) -> str:
    """Return a number of bytes with its binary unit: `512 MiB`, `12.3 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes / 1024:.3g} KiB"


def _after_asking(end: RankEnd, asked: str) -> RankEnd:
    """Return an end as what it follows from: a signal that was sent to the whole command, which asked it to end."""
    if not asked or end.is_asked:
        return end
    detail = asked if end.detail == asked else f"{asked}, then {end.detail}"
    return msgspec.structs.replace(end, how=SIGNAL, detail=detail, cause=FOLLOWS, is_asked=True)


def end_by_words(bye: Bye, time: float, status: int | None) -> RankEnd:
    """Return how a rank ended by what it said itself. time: of its goodbye, seconds since the epoch. status: of its process,
    as `wait` has it; None: not known."""
    if bye.signal:
        # Its handler saved what there was to save, where it says 0.
        is_bad = bye.reason == "exception" or bye.code != 0
        end = RankEnd(how=GOODBYE, detail=bye.signal, time=time, step=bye.step)
        return _end_by_signal(bye.signal, time, bye.step) if is_bad else end
    if bye.reason == "interrupted":
        return _end_by_signal("SIGINT", time, bye.step)
    if bye.reason == "exception":
        if bye.error.endswith(_ASKED_ERRORS):
            return _end_by_signal("SIGTERM", time, bye.step)
        text = f"{bye.error}: {bye.message}" if bye.message else bye.error
        how = OUT_OF_MEMORY if bye.is_memory else EXCEPTION
        cause = FOLLOWS if bye.is_lost_peer and not bye.is_memory else OWN
        return RankEnd(how=how, detail=text, time=time, step=bye.step, cause=cause)
    # A crash while Python takes itself down, behind a goodbye, takes nothing from a run that ended well.
    code = bye.code or (status_words(status)[1] if status is not None else 0)
    return _end_by_code(code, bye.reason, time, bye.step)


def _end_by_code(code: int, reason: str, time: float, step: int) -> RankEnd:
    if code == 0:
        return RankEnd(how=GOODBYE, detail=reason or "exit code 0", time=time, step=step)
    if code > 128:
        try:
            return _end_by_signal(signal.Signals(code - 128).name, time, step)
        except ValueError:
            pass
    return RankEnd(how=EXCEPTION, detail=f"exit code {code}", time=time, step=step, cause=OWN)


def _end_by_signal(name: str, time: float, step: int) -> RankEnd:
    # A rank that aborts is often the collective library of one that waited for another in vain.
    cause = FOLLOWS if name == "SIGTERM" else OWN if name in CRASHES and name != "SIGABRT" else UNEXPLAINED
    return RankEnd(how=SIGNAL, detail=name, time=time, step=step, cause=cause, is_asked=name in _ASKED)


def is_settled(ranks: Sequence[RankFacts], now: float) -> bool:
    """Tell whether the first end is so old that those which follow from it are known; also where there is none."""
    ended = [one for one in ranks if one.end is not None]
    if not ended:
        return True
    first, last = min(one.ended_at for one in ended), max(one.ended_at for one in ended)
    is_bad = any(one.end is not None and one.end.how != GOODBYE for one in ended)
    is_leaving = any(one.end is not None and one.end.how == GOODBYE and one.process_state for one in ended)
    if is_bad and is_leaving and now - first < LEAVE_S:
        return False
    return now - first >= SETTLE_S and now - last >= READ_S


def run_end(ranks: Sequence[RankFacts], wall: float, *, is_restarted: bool = False) -> RunEnd | None:
    """Return how the run of these ranks ended; None: a rank runs, or may run.

    wall: seconds since the epoch, now. is_restarted: a newer attempt has begun.
    """
    by_rank = {one.rank: one.end for one in ranks if one.end is not None and not one.end.is_at_prompt}
    if not by_rank or len(by_rank) < len(ranks):
        return None
    ends = list(by_rank.values())
    last = max(end.time for end in ends)
    late_s = 0.0 if any(one.is_live for one in ranks) else max(0.0, wall - last)
    bad = [end for end in ends if end.how != GOODBYE]
    if not bad:
        details = sorted({end.detail for end in ends if end.detail})
        step = max(end.step for end in ends)
        return RunEnd(
            how=GOODBYE, step=step, detail=", ".join(details), time=last, found_late_s=late_s,
            is_restarted=is_restarted, is_between=all(end.is_between for end in ends if end.step == step),
        )  # fmt: skip
    first, end = first_to_go(by_rank)
    if end is not None:
        return RunEnd(
            how=end.how, rank=first, step=end.step, detail=end.detail, time=end.time, found_late_s=late_s,
            is_asked=end.is_asked, is_restarted=is_restarted, has_memory=end.has_memory, is_between=end.is_between,
            ignored_sigterm=end.ignored_sigterm,
        )  # fmt: skip
    earliest = min(bad, key=lambda end: end.time)
    if was_asked(ends):
        return RunEnd(
            how=SIGNAL, step=earliest.step, detail="SIGTERM", time=earliest.time, found_late_s=late_s, is_asked=True,
            is_restarted=is_restarted, is_between=earliest.is_between,
        )  # fmt: skip
    is_asked = any(end.is_asked for end in bad)
    # Who lost others says nothing of how those went; and who saw them go, and followed without a word, was sent what they
    # were sent.
    killed = [] if is_asked else [end for end in bad if end.cause != FOLLOWS]
    reported = [end for end in bad if end.detail == "SIGTERM" or end.cause != FOLLOWS or end.how != SIGNAL]
    bad = killed or reported or bad
    hows = {(end.how, end.detail) for end in bad if end.is_asked or not is_asked}
    how, detail = earliest.how, earliest.detail
    if len(hows) == 1:
        how, detail = next(iter(hows))
    elif is_asked:
        how, detail = sorted(hows)[0]
    else:
        spread_s = max(last - earliest.time, 0.0)
        together = ALL_TOGETHER if spread_s < CLEAR_S and len(bad) == len(ends) else "without a word"
        detail = f"{together}, {len(bad)} ranks within {spread_s:.2g} s of one another"
    return RunEnd(
        how=how, step=earliest.step, detail=detail, time=earliest.time, found_late_s=late_s,
        is_asked=is_asked or all(end.detail == "SIGTERM" for end in bad), is_restarted=is_restarted,
        has_memory=all(end.has_memory for end in bad), ignored_sigterm=all(end.ignored_sigterm for end in bad),
    )  # fmt: skip
