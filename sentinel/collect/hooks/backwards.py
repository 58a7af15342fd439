"""Whether this thread runs inside a backward, and the number of that backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Returns the number of the backward that runs on this thread; -1: none runs, or this torch lacks the private function."""


def in_backward() -> bool:
    """Whether this thread is inside a backward: a forward that runs now is a recompute.

    False where torch lacks the private function; recomputes inside a backward then count as forwards.
    """
    return graph_task() >= 0
