"""A command in the background: in a session of its own, its output in a log, and its end in words."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sentinel.private_files import create_file, make_directory

LAST_BYTES = 8192
"""Bytes of the end of a log in which the last line is looked for."""
PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def sentinel_command(*arguments: str) -> list[str]:
    """Return the command of a `sentinel` that finds the modules which this process finds.

    `python -m` looks in the current directory first, which the command `sentinel` does not: a folder there that is
    called like the module of another package would be imported in its place.
    """
    try:
        looks_here = "" in sys.path or str(Path.cwd()) in sys.path
    except OSError:  # the directory is gone
        looks_here = True
    return [sys.executable, *(() if looks_here else ("-P",)), "-m", "sentinel.cli", *arguments]


class LoggedCommand:
    """Neither its death nor a Ctrl-C at the terminal touches us, nor ours it, unless it is told to end with us."""

    def __init__(
        self, command: Sequence[str], log: Path, *, holds_sigterm: bool = False, ends_with_us: bool = False
    ) -> None:
        """log: to which stdout and stderr are appended. Nothing is started yet.

        holds_sigterm: it begins with SIGTERM blocked, and unblocks it once it has its handlers: who ends a command that has
        just begun must not kill it half started by the very signal that asks it to finish.
        ends_with_us: it gets SIGTERM when the thread that started it ends, however that ends; on Linux alone.
        """
        self.log = log
        self._command = list(command)
        self._held = {signal.SIGTERM} if holds_sigterm else set[signal.Signals]()
        self._before = _end_with_parent() if ends_with_us else None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_asked = False
        """It was asked to end."""

    @property
    def pid(self) -> int | None:
        """Process id of what runs now, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def code(self) -> int | None:
        """Exit code of what ended, below 0 the signal that ended it; None: it runs, or was not started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it; OSError."""
        self._is_asked = False
        former = signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        try:
            make_directory(self.log.parent)
            with os.fdopen(create_file(self.log, os.O_WRONLY | os.O_APPEND), "ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=self._before,
                )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, where it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def ask(self) -> None:
        """Ask it to end, once: another SIGTERM kills one that has done all and is just ending, without a handler by then."""
        if not self._is_asked:
            self._is_asked = True
            self.send(signal.SIGTERM)

    def end(self, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False) -> int | None:
        """Ask it to end, and return its exit code; None: it did not within `timeout_s` seconds, and was killed.

        is_hurried: asked meanwhile whether to wait no longer.
        """
        if self._process is None:
            return None
        self.ask()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not is_hurried():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(0.1)
        self._process.kill()
        self._process.wait()
        return None

    def last_line(self) -> str:
        """Return the last line of the log, and the path of the log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {self.log}: {error.strerror or error}"
        said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{said.removeprefix('sentinel: ')[:500]}; see {self.log}"


def _end_with_parent() -> Callable[[], None] | None:
    """Return what a child calls before it becomes its command; None: this system has no such thing."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return None if prctl is None else lambda: prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
