"""ServedRuns: the runs that a daemon serves. Found, stood by for, taken over, let go of and tried again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from sentinel.daemon.run_turns import RunTurns
from sentinel.daemon.serving import ServedRun
from sentinel.errors import SentinelError
from sentinel.incident import Incident
from sentinel.printable import printable
from sentinel.private_files import refuse_foreign, tighten
from sentinel.store.lease_fence import FencedOff
from sentinel.store.lock import LockHeld
from sentinel.store.run_paths import RunPaths, further_runs, is_run, refuse_planted, refuse_unprintable, runs_in
from sentinel.store.run_values import RunValues
from sentinel.store.trouble import disk_trouble

log = logging.getLogger("sentinel.daemon")

RETRY_RUN_S = 5.0
"""Seconds until a run that could not be served is tried again."""

T = TypeVar("T")


class ServedRuns:
    """One run, or every run of a directory. No failure of one keeps the daemon from the others: it is let go of and said."""

    def __init__(
        self,
        directory: Path,
        state_dir: Path | None,
        turns: RunTurns,
        *,
        is_owned: bool,
        serve: Callable[[RunPaths], ServedRun],
        joined: Callable[[ServedRun], None],
        left: Callable[[ServedRun], None],
        fenced: Callable[[], None] = lambda: None,
    ) -> None:
        """state_dir: for what is judged, where that is not each run's own. is_owned: the daemon of a command, which serves
        all that the command attached and stands by for nobody. serve: opens a run. joined, left: told of each run. fenced:
        told that the journal of a run is not to be written under our epoch.
        """
        self.problems: dict[str, str] = {}
        """Run -> why it is not served."""
        self.held: dict[str, str] = {}
        """Run -> the process that serves it, which this daemon stands by for."""
        self.is_single = is_run(directory)
        self._directory, self._state_dir, self._turns, self._is_owned = directory, state_dir, turns, is_owned
        self._serve, self._joined, self._left, self._fenced = serve, joined, left, fenced
        self._runs: dict[str, ServedRun] = {}
        self._between: dict[str, list[Callable[[ServedRun], None]]] = {}
        """Run -> what is done when the turn that it is in the middle of is at its end."""
        self._retry_at: dict[str, float] = {}
        """Run -> when it is tried again, seconds since the epoch."""

    def __iter__(self) -> Iterator[ServedRun]:
        return iter(list(self._runs.values()))

    def orders_about(self, incident: Incident) -> Sequence[str]:
        """Return what was ordered because of an incident, in words. For any thread."""
        run = self._runs.get(incident.run)
        return run.commanding.orders_about(incident) if run is not None else ()

    def phases_of(self, name: str) -> Collection[str]:
        """Return what the ranks of a run are at; nothing of one that is not served. For any thread."""
        run = self._runs.get(name)
        return run.phases() if run is not None else ()

    def values_of(self, name: str) -> RunValues | None:
        """Return what the journal of a run keeps; None: it is not served. For any thread."""
        run = self._runs.get(name)
        return run.journal.values if run is not None else None

    @property
    def are_left(self) -> bool:
        """Whether runs are in the middle of a turn, and wait for rows of another machine say."""
        return any(map(self._turns.is_left, self._runs))

    def turn(self, now: Callable[[], float]) -> bool:
        """Have each run take its turn; return whether any moved. now: returns the seconds since the epoch."""

        def take(name: str, run: ServedRun) -> bool:
            has_moved = self._turns.take(name, lambda: run.turn(now()))
            while name in self._between and not self._turns.is_left(name):
                acts = self._between.pop(name)
                for act in acts:
                    act(run)
            return has_moved

        return any(has_moved for _, has_moved in self._each(take))

    def between_turns(self, act: Callable[[ServedRun], None]) -> None:
        """Have something done with each run, at once or when the turn that it is in the middle of is at its end."""

        def do(name: str, run: ServedRun) -> None:
            if self._turns.is_left(name):
                self._between.setdefault(name, []).append(act)
            else:
                act(run)

        self._each(do)

    def finish(self, now: Callable[[], float], *, is_over: bool, deadline: float) -> list[tuple[ServedRun, bool]]:
        """Have each run judge what is left, as of `ServedRun.finish`; return whether each did.

        One that still waits at the deadline is left where it is: the next daemon judges again what it has not committed.
        """

        def end(name: str, run: ServedRun) -> bool:
            return self._turns.finish(name, deadline) and run.finish(now(), is_over=is_over, deadline=deadline)

        return self._each(end)

    def _each(self, act: Callable[[str, ServedRun], T]) -> list[tuple[ServedRun, T]]:
        """Return what each run answers; one that raises, whatever it is, is let go of."""
        answers = []
        for name, run in list(self._runs.items()):
            try:
                answers.append((run, act(name, run)))
            except Exception as error:  # Whatever is wrong with one run, the others are judged on.
                self._drop(name, self._why(run.paths.run_dir, error), run)
        return answers

    def discover(self, now: float) -> None:
        """Serve what is new, and what another daemon no longer serves. now: seconds since the epoch."""
        found = [(printable(run_dir.absolute().name), run_dir) for run_dir in self._found()]
        names = {name for name, _ in found}
        self.held = {name: who for name, who in self.held.items() if name in names}
        for name, run_dir in found:
            if name in self._runs or now < self._retry_at.get(name, 0.0):
                continue
            try:
                run = self._opened(run_dir)
            except Exception as error:
                if isinstance(error, LockHeld) and not self._is_owned:
                    self._stand_by(name, error.holder)
                else:
                    self._refuse(name, self._why(run_dir, error), now)
                continue
            if who := self.held.pop(name, ""):
                fields = {"event": "run.taken_over", "run": name, "from": who}
                log.info("run %s: taken over from process %s", name, who, extra={"fields": fields})
            self.problems.pop(name, None)
            self._runs[name] = run
            self._joined(run)

    def stand_by_for(self, who: str) -> None:
        """Serve nothing new, for a process serves all runs that there are, or will be, in our place."""
        self.held = {"": who}

    def close(self) -> None:
        """Close every run, each as far as it is judged."""
        for name, run in self._runs.items():
            self._turns.abandon(name)
            run.close()

    def _found(self) -> list[Path]:
        """Return the runs to serve: of one that we own also the others that its command attached under the same name."""
        if not self.is_single:
            return runs_in(self._directory)
        if not self._is_owned or self._state_dir is not None:
            return [self._directory]
        return [self._directory, *further_runs(self._directory)]

    def _opened(self, run_dir: Path) -> ServedRun:
        refuse_unprintable(run_dir)
        refuse_planted(run_dir)
        for one in (run_dir, run_dir / "spool"):
            if one.exists():
                take_from_others(one)
        paths = RunPaths.of(run_dir, self._state_dir)
        if self._state_dir is None:
            paths.refuse_unproven()
        return self._serve(paths)

    def _stand_by(self, name: str, who: str) -> None:
        """Leave a run to the daemon that serves it, until that is gone."""
        self.problems.pop(name, None)
        if self.held.get(name) != who:
            fields = {"event": "run.standby", "run": name, "of": who}
            words = "run %s: standby of process %s, which serves it; taken over when that ends"
            log.info(words, name, who, extra={"fields": fields})
        self.held[name] = who

    def _drop(self, name: str, problem: str, run: ServedRun) -> None:
        self._turns.abandon(name)
        self._between.pop(name, None)
        del self._runs[name]
        self._left(run)
        run.close()
        self._refuse(name, problem, time.time())

    def _why(self, run_dir: Path, error: Exception) -> str:
        """Return why a run is not served, in words; what should never happen is logged with where it did."""
        if isinstance(error, FencedOff):
            self._fenced()
        if isinstance(error, SentinelError):
            return str(error)
        if isinstance(error, OSError):
            return str(disk_trouble(Path(error.filename or run_dir), error))
        log.error("run %s: a defect of Sentinel, please report it", run_dir.name, exc_info=error)
        return f"{run_dir}: a defect of Sentinel, its log says where: {type(error).__name__}: {error}"

    def _refuse(self, name: str, problem: str, now: float) -> None:
        if self.problems.get(name) != problem:
            fields = {"event": "run.refused", "run": name, "problem": problem}
            log.error("run %s is not served: %s", name, problem, extra={"fields": fields})
        self.problems[name] = problem
        self._retry_at[name] = now + RETRY_RUN_S


def take_from_others(directory: Path) -> None:
    """Take from others the right to write a directory, and say so; StoreError when it is another user's."""
    if said := tighten(directory):
        log.warning("%s", said)
    refuse_foreign(directory)
