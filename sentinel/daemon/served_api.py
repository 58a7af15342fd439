"""What can be asked of the daemon from other threads: reads published state and journals, never the judging itself."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sentinel.control.acts import ActRequest, leave_act
from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.daemon_health import DaemonHealth
from sentinel.daemon.history_api import HistoryQueries, HistoryRequest
from sentinel.daemon.http.daemon_api import ShownIncident, Unavailable, UnknownRun
from sentinel.daemon.journal_api import JournalQueries
from sentinel.daemon.meters import DaemonMeters
from sentinel.daemon.notifying import Notifying
from sentinel.daemon.pipeline_api import PipelineQueries, PipelineRequest
from sentinel.daemon.rules_api import RuleQueries, WhatIfRequest
from sentinel.daemon.run_status import RunChanges
from sentinel.daemon.series_api import SeriesQueries, SeriesRequest
from sentinel.daemon.serving import ServedRun
from sentinel.daemon.trace_api import TraceRequest, traced
from sentinel.errors import StoreError
from sentinel.judge.packs import RulePacks
from sentinel.report.links import NO_LINKS
from sentinel.report.metrics import RELOAD_OUTCOMES, MetricsSnapshot, MirrorCounts
from sentinel.report.prometheus_page import MetricsCollector
from sentinel.report.silences import Silence, SilenceBook, SilenceRequest, Silences

RELOAD_WAIT_S = 10.0

_Written = TypeVar("_Written")


class ServedApi:
    """The `DaemonApi` of HTTP over the runs that are served. The loop calls `publish`; any thread calls the rest."""

    def __init__(
        self,
        packs: RulePacks,
        config: ConfigInForce,
        notifying: Notifying,
        silences: Silences,
        ask_reload: Callable[[], None],
        meters: DaemonMeters | None = None,
    ) -> None:
        self.state = DaemonHealth(packs, config, notifying, silences)
        self._meters = meters or DaemonMeters()
        self.certificate_expires: float | None = None
        self.links = NO_LINKS
        """Runbook and dashboard, as messages have them."""
        self._packs = packs
        self._config = config
        self._notifying = notifying
        self._silences = silences
        self._ask_reload = ask_reload
        self._journals = JournalQueries()
        self._started = time.time()
        self._reload_done = threading.Event()
        self._collector = MetricsCollector(self._snapshot)
        self._series, self._history, self._pipeline = SeriesQueries(), HistoryQueries(), PipelineQueries()
        self._rules = RuleQueries(packs)

    # Called by the loop.

    def publish(
        self, runs: Iterable[ServedRun], problems: Mapping[str, str], held: Mapping[str, str], *, is_caught_up: bool
    ) -> None:
        """Say which runs are served and what is wrong; called every turn of the loop.

        held: run -> the process that serves it in our place.
        """
        self.state.publish({run.name: run for run in runs}, problems, held, is_caught_up=is_caught_up)

    def reloaded(self) -> None:
        """Say that a reload was done, whatever came of it."""
        self._reload_done.set()

    # Called from anywhere: `DaemonApi`.

    def health(self) -> dict[str, Any]:
        """Return the status and every problem in words."""
        return self.state.describe()

    def is_ready(self) -> bool:
        """Return whether everything there was at the start has been judged, nothing stops, and this is no standby."""
        return self.state.is_ready

    def runs(self) -> list[dict[str, Any]]:
        """Return one object a run."""
        return [run.status.describe() for _, run in sorted(self._runs.items())]

    def anomalies(self, run: str | None, *, limit: int, before: int | None, step: int | None) -> list[bytes]:
        """Return the newest anomalies as lines of JSON, newest first; of all runs when `run` is None."""
        return self._journals.anomalies(self._chosen(run), limit=limit, before=before, step=step)

    def incidents(self, run: str | None, *, limit: int, is_open: bool) -> list[bytes]:
        """Return the newest revision of each incident as lines of JSON."""
        return self._journals.incidents(self._chosen(run), limit=limit, is_open=is_open)

    def incident(self, run: str | None, incident: str) -> ShownIncident:
        """Return an incident, open or over, from the journal of its run."""
        where = f'run "{run[:200]}"' if run is not None else "the runs that are served here"
        return self._journals.incident(self._chosen(run), incident, where, self.links)

    def series(self, request: SeriesRequest) -> dict[str, Any]:
        """Return values of tensors, groups of them or scalars: see `SeriesQueries`."""
        return self._series.answer(self._chosen(request.run), request)

    def history(self, request: HistoryRequest) -> dict[str, Any]:
        """Return what the history of a run holds."""
        return self._history.held(self._run_dir(request.run), request)

    def history_series(self, request: HistoryRequest) -> dict[str, Any]:
        """Return single series over steps, out of the history."""
        return self._history.series(self._run_dir(request.run), request)

    def heatmap(self, request: HistoryRequest) -> dict[str, Any]:
        """Return one statistic of many tensors over steps, out of the history."""
        return self._history.heatmap(self._run_dir(request.run), request)

    def traces(self, request: TraceRequest) -> dict[str, Any]:
        """Return pictures of tensors that the ranks of a run have made."""
        return traced(self._run_dir(request.run), request)

    def vectors(self, request: HistoryRequest) -> dict[str, Any]:
        """Return the value of each expert, or of each head, over steps, out of the history."""
        return self._history.vectors(self._run_dir(request.run), request)

    def pipeline(self, request: PipelineRequest) -> dict[str, Any]:
        """Return a step as its ranks ran it, with what was found in it in the causal order."""
        [one] = self._chosen(request.run)
        return self._pipeline.answer(one, request, one.status.metrics().judged_step)

    def changes(self) -> dict[str, RunChanges]:
        """Return run -> numbers that are others once something of it is."""
        return {name: run.status.changes() for name, run in self._runs.items()}

    def divergence(self, runs: Sequence[str], statistic: str) -> dict[str, Any]:
        """Return where two runs diverge, out of their histories."""
        return self._history.divergence({run: self._run_dir(run) for run in runs}, statistic)

    def rules(self, run: str) -> dict[str, Any]:
        """Return the rules in force, and what each said of a run."""
        [one] = self._chosen(run)
        return self._rules.rules(one)

    def what_if(self, request: WhatIfRequest) -> dict[str, Any]:
        """Return what a rule with other numbers would have said of a run."""
        [one] = self._chosen(request.run)
        return self._rules.what_if(one, request, self._config.config.judging)

    def marks(self, run: str) -> list[dict[str, Any]]:
        """Return what happened to a run beside its values, each at its step."""
        [one] = self._chosen(run)
        marks: list[dict[str, Any]] = msgspec.to_builtins(one.marks())
        return marks

    def audit(self, run: str | None, *, limit: int) -> list[dict[str, Any]]:
        """Return the newest entries of the audit, newest first."""
        return self._journals.audit(self._chosen(run), limit=limit)

    def control(self, run: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do `enable` or `disable` in a run."""
        [one] = self._chosen(run)
        try:
            return one.commanding.order(action, request, time.time())
        except (StoreError, sqlite3.Error) as error:
            raise Unavailable(f"run {run}: the order may not have been given, nothing can be written: {error}") from error

    def act(self, run: str, request: ActRequest) -> dict[str, Any]:
        """Leave what a person does about an incident of a run for its judge."""
        [one] = self._chosen(run)
        act = request.begun(time.time())
        try:
            leave_act(one.paths.run_dir, act)
        except OSError as error:
            raise Unavailable(f"run {run}: nothing can be written: {error.strerror or error}") from error
        return {"id": act.id, "incident": act.incident, "act": act.act, "who": act.who}

    def silences(self) -> list[Silence]:
        """Return the silences that hold now."""
        return self._silences.active(time.time())

    def silence(self, request: SilenceRequest) -> Silence:
        """Begin a silence, for every run that is served."""
        now = time.time()
        silence = request.begun(now)
        self._write_silences(lambda book: book.add(silence, now))
        return silence

    def end_silence(self, wanted: str, who: str) -> Silence:
        """End a silence of the daemon, or of one of its runs."""
        now = time.time()
        books = [book for book in self._silences.books if any(one.id == wanted for one in book.active(now))]
        return self._write_silences(lambda book: book.end(wanted, who, now), books)

    def _write_silences(self, write: Callable[[SilenceBook], _Written], books: Sequence[SilenceBook] = ()) -> _Written:
        try:
            return write((books or self._silences.books)[0])
        except OSError as error:
            raise Unavailable(f"silences: nothing can be written: {error.strerror or error}") from error

    def reload(self) -> dict[str, Any]:
        """Have the loop read the configuration and the rule packs again, and wait for the outcome."""
        self._reload_done.clear()
        self._ask_reload()
        if not self._reload_done.wait(RELOAD_WAIT_S):
            return {"outcome": "failed", "problem": f"the loop did not come round within {RELOAD_WAIT_S:g} s"}
        problem = "; ".join(filter(None, (self._config.problem, self._packs.problem)))
        return {
            "outcome": "failed" if problem else "ok",
            "problem": problem or None,
            "pack_hash": self._packs.pack_hash,
            "config_hash": self._config.config_hash,
        }

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return (body, content type) of a scrape."""
        return self._collector.render(accept)

    # Inside.

    @property
    def _runs(self) -> Mapping[str, ServedRun]:
        return self.state.runs

    def _chosen(self, run: str | None) -> list[ServedRun]:
        if run is None:
            return [one for _, one in sorted(self._runs.items())]
        if run not in self._runs:
            known = ", ".join(sorted(self._runs)[:20]) or "none"
            raise UnknownRun(f'run "{run[:200]}": expected one that is served here; known: {known}')
        return [self._runs[run]]

    def _run_dir(self, run: str) -> Path:
        [one] = self._chosen(run)
        return one.paths.run_dir

    def _snapshot(self) -> MetricsSnapshot:
        workers, packs, config, beat = self._notifying.notifier.workers, self._packs, self._config, self.state.heartbeat
        stages = self._meters.stages.read()
        stages["notify"] = (
            sum(worker.sending_s for worker in workers.values()), sum(worker.num_requests for worker in workers.values())
        )  # fmt: skip
        return MetricsSnapshot(
            runs=tuple(run.status.metrics() for run in self._runs.values()),
            start_time=self._started,
            is_standby=self.state.is_standby,
            num_problems=len(self.state.problems()),
            sinks=tuple(workers),
            notifications=self._notifying.notifier.counts(),
            notifications_pending=self._notifying.notifier.pending(),
            notifications_withheld=self._notifying.notifier.withheld(),
            keep_alives={name: worker.num_keep_alives for name, worker in workers.items()},
            delivery_latency={name: worker.latency.read() for name, worker in workers.items()},
            reloads={
                (what, outcome): counts[outcome]
                for what, counts in (("rules", packs.counts), ("config", config.counts))
                for outcome in RELOAD_OUTCOMES
            },
            reload_times={"rules": packs.loaded_at or self._started, "config": config.loaded_at},
            reload_failures=frozenset(what for what, one in (("rules", packs), ("config", config)) if one.problem),
            config_hashes={"rules": packs.pack_hash, "config": config.config_hash},
            mirrors=_of_all_runs(self._runs.values()),
            stages=stages,
            judge_lag=self._meters.judge_lag.read(),
            disks=self._meters.disks,
            heartbeats=None if beat is None else dict(beat.counts),
            heartbeat_time=None if beat is None else beat.last_taken,
            certificate_expiry_time=self.certificate_expires,
        )


def _of_all_runs(runs: Iterable[ServedRun]) -> dict[str, MirrorCounts]:
    found: dict[str, MirrorCounts] = {}
    for run in runs:
        for name, counts in run.mirrors.counts.items():
            found[name] = counts.plus(found.get(name, MirrorCounts()))
    return found
