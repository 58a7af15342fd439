"""The few calls that Sentinel makes of a device's runtime: streams, events, memory that device and host share."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from sentinel.collect.rows.pinned import PINNED


def is_capturing() -> bool:
    """Whether a CUDA graph is being recorded on the current stream; where nobody has used CUDA it is not asked."""
    return bool(torch.cuda.is_initialized()) and bool(torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


class Accelerator:
    """The runtime of one device other than the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self.raw_stream: Callable[[], int] = self._stream_id
        """Returns a number that tells the current streams apart: on CUDA their handle, in a tenth of a microsecond."""
        self.is_capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", bool)
        """Returns whether a graph is being recorded on the current stream: what is put on it now runs at each replay."""
        self.event_type: Any = getattr(self._module, "Event", None)
        """The class of events; None: this device has none."""
        self.stream_type: Any = getattr(self._module, "Stream", None)
        """The class of streams; None: this device has none."""
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.raw_stream = functools.partial(torch._C._cuda_getCurrentRawStream, index)

    def _stream_id(self) -> int:
        return int(self.current_stream().stream_id)

    def current_stream(self) -> Any:
        """Return the current stream of the device."""
        return self._module.current_stream(self.device)

    def event(self) -> Any:
        """Return an event; who waits for it sleeps, where the device can do that, and spins on no core."""
        return self._module.Event(blocking=True) if self.device.type == "cuda" else self._module.Event()

    def timed_event(self) -> Any:
        """Return an event that notes when the stream reached it."""
        return self.event_type(enable_timing=True)

    def pinned(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return int64 zeros in pinned memory, which the device addresses as the host does."""
        return PINNED.empty(shape, torch.int64).zero_()

    def leave_captures_alone(self) -> None:
        """Have the device allow this thread, from now on, calls that break a capture of a CUDA graph in any thread.

        For a thread that trains nothing: whether an event has happened may then be asked while another thread captures.
        """
        if self.device.type == "cuda":
            _leave_captures_alone()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the device, filled on its current stream."""
        return torch.zeros(shape, dtype=dtype, device=self.device)


_CAPTURE_MODE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of the CUDA driver API."""
_threads = threading.local()


def _leave_captures_alone() -> None:
    if getattr(_threads, "is_relaxed", False):
        return
    _threads.is_relaxed = True
    # The driver keeps the mode for each thread; torch has no name for the call. Without it all is as it was.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))
