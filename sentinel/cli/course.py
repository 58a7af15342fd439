"""How much of a run was watched and how it ended, in the words of `sentinel status` and of the end of `sentinel run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sentinel.daemon.gauges import WATCHED_FACT
from sentinel.decision import STEP, TICK
from sentinel.printable import printable
from sentinel.run_end import GOODBYE, RunEnd, end_words
from sentinel.store.journal import Journal
from sentinel.store.run_paths import runs_in

MAX_TICKS = 256
"""Newest ticks among which the end of a run is looked for; a bound on time: few ticks come after it."""
NOTHING = "nothing was watched"


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """A run as a whole, from its journal: how much was judged, and how it ended."""

    num_steps: int = 0
    """Steps judged, all attempts."""
    num_ranks: int = 0
    """Ranks of the newest layout."""
    num_tensors: int = 0
    ended: RunEnd | None = None
    """How the newest attempt ended; None: it goes on, or that is not known."""

    @property
    def is_bad(self) -> bool:
        """Whether it ended otherwise than in order, and not by hand."""
        return self.ended is not None and self.ended.how != GOODBYE and self.ended.detail != "SIGINT"

    @property
    def lines(self) -> list[str]:
        """How it ended, and how much was watched, for people."""
        lines = []
        if self.ended is not None:
            who = "every rank" if self.ended.rank is None else f"rank {self.ended.rank}"
            first = "" if self.ended.rank is None or self.num_ranks == 1 else "; it was the first to go"
            at = f", {'after' if self.ended.is_between else 'in'} step {self.ended.step}," if self.ended.step >= 0 else ""
            lines.append(f"ended: {who}{at} {end_words(self.ended)}{first}")
        if self.num_steps:
            counts = ((self.num_steps, "step"), (self.num_ranks, "rank"), (self.num_tensors, "tensor"))
            lines.append("watched: " + ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts))
        return lines


class _DecisionTime(msgspec.Struct):
    attempt: int
    time: float = 0.0
    ended: RunEnd | None = None


class _WatchedCounts(msgspec.Struct):
    ranks: int = 0
    tensors: int = 0


def course_of(journal: Journal) -> Course:
    """Return the course of the run of a journal."""
    watched = msgspec.json.decode(journal.values.get(WATCHED_FACT) or "{}", type=_WatchedCounts)
    steps = [msgspec.msgpack.decode(body, type=_DecisionTime) for body in journal.newest_decisions(STEP, 1)]
    ticks = (msgspec.msgpack.decode(body, type=_DecisionTime) for body in journal.newest_decisions(TICK, MAX_TICKS))
    newest = next((one for one in ticks if one.ended is not None), None)
    # What the ranks wrote before their end may be decided behind it.
    goes_on = newest is None or any(one.attempt >= newest.attempt and one.time > newest.time for one in steps)
    return Course(
        num_steps=journal.num_steps, num_ranks=watched.ranks, num_tensors=watched.tensors,
        ended=None if newest is None or goes_on else newest.ended,
    )  # fmt: skip


def course_report(course: Course) -> dict[str, Any]:
    """Return the entries of a report, JSON."""
    return {
        "num_steps": course.num_steps, "num_ranks": course.num_ranks, "num_tensors": course.num_tensors,
        "ended": None if course.ended is None else msgspec.to_builtins(course.ended),
    }  # fmt: skip


def course_in(report: dict[str, Any]) -> Course:
    """Return the course that the entries of a report have; an empty one where it has none."""
    return msgspec.convert({name: report[name] for name in Course.__struct_fields__ if name in report}, Course)


def why_nothing(run_dir: Path, began: float) -> str:
    """Return in words that no rank of a run ever attached, and what to do; empty where one did.

    began: seconds since the epoch; what other runs wrote since may be this one under another name.
    """
    if any((run_dir / "spool").glob("r*")):
        return ""
    elsewhere = [
        one
        for one in runs_in(run_dir.parent)
        if one.name != run_dir.name
        and any(incarnation.stat().st_mtime >= began for incarnation in (one / "spool").glob("r*"))
    ]
    if elsewhere:
        names = ", ".join(printable(one.name) for one in elsewhere[:4])
        mend = f"leave the name out of its config, or: sentinel serve {elsewhere[0]}"
        return f"{NOTHING} here: the command's run is {names}; {mend}"
    return (
        f"{NOTHING}: the command never attached; call sentinel.attach(model, optimizer) in the trainer, with this Sentinel "
        "installed where it runs and without SENTINEL_DISABLE"
    )
