"""How long this rank waits for others inside collectives, from which the daemon finds the rank that is last.

In a synchronous group all steps are equally long; the slow rank is the one that does not wait. Here is what is common to all
devices, and host time, which is what is waited where a model lies on the CPU; `stream_waiting` has accelerators, where the
stream waits and the host goes on.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from sentinel.collect.hooks.interception import Interception


class WaitWatcher(Protocol):
    """Called at every wait of this process for a collective of torch.distributed."""

    def enter(self) -> None:
        """Called when a wait begins."""

    def add(self, seconds: float) -> None:
        """Called when a wait has ended, also by an exception. seconds: host time that it took."""

    def promised(self, work: Any, future: Any) -> None:
        """Called when a future of a Work, or of such a future, was taken: a wait for it is one for the Work."""

    def done(self, work: Any, seconds: float) -> None:
        """Called when a Work, or a future of one, was waited for: it is complete on the current stream.

        seconds: of the wait.
        """


Reading = Callable[[], tuple[float, float] | None]
"""Returns seconds of a step and of the waits in it, as the device has them, once the step is over; None: not known."""


class WaitClock(Protocol):
    """Measures how long this rank waits for others, step by step. Its methods do not raise and do not wait."""

    num_waits: int
    """Waits that are over; it only grows. 0 where the host does not wait."""

    @property
    def is_waiting(self) -> int:
        """1 while the training thread waits for others, 0 while it does not; -1: not known. Asked by the writer thread."""

    def install(self) -> None:
        """Begin to watch waits for collectives of torch.distributed."""

    def remove(self) -> None:
        """Undo `install`."""

    def begin_step(self) -> None:
        """Called by the training thread when the step's first forward begins."""

    def begin_backward_end(self) -> None:
        """Called when this rank's own part of a backward is done: the time from now on waits for the reductions (DDP,
        FSDP)."""

    def end_backward_end(self) -> None:
        """Called when the reductions of a backward are done."""

    def take(self) -> tuple[float, Reading | None]:
        """Return the seconds waited in the step that ends, and begin anew; -1.0: not known, or not yet: then the writer
        thread asks the reading that comes with it.

        Called by the training thread.
        """


class HostWaits:
    """Seconds that the training thread spent waiting in collectives since the step began, as `WaitClock`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._thread = threading.get_ident()
        self._since = 0.0
        self._is_inside = False
        self.num_waits = 0

    @property
    def is_waiting(self) -> int:
        """1 while the training thread waits for others, 0 while it does not; -1: not known. Asked by the writer thread."""
        if not WORKS.is_active:
            return -1
        return int(self._is_inside or self._since > 0.0)

    def install(self) -> None:
        """Watch every wait for a collective of torch.distributed."""
        WORKS.join(self)

    def remove(self) -> None:
        """Undo `install`."""
        WORKS.leave(self)

    def begin_step(self) -> None:
        """Do nothing: a step's waits are counted from the end of the one before."""

    def begin_backward_end(self) -> None:
        """Called when this rank's own part of a backward is done: the time from now on waits for the reductions (DDP,
        FSDP)."""
        self._since = time.perf_counter()

    def end_backward_end(self) -> None:
        """Called when the reductions of a backward are done."""
        since, self._since = self._since, 0.0
        if since:
            self.add(time.perf_counter() - since)

    def enter(self) -> None:
        """Note that a wait begins, if it is the training thread's."""
        self._is_inside = threading.get_ident() == self._thread

    def add(self, seconds: float) -> None:
        """Add the seconds of a wait of the training thread.

        Those in a backward's end are in the time of that end already.
        """
        if threading.get_ident() == self._thread:
            self._is_inside = False
            self.num_waits += 1
            if not self._since:
                self._seconds += seconds

    def promised(self, work: Any, future: Any) -> None:
        """Do nothing: it does not matter whose future it is."""

    def done(self, work: Any, seconds: float) -> None:
        """Do nothing: it does not matter which Work was waited for."""

    def take(self) -> tuple[float, None]:
        """Return the seconds waited in the step that ends, and begin anew; -1.0: not known.

        Called by the training thread.
        """
        self._thread = threading.get_ident()
        seconds, self._seconds = self._seconds, 0.0
        return (seconds if WORKS.is_active else -1.0), None


class Works(Interception[WaitWatcher]):
    """The watchers of this process, and the functions of torch that are replaced while there is one."""

    @property
    def is_active(self) -> bool:
        dist = sys.modules.get("torch.distributed")
        return dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _replace_all(works: Interception[WaitWatcher]) -> None:
    # Synchronous collectives of torch.distributed end in a wait of their own work: one method sees them all.
    work = getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)
    if work is None:
        return
    futures = _Futures(works)
    for name in ("wait", "synchronize", "block_current_stream"):
        if hasattr(work, name):
            works.replace(work, name, _timed(works, getattr(work, name)))
    # Tensor parallel styles and DTensor wait in an operator that no Work is handed to.
    functional = sys.modules.get("torch.distributed._functional_collectives")
    wait_tensor = getattr(functional, "wait_tensor", None)
    if wait_tensor is not None:
        works.replace_everywhere("wait_tensor", wait_tensor, _timed(works, wait_tensor))
    torch_c = sys.modules.get("torch._C")
    if torch_c is None or not hasattr(work, "get_future") or not hasattr(torch_c, "Future"):
        return
    works.replace(work, "get_future", futures.taken(work.get_future))
    for name in ("wait", "value"):
        works.replace(torch_c.Future, name, _timed(works, getattr(torch_c.Future, name), futures.knows))
    works.replace(torch_c.Future, "then", futures.followed(torch_c.Future.then))
    if hasattr(torch_c, "_collect_all"):
        works.replace(torch_c, "_collect_all", futures.joined(torch_c._collect_all))


class _Futures:
    """The futures of collectives, held weakly; those of other kinds of work do not matter here."""

    def __init__(self, works: Interception[WaitWatcher]) -> None:
        self._works = works
        self._known: dict[int, weakref.ref[Any]] = {}

    def knows(self, future: Any) -> bool:
        """Return whether this is the future of a collective."""
        found = self._known.get(id(future))
        return found is not None and found() is future

    def _promise(self, owner: Any, future: Any) -> None:
        known, key = self._known, id(future)
        if not self.knows(future):
            known[key] = weakref.ref(future, lambda _: known.pop(key, None))
        for user in self._works.users:
            user.promised(owner, future)

    def taken(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Work.get_future` that reports every future it returns."""

        @functools.wraps(original)
        def get_future(work: Any) -> Any:
            future = original(work)
            self._promise(work, future)
            return future

        return get_future

    def followed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Future.then` that reports futures derived from those of collectives."""

        @functools.wraps(original)
        def then(future: Any, *args: Any, **kwargs: Any) -> Any:
            follower = original(future, *args, **kwargs)
            if self.knows(future):
                self._promise(future, follower)
            return follower

        return then

    def joined(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits for several futures as `original` does, and reports those of collectives."""

        @functools.wraps(original)
        def collect_all(futures: Any) -> Any:
            whole = original(futures)
            for future in filter(self.knows, futures):
                self._promise(future, whole)
            return whole

        return collect_all


def _timed(
    works: Interception[WaitWatcher], original: Callable[..., Any], is_meant: Callable[[Any], bool] | None = None
) -> Callable[..., Any]:
    """Return a function that waits as `original` does, for what its first argument stands for, and reports how long.

    is_meant: for which arguments alone; None: for all.
    """
    clock = time.perf_counter

    @functools.wraps(original)
    def wait(awaited: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (is_meant is not None and not is_meant(awaited)):
            return original(awaited, *args, **kwargs)
        began = clock()
        for user in works.users:
            user.enter()
        try:
            result = original(awaited, *args, **kwargs)
        finally:
            waited = clock() - began
            for user in works.users:
                user.add(waited)
        for user in works.users:
            user.done(awaited, waited)
        return result

    return wait


WORKS = Works(_replace_all)
