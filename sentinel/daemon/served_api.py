"""What can be asked of the daemon from other threads: reads published state and journals, never the judging itself."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sentinel.control.acts import ActRequest, leave_act
from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.daemon_health import DaemonHealth
from sentinel.daemon.http.daemon_api import ShownIncident, Unavailable
from sentinel.daemon.journal_api import JournalQueries
from sentinel.daemon.meters import DaemonMeters
from sentinel.daemon.notifying import Notifying
from sentinel.daemon.run_status import RunChanges
from sentinel.daemon.served_questions import ServedQuestions, chosen
from sentinel.daemon.serving import ServedRun
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
        self.questions = ServedQuestions(self.state, packs, config)

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
        return [run.status.describe() for _, run in sorted(self.state.runs.items())]

    def anomalies(self, run: str | None, *, limit: int, before: int | None, step: int | None) -> list[bytes]:
        """Return the newest anomalies as lines of JSON, newest first; of all runs when `run` is None."""
        return self._journals.anomalies(chosen(self.state.runs, run), limit=limit, before=before, step=step)

    def incidents(self, run: str | None, *, limit: int, is_open: bool) -> list[bytes]:
        """Return the newest revision of each incident as lines of JSON."""
        return self._journals.incidents(chosen(self.state.runs, run), limit=limit, is_open=is_open)

    def incident(self, run: str | None, incident: str) -> ShownIncident:
        """Return an incident, open or over, from the journal of its run."""
        where = f'run "{run[:200]}"' if run is not None else "the runs that are served here"
        return self._journals.incident(chosen(self.state.runs, run), incident, where, self.links)

    def changes(self) -> dict[str, RunChanges]:
        """Return run -> numbers that are others once something of it is."""
        return {name: run.status.changes() for name, run in self.state.runs.items()}

    def audit(self, run: str | None, *, limit: int) -> list[dict[str, Any]]:
        """Return the newest entries of the audit, newest first."""
        return self._journals.audit(chosen(self.state.runs, run), limit=limit)

    def control(self, run: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do `enable` or `disable` in a run."""
        [one] = chosen(self.state.runs, run)
        try:
            return one.commanding.order(action, request, time.time())
        except (StoreError, sqlite3.Error) as error:
            raise Unavailable(f"run {run}: the order may not have been given, nothing can be written: {error}") from error

    def act(self, run: str, request: ActRequest) -> dict[str, Any]:
        """Leave what a person does about an incident of a run for its judge."""
        [one] = chosen(self.state.runs, run)
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

    def _snapshot(self) -> MetricsSnapshot:
        workers, packs, config, beat = self._notifying.notifier.workers, self._packs, self._config, self.state.heartbeat
        stages = self._meters.stages.read()
        stages["notify"] = (
            sum(worker.sending_s for worker in workers.values()), sum(worker.num_requests for worker in workers.values())
        )  # fmt: skip
        return MetricsSnapshot(
            runs=tuple(run.status.metrics() for run in self.state.runs.values()),
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
            mirrors=_of_all_runs(self.state.runs.values()),
            stages=stages,
            judge_lag=self._meters.judge_lag.read(),
            disks=self._meters.disks,
            heartbeats=None if beat is None else dict(beat.counts),
            heartbeat_time=None if beat is None else beat.last_taken,
            certificate_expiry_time=self.certificate_expires,
            join=None if self.state.join_health is None else self.state.join_health(),
        )


def _of_all_runs(runs: Iterable[ServedRun]) -> dict[str, MirrorCounts]:
    found: dict[str, MirrorCounts] = {}
    for run in runs:
        for name, counts in run.mirrors.counts.items():
            found[name] = counts.plus(found.get(name, MirrorCounts()))
    return found
