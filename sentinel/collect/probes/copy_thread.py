"""The thread that takes copies of tensors from the training thread to the disk, in order; the trainer waits for nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import torch


class Copies(Protocol):
    """Copies of one step's tensors, complete once `events` have happened."""

    events: list[Any]
    """One behind the copies of each accelerator's stream."""
    num_bytes: int


CopiesT = TypeVar("CopiesT", bound=Copies)


class CopyThread(Generic[CopiesT]):
    """Calls `write` with what `submit` hands over, once it has arrived on the host. Its thread begins with the first."""

    def __init__(self, name: str, write: Callable[[CopiesT], None], failed: Callable[[CopiesT, Exception], None]) -> None:
        """write, failed: called on the thread; failed with what `write` raised."""
        self.num_written = 0
        """Bytes that no longer wait, written or given up. Only the thread changes it."""
        self._name = name
        self._write = write
        self._failed = failed
        self._queue: queue.SimpleQueue[CopiesT | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, copies: CopiesT) -> None:
        """Queue copies. Does not wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(copies)

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and end the thread; return False where that takes more than `timeout_s`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._queue.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while (copies := self._queue.get()) is not None:
            try:
                for event in copies.events:
                    event.synchronize()
                self._write(copies)
            except Exception as error:
                self._failed(copies, error)
            finally:
                self.num_written += copies.num_bytes
            del copies


def events_behind(copies: Iterable[torch.Tensor]) -> list[Any]:
    """Return an event behind the copies of each accelerator; none on a CPU."""
    if not torch.accelerator.is_available() or not any(copy.is_pinned() for copy in copies):
        return []
    device = torch.accelerator.current_accelerator()
    assert device is not None
    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream())
    return [event]


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the elements of a dense tensor on the host as a buffer."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
