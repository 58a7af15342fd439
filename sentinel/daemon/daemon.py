"""The daemon: composes runs, rules, notifications, HTTP and signals into one loop. Decides nothing itself."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from sentinel.control.config import unknown_rules
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.disk_watch import DiskWatch
from sentinel.daemon.garbage import Garbage
from sentinel.daemon.http.bound_server import bound_server
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.server import HttpServer
from sentinel.daemon.loop_requests import LoopRequests
from sentinel.daemon.meters import DaemonMeters
from sentinel.daemon.notifying import Notifying
from sentinel.daemon.outside_packages import OutsidePackages
from sentinel.daemon.page_address import PageAddress
from sentinel.daemon.run_notes import RunNotes
from sentinel.daemon.run_turns import PlainTurns, RunTurns
from sentinel.daemon.served_api import ServedApi
from sentinel.daemon.served_runs import ServedRuns, take_from_others
from sentinel.daemon.serving import ServedRun
from sentinel.daemon.systemd import Systemd
from sentinel.errors import StoreError
from sentinel.ingest.arrivals import Arrivals
from sentinel.ingest.away_rows import RowSource
from sentinel.join_health import JoinHealth
from sentinel.judge.packs import RulePacks
from sentinel.private_files import make_directory, refuse_foreign
from sentinel.report.heartbeat import HeartbeatSender
from sentinel.report.links import MessageLinks
from sentinel.report.silences import SilenceBook, Silences
from sentinel.report.sinks.delivery import HttpPoster
from sentinel.store.run_paths import (
    is_run,
)

log = logging.getLogger("sentinel.daemon")

FAST_POLL_S = 0.005
"""Pause between two looks at the spool while data flows."""
FLOWING_S = 2.0
"""Data flows until nothing came for so long."""
SLOW_POLL_S = 0.1
"""Longest pause between two looks: a third of what an alert may take."""
WAITING_POLL_S = 0.02
"""The same where a run waits for rows of another machine: a step that needs any asks for them in one round."""
DISCOVER_S = 0.5
RELOAD_CHECK_S = 1.0
ORPHAN_QUIET_S = 60.0
"""A daemon whose `sentinel run` was killed ends when the ranks were silent for so long."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `sentinel serve`."""

    directory: Path
    state_dir: Path | None = None
    packs: tuple[str, ...] = ()
    config: DaemonConfig = DaemonConfig()
    http: HttpConfig | None = HttpConfig()
    """None: nothing is served."""
    is_owned: bool = False
    """The daemon of `sentinel run`: the end of its parent, or SIGTERM, is the end of the run, and open steps close."""
    parent: int = 0
    """Process id of the parent, when it is owned."""
    drain_s: float = 10.0
    """Longest time for judging and telling what is left after SIGTERM."""
    config_file: Path | None = None
    """Where `config` comes from; None: there is no file, and it stays."""
    read_config: Callable[[], DaemonConfig] | None = None
    """Reads that file again for a reload, with what the command line says on top; ConfigError."""
    arrivals: Callable[[str], Arrivals] = lambda run: Arrivals()
    """Returns what is known of what comes into a run's spools; for any thread."""
    rows_from: Callable[[str], RowSource | None] = lambda run: None
    """Returns where the rows of a run are that its spools here have not got; None: they have all."""
    standby_of: Callable[[], str] = lambda: ""
    """Returns who judges in our place, whatever the locks of runs say; empty: nobody. A daemon that judged before judges no
    more then, and is to be stopped."""
    join_health: Callable[[], JoinHealth] | None = None
    """Returns how the join is whose daemon this is, for any thread; None: it is no join's."""
    epoch: Callable[[], int] = lambda: 0
    """Returns the epoch of the lease under which runs are served; 0: under none."""
    on_fenced: Callable[[], None] = lambda: None
    """Told that the journal of a run is another's by a higher epoch than ours."""
    turns: RunTurns = PlainTurns()
    """How runs take turns."""
    is_dry_run: bool = False
    """Nothing is sent: the log says what would be."""


class Daemon:
    """Serves a run, or every run of a directory, until it is asked to stop."""

    def __init__(self, options: ServeOptions, environ: Mapping[str, str], stream: TextIO) -> None:
        """Read rules and configuration; raise SentinelError for what cannot be served. environ: for the sinks' secrets."""
        self._options = options
        self._state = (options.state_dir or options.directory / ".daemon").absolute()
        if is_run(options.directory):
            take_from_others(options.directory)
        else:
            refuse_foreign(options.directory, is_shared=True)
        make_directory(self._state)
        take_from_others(self._state)
        self._packs = RulePacks(list(options.packs))
        self._packs.load()
        self._config = ConfigInForce(options.config, options.config_file, options.read_config, time.time())
        self._warn_of_policies()
        self._notes = RunNotes(lambda run: self._runs.values_of(run))
        self._silences = Silences(SilenceBook(self._state))
        self._notifying = Notifying(
            options.config.notify, environ, stream, lambda alert: self._runs.orders_about(alert.incident), self._notes,
            silences=self._silences, phases_of=lambda run: self._runs.phases_of(run), is_dry_run=options.is_dry_run,
        )  # fmt: skip
        self._environ = environ
        self._systemd = Systemd.of(environ)
        self._requests = LoopRequests()
        # What the others take while a turn is left is none of its stages' own.
        self._meters = DaemonMeters(lambda: time.perf_counter() - options.turns.left_s)
        self._runs = ServedRuns(
            options.directory, options.state_dir, options.turns, is_owned=options.is_owned, joined=self._take_in,
            left=self._let_go, fenced=options.on_fenced,
            serve=lambda paths: ServedRun(
                paths, self._config.config, self._packs, self._meters, environ, lambda: options.arrivals(paths.name),
                options.rows_from(paths.name), options.epoch(), self._advanced, options.turns,
            ),
        )  # fmt: skip
        self._address = PageAddress(self._state, options.directory)
        self.api = ServedApi(self._packs, self._config, self._notifying, self._silences, self._requests.reload, self._meters)
        self.api.state.heartbeat = _heartbeat(options.config, environ, self.api.state.is_at_work)
        self.api.state.join_health = options.join_health
        self.api.links = _links(options.config)
        self._http: HttpServer | None = None
        self._outside_packages = OutsidePackages()
        self._disks = DiskWatch(lambda: {run.name: run.status.slow_disk for run in self._runs})

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code: 1 where a run that is over was not judged to its end."""
        with self._requests.by_signals():
            try:
                self._start()
                self._loop()
                is_complete = self._drain()
            finally:
                self._close()
        return 0 if is_complete else 1

    def stop(self) -> None:
        """Have `run` drain and return; may be called from any thread."""
        self._requests.stop()

    # The loop.

    def _start(self) -> None:
        # The port first: restoring what runs were judged to takes seconds where there are many, and connections wait in it.
        self._http = bound_server(self.api, self._options.http, self._state, is_owned=self._options.is_owned)
        self._discover(time.time())
        if self._runs.is_single and self._runs.problems:
            raise StoreError(next(iter(self._runs.problems.values())))
        self._notifying.start()
        if self.api.state.heartbeat is not None:
            self.api.state.heartbeat.start()
        if self._http is not None:
            log.info("serving %s on %s", self._options.directory, self._http.url)
        self._outside_packages.start()
        self._disks.start()

    def _loop(self) -> None:
        with contextlib.closing(Garbage(time.monotonic())) as garbage:
            self._go_round(garbage)

    def _go_round(self, garbage: Garbage) -> None:
        is_first, pause, flowed = True, FAST_POLL_S, time.monotonic()
        next_discovery = next_check = 0.0
        has_reloaded = False
        while not self._requests.is_stopping:
            begun = time.monotonic()
            if begun >= next_discovery:
                next_discovery = begun + DISCOVER_S
                self._discover(time.time())
                self._meters.look_at_disks({"state": self._state, "runs": self._options.directory})
                if self._is_orphaned():
                    self._requests.stop()
            if self._requests.wants_reload or begun >= next_check:
                next_check = begun + RELOAD_CHECK_S
                has_reloaded = self._check_files()
            self._notifying.turn()
            has_moved = self._turn()
            now = time.monotonic()
            has_caught_up = all(run.has_caught_up for run in self._runs)
            self.api.publish(self._runs, self._runs.problems, self._runs.held, is_caught_up=has_caught_up)
            if has_reloaded:
                has_reloaded = False
                self.api.reloaded()
            self._advanced()
            if is_first:
                # HTTP after the first look at the spool: its libraries take as long to load as a step takes to judge.
                is_first = False
                if self._http is not None:
                    self._http.start()
                self._systemd.ready()
            garbage.turn(now, is_idle=not has_moved)
            if has_moved:
                flowed = now
                pause = FAST_POLL_S
                continue
            # Ten times the cost of a look that found nothing: thousands of ranks must not cost a core.
            pause = max(FAST_POLL_S, 10.0 * (now - begun)) if now - flowed < FLOWING_S else pause * 1.5
            longest = max(WAITING_POLL_S, 2.0 * (now - begun)) if self._runs.are_left else SLOW_POLL_S
            self._requests.pause(min(pause, longest))

    def _advanced(self) -> None:
        """Say that the loop goes on: it came round, or a step was judged, of which a turn may have many."""
        self.api.state.alive()
        self._systemd.alive()

    def _turn(self) -> bool:
        """Judge what came of each run; return whether anything did."""
        has_moved = not self._options.standby_of() and self._runs.turn(time.time)
        for run in self._runs:
            if run.take_alerts():
                self._notifying.notifier.wake()
        return has_moved

    def _discover(self, now: float) -> None:
        if who := self._options.standby_of():
            self._runs.stand_by_for(who)
        else:
            self._runs.discover(now)
        if self._http is not None:
            self._address.leave(self._http.address)

    def _take_in(self, run: ServedRun) -> None:
        """Have what waits in a run sent: whoever served it may have been gone for long, and what is open is said again."""
        self._notifying.outboxes.join(run.journal.outbox)
        self._open_books()
        self._notifying.notifier.wake()

    def _let_go(self, run: ServedRun) -> None:
        self._notifying.outboxes.leave(run.journal.outbox)
        self._notifying.notifier.wake()
        self._notes.release(run.name)
        self._open_books()

    def _check_files(self) -> bool:
        """Take in files that changed; return whether rules or configuration were read again."""
        if self._http is not None:
            self.api.state.http_problems = self._http.refresh()
            self.api.certificate_expires = self._http.certificate_expires
        if self._silences.have_changed():
            self._note_silences()
        is_asked, self._requests.wants_reload = self._requests.wants_reload, False
        if not is_asked and not self._packs.have_changed():
            return False
        self._systemd.reloading()
        if is_asked:
            self._config.reload(time.time(), self._exchange)
        outcome = self._packs.reload(time.time())
        self._warn_of_policies()
        self._runs.between_turns(lambda run: run.note_reload(outcome, time.time()))
        self._systemd.ready()
        return True

    def _open_books(self) -> None:
        """Have silences read from the daemon's own file and from those of the runs."""
        states = dict.fromkeys([self._state, *(run.paths.lock_directory for run in self._runs)])
        known = {book.path.parent: book for book in self._silences.books}
        self._silences.books = tuple(known.get(state) or SilenceBook(state) for state in states)

    def _note_silences(self) -> None:
        """Write down in each run who silenced what, and have what is silenced no more sent."""
        silences = self._silences.active(0.0)
        self._runs.between_turns(lambda run: run.note_silences(silences, time.time()))
        self._notifying.notifier.wake()

    def _exchange(self, former: DaemonConfig, new: DaemonConfig) -> None:
        """Act on a new configuration; ConfigError, with all as it was, when it cannot be used."""
        notifier, heartbeat = self._notifying.built(new.notify), _heartbeat(new, self._environ, self.api.state.is_at_work)
        self._runs.between_turns(lambda run: run.use(new))
        self._notifying.exchange(notifier)
        self.api.links = _links(new)
        heartbeat, self.api.state.heartbeat = self.api.state.heartbeat, heartbeat
        if heartbeat is not None:
            heartbeat.close()
        if self.api.state.heartbeat is not None:
            self.api.state.heartbeat.start()

    def _warn_of_policies(self) -> None:
        """Log what policies name that is no rule in use: nothing would follow from it, and nobody would know why."""
        for message in unknown_rules(self._config.config.control.policies, [rule.name for rule in self._packs.pack.rules]):
            log.warning("%s", message, extra={"fields": {"event": "config.suspicious", "problem": message}})

    def _is_orphaned(self) -> bool:
        if not self._options.is_owned or self._options.parent in (0, os.getppid()):
            return False
        # The command may have outlived `sentinel run`: it is watched until it says nothing any more.
        now = time.time()
        return all(now - run.last_received > ORPHAN_QUIET_S for run in self._runs)

    # The end.

    def _drain(self) -> bool:
        """Judge and tell what is left; return whether every run that is over was judged to its end."""
        is_owned, is_complete = self._options.is_owned, True
        self._systemd.stopping()
        # A command that failed at once left its run less than a discovery ago.
        self._discover(time.time())
        self.api.state.is_stopping = True
        deadline = time.monotonic() + self._options.drain_s
        while (has_moved := self._turn()) or (self._runs.are_left and not self._options.standby_of()):
            if time.monotonic() >= deadline:
                break
            if not has_moved:
                time.sleep(FAST_POLL_S)
        if self._options.standby_of():
            return True  # what is left is for whoever that is
        for run, is_done in self._runs.finish(time.time, is_over=is_owned, deadline=deadline):
            if not is_done and not is_owned:
                log.info("run %s: left in the middle of a step, for whoever serves it next", run.name)
            elif not is_done:
                is_complete = False
                what = f"run {run.name} was not judged to its end within {self._options.drain_s:g} s (--drain-s)"
                log.error("%s; sentinel serve %s judges the rest", what, run.paths.run_dir)
        self._notifying.notifier.hurry()
        waiting: Sequence[int] = ()
        while time.monotonic() < deadline:
            waiting = [count for count in self._notifying.notifier.sendable().values() if count]
            if not waiting or self._notifying.notifier.problems():
                break
            time.sleep(0.01)
        return is_complete and not (is_owned and self._runs.problems)

    def _close(self) -> None:
        if self._http is not None:
            self._http.stop()
        self._address.close()
        if self.api.state.heartbeat is not None:
            self.api.state.heartbeat.close()
        self._notifying.close()
        self._outside_packages.close()
        self._disks.close()
        for run in self._runs:
            run.mirrors.hurry()
        self._runs.close()


def _links(config: DaemonConfig) -> MessageLinks:
    return MessageLinks(runbook_url=config.notify.runbook_url, dashboard_url=config.notify.dashboard_url)


def _heartbeat(config: DaemonConfig, environ: Mapping[str, str], is_at_work: Callable[[], bool]) -> HeartbeatSender | None:
    heartbeat, notify = config.heartbeat, config.notify
    url = heartbeat.address(environ)
    if not url:
        return None
    poster = HttpPoster(timeout_s=heartbeat.timeout_s, proxy=notify.proxy, ca_file=notify.ca_file, method=heartbeat.method)
    return HeartbeatSender(url, heartbeat.interval_s, poster, is_at_work)
