"""A process that answers one `what if`: bounded in time and memory, behind everybody else, and gone with its answer.

The thread that judges shares an interpreter with the threads of HTTP; what judges thousands of steps at once must not.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

import msgspec

from sentinel.detect.dotted import allow_code, is_code_allowed
from sentinel.errors import RuleError, SentinelError, StoreError, TookTooLong
from sentinel.exception_words import described
from sentinel.judge.what_if import Question, WhatIf, what_if
from sentinel.printable import printable

LIMIT_S = 20.0
"""Seconds that steps are judged for one answer (chosen: as long as a person waits). What was judged by then is answered."""
SPARE_S = 20.0
"""Seconds beside them to start, to read what lies before the first step, and to answer; then the process is ended."""
MOST_BYTES = 3 * 2**30
"""Address space of the process, of which Python and numpy take a quarter; a bound on memory."""
NICENESS = 10
"""It runs where nobody else wants to: the judge, and a trainer on the same machine, come first."""
_CODE = """
import json, os, sys
# Each thread of numeric libraries would take address space, and none is needed.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
sys.path[:], may_run_code, limit_s, most_bytes = json.loads(sys.argv[1])
from sentinel.daemon.what_if_process import answer
answer(may_run_code, limit_s, most_bytes)
"""
_Answer = tuple[WhatIf | None, str, str]
"""(answer, kind of error, error); one of the first and the last is empty."""


def ask_apart(question: Question) -> WhatIf:
    """Return the answer of another process, in which rules may name the detectors that they may name here.

    RuleError for a change that no pack may have; StoreError where the run cannot be read, or the process ended before its
    answer; TookTooLong where it was ended.
    """
    argument = json.dumps([sys.path, is_code_allowed(), LIMIT_S, MOST_BYTES])
    with tempfile.TemporaryFile() as talk:
        child = subprocess.Popen(
            [sys.executable, "-c", _CODE, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=talk
        )
        try:
            body, _ = child.communicate(msgspec.json.encode(question), timeout=LIMIT_S + SPARE_S)
        except subprocess.TimeoutExpired:
            raise TookTooLong(
                f"no answer within {LIMIT_S + SPARE_S:g} s: the machine is busy, or the disk of the run slow; {_BY_HAND}"
            ) from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if not body:
            raise StoreError(f"the process that judged it ended with {_how(child.returncode)}{_last_line(talk)}; {_BY_HAND}")
    answered: WhatIf | None
    answered, kind, error = msgspec.json.decode(body, type=_Answer)
    if answered is None:
        raise (RuleError if kind == "rule" else StoreError)(error)
    return answered


_BY_HAND = "sentinel rules backtest has no such limits"


def answer(may_run_code: bool, limit_s: float, most_bytes: int) -> None:
    """Answer the question on stdin to stdout. Called in the process that `ask_apart` starts, and there alone."""
    # Whoever asked may be gone: nothing outlives its time.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, limit_s + SPARE_S)
    with contextlib.suppress(OSError, ValueError):
        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    # A rule's own code may print.
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    allow_code(may_run_code)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    until = time.monotonic() + limit_s
    told: _Answer
    try:
        told = (what_if(question, is_over=lambda: time.monotonic() > until), "", "")
    except RuleError as error:
        told = (None, "rule", str(error))
    except (SentinelError, OSError, MemoryError) as error:
        told = (None, "store", str(error) if isinstance(error, SentinelError) else described(error))
    with os.fdopen(out, "wb") as stream:
        stream.write(msgspec.json.encode(told))


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _last_line(talk: IO[bytes]) -> str:
    talk.seek(0)
    lines = [line.strip() for line in talk.read()[-4000:].decode("utf-8", "replace").splitlines() if line.strip()]
    return f': "{printable(lines[-1])[:200]}"' if lines else ""
