"""NotebookCells: that a cell which trains raises, where the exception ends nothing: IPython's kernel lives on.

A cell often trains and does something else. What it raises is the trainer's where the statement of the cell that raised is
the one that trained, a loop or a call; a slip in the plot behind it is not. IPython is asked only where it was imported
already, and has a callback of ours only while a cell trains.
"""

from __future__ import annotations

import sys
import weakref
from types import CodeType, FrameType, TracebackType
from typing import Any, Protocol

from sentinel.collect.lifecycle.farewell import farewell
from sentinel.messages import Bye


class Trains(Protocol):
    """What trains, as this module knows it."""

    raised: Bye | None
    """What its cell raised; None: nothing, or it has trained since."""


class NotebookCells:
    """One for the process. A class for its state: which statement of the running cell trains whom."""

    def __init__(self) -> None:
        self._shell: Any = None
        """IPython's, while a cell trains."""
        self._trained: list[tuple[weakref.ref[Any], CodeType]] = []

    def note_step(self, running: Trains) -> None:
        """Note that a step of a training begins; where no notebook is, this is one look into a dict."""
        running.raised = None
        if "IPython" not in sys.modules:
            return
        shell = self._shell or _shell()
        code = None if shell is None else _statement_of_stack(shell, sys._getframe(1))
        if code is None or any(known is code and one() is running for one, known in self._trained):
            return
        self._trained.append((weakref.ref(running), code))
        if self._shell is None:
            self._shell = shell
            shell.events.register("post_run_cell", self._cell_ran)

    def _cell_ran(self, result: Any = None) -> None:
        shell, self._shell = self._shell, None
        trained, self._trained = self._trained, []
        if shell is not None:
            shell.events.unregister("post_run_cell", self._cell_ran)
        error = getattr(result, "error_in_exec", None)
        if shell is None or not isinstance(error, BaseException):
            return
        said = farewell("exception", error)
        code = _statement_of_error(shell, error.__traceback__)
        for one, known in trained:
            running = one()
            if running is not None and known is code and said.reason == "exception":
                running.raised = said


def _shell() -> Any:
    """Return IPython's shell, if this process is one."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get() if callable(get) else None
    return shell if hasattr(shell, "events") and hasattr(shell, "user_ns") else None


def _statement_of_stack(shell: Any, frame: FrameType | None) -> CodeType | None:
    """Return the code of the cell's statement that runs: IPython compiles each of a cell's statements for itself."""
    found = None
    while frame is not None:
        if _is_of_cell(shell, frame):
            found = frame.f_code
        frame = frame.f_back
    return found


def _statement_of_error(shell: Any, trace: TracebackType | None) -> CodeType | None:
    while trace is not None:
        if _is_of_cell(shell, trace.tb_frame):
            return trace.tb_frame.f_code
        trace = trace.tb_next
    return None


def _is_of_cell(shell: Any, frame: FrameType) -> bool:
    return frame.f_globals is shell.user_ns and frame.f_code.co_name.startswith(("<module>", "<cell line: "))


CELLS = NotebookCells()
"""The one of this process."""
