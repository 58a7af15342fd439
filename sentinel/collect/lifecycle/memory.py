"""Memory of this process, read by the writer thread behind a step: counters of the host, no device is asked."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

_DEVICE_COUNTERS = (
    ("memory_allocated_bytes", "allocated_bytes", "current"),
    ("memory_peak_bytes", "allocated_bytes", "peak"),
    ("memory_reserved_bytes", "reserved_bytes", "current"),
)
"""(scalar, counter of torch's caching allocator, which of its values). The peak is since the trainer last reset it."""


FRESH_S = 0.1
"""Seconds for which a reading counts as current. Too small: each short step pays for one; too large: a peak is missed."""


class MemoryUse:
    """Names and numbers of the memory in use; what cannot be read once is not asked for again."""

    def __init__(self, device: torch.device, fresh_s: float = FRESH_S) -> None:
        """device: where the model lies."""
        self._device = device
        self._fresh_s = fresh_s
        self._counters = getattr(_module_of(device), "memory_stats_as_nested_dict", None)
        self._statm: int | None = None
        """Opened at the first question; -1: there is none, or no more."""
        self._page = 0
        self._read: Mapping[str, float] = {}
        self._read_at = -math.inf

    def __call__(self) -> Mapping[str, float]:
        """Return scalar -> bytes, read at most `fresh_s` ago."""
        now = time.monotonic()
        if now - self._read_at >= self._fresh_s:
            self._read, self._read_at = self._read_now(), now
        return self._read

    def _read_now(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        if self._statm is None:
            self._statm = -1
            with contextlib.suppress(OSError, ValueError):  # Only Linux says it so cheaply.
                self._page = os.sysconf("SC_PAGE_SIZE")
                self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        if self._statm >= 0:
            try:
                found["memory_host_bytes"] = float(int(os.pread(self._statm, 128, 0).split()[1]) * self._page)
            except (OSError, ValueError, IndexError):
                self.close()
        if self._counters is not None:
            try:
                stats: Mapping[str, Any] = self._counters(self._device)
                found.update({name: float(stats[key]["all"][which]) for name, key, which in _DEVICE_COUNTERS})
            except (RuntimeError, KeyError, TypeError):
                self._counters = None
        return found

    def close(self) -> None:
        """Let go of the file."""
        statm, self._statm = self._statm, -1
        if statm is not None and statm >= 0:
            os.close(statm)


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device) if device.type not in ("cpu", "meta") else None
