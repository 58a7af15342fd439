"""The daemon beside a training command: started, watched, started again when it dies, ended when the command is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from sentinel.cli.logged_command import LoggedCommand, sentinel_command

MAX_RESTARTS = 5
"""Restarts of the daemon within RESTART_WINDOW_S, after which the run goes on unwatched and says so. Too small: a passing
failure ends the watching; too large: a daemon that cannot start takes the trainer's processor time."""
RESTART_WINDOW_S = 60.0


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
        self._log = log
        self._daemon = LoggedCommand(sentinel_command("serve", *arguments), log, holds_sigterm=True)
        self._deaths: list[float] = []
        self._due: float | None = None
        self._is_started = False
        """It was, and its end was not noted yet."""
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id of the daemon that runs now, or None."""
        return self._daemon.pid

    @property
    def num_restarts(self) -> int:
        """Times it died so far, within the window."""
        return len(self._deaths)

    def watch(self) -> None:
        """Start the daemon again if it ended; to be called often. After a bad command line (exit code 2) it is not."""
        now = time.monotonic()
        code = self._daemon.code if self._is_started else None
        if code is not None:
            self._is_started = False
            if code == 2:
                self.problem = f"the daemon refused to start: {self._daemon.last_line()}"
                return
            self._deaths = [at for at in self._deaths if now - at < RESTART_WINDOW_S] + [now]
            if len(self._deaths) > MAX_RESTARTS:
                self.problem = f"the daemon died {len(self._deaths)} times within a minute: {self._daemon.last_line()}"
                return
            self.setback = f"the daemon died, and is started again: {self._daemon.last_line()}"
            self._due = now + 0.1 * 2 ** (len(self._deaths) - 1)
        if not self._is_started and not self.problem and self._due is not None and now >= self._due:
            self._due = None
            self._start()

    def finish(self, timeout_s: float) -> bool:
        """Let the daemon judge what is left and end; return whether it did so, in order, within `timeout_s` seconds."""
        if not self._is_started and not self.problem:
            self._start()
        if not self._is_started:
            return False
        code = self._daemon.end(timeout_s)
        if code is None:
            self.problem = f"the daemon needed more than {timeout_s:g} s to judge what was left; see {self._log}"
        elif code:
            self.problem = f"the daemon ended with {code}: {self._daemon.last_line()}"
        return code == 0

    def _start(self) -> None:
        try:
            self._daemon.start()
        except OSError as error:
            self.problem = f"the daemon could not be started: {error}"
        else:
            self._is_started = True
