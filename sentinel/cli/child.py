"""A training command as a child process: in its own process group, with our signals and the terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from sentinel.errors import ConfigError

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


class Child:
    """A command that runs in a process group of its own until it ends.

    A process group, because a launcher has workers: a signal that reached only the launcher would leave them behind. On a
    terminal the group is put in the foreground, so that Ctrl-C reaches it once, from the terminal, as without `sentinel
    run`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command`; ConfigError when there is no such program."""
        self.code: int | None = None
        """Exit code once it ended: its own, or 128 + n when signal n ended it."""
        self._terminal = _foreground_terminal()
        self._former: dict[int, object] = {}
        # Handlers first: a signal between start and handler would end us and leave the child alone.
        self.pid = 0
        self._early: list[int] = []
        self.signals: tuple[tuple[str, float], ...] = ()
        """(name, seconds since the epoch) of the signals handed on, oldest first."""
        for number in FORWARDED:
            if signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP:
                continue  # nohup
            self._former[number] = signal.signal(number, self._forward)
        try:
            self.pid = _spawn(command, environment, self._terminal)
        except OSError as error:
            self._restore()
            raise ConfigError(f'command "{command[0]}": {error.strerror or error}') from error
        for early in self._early:
            self._send(early)

    def poll(self) -> int | None:
        """Return the exit code if it ended, else None. Never waits. A stop (Ctrl-Z) of the child stops our own group too."""
        if self.code is not None:
            return self.code
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            self.code = 1
            return self.code
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            self._stop_with_it()
            return None
        self.code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self._take_terminal(os.getpgrp())
        return self.code

    def close(self) -> None:
        """Take the terminal back and put the former signal handlers in place."""
        self._take_terminal(os.getpgrp())
        self._restore()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.pid:
            self._send(number)
        else:
            self._early.append(number)

    def _send(self, number: int) -> None:
        if self.code is None:
            self.signals = (*self.signals, (signal.Signals(number).name, time.time()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _stop_with_it(self) -> None:
        if self._terminal is None:
            return
        self._take_terminal(os.getpgrp())
        os.kill(os.getpid(), signal.SIGSTOP)
        # Continued by the shell's `fg` or `bg`.
        if _is_foreground(self._terminal):
            self._take_terminal(self.pid)
        self._send(signal.SIGCONT)

    def _take_terminal(self, group: int) -> None:
        if self._terminal is None:
            return
        # Whoever is in the background and changes the foreground is stopped by SIGTTOU unless it ignores it.
        former = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._terminal, group)
        finally:
            signal.signal(signal.SIGTTOU, former)

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        self._former = {}


def _spawn(command: Sequence[str], environment: Mapping[str, str], terminal: int | None) -> int:
    """Start the command in a group of its own and return its pid. fork and exec by hand: subprocess cannot lend a terminal.

    The parent has no threads yet, so forking is safe. A failed exec comes back through a pipe as its errno.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.setpgid(0, 0)
            if terminal is not None:
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                with contextlib.suppress(OSError):
                    os.tcsetpgrp(terminal, os.getpgrp())
            for number in (*FORWARDED, signal.SIGTTOU, signal.SIGPIPE):
                if signal.getsignal(number) is not signal.SIG_IGN or number in (signal.SIGTTOU, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
            os.execvpe(command[0], list(command), dict(environment))
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(writer)
    # Both sides set the group: whoever comes first, nobody sees the child outside it.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    with os.fdopen(reader, "rb") as failure:
        errno = failure.read()
    if errno:
        os.waitpid(pid, 0)
        raise OSError(int(errno), os.strerror(int(errno)))
    return pid


def _foreground_terminal() -> int | None:
    try:
        fd = sys.stdin.fileno()
    except (OSError, ValueError, AttributeError):
        return None
    return fd if os.isatty(fd) and _is_foreground(fd) else None


def _is_foreground(fd: int) -> bool:
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
