"""A device's runtime in memory of the host: streams whose work waits until it is run, and events on them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sentinel.collect.rows.buffer import DeviceStats, StepRows


class Stream:
    """Work in order, done when somebody waits for it."""

    def __init__(self, runtime: Runtime, stream_id: int) -> None:
        self.runtime = runtime
        self.stream_id = stream_id
        self.work: list[Callable[[], None]] = []
        self.num_done = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def run_to(self, position: int) -> None:
        """Do the first `position` pieces of work."""
        while self.num_done < position:
            self.num_done += 1
            self.work[self.num_done - 1]()

    def wait_event(self, event: Event) -> None:
        self.runtime.touch()
        self.enqueue(event.wait)

    def wait_stream(self, other: Stream) -> None:
        self.runtime.touch()
        position = len(other.work)
        self.enqueue(lambda: other.run_to(position))


class Event:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.stream: Stream | None = None
        self.position = 0

    def record(self, stream: Stream) -> None:
        self.runtime.touch()
        self.stream, self.position = stream, len(stream.work)

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self.position)

    def query(self) -> bool:
        self.runtime.touch()
        return self.stream is None or self.stream.num_done >= self.position

    def synchronize(self) -> None:
        self.runtime.touch()
        self.wait()


class Runtime:
    """An Accelerator of the tests: `current` is the current stream; once it `is_dead` every call raises."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.num_calls = 0
        self.is_dead = False
        self.streams = [Stream(self, 0), Stream(self, 1)]
        self.current = self.streams[0]

    def touch(self) -> None:
        self.num_calls += 1
        if self.is_dead:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def raw_stream(self) -> int:
        self.touch()
        return self.current.stream_id

    def current_stream(self) -> Stream:
        self.touch()
        return self.current

    def event(self) -> Event:
        self.touch()
        return Event(self)

    def pinned(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.touch()
        return torch.zeros(shape, dtype=torch.int64)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.touch()
        return torch.zeros(shape, dtype=dtype)


def device_rows(capacity: int, runtime: Runtime | None = None) -> StepRows:
    """Return rows whose accelerator is `runtime`: kernels that write slots take CPU tensors for those of a device."""
    own = runtime or Runtime()
    return StepRows(capacity, lambda device, rows: DeviceStats(device, rows, own))  # type: ignore[arg-type]
