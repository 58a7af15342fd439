"""LoneRuns: judges what the ranks of one machine do while no join answers it, so that not everything waits for that.

A join that comes back judges all of it, with the ranks of all machines, and tells people: what is found here is for the log
of the machine, and for `sentinel fleet status`. One machine's ranks may hold a part of a tensor; a NaN is one there too, and
a part has a past of its own. Where a NaN was born only all ranks tell: of some it is said where they saw it first.
Who is silent or hangs only the others tell, and is not judged here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sentinel.incident import Incident
from sentinel.incidents.titles import seen_words
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.steps import StepAssembler
from sentinel.judge.judge import Judge
from sentinel.messages import EndStep
from sentinel.rules.language.schema import Pack

log = logging.getLogger("sentinel.fleet")

LOOK_S = 2.0
"""Most seconds of one look at one run: of what was written while nobody looked the rest is for the next."""
MAX_FOUND = 8
"""Most incidents of a run that are kept to be said; of a storm the first tell where it began."""

SEEN_BY = "of this machine's ranks"

Committed = Mapping[str, tuple[int, int]]
"""Folder of a spool -> (file index, offset) behind what the join has judged."""


class LoneRuns:
    """Not for several threads at once. Writes nothing."""

    def __init__(self, directory: Path, pack: Pack, clock: Callable[[], float] = time.monotonic) -> None:
        """directory: of the runs of this machine. pack: the rules of the join."""
        self._directory, self._pack, self._clock = directory, pack, clock
        self._runs: dict[str, _LoneRun] = {}

    def look(self, unanswered: Mapping[str, Committed | None]) -> dict[str, tuple[str, ...]]:
        """Judge what is new of runs for which no join answers; return run -> what was found since none does, in words.

        Of a run for which one answers again nothing is kept. unanswered: run -> what its join has judged; None: nothing is
        written in it just now, and what was found stays.
        """
        for name in self._runs.keys() - unanswered.keys():
            del self._runs[name]
        for name, committed in unanswered.items():
            if committed is None:
                continue
            if name not in self._runs:
                self._runs[name] = _LoneRun(self._directory / name, self._pack, committed)
            run = self._runs[name]
            try:
                run.look(self._clock)
            except Exception:
                # Others are judged on, and what was found stays.
                log.exception("run %s: what it does is not judged here any more", name)
                run.is_given_up = True
        return {name: run.found for name, run in self._runs.items()}


class _LoneRun:
    def __init__(self, run_dir: Path, pack: Pack, committed: Committed) -> None:
        self._committed = dict(committed)
        self._follower = RunFollower(
            run_dir, on_problem=_nobody, first_file=lambda folder: self._committed.get(folder, (0, 0))[0]
        )
        self._assembler = StepAssembler(run_dir.name)
        self._judge = Judge(pack)
        self._judged = (-1, -1)
        """(attempt, step) up to which the join has judged: these steps are a past, and no news."""
        self._found: dict[str, str] = {}
        """Id of an incident -> what is said of it."""
        self.is_given_up = False

    @property
    def found(self) -> tuple[str, ...]:
        """What was found so far, in words."""
        return tuple(self._found.values())

    def look(self, clock: Callable[[], float]) -> None:
        """Judge what is new, for a while."""
        begun, has_more = clock(), not self.is_given_up
        while has_more and clock() - begun < LOOK_S:
            # Ranks are read one after the other: what one wrote meanwhile makes nobody late.
            attempt, settled_step = self._assembler.attempt, self._assembler.newest_step
            records = self._follower.poll()
            for record in records:
                self._assembler.take((record,), clock())
                self._note_judged(record)
            settled_step = settled_step if self._assembler.attempt == attempt else -1
            for view in self._assembler.close(clock(), self._follower.behind, settled_step=settled_step):
                if isinstance(view, ClosedStep):
                    self._take(view)
            has_more = bool(records)

    def _note_judged(self, record: SpoolRecord) -> None:
        """Note a step that the join has judged, by the attempt that it is of here: the launcher may count none."""
        incarnation = record.incarnation
        if isinstance(record.message, EndStep) and record.begin < self._committed.get(incarnation.folder, (0, 0)):
            attempt = self._assembler.attempts.attempt_of(incarnation.id)
            if attempt is not None:
                self._judged = max(self._judged, (attempt, record.frame.header.step))

    def _take(self, view: ClosedStep) -> None:
        for incident in self._judge.judge(view.decision, view).incidents:
            is_news = (view.attempt, incident.opened_step) > self._judged
            if is_news and incident.paged and incident.nature != "liveness" and len(self._found) < MAX_FOUND:
                self._found.setdefault(incident.id, f"{incident.severity.value}: {_title(incident, view)}")


def _title(incident: Incident, view: ClosedStep) -> str:
    """Return what is said of an incident: where it was born this machine cannot tell that has some of the ranks alone."""
    is_whole = len(view.places) >= max((place.world_size for place in view.places.values()), default=0)
    if incident.nature != "nonfinite" or is_whole:
        return incident.title
    return f"{seen_words(incident.title, SEEN_BY)}; other machines may have had it before"


def _nobody(problem: str) -> None:
    """What is wrong with a spool the join says, once there is one."""
