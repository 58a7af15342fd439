"""How long the stream of an accelerator that trains stands still for other ranks: time between pairs of events around waits.

The host goes on at once where a model lies on an accelerator, and the stream waits. So where a wait begins an event is
recorded on the stream, where it ends another one, and whoever writes the step asks, once the device is through, how much
time lies between them. Nobody waits for an event, and what the device has not reached by then is not known.

What holds the stream up, and is seen:
- a wait for a Work or a future, functional collectives' `wait_tensor`, and the end of a backward, in which DDP and FSDP wait
  (`waiting.WORKS`);
- a collective called with async_op=False, which newer torch puts on the current stream itself: there the wait lies inside of
  the collective's kernel, so the events are around the call;
- a wait for an event or another stream, once a collective was called, or waited for, on a stream beside the one that
  trains: so FSDP waits for its gathers, which run on streams of their own. What else the stream waits for in such a trainer,
  a copy on a stream of its own, counts too: nobody can tell them apart.
What is not seen: waits that C++ makes but at the end of a backward, those inside a captured graph, and those that a
compiled graph makes. The time between two events includes the transfer itself; it is alike on all ranks, which are compared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from sentinel.collect.accelerator import Accelerator
from sentinel.collect.hooks.backwards import in_backward
from sentinel.collect.hooks.failures import Guard
from sentinel.collect.hooks.interception import Interception
from sentinel.collect.parallel.collectives import METHODS, named
from sentinel.collect.parallel.waiting import WORKS, HostWaits, Reading, WaitClock

MAX_PAIRS = 4096
"""Waits of a step that are timed: a bound on events and on the writer's work (chosen: 80 layers, 16 micro-steps, three
collectives each). A step with more has no known wait."""

Pair = tuple[Any, Any]
"""The events before and behind a wait."""


def wait_clock(device: torch.device, guard: Guard) -> WaitClock:
    """Return the clock for a model on this device.

    On one whose module of torch has no streams and events, such as `meta` or `mps`, nothing is ever known: wait_s stays -1.
    A model that is moved after it was attached keeps the clock of where it was.
    """
    return HostWaits() if device.type == "cpu" else StreamWaits(_runtime_of(device), guard)


def _runtime_of(device: torch.device) -> Accelerator | None:
    module = getattr(torch, device.type, None)
    has_events = all(hasattr(module, name) for name in ("Event", "Stream", "current_stream"))
    return Accelerator(device) if has_events else None


class StreamWaits:
    """Seconds that the stream which trains stood still for others since the step began, as `WaitClock`.

    The stream that trains is the one that was current when the step's first forward began. Nothing is recorded in a world of
    one. What the device's runtime raises goes to the guard, once, and nothing is known from then on.
    """

    num_waits = 0
    is_waiting = -1
    """The host does not wait, and where the stream stands nobody asks."""

    def __init__(self, accelerator: Accelerator | None, guard: Guard) -> None:
        """accelerator: None where the device has no streams and events."""
        self._accelerator = accelerator
        self._guard = guard
        self._thread = threading.get_ident()
        self._pool: deque[Any] = deque()
        """Events that nobody needs any more."""
        self._is_on = False
        """Waits are timed: the step began on a known stream."""
        self._stream: Any = None
        """The stream that trains, and the number that tells it apart."""
        self._raw_stream = 0
        self._side: set[Any] = set()
        """Other streams on which a collective was called or waited for."""
        self._began: Any = None
        self._pairs: list[Pair] = []
        self._is_full = False
        self._backward_end: Any = None
        """The event where the end of a backward began; None: none runs, or it is not timed."""
        self._open = _OpenWaits()
        self._failure: Exception | None = None
        """What the writer thread met, for the training thread to report."""
        self._is_lost = False
        """The runtime has raised: it is asked nothing any more."""

    def install(self) -> None:
        """Watch every wait for a collective, if there is anybody to wait for by now."""
        if self._accelerator is not None and WORKS.is_active:
            WORKS.join(self)
            held_streams(self._accelerator.event_type, self._accelerator.stream_type).join(self)

    def remove(self) -> None:
        """Undo `install`."""
        self._is_on = False
        if self._accelerator is not None:
            WORKS.leave(self)
            held_streams(self._accelerator.event_type, self._accelerator.stream_type).leave(self)

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note on the current stream, which is the one that trains, where the step begins."""
        self._thread = threading.get_ident()
        self._is_on = False
        if self._accelerator is None or self._is_lost or not WORKS.is_active:
            return
        if self._failure is not None:
            self._give_up(self._failure)
            return
        try:
            self.install()  # A group may come into being behind the attach.
            if self._accelerator.is_capturing():
                return
            self._stream, self._raw_stream = self._accelerator.current_stream(), self._accelerator.raw_stream()
            self._side.discard(self._stream)
            self._began, self._is_on = self._mark(), True
        except Exception as error:
            self._give_up(error)

    def take(self) -> tuple[float, Reading | None]:
        """Return -1.0, and what the writer thread asks for the times of the step that ends; None: they will not be known."""
        began, pairs, is_full = self._began, self._pairs, self._is_full
        self._began, self._pairs, self._is_full = None, [], False
        if self._backward_end is not None:
            self._pool.append(self._backward_end)
            self._backward_end = None
        if self._accelerator is not None and self._is_on and began is not None and not is_full:
            try:
                if not self._accelerator.is_capturing():
                    return -1.0, functools.partial(self._read, (began, self._mark()), pairs)
            except Exception as error:
                self._give_up(error)
        self._pool.extend(itertools.chain([] if began is None else [began], *pairs))
        return -1.0, None

    def _read(self, whole: Pair, pairs: list[Pair]) -> tuple[float, float] | None:
        """Return seconds of a step and of its waits; None: the device has not come so far. Called by the writer thread."""
        try:
            # An event before a wait is done where the one behind it is.
            if not all(after.query() for _, after in (whole, *pairs)):
                return None
            step_ms, wait_ms = _ms_between(whole), sum(map(_ms_between, pairs))
            return step_ms / 1e3, wait_ms / 1e3
        except Exception as error:
            self._failure = error
            return None
        finally:
            self._pool.extend(itertools.chain(whole, *pairs))

    # -- waits ---------------------------------------------------------------------------------------------------------

    def begin_backward_end(self) -> None:
        """Note on the stream that this rank's own part of a backward is done, and the reductions are waited for."""
        if self._backward_end is not None:  # The one before raised before its end.
            self._pool.append(self._backward_end)
        self._backward_end = self._before()

    def end_backward_end(self) -> None:
        """Note on the stream that the reductions of a backward are done."""
        before, self._backward_end = self._backward_end, None
        self._behind(before)

    def enter(self) -> None:
        """Note on the stream that a wait begins, if it is the training thread's and not inside of another one."""
        waits = self._open.waits
        is_timed = not waits and self._backward_end is None and (threading.get_ident() == self._thread or in_backward())
        waits.append(self._before() if is_timed else None)

    def add(self, seconds: float) -> None:
        """Note on the stream that a wait ends. seconds: of the host, which mean nothing here."""
        waits = self._open.waits
        self._behind(waits.pop() if waits else None)

    def promised(self, work: Any, future: Any) -> None:
        """Do nothing: it does not matter whose future it is."""

    def done(self, work: Any, seconds: float) -> None:
        """Do nothing: it does not matter which Work was waited for."""

    def may_be_held_by_event(self, stream: Any) -> bool:
        """Return whether others may be what a stream waits for that waits for an event. stream: None: the current one."""
        return self._is_on and bool(self._side) and (stream is None or stream == self._stream)

    def may_be_held_by_stream(self, other: Any) -> bool:
        """Return whether others may be what the host waits for that waits for another stream."""
        return self._is_on and other in self._side

    def _before(self) -> Any:
        """Return an event where a wait begins, on the stream that trains; None: this wait is not timed."""
        if not self._is_on or self._accelerator is None:
            return None
        try:
            if self._accelerator.is_capturing():
                return None
            if self._accelerator.raw_stream() != self._raw_stream:
                self._side.add(self._accelerator.current_stream())
                return None
            if len(self._pairs) >= MAX_PAIRS:
                self._is_full = True
                return None
            return self._mark()
        except Exception as error:
            self._give_up(error)
            return None

    def _behind(self, before: Any) -> None:
        """Note where a wait ends that began at the event `before`."""
        if before is None or not self._is_on:
            return
        try:
            self._pairs.append((before, self._mark()))
        except Exception as error:
            self._give_up(error)

    def _mark(self) -> Any:
        """Return an event recorded on the stream that trains."""
        assert self._accelerator is not None
        try:
            event = self._pool.popleft()
        except IndexError:
            event = self._accelerator.timed_event()
        event.record(self._stream)
        return event

    def _give_up(self, error: Exception) -> None:
        """Report what the runtime raised, and ask nothing of it any more."""
        self._is_on, self._is_lost = False, True
        self._guard("waits", error)


class _OpenWaits(threading.local):
    """The waits that a thread is in: for each the event where it began; None: it is not timed."""

    def __init__(self) -> None:
        self.waits: list[Any] = []


def _ms_between(pair: Pair) -> float:
    before, after = pair
    return max(float(before.elapsed_time(after)), 0.0)


class StreamWatcher(Protocol):
    """Called where a stream may wait for other ranks although nobody waits for a Work. Its methods do not raise."""

    def enter(self) -> None:
        """Called when such a wait begins."""

    def add(self, seconds: float) -> None:
        """Called when such a wait has been put on the stream, also by an exception. seconds: 0.0."""

    def may_be_held_by_event(self, stream: Any) -> bool:
        """Return whether others may be what a stream waits for that waits for an event. stream: None: the current one."""

    def may_be_held_by_stream(self, other: Any) -> bool:
        """Return whether others may be what the host waits for that waits for another stream."""


@functools.cache
def held_streams(event_type: Any, stream_type: Any) -> Interception[StreamWatcher]:
    """Return the watchers of the streams of one kind of device, which is told by its classes of events and streams."""
    return Interception(functools.partial(_replace_all, event_type, stream_type))


def _replace_all(event_type: Any, stream_type: Any, streams: Interception[StreamWatcher]) -> None:
    group = getattr(sys.modules.get("torch._C._distributed_c10d"), "ProcessGroup", None)
    # Methods of the group and not functions of torch.distributed: trainers import those under names of their own, and
    # torch.compile knows them by what they are.
    for name in METHODS:
        if hasattr(group, name):
            streams.replace(group, name, named(_timed(streams, getattr(group, name), _is_synchronous), name))
    end = getattr(group, "_end_coalescing", None)
    if end is not None:  # What was coalesced is called here, and nobody says whether on this stream.
        streams.replace(group, "_end_coalescing", named(_timed(streams, end, lambda *_: True), "_end_coalescing"))
    for owner, name, is_meant in ((event_type, "wait", _is_held), (stream_type, "synchronize", _holds)):
        with contextlib.suppress(TypeError, AttributeError):  # A class of C that nobody can change, or without the method.
            streams.replace(owner, name, _timed(streams, getattr(owner, name), is_meant))


Meant = Callable[[StreamWatcher, tuple[Any, ...], Mapping[str, Any]], bool]
"""Returns whether a call with these arguments, self included, may wait for other ranks, as a watcher knows it."""


def _is_synchronous(_: StreamWatcher, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    # Options of older versions of torch do not say it: there every collective is waited for by its Work.
    return getattr(kwargs.get("opts", args[-1]), "asyncOp", True) is False


def _is_held(watcher: StreamWatcher, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return watcher.may_be_held_by_event(args[1] if len(args) > 1 else kwargs.get("stream"))


def _holds(watcher: StreamWatcher, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return watcher.may_be_held_by_stream(args[0])


def _timed(streams: Interception[StreamWatcher], original: Callable[..., Any], is_meant: Meant) -> Callable[..., Any]:
    """Return a method that does as `original` does, inside of a wait of the watchers for which it is meant."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        held = [watcher for watcher in streams.users if is_meant(watcher, args, kwargs)]
        for watcher in held:
            watcher.enter()
        try:
            return original(*args, **kwargs)
        finally:
            for watcher in held:
                watcher.add(0.0)

    return method
