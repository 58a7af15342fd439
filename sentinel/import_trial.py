"""A trial of an import in a process of its own: what ends that process, or holds it up, harms nobody else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, NoReturn

from sentinel.exception_words import described
from sentinel.printable import printable

LIMIT_S = 30.0
"""Most seconds that the import of another package may take (chosen: torch off a slow disk takes 10 to 20). Smaller: packages
on slow disks are refused; larger: one that hangs is named later."""
SPARE_S = 5.0
"""Seconds that the process has beside the import: to start, and to end by itself."""
MOST_WORDS = 200
"""Characters of the last line that the process wrote which a message quotes."""
_IMPORTED, _RAISED = 86, 87
"""Exit codes of the process; chosen among those that no convention takes."""
_CODE = """
import json, sys
sys.path[:], value, limit_s = json.loads(sys.argv[1])
from sentinel.import_trial import attempt
attempt(value, limit_s)
"""


def import_problem(value: str, limit_s: float = LIMIT_S) -> str:
    """Return in words why `value`, as entry points have it (`package.module:Class`), cannot be imported; empty: it can.

    It is imported by another process of this interpreter with the same sys.path, which ends with it. Where no process can
    be started nothing is known, and nothing is said.
    """
    with tempfile.TemporaryFile() as talk:
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _CODE, json.dumps([sys.path, value, limit_s])],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=talk,
            )  # fmt: skip
        except OSError:
            return ""
        try:
            code = child.wait(limit_s + SPARE_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        said = _last_line(talk)
    if code == _IMPORTED:
        return ""
    if code == _RAISED:
        return said
    if code == -signal.SIGALRM:
        return f"its import does not end within {limit_s:g} s"
    how = f"exit code {code}" if code >= 0 else _signal_name(-code)
    words = said if len(said) <= MOST_WORDS else f"{said[:MOST_WORDS]}..."
    return f"its import ends the process that imports it, with {how}" + (f'; its last words: "{words}"' if words else "")


def attempt(value: str, limit_s: float) -> NoReturn:
    """Import `value`, and end this process with an exit code that says whether that could be done.

    An alarm ends it after `limit_s`, whether somebody still waits for it or not.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        importlib.metadata.EntryPoint("", value, "").load()
    except (Exception, SystemExit) as error:  # another package's import may fail in any way
        os.write(2, f"\n{described(error)}\n".encode())
        os._exit(_RAISED)
    os._exit(_IMPORTED)


def _signal_name(number: int) -> str:
    """Return the name of a signal; most of those for real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _last_line(talk: IO[bytes]) -> str:
    """Return the last line that is not blank; what cannot be printed is escaped."""
    talk.seek(0)
    lines = talk.read().decode("utf-8", "replace").splitlines()
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return printable(said)
