"""RunNotices: what is wrong with a run, and what people should know of it: in the log once, in health while it lasts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sentinel.daemon.absent_ranks import MISSING_FACT, PARTIAL_FACT, MissingRanks, PartialSteps
from sentinel.daemon.gauges import WATCHED_FACT, RunGauges
from sentinel.daemon.notes import Notes, note_lines
from sentinel.ingest.incarnation import Incarnation
from sentinel.ingest.run_losses import RunLosses
from sentinel.report.files import json_line
from sentinel.step_view import StepView
from sentinel.store.journal import Journal

log = logging.getLogger("sentinel.serving")

FAILURES_FACT = "failures"
"""The journal's word for which rules are off because the code of others failed, and why: a JSON list."""


class RunNotices:
    """Kept in the journal where `sentinel status` and the report say it too."""

    def __init__(self, name: str, journal: Journal) -> None:
        self._name, self._journal = name, journal
        self._notes = Notes.recalled(journal)
        self._partial, self._missing = PartialSteps.recalled(journal), MissingRanks.recalled(journal)
        self._problems: dict[str, str] = {}
        self._blind: list[str] = []
        self._failures: list[str] = []
        self._replicas = ""
        self._watched: dict[str, int] = {}

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        return list(self._problems.values())

    @property
    def notes(self) -> list[str]:
        """What ranks said of themselves, in words, a line each."""
        return note_lines(self._notes)

    def add_problem(self, problem: str) -> None:
        """Take in what makes a rank unreadable or a rule blind."""
        log.warning("run %s: %s", self._name, problem)
        self._problems[problem] = problem

    def take_step(self, view: StepView) -> None:
        """Take in what ranks said in one step, and whose part of it is not there."""
        self._notes.take(view)
        if view.decision is not None:
            self._partial.take(view.decision)

    def keep(self, gauges: RunGauges, blind: Sequence[str], failures: Sequence[str], losses: RunLosses) -> None:
        """Write down what has changed, once a batch of steps.

        blind: what rules cannot judge, in words. failures: those of it that the code of others is to blame for.
        """
        self._keep_watched(gauges)
        self._take_blind(list(blind))
        if list(failures) != self._failures:
            self._failures = list(failures)
            self._remember(FAILURES_FACT, json_line(self._failures).decode())
        self.keep_losses(losses)
        self._notes.write(self._journal)

    def keep_losses(self, losses: RunLosses) -> None:
        """Write down what was lost before it could be judged."""
        if losses.is_complete:
            return
        if "losses" not in self._problems:
            log.warning("run %s: %s", self._name, losses.words)
        self._problems["losses"] = losses.words
        self._remember("losses", msgspec.json.encode(losses).decode())

    def keep_partial(self, num_rows_late: Mapping[int, int], known: Iterable[Incarnation]) -> None:
        """Write down what was judged without.

        num_rows_late: rank -> rows that came too late. known: processes of the run.
        """
        self._partial.take_late(num_rows_late)
        if self._partial.num_steps or self._partial.num_rows_late:
            self._partial.name_hosts(known)
            self._remember(PARTIAL_FACT, msgspec.json.encode(self._partial).decode())

    def keep_missing(self, missing: MissingRanks) -> None:
        """Write down who is not heard while others are."""
        if missing != self._missing:
            self._missing = missing
            self._remember(MISSING_FACT, msgspec.json.encode(missing).decode())

    def _keep_watched(self, gauges: RunGauges) -> None:
        """Write down how much is watched, and how many weights have copies to compare."""
        if gauges.watched != self._watched:
            self._watched = gauges.watched
            self._journal.values.put(WATCHED_FACT, json_line(self._watched).decode())
        words = gauges.replica_words
        if words != self._replicas:
            self._replicas = words
            if self._remember("replicas", words):
                log.info("run %s: replicas: %s", self._name, words)

    def _take_blind(self, blind: list[str]) -> None:
        """Say which rules are blind: while they are."""
        for problem in self._blind:
            if problem not in blind:
                self._problems.pop(problem, None)
        for problem in blind:
            if problem not in self._blind:
                self.add_problem(problem)
        self._blind = blind

    def _remember(self, key: str, value: str) -> bool:
        """Keep a fact; False: the journal has it."""
        if value == self._journal.values.get(key):
            return False
        self._journal.values.put(key, value)
        return True
