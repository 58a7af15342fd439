"""The daemon beside a training command: started, watched, started again when it dies, ended when the command is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sentinel.private_files import create_file, make_directory

MAX_RESTARTS = 5
"""Restarts of the daemon within RESTART_WINDOW_S, after which the run goes on unwatched and says so. Too small: a passing
failure ends the watching; too large: a daemon that cannot start takes the trainer's processor time."""
RESTART_WINDOW_S = 60.0
LAST_BYTES = 8192
"""Bytes of the end of the daemon's log in which its last line is looked for."""


def daemon_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a daemon that finds the modules which this process finds.

    `python -m` looks in the current directory first, which the command `sentinel` does not: a folder there that is
    called like the module of another package would be imported in its place.
    """
    try:
        looks_here = "" in sys.path or str(Path.cwd()) in sys.path
    except OSError:  # the directory is gone
        looks_here = True
    return [sys.executable, *(() if looks_here else ("-P",)), "-m", "sentinel.cli", "serve", *arguments]


class Companion:
    """`sentinel serve RUN` in a session of its own: neither its death nor a Ctrl-C at the terminal touches the command.

    arguments: those of `sentinel serve`. log: the file that its stderr goes to. Never raises: `problem` says why no daemon
    runs.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.problem = ""
        """Why no daemon runs any more, in words; empty while one runs, or is about to be started again."""
        self.setback = ""
        """Why it died last; empty: it has not."""
        self._command = daemon_command(arguments)
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
        """Start the daemon again if it ended; to be called often. After a bad command line (exit code 2) it is not."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            self._process = None
            if code == 2:
                self.problem = f"the daemon refused to start: {self._last_log_line()}"
                return
            self._deaths = [at for at in self._deaths if now - at < RESTART_WINDOW_S] + [now]
            if len(self._deaths) > MAX_RESTARTS:
                self.problem = f"the daemon died {len(self._deaths)} times within a minute: {self._last_log_line()}"
                return
            self.setback = f"the daemon died, and is started again: {self._last_log_line()}"
            self._due = now + 0.1 * 2 ** (len(self._deaths) - 1)
        if self._process is None and not self.problem and self._due is not None and now >= self._due:
            self._due = None
            self._start()

    def finish(self, timeout_s: float) -> bool:
        """Let the daemon judge what is left and end; return whether it did so, in order, within `timeout_s` seconds."""
        if self._process is None and not self.problem:
            self._start()
        process = self._process
        if process is None:
            return False
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.problem = f"the daemon needed more than {timeout_s:g} s to judge what was left; see {self._log}"
            return False
        if code:
            self.problem = f"the daemon ended with {code}: {self._last_log_line()}"
        return code == 0

    def _last_log_line(self) -> str:
        """Return the last line of the daemon's log, and the path of the log."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {self._log}: {error.strerror or error}"
        said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{said.removeprefix('sentinel: ')[:500]}; see {self._log}"

    def _start(self) -> None:
        # Blocked until the daemon has its handlers: a command that ends at once must not find it half started, to be
        # killed by the very signal that asks it to judge what is left. The mask is inherited, and undone by the daemon.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            make_directory(self._log.parent)
            with os.fdopen(create_file(self._log, os.O_WRONLY | os.O_APPEND), "ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            self.problem = f"the daemon could not be started: {error}"
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
