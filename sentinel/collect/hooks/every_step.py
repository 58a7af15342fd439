"""The one hook of this process on the steps of all torch optimizers, and the monitors that it calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from sentinel.collect.compiled.graphs import leave_alone
from sentinel.collect.hooks.weak import WeakList


class MeetsOptimizers(Protocol):
    """Who wants to know of every optimizer that steps."""

    def meet(self, optimizer: Any) -> None:
        """Called before any torch optimizer of this process steps, in the thread that steps it. Raises nothing."""


_LISTENERS: WeakList[MeetsOptimizers] = WeakList(lambda: None)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for one in _LISTENERS:
        one.meet(optimizer)


leave_alone(_before_step)


@functools.cache
def _install() -> None:
    """Put the hook on, once for the life of the process.

    It is never taken off: a monitor that goes out of scope ends wherever garbage happens to be collected, which may be while
    torch goes through these hooks, and then the trainer's step would raise.
    """
    register_optimizer_step_pre_hook(_before_step)


def listen(listener: MeetsOptimizers) -> Callable[[], None]:
    """Call a listener, held weakly, from now on; return what ends that, at any moment."""
    _install()
    _LISTENERS.append(listener)
    return functools.partial(_LISTENERS.remove, listener)
