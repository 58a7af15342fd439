"""Whether this thread is inside a backward, and of which."""

from __future__ import annotations

from collections.abc import Callable

import torch

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Returns a number for the backward that this thread is inside of; -1: none, or nobody can tell, for it is private."""


def in_backward() -> bool:
    """Whether this thread is inside a backward: a forward that runs now is a recompute.

    Where nobody can tell, recomputes inside a backward are counted.
    """
    return graph_task() >= 0
