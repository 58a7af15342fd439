"""FleetProcesses: broker, shippers, workers and join of a fleet on one machine: started, watched, ended in order."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sentinel.cli.logged_command import LoggedCommand, sentinel_command
from sentinel.errors import ConfigError, StoreError
from sentinel.fleet.broker import BrokerConfig, nats_client
from sentinel.fleet.broker_users import JOIN, STATUS, WORKER
from sentinel.fleet.own_broker import OwnBroker
from sentinel.private_files import make_directory
from sentinel.store.lock import LockHeld, RunLock

BROKER = "broker"
BEGIN_S = 120.0
"""Longest time until all of it is up."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SOUND_S = 60.0
"""What ran for so long before it ended is started again after the first pause."""
FREED_S = 3.0
LOOK_S = 0.05
DRAIN_S = 10.0
"""Longest time in which a shipper waits for the join, and the join for what is left to tell."""


class FleetProcess:
    """One of them, started again whenever it ends: at once the first time, later and later when that does not help."""

    def __init__(self, name: str, background: LoggedCommand, say: Callable[[str], None]) -> None:
        self.name = name
        self.background = background
        self._say = say
        self._started_at = 0.0
        self._num_ends = 0
        """In a row."""
        self._due: float | None = None

    def start(self) -> None:
        """Start it; OSError."""
        self._due, self._started_at = None, time.monotonic()
        self.background.start()

    def watch(self) -> None:
        """Start it again if it ended, after a pause; says so."""
        now = time.monotonic()
        if self._due is not None:
            if now >= self._due:
                self.start()
                self._say(f"{self.name}: started again, process {self.background.pid}")
            return
        code = self.background.code
        if code is None:
            return
        self._num_ends = 1 if now - self._started_at >= SOUND_S else self._num_ends + 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_ends - 1, 10))
        self._due = now + pause_s
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        # What a process said last need not be why it ended: one that was killed could not say.
        said = f"it said last: {self.background.last_line()}"
        self._say(f"{self.name} {how}; it is started again in {pause_s:g} s; {said}")


class FleetProcesses:
    """Of one directory, and for one thread. What lies in the directory is gone on from."""

    def __init__(
        self,
        directory: Path,
        num_nodes: int,
        *,
        broker_port: int,
        join_arguments: Sequence[str],
        say: Callable[[str], None],
        worker_arguments: Sequence[Sequence[str]] = (),
    ) -> None:
        """broker_port: 0 for a free one. join_arguments: further ones of `sentinel join`. say: told what happens.

        worker_arguments: further ones of each worker to which the nodes ship; none: they ship to the join.
        """
        self.directory, self.joined = directory, directory / "joined"
        self.nodes = {f"node-{number}": directory / f"node-{number}" for number in range(1, num_nodes + 1)}
        """Node -> its directory of runs."""
        self._workers = {f"worker-{number}": list(its) for number, its in enumerate(worker_arguments, 1)}
        """Worker -> its further arguments."""
        self.url = ""
        """Of the page; empty: it is not known yet."""
        self._broker = OwnBroker(directory, list(self.nodes), broker_port or free_port())
        self._port = broker_port
        self._join_arguments, self._say = list(join_arguments), say
        self._lock: RunLock | None = None
        self._processes: dict[str, FleetProcess] = {}

    @property
    def credentials(self) -> Path:
        """Folder of `ca.pem` and a login of each user."""
        return self._broker.credentials

    @property
    def status_access(self) -> BrokerConfig:
        """How `sentinel fleet status` reaches the broker."""
        return self._broker.access(STATUS)

    def pid(self, name: str) -> int | None:
        """Return the process id of `broker`, `join`, `worker-1` or a node's shipper; None: it does not run just now."""
        known = self._processes.get(name)
        return None if known is None else known.background.pid

    def start(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Start all of it, and wait until it is up, or `is_stopping`; ConfigError, with all of it ended: it cannot be."""
        nats_client()
        for path in (self.joined, *self.nodes.values()):
            try:
                make_directory(path)
            except OSError as error:
                raise ConfigError(
                    f"{path}: expected a directory that we may write, got: {error.strerror or error}"
                ) from error
        try:
            self._lock = RunLock(self.directory / "broker", f"fleet {self.directory}")
        except LockHeld as error:
            raise ConfigError(f"{self.directory}: this fleet is up already, by process {error.holder}") from error
        try:
            # The broker of a fleet whose own process was killed needs a moment to end.
            if self._port and not _becomes_free(self._port):
                where = f"127.0.0.1:{self._port}"
                raise ConfigError(
                    f"{where}: expected a free port for the broker, it is taken; --broker-port 0 takes a free one"
                )
            self._broker.prepare()
            # Of a join that was killed; the one that is started leaves its own.
            (self.joined / ".daemon" / "http.json").unlink(missing_ok=True)
            self._processes = {name: FleetProcess(name, one, self._say) for name, one in self._backgrounds().items()}
            for name, process in self._processes.items():
                process.start()
                if name == BROKER:
                    self._await(lambda: self._broker.is_up, is_stopping)
            self._await(self._finds_page, is_stopping)
        except BaseException:
            self.kill()
            raise

    def watch(self) -> None:
        """Start again what ended; to be called often. ConfigError, with all of it ended: it cannot be started again."""
        try:
            for process in self._processes.values():
                process.watch()
            if (former := self.url) and self._finds_page() and self.url != former:
                self._say(f"the page is at {self.url} now")
        except OSError as error:
            self.kill()
            raise ConfigError(f"{self.directory}: a process cannot be started again: {error}") from error

    def finish(self, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """End all: shippers, workers, the join, then the broker; return whether the join held and judged all there was.

        is_hurried: asked meanwhile whether all of it is to be killed at once.
        """
        is_complete = True
        shippers = [self._processes[node] for node in self.nodes if node in self._processes]
        for one in shippers:
            # All at once: each waits for the join.
            one.background.ask()
        for one in shippers:
            if one.background.end(DRAIN_S + 5.0, is_hurried) != 0:
                is_complete = False
                self._say(f"{one.name}: the join does not hold all of its spools; the rest is taken at the next start")
        for name in (*self._workers, JOIN, BROKER):
            if name not in self._processes:
                continue
            code = self._processes[name].background.end(DRAIN_S + 15.0, is_hurried)
            if name == JOIN and code != 0:
                is_complete = False
                log = self._processes[name].background.log
                self._say(f"{name}: did not judge all that it holds; the next start does; see {log}")
        self._unlock()
        return is_complete

    def kill(self) -> None:
        """End all at once."""
        for process in reversed(self._processes.values()):
            process.background.end(0.0)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _backgrounds(self) -> dict[str, LoggedCommand]:
        def background(name: str, command: Sequence[str], *, holds_sigterm: bool = False) -> LoggedCommand:
            log = self.directory / "logs" / f"{name}.log"
            return LoggedCommand(command, log, holds_sigterm=holds_sigterm, ends_with_us=True)

        def ours(name: str, verb: str, where: Path, *arguments: str, user: str = "") -> LoggedCommand:
            command = sentinel_command(verb, str(where), *self._access(user or name), *arguments)
            return background(name, command, holds_sigterm=True)

        drain = ("--drain-s", f"{DRAIN_S:g}")
        to = ("--to-workers",) if self._workers else ()
        return {
            BROKER: background(BROKER, self._broker.command),
            JOIN: ours(JOIN, "join", self.joined, *drain, *self._join_arguments),
            **{name: ours(name, "worker", self.directory / name, *its, user=WORKER) for name, its in self._workers.items()},
            **{node: ours(node, "ship", path, "--node", node, *drain, *to) for node, path in self.nodes.items()},
        }

    def _access(self, user: str) -> list[str]:
        access = self._broker.access(user)
        return ["--server", access.server, "--tls-ca", access.ca_file, "--login", access.login_file]

    def _await(self, is_so: Callable[[], bool], is_stopping: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BEGIN_S
        while not is_stopping() and not is_so():
            for process in self._processes.values():
                code, said = process.background.code, process.background.last_line
                if code is not None and code < 0:
                    raise StoreError(f"{process.name} was killed by signal {-code} as it started; it said last: {said()}")
                if code is not None:
                    raise StoreError(f"{process.name} does not start: {said()}")
            if time.monotonic() > deadline:
                raise StoreError(f"{self.directory}: not up within {BEGIN_S:g} s; see {self.directory / 'logs'}")
            time.sleep(LOOK_S)

    def _finds_page(self) -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.url = str(json.loads((self.joined / ".daemon" / "http.json").read_bytes())["url"]).rstrip("/")
        return bool(self.url)


def _becomes_free(port: int) -> bool:
    """Return whether a port of this machine is free within a few seconds."""
    deadline = time.monotonic() + FREED_S
    while not (is_free := _is_free(port)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return is_free


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the broker binds: connections that ended a moment ago do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a free port below those that kernels give to outgoing connections: none of them takes it meanwhile."""
    found = next(filter(_is_free, random.SystemRandom().sample(range(10_000, 32_768), 1_000)), None)
    if found is None:
        raise ConfigError("no port of 127.0.0.1 between 10000 and 32767 is free; name one with --broker-port")
    return found
