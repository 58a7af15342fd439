"""A device's runtime in memory of the host: streams whose work waits until it is run, events on them, a clock of its own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from sentinel.collect.rows.buffer import DeviceStats, StepRows


class Stream:
    """Work in order, done when somebody waits for it."""

    def __init__(self, runtime: Runtime, stream_id: int) -> None:
        self.runtime = runtime
        self.stream_id = stream_id
        self.work: list[Callable[[], None]] = []
        self.num_done = 0
        self.now_s = 0.0
        """Seconds on the device's clock at which the work done so far was over."""

    def enqueue(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def compute(self, seconds: float) -> None:
        """Enqueue a kernel that takes so long."""
        self.enqueue(lambda: self.hold_until(self.now_s + seconds))

    def hold_until(self, now_s: float) -> None:
        """Stand still until the device's clock says so."""
        self.now_s = max(self.now_s, now_s)

    def run_to(self, position: int) -> None:
        """Do the first `position` pieces of work."""
        while self.num_done < position:
            self.num_done += 1
            self.work[self.num_done - 1]()

    def run(self) -> None:
        """Do all work."""
        self.run_to(len(self.work))

    def record_event(self) -> Event:
        event = Event(self.runtime)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.runtime.touch()
        for stream in self.runtime.streams:
            stream.run()
        for stream in self.runtime.streams:  # What the host enqueues from now on begins no sooner.
            stream.hold_until(self.now_s)


class Event:
    def __init__(self, runtime: Runtime, *, enable_timing: bool = False) -> None:
        self.runtime = runtime
        self.is_timed = enable_timing
        self.stream: Stream | None = None
        self.position = 0
        self.reached_s = 0.0

    def record(self, stream: Stream) -> None:
        self.runtime.touch()
        assert not self.runtime.is_recording_graph, "an event on a stream whose graph is recorded runs again at each replay"
        self.runtime.num_recorded += 1
        self.stream = stream
        if self.is_timed:
            stream.enqueue(functools.partial(self._reach, stream))
        self.position = len(stream.work)

    def _reach(self, stream: Stream) -> None:
        self.reached_s = stream.now_s

    def _hold(self, stream: Stream) -> None:
        if self.stream is not None:
            self.stream.run_to(self.position)
            stream.hold_until(self.stream.now_s)

    def wait(self, stream: Stream | None = None) -> None:
        self.runtime.touch()
        stream = stream or self.runtime.current
        stream.enqueue(functools.partial(self._hold, stream))

    def query(self) -> bool:
        self.runtime.touch()
        return self.stream is None or self.stream.num_done >= self.position

    def synchronize(self) -> None:
        self.runtime.touch()
        assert threading.get_ident() != self.runtime.trainer, "the training thread waits for nobody"
        if self.stream is not None:
            self.stream.run_to(self.position)

    def elapsed_time(self, after: Event) -> float:
        self.runtime.touch()
        if not (self.is_timed and after.is_timed and self.query() and after.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (after.reached_s - self.reached_s) * 1e3


class Runtime:
    """An Accelerator of the tests: `current` is the current stream; once it `is_dead` every call raises."""

    event_type: Any = Event
    stream_type: Any = Stream

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.num_calls = 0
        self.num_timed_events = 0
        """Events made that note the time."""
        self.num_recorded = 0
        """Events recorded, however often each."""
        self.is_dead = False
        self.is_recording_graph = False
        self.trainer: int | None = None
        """The thread that must not wait for an event; None: any may."""
        self.streams = [Stream(self, 0), Stream(self, 1)]
        self.current = self.streams[0]

    def touch(self) -> None:
        self.num_calls += 1
        if self.is_dead:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def raw_stream(self) -> int:
        self.touch()
        return self.current.stream_id

    def is_capturing(self) -> bool:
        self.touch()
        return self.is_recording_graph

    def current_stream(self) -> Stream:
        self.touch()
        return self.current

    def event(self) -> Event:
        self.touch()
        return Event(self)

    def timed_event(self) -> Event:
        self.touch()
        self.num_timed_events += 1
        return Event(self, enable_timing=True)

    def pinned(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.touch()
        return torch.zeros(shape, dtype=torch.int64)

    def leave_captures_alone(self) -> None:
        assert threading.get_ident() != self.trainer

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.touch()
        return torch.zeros(shape, dtype=dtype)


def device_rows(capacity: int, runtime: Runtime | None = None) -> StepRows:
    """Return rows whose accelerator is `runtime`: kernels that write slots take CPU tensors for those of a device."""
    own = runtime or Runtime()
    return StepRows(capacity, lambda device, rows: DeviceStats(device, rows, own))  # type: ignore[arg-type]
