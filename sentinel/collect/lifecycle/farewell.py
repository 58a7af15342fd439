"""What an incarnation says when it ends: its reason, and the exception or exit code where there is one."""

from __future__ import annotations

import re
import sys

import torch
import torch.distributed as dist

from sentinel.collect.lifecycle.signal_handlers import signal_of_error
from sentinel.messages import Bye
from sentinel.wire.frame import NO_STEP

MAX_MESSAGE = 500
"""Characters of an exception's message that travel."""

_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|std::bad_alloc|failed to allocate .{0,40}memory",
    re.IGNORECASE,
)
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|was closed|lost)|broken pipe|socket (timeout|error)|remote process|"
    r"remote error|timed out waiting|(wait|collective operation) timeout|communicator was aborted|aborted by|"
    r"no response from|peer.{0,40}(dropped|died|failed)|heartbeat.{0,60}(timed out|lost)|unhandled system error",
    re.IGNORECASE,
)
_COLLECTIVES = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "DistQueueEmptyError")
_LOST = tuple(one for name in _COLLECTIVES if isinstance(one := getattr(dist, name, None), type))


def farewell(reason: str, error: BaseException | None = None, code: int = 0) -> Bye:
    """Return the last words of an incarnation; its step is filled in when they are written.

    reason: `detached`, `exit`, `exception`. error: what is being raised, if it is known. An interrupt by hand is no
    exception, and SystemExit is an exit with its code.
    """
    if isinstance(error, KeyboardInterrupt):
        return Bye(reason="interrupted", step=NO_STEP, error="KeyboardInterrupt")
    if isinstance(error, SystemExit):
        code = exit_code(error.code)
        # Launchers of processes exit where they caught what the trainer raised: that is why.
        why = None if error.__suppress_context__ else error.__context__
        if code and why is not None and not isinstance(why, SystemExit):
            return farewell("exception", why, code)
        return Bye(reason="exit", step=NO_STEP, code=code)
    if error is None:
        return Bye(reason=reason, step=NO_STEP, code=code)
    text = str(error)
    return Bye(
        reason="exception", step=NO_STEP, error=_type_of(error),
        message=" ".join(text[: 4 * MAX_MESSAGE].split())[:MAX_MESSAGE], code=code,
        is_memory=_is_memory(error, text), is_lost_peer=_is_lost_peer(error, text), signal=signal_of_error(error),
    )  # fmt: skip


def raised_now() -> BaseException | None:
    """Return the exception that is being handled, or is on its way through a `finally`, in this thread; None: none is."""
    return sys.exc_info()[1]


def exit_code(status: object) -> int:
    """Return the exit code that Python makes of what `sys.exit` is given."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"


def _is_memory(error: BaseException, text: str) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and _MEMORY.search(text) is not None


def _is_lost_peer(error: BaseException, text: str) -> bool:
    """Tell whether this, or what it was raised from, is about another rank that does not answer."""
    if isinstance(error, (*_LOST, ConnectionError, TimeoutError)):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(text) is not None:
        return True
    before = error.__cause__ or error.__context__
    return before is not None and before is not error and _is_lost_peer(before, str(before))
