"""RunStatus: where a run stands, for whoever asks from another thread: what is handed out is replaced, never changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from sentinel.daemon.commanding import Commanding
from sentinel.daemon.commits import StepCommits
from sentinel.daemon.gauges import RunGauges, progress_of
from sentinel.daemon.judged_by_rule import JudgedByRule
from sentinel.daemon.run_files import RunFiles
from sentinel.daemon.run_history import RunHistory
from sentinel.daemon.run_mirrors import RunMirrors
from sentinel.daemon.run_notices import RunNotices
from sentinel.daemon.snapshots import Acknowledgement
from sentinel.daemon.spool_watch import SpoolWatch
from sentinel.daemon.stages import RunStages
from sentinel.judge.judge import Judge
from sentinel.report.metrics import RunMetrics
from sentinel.store.run_paths import RunPaths
from sentinel.store.write_clock import WriteClock

HEARD_S = 5.0
"""Seconds in which it makes no difference when a run was last heard."""


class RunChanges(NamedTuple):
    """Numbers that are others once something of a run is."""

    progress: tuple[int | None, ...]
    """Of its steps and ranks, and of its history."""
    found: tuple[int, ...]
    """Of its anomalies, incidents and problems."""


class RunStatus:
    """Gathers what the parts of a served run say of themselves."""

    def __init__(
        self,
        paths: RunPaths,
        gauges: RunGauges,
        notices: RunNotices,
        commits: StepCommits,
        commanding: Commanding,
        files: RunFiles,
        acknowledgement: Acknowledgement,
        spool_watch: SpoolWatch,
        journal_writes: WriteClock,
        history: RunHistory,
        mirrors: RunMirrors,
    ) -> None:
        self.writes = (journal_writes, files.writes)
        """How long writes take: of the journal, and of the files."""
        self._paths, self._gauges, self._notices, self._commits = paths, gauges, notices, commits
        self._commanding, self._files = commanding, files
        self._acknowledgement, self._spool_watch = acknowledgement, spool_watch
        self._history, self._mirrors = history, mirrors
        self._published = gauges.metrics
        self._judged = JudgedByRule()

    def publish(self, stages: RunStages, now: float, heard: Collection[int] = ()) -> None:
        """Have the newest gauges handed out. Called by the loop.

        now: seconds since the epoch. heard: ranks that write now.
        """
        self._gauges.take_progress(stages.follower, stages.assembler)
        metrics, tracker, commanding = self._gauges.metrics, stages.watch.tracker, self._commanding
        stale = stages.judge.stale_ranks.intersection(heard)
        late = set(self._gauges.late).intersection(heard) - stale
        metrics.ranks = {
            "live": len(heard) - len(stale) - len(late), "late": len(late), "stale": len(stale),
            "missing": max(metrics.num_ranks_expected - len(heard), 0),
        }  # fmt: skip
        received_at = tracker.received_at()
        metrics.quietest_received_time = None if received_at is None else now - (tracker.now - received_at)
        metrics.commands = commanding.counts()
        metrics.config_edits = commanding.edits()
        metrics.is_monitoring = commanding.is_monitoring()
        metrics.monitoring_acked_step = commanding.monitoring_acked_step
        metrics.num_file_failures, metrics.num_file_lines_pending = self._files.num_failures, self._files.num_pending
        metrics.num_history_missing = self._history.num_missing
        self._published = msgspec.structs.replace(metrics)

    def metrics(self) -> RunMetrics:
        """Return the newest gauges."""
        return self._published

    def take_judge(self, judge: Judge) -> None:
        """Take in what each rule has looked at; called by the loop behind a batch of steps."""
        self._judged = JudgedByRule.of(judge)

    def judged_by_rule(self) -> JudgedByRule:
        """Return what each rule has looked at so far."""
        return self._judged

    def problems(self) -> list[str]:
        """Return what is wrong with the run, in words."""
        others = (
            self._acknowledgement.problem, self._spool_watch.problem, *self._files.problems, self._commanding.problem,
            self._commanding.config_problem, self._history.problem,
        )  # fmt: skip
        return [*self._notices.problems, *filter(None, (*others, self.slow_disk)), *self._mirrors.problems]

    @property
    def slow_disk(self) -> str:
        """That a disk of the run answers slowly, in words, also while it does not answer; empty: it answers in time."""
        return next((one.problem for one in self.writes if one.problem), "")

    def changes(self) -> RunChanges:
        """Return what tells whether anything of the run is new. Two that are equal are of one state."""
        metrics = self._published
        heard = round((metrics.last_record_time or 0.0) / HEARD_S)
        progress = (
            metrics.attempt,
            metrics.newest_step,
            metrics.judged_step,
            heard,
            self._history.num_bytes,
            *metrics.ranks.values(),
        )
        found = (self._commits.num_onsets, self._commits.num_revisions, len(self.problems()), len(self._notices.notes))
        return RunChanges(progress=progress, found=found)

    def describe(self) -> dict[str, Any]:
        """Return what `/api/v1/runs` says of the run."""
        metrics = self._published
        return {
            "run": self._paths.name,
            "directory": str(self._paths.run_dir),
            **progress_of(metrics),
            "num_anomalies": self._commits.num_onsets,
            "num_rows_lost": metrics.num_rows_dropped,
            "num_steps_lost": metrics.num_steps_dropped,
            "is_complete": not metrics.num_rows_dropped and not metrics.num_steps_dropped,
            "replicas": self._gauges.replica_words,
            "history_bytes": self._history.num_bytes,
            "mirrors": {name: msgspec.structs.asdict(one) for name, one in self._mirrors.counts.items()},
            **self._commanding.describe(),
            "problems": self.problems(),
            "notes": self._notices.notes,
        }
