"""The daemon: composes runs, rules, notifications, HTTP and signals into one loop. Decides nothing itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec

from sentinel.control.config import unknown_rules
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.disk_watch import DiskWatch
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.server import HttpServer
from sentinel.daemon.meters import DaemonMeters
from sentinel.daemon.notifying import Notifying
from sentinel.daemon.outside_packages import OutsidePackages
from sentinel.daemon.run_notes import RunNotes
from sentinel.daemon.served_api import ServedApi
from sentinel.daemon.serving import ServedRun
from sentinel.daemon.systemd import Systemd
from sentinel.errors import ConfigError, SentinelError, StoreError
from sentinel.judge.packs import RulePacks
from sentinel.printable import printable
from sentinel.private_files import make_directory, refuse_foreign, tighten
from sentinel.report.alert import Alert
from sentinel.report.heartbeat import HeartbeatSender
from sentinel.report.links import MessageLinks
from sentinel.report.silences import SilenceBook, Silences
from sentinel.report.sinks.delivery import HttpPoster
from sentinel.store.lock import LockHeld, RunLock
from sentinel.store.run_paths import (
    RunPaths,
    further_runs,
    is_run,
    refuse_planted,
    refuse_unprintable,
    runs_in,
    write_whole,
)
from sentinel.store.run_values import RunValues
from sentinel.store.trouble import disk_trouble

log = logging.getLogger("sentinel.daemon")

FAST_POLL_S = 0.005
"""Pause between two looks at the spool while data flows."""
FLOWING_S = 2.0
"""Data flows until nothing came for so long."""
SLOW_POLL_S = 0.1
"""Longest pause between two looks: a third of what an alert may take."""
DISCOVER_S = 0.5
RELOAD_CHECK_S = 1.0
RETRY_RUN_S = 5.0
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
    notify_socket: str = ""
    watchdog_us: int = 0
    drain_s: float = 10.0
    """Longest time for judging and telling what is left after SIGTERM."""
    config_file: Path | None = None
    """Where `config` comes from; None: there is no file, and it stays."""
    read_config: Callable[[], DaemonConfig] | None = None
    """Reads that file again for a reload, with what the command line says on top; ConfigError."""
    is_dry_run: bool = False
    """Nothing is sent: the log says what would be."""


class Daemon:
    """Serves a run, or every run of a directory, until it is asked to stop."""

    def __init__(self, options: ServeOptions, environ: Mapping[str, str], stream: TextIO) -> None:
        """Read rules and configuration; raise SentinelError for what cannot be served. environ: for the sinks' secrets."""
        self._options = options
        self._is_single = is_run(options.directory)
        self._state = (options.state_dir or options.directory / ".daemon").absolute()
        if self._is_single:
            _make_ours(options.directory)
        else:
            refuse_foreign(options.directory, is_shared=True)
        make_directory(self._state)
        _make_ours(self._state)
        self._packs = RulePacks(list(options.packs))
        self._packs.load()
        self._config = ConfigInForce(options.config, options.config_file, options.read_config, time.time())
        self._warn_of_policies()
        self._notes = RunNotes(self._values_of)
        self._silences = Silences(SilenceBook(self._state))
        self._notifying = Notifying(
            options.config.notify, environ, stream, self._orders_of, self._notes, silences=self._silences,
            phases_of=self._phases_of, is_dry_run=options.is_dry_run,
        )  # fmt: skip
        self._environ = environ
        self._systemd = Systemd(options.notify_socket, options.watchdog_us)
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each time that the loop's pause is to end at once.

        Signal handlers put some in. They may run while the loop is anywhere in its pause, with the lock of a
        threading.Event in hand say, which they would wait for for ever; this queue is made to be put into by them.
        """
        self._is_stopping = False
        self._wants_reload = False
        self._runs: dict[str, ServedRun] = {}
        self._problems: dict[str, str] = {}
        self._held: dict[str, str] = {}
        """Run -> the process that serves it, which this daemon stands by for."""
        self._announced: RunLock | None = None
        """Held while the page's address is where commands look for it."""
        self._unannounced = ""
        """Why it is not; empty: it is, or another daemon's is."""
        self._retry_at: dict[str, float] = {}
        self._meters = DaemonMeters()
        self.api = ServedApi(self._packs, self._config, self._notifying, self._silences, self._ask_reload, self._meters)
        self.api.heartbeat = self._heartbeat(options.config)
        self.api.links = _links(options.config)
        self._http: HttpServer | None = None
        self._outside_packages = OutsidePackages()
        self._disks = DiskWatch(lambda: {name: run.status.slow_disk for name, run in list(self._runs.items())})

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code: 1 where a run that is over was not judged to its end."""
        former = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        # `sentinel run` starts us with SIGTERM held back.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, former.keys())
        try:
            self._start()
            self._loop()
            is_complete = self._drain()
        finally:
            self._close()
            for number, handler in former.items():
                signal.signal(number, handler)
        return 0 if is_complete else 1

    def _orders_of(self, alert: Alert) -> Sequence[str]:
        """Return what was ordered because of an incident; called by the threads of the sinks."""
        run = self._runs.get(alert.incident.run)
        return run.commanding.orders_about(alert.incident) if run is not None else ()

    def _values_of(self, name: str) -> RunValues | None:
        run = self._runs.get(name)
        return run.journal.values if run is not None else None

    def stop(self) -> None:
        """Have `run` drain and return; may be called from any thread."""
        self._is_stopping = True
        self._wakes.put(None)

    # The loop.

    def _start(self) -> None:
        # The port first: restoring what runs were judged to takes seconds where there are many, and connections wait in it.
        self._http = self._bind()
        self._discover(time.time())
        if self._is_single and self._problems:
            raise StoreError(next(iter(self._problems.values())))
        self._notifying.start()
        if self.api.heartbeat is not None:
            self.api.heartbeat.start()
        if self._http is not None:
            log.info("serving %s on %s", self._options.directory, self._http.url)
        self._announce()
        self._outside_packages.start()
        self._disks.start()

    def _heartbeat(self, daemon_config: DaemonConfig) -> HeartbeatSender | None:
        config, notify = daemon_config.heartbeat, daemon_config.notify
        url = config.address(self._environ)
        if not url:
            return None
        poster = HttpPoster(timeout_s=config.timeout_s, proxy=notify.proxy, ca_file=notify.ca_file, method=config.method)
        return HeartbeatSender(url, config.interval_s, poster, self.api.is_at_work)

    def _announce(self) -> None:
        """Leave the page's address where commands look for it; a standby leaves that of the daemon that it stands by for."""
        if self._announced is not None or self._http is None:
            return
        try:
            lock = RunLock(self._state / "page", f"the page of {self._options.directory}")
        except LockHeld:
            return
        except StoreError as error:
            self._say_unannounced(str(error))
            return
        try:
            write_whole(self._state / "http.json", json.dumps(self._http.address) + "\n")
        except OSError as error:
            lock.close()
            self._say_unannounced(str(disk_trouble(self._state / "http.json", error)))
            return
        self._announced, self._unannounced = lock, ""

    def _say_unannounced(self, why: str) -> None:
        """Say once why commands do not find the page; judging goes on, and it is tried again."""
        if why != self._unannounced:
            self._unannounced = why
            log.error("the page's address cannot be left where commands look for it: %s", why)

    def _bind(self) -> HttpServer | None:
        """Take the port; beside a command another one, or none, where that is taken: judging is worth more than the page."""
        asked = self._options.http
        if asked is None:
            return None
        credentials = Credentials(self._state, asked)
        try:
            return HttpServer(self.api, asked, credentials)
        except ConfigError as error:
            if not self._options.is_owned:
                raise
            log.error("%s; a free port is tried instead", error)
        try:
            return HttpServer(self.api, msgspec.structs.replace(asked, port=0, socket=""), credentials)
        except ConfigError as error:
            log.error("%s; the page is not served, judging goes on", error)
            return None

    def _loop(self) -> None:
        is_first, pause, flowed = True, FAST_POLL_S, time.monotonic()
        next_discovery = next_check = 0.0
        has_reloaded = False
        while not self._is_stopping:
            begun = time.monotonic()
            if begun >= next_discovery:
                next_discovery = begun + DISCOVER_S
                self._discover(time.time())
                self._meters.look_at_disks({"state": self._state, "runs": self._options.directory})
                self._is_stopping = self._is_stopping or self._is_orphaned()
            if self._wants_reload or begun >= next_check:
                next_check = begun + RELOAD_CHECK_S
                has_reloaded = self._check_files()
            self._notifying.turn()
            has_moved = self._turn()
            now = time.monotonic()
            self.api.publish(self._runs.values(), self._problems, self._held, is_caught_up=not has_moved)
            if has_reloaded:
                has_reloaded = False
                self.api.reloaded()
            self._systemd.alive()
            if is_first:
                # HTTP after the first look at the spool: its libraries take as long to load as a step takes to judge.
                is_first = False
                if self._http is not None:
                    self._http.start()
                self._systemd.ready()
            if has_moved:
                flowed = now
                pause = FAST_POLL_S
                continue
            # Ten times the cost of a look that found nothing: thousands of ranks must not cost a core.
            pause = max(FAST_POLL_S, 10.0 * (now - begun)) if now - flowed < FLOWING_S else pause * 1.5
            self._pause(min(pause, SLOW_POLL_S))

    def _pause(self, longest_s: float) -> None:
        """Wait so long, or until it is ended."""
        with contextlib.suppress(queue.Empty):
            self._wakes.get(timeout=longest_s)
            for _ in range(self._wakes.qsize()):
                self._wakes.get_nowait()

    def _turn(self) -> bool:
        has_moved = False
        for name, run in list(self._runs.items()):
            try:
                has_moved = run.turn(time.time()) or has_moved
                if run.take_alerts():
                    self._notifying.notifier.wake()
            except Exception as error:  # whatever is wrong with one run, the others are judged on
                self._drop(name, _why(run.paths.run_dir, error))
        return has_moved

    def _discover(self, now: float) -> None:
        found = self._found()
        names = {printable(run_dir.absolute().name) for run_dir in found}
        self._held = {name: who for name, who in self._held.items() if name in names}
        for run_dir in found:
            name = printable(run_dir.absolute().name)
            if name in self._runs or now < self._retry_at.get(name, 0.0):
                continue
            try:
                refuse_unprintable(run_dir)
                refuse_planted(run_dir)
                for one in (run_dir, run_dir / "spool"):
                    if one.exists():
                        _make_ours(one)
                paths = RunPaths.of(run_dir, self._options.state_dir)
                if self._options.state_dir is None:
                    paths.refuse_unproven()
                run = ServedRun(paths, self._config.config, self._packs, self._meters)
            except Exception as error:
                if isinstance(error, LockHeld) and not self._options.is_owned:
                    self._stand_by(name, error.holder)
                else:
                    self._refuse(name, _why(run_dir, error), now)
                continue
            if who := self._held.pop(name, ""):
                fields = {"event": "run.taken_over", "run": name, "from": who}
                log.info("run %s: taken over from process %s", name, who, extra={"fields": fields})
            self._problems.pop(name, None)
            self._runs[name] = run
            self._notifying.outboxes.join(run.journal.outbox)
            self._open_books()
            # Whoever served it may have been gone for long: what is open is said again at once.
            self._notifying.notifier.wake()
        self._announce()

    def _stand_by(self, name: str, who: str) -> None:
        """Leave a run to the daemon that serves it, until that is gone."""
        self._problems.pop(name, None)
        if self._held.get(name) != who:
            fields = {"event": "run.standby", "run": name, "of": who}
            words = "run %s: standby of process %s, which serves it; taken over when that ends"
            log.info(words, name, who, extra={"fields": fields})
        self._held[name] = who

    def _found(self) -> list[Path]:
        """Return the runs to serve: of one that we own also the others that its command attached under the same name."""
        given = self._options.directory
        if not self._is_single:
            return runs_in(given)
        if not self._options.is_owned or self._options.state_dir is not None:
            return [given]
        return [given, *further_runs(given)]

    def _drop(self, name: str, problem: str) -> None:
        run = self._runs.pop(name)
        self._notifying.outboxes.leave(run.journal.outbox)
        self._notifying.notifier.wake()
        self._notes.release(run.name)
        self._open_books()
        run.close()
        self._refuse(name, problem, time.time())

    def _refuse(self, name: str, problem: str, now: float) -> None:
        if self._problems.get(name) != problem:
            fields = {"event": "run.refused", "run": name, "problem": problem}
            log.error("run %s is not served: %s", name, problem, extra={"fields": fields})
        self._problems[name] = problem
        self._retry_at[name] = now + RETRY_RUN_S

    def _check_files(self) -> bool:
        """Take in files that changed; return whether rules or configuration were read again."""
        if self._http is not None:
            self.api.http_problems = self._http.refresh()
            self.api.certificate_expires = self._http.certificate_expires
        if self._silences.have_changed():
            self._note_silences()
        is_asked, self._wants_reload = self._wants_reload, False
        if not is_asked and not self._packs.have_changed():
            return False
        self._systemd.reloading()
        if is_asked:
            self._config.reload(time.time(), self._exchange)
        outcome = self._packs.reload(time.time())
        self._warn_of_policies()
        for name, run in list(self._runs.items()):
            try:
                run.note_reload(outcome, time.time())
            except SentinelError as error:
                self._drop(name, str(error))
        self._systemd.ready()
        return True

    def _open_books(self) -> None:
        """Have silences read from the daemon's own file and from those of the runs."""
        states = dict.fromkeys([self._state, *(run.paths.lock_directory for run in self._runs.values())])
        known = {book.path.parent: book for book in self._silences.books}
        self._silences.books = tuple(known.get(state) or SilenceBook(state) for state in states)

    def _note_silences(self) -> None:
        """Write down in each run who silenced what, and have what is silenced no more sent."""
        silences = self._silences.active(0.0)
        for name, run in list(self._runs.items()):
            try:
                run.note_silences(silences, time.time())
            except SentinelError as error:
                self._drop(name, str(error))
        self._notifying.notifier.wake()

    def _phases_of(self, run: str) -> Collection[str]:
        """Return what the ranks of a run are at. For any thread."""
        served = self._runs.get(run)
        return () if served is None else served.phases()

    def _exchange(self, former: DaemonConfig, new: DaemonConfig) -> None:
        """Act on a new configuration; ConfigError, with all as it was, when it cannot be used."""
        notifier, heartbeat = self._notifying.built(new.notify), self._heartbeat(new)
        for name, run in list(self._runs.items()):
            try:
                run.use(new)
            except SentinelError as error:
                self._drop(name, str(error))
        self._notifying.exchange(notifier)
        self.api.links = _links(new)
        heartbeat, self.api.heartbeat = self.api.heartbeat, heartbeat
        if heartbeat is not None:
            heartbeat.close()
        if self.api.heartbeat is not None:
            self.api.heartbeat.start()

    def _warn_of_policies(self) -> None:
        """Log what policies name that is no rule in use: nothing would follow from it, and nobody would know why."""
        for message in unknown_rules(self._config.config.control.policies, [rule.name for rule in self._packs.pack.rules]):
            log.warning("%s", message, extra={"fields": {"event": "config.suspicious", "problem": message}})

    def _ask_reload(self) -> None:
        self._wants_reload = True
        self._wakes.put(None)

    def _is_orphaned(self) -> bool:
        if not self._options.is_owned or self._options.parent in (0, os.getppid()):
            return False
        # The command may have outlived `sentinel run`: it is watched until it says nothing any more.
        now = time.time()
        return all(now - run.last_received > ORPHAN_QUIET_S for run in self._runs.values())

    # The end.

    def _drain(self) -> bool:
        """Judge and tell what is left; return whether every run that is over was judged to its end."""
        is_owned, is_complete = self._options.is_owned, True
        self._systemd.stopping()
        # A command that failed at once left its run less than a discovery ago.
        self._discover(time.time())
        self.api.is_stopping = True
        deadline = time.monotonic() + self._options.drain_s
        while self._turn() and time.monotonic() < deadline:
            pass
        for name, run in list(self._runs.items()):
            try:
                is_done = run.finish(time.time(), is_over=is_owned, deadline=deadline)
            except Exception as error:
                self._drop(name, _why(run.paths.run_dir, error))
                continue
            if not is_done:
                is_complete = False
                what = f"run {name} was not judged to its end within {self._options.drain_s:g} s (--drain-s)"
                log.error("%s; sentinel serve %s judges the rest", what, run.paths.run_dir)
        self._notifying.notifier.hurry()
        waiting: Sequence[int] = ()
        while time.monotonic() < deadline:
            waiting = [count for count in self._notifying.notifier.sendable().values() if count]
            if not waiting or self._notifying.notifier.problems():
                break
            time.sleep(0.01)
        return is_complete and not (is_owned and self._problems)

    def _close(self) -> None:
        if self._http is not None:
            self._http.stop()
        if self._announced is not None:
            (self._state / "http.json").unlink(missing_ok=True)
            self._announced.close()
        if self.api.heartbeat is not None:
            self.api.heartbeat.close()
        self._notifying.close()
        self._outside_packages.close()
        self._disks.close()
        for run in self._runs.values():
            run.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._ask_reload()
        else:
            self.stop()


def _links(config: DaemonConfig) -> MessageLinks:
    return MessageLinks(runbook_url=config.notify.runbook_url, dashboard_url=config.notify.dashboard_url)


def _make_ours(directory: Path) -> None:
    """Take from others the right to write a directory, and say so; StoreError when it is another user's."""
    if said := tighten(directory):
        log.warning("%s", said)
    refuse_foreign(directory)


def _why(run_dir: Path, error: Exception) -> str:
    """Return why a run is not served, in words; what should never happen is logged with where it did."""
    if isinstance(error, SentinelError):
        return str(error)
    if isinstance(error, OSError):
        return str(disk_trouble(Path(error.filename or run_dir), error))
    log.error("run %s: a defect of Sentinel, please report it", run_dir.name, exc_info=error)
    return f"{run_dir}: a defect of Sentinel, its log says where: {type(error).__name__}: {error}"
