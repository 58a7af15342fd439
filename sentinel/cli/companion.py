"""The daemon beside a training command: started, watched, started again when it dies, ended when the command is over."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MAX_RESTARTS = 5
"""Restarts within RESTART_WINDOW_S; then the run goes on unwatched, and says so (chosen)."""
RESTART_WINDOW_S = 60.0


class Companion:
    """`sentinel serve RUN` in a session of its own: neither its death nor a Ctrl-C at the terminal touches the command.

    arguments: what follows `sentinel serve`. log: where its talk goes.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.problem = ""
        """Why nobody watches; empty while the daemon runs."""
        self._command = [sys.executable, "-m", "sentinel.cli", "serve", *arguments]
        self._log = log
        self._deaths: list[float] = []
        self._due: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id of the daemon that runs now, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def num_restarts(self) -> int:
        """Times it died so far, within the window."""
        return len(self._deaths)

    def watch(self) -> None:
        """Start it again if it died; call often. A bad command line (exit code 2) is not tried again."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            self._process = None
            if code == 2:
                self.problem = f"the daemon refused to start; see {self._log}"
                return
            self._deaths = [at for at in self._deaths if now - at < RESTART_WINDOW_S] + [now]
            if len(self._deaths) > MAX_RESTARTS:
                self.problem = f"the daemon died {len(self._deaths)} times within a minute; see {self._log}"
                return
            self._due = now + 0.1 * 2 ** (len(self._deaths) - 1)
        if self._process is None and not self.problem and self._due is not None and now >= self._due:
            self._due = None
            self._start()

    def finish(self, timeout_s: float) -> bool:
        """Let it judge what is left and end it; True when it ended by itself, in order, within the time."""
        if self._process is None and not self.problem:
            self._start()
        process = self._process
        if process is None:
            return False
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False

    def _start(self) -> None:
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Blocked until the daemon has its handlers: a command that ends at once must not find it half started, to be
        # killed by the very signal that asks it to judge what is left. The mask is inherited, and undone by the daemon.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                self.problem = f"the daemon could not be started: {error}"
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
