"""The rows of one step: preallocated, filled in place by the kernels, on the host or on the way to it."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sentinel.native.fallback import point_at_own
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, STATS_OFFSET, Flag, Kind

WORDS = STATS_DTYPE.itemsize // 8
"""Words of statistics a row: twelve."""

GRADIENT_KINDS = [int(Kind.DGRAD), int(Kind.DGRAD_IN), int(Kind.WGRAD_UNREDUCED)]
"""Read while a backward runs: nobody has divided them by the scale of the loss yet."""
SCALED_KINDS = [int(Kind.WGRAD), *GRADIENT_KINDS]

_META = struct.Struct("<IBBHiIIIIIii")
_NOT_ARRIVED = -1
"""The count of a row whose statistics have not reached the host."""

_EMPTY_ROW = np.zeros((), ROW_DTYPE)
_EMPTY_ROW["min"], _EMPTY_ROW["max"] = np.inf, -np.inf


class StepRows:
    """A buffer of rows. One thread fills it, hands it over, another one finishes and resets it: never both at once.

    Rows of CPU tensors are written straight into `array`. Rows of tensors on an accelerator are written into a buffer
    there, which `begin_copy` sends home and `finish` waits for.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.array = np.full(capacity, _EMPTY_ROW)
        """[capacity] ROW_DTYPE. Its rows up to num_rows count; complete after `finish`."""
        self.num_rows = 0
        """Rows begun so far."""
        self.capacity = capacity
        self.address = 0
        """Where the statistics of row 0 lie in memory; those of row i lie i * 136 bytes behind."""
        self.grad_scale: float | torch.Tensor = 1.0
        """What every gradient of the step is multiplied by, 0-dim on the host where it is a tensor: `finish` divides."""
        self.wgrads_are_scaled = True
        """The weight gradients carried that scale when they were read; false: only those of activations do."""
        self.is_read_early = False
        """An adapter reads the weight gradients before its trainer's scaler divides them."""
        self._bytes = memoryview(b"")
        self._words = torch.empty(0)
        self._devices: dict[torch.device, DeviceStats] = {}
        self._point_into_array()

    def _point_into_array(self) -> None:
        self.address = self.array.ctypes.data + STATS_OFFSET
        self._bytes = memoryview(self.array.view(np.uint8).data)
        words = self.array.view(np.int64).reshape(self.capacity, ROW_DTYPE.itemsize // 8)
        self._words = torch.from_numpy(words)[:, STATS_OFFSET // 8 :]

    @property
    def is_on_host(self) -> bool:
        """No row of this step lies on an accelerator, so `array` is complete already."""
        return not any(device.is_used for device in self._devices.values())

    def add(
        self, tensor: int, kind: int, flags: int, micro_step: int, call_id: int, site_pos: int, num_folded: int = 1
    ) -> int:
        """Begin a row and return its index; its statistics are those of nothing until a kernel writes them.

        IndexError where the buffer is full (`grow` it, or fold).
        """
        row = self.num_rows
        if row >= self.capacity:
            raise IndexError(f"the buffer of this step is full: {row} rows")
        _META.pack_into(
            self._bytes, row * 136, tensor, kind, 0, flags, micro_step, call_id, site_pos, num_folded,
            NONE_ID, NONE_ID, -1, -1,
        )  # fmt: skip
        self.num_rows = row + 1
        return row

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` rows; what was written stays. Allocates; does not wait for an accelerator."""
        if capacity <= self.capacity:
            return
        array = np.full(capacity, _EMPTY_ROW)
        array[: self.num_rows] = self.array[: self.num_rows]
        self.array, self.capacity = array, capacity
        self._point_into_array()
        for device in self._devices.values():
            device.grow(capacity)

    def truncate(self, num_rows: int) -> None:
        """Forget the rows from `num_rows` on."""
        self.array[num_rows : self.num_rows] = _EMPTY_ROW
        for device in self._devices.values():
            device.is_row[num_rows : self.num_rows] = False
        self.num_rows = num_rows

    def stats_on(self, device: torch.device, first_row: int, num_rows: int) -> torch.Tensor:
        """Return where a kernel writes the statistics of rows: [num_rows, 12] int64 words on `device` (f64 bits by view)."""
        if device.type == "cpu":
            return self._words[first_row : first_row + num_rows]
        stats = self._devices.get(device)
        if stats is None:
            stats = self._devices[device] = DeviceStats(device, self.capacity)
        return stats.rows(first_row, num_rows)

    def take_scale(self, scale: torch.Tensor | None, *, wgrads_are_scaled: bool) -> None:
        """Note what the loss was multiplied by; None: nothing, or an adapter said it already."""
        if scale is not None:
            self.grad_scale, self.wgrads_are_scaled = scale, wgrads_are_scaled or self.is_read_early

    def begin_copy(self) -> None:
        """Send rows on accelerators towards the host, behind the work that fills them. Does not wait."""
        for device in self._devices.values():
            device.begin_copy(self.num_rows)

    def finish(self, *, wait: bool = True) -> int:
        """Complete `array`; return the number of rows that never arrived (0, unless the device failed).

        Waits for the copy, so it is called off the training thread. With wait=False it makes no call to the device, and
        takes what has arrived: after a device assert every call raises. Rows that did not arrive are empty and DEGRADED.
        """
        used = self.array[: self.num_rows]
        num_missing = sum(device.finish(used, wait) for device in self._devices.values())
        scale, self.grad_scale = float(self.grad_scale), 1.0
        if scale not in (0.0, 1.0) and math.isfinite(scale):
            divide_gradients(used, scale, scaled_kinds(self.wgrads_are_scaled))
        self.wgrads_are_scaled = True
        point_at_own(used)
        return num_missing

    def snapshot(self) -> np.ndarray:
        """Return a copy of the rows begun so far, complete: [num_rows] ROW_DTYPE. Waits for accelerators."""
        used = self.array[: self.num_rows].copy()
        for device in self._devices.values():
            device.read_into(used)
        return used

    def reset(self) -> None:
        """Make the buffer empty again."""
        self.array[: self.num_rows] = _EMPTY_ROW
        self.num_rows = 0
        self.grad_scale, self.is_read_early = 1.0, False
        for device in self._devices.values():
            device.reset()


class DeviceStats:
    """Statistics of rows on one accelerator, and their pinned mirror on the host."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.device = device
        self.is_row = np.zeros(capacity, bool)
        """[capacity] which rows of the step are measured here."""
        self.is_used = False
        self._stats = torch.empty((capacity, WORDS), dtype=torch.int64, device=device)
        self._pinned = _pin(capacity)
        self._module = torch.get_device_module(device)
        self._streams: dict[int, Any] = {}
        self._copy_stream: Any = None
        self._arrived: Any = None

    def grow(self, capacity: int) -> None:
        """Make room for more rows; those written on another stream than the current one must not be in flight."""
        stats = torch.empty((capacity, WORDS), dtype=torch.int64, device=self.device)
        current = self._module.current_stream(self.device)
        for stream in self._streams.values():
            if stream != current:
                current.wait_stream(stream)
        old = len(self.is_row)
        stats[:old].copy_(self._stats)
        self._stats = stats
        self._pinned = _pin(capacity)
        self.is_row = np.concatenate([self.is_row, np.zeros(capacity - old, bool)])

    def rows(self, first_row: int, num_rows: int) -> torch.Tensor:
        """Return [num_rows, 12] int64 to be written on the current stream."""
        stream = self._module.current_stream(self.device)
        self._streams[stream.stream_id] = stream
        self.is_row[first_row : first_row + num_rows] = True
        self.is_used = True
        return self._stats[first_row : first_row + num_rows]

    def begin_copy(self, num_rows: int) -> None:
        """Copy the first `num_rows` rows to pinned memory on a stream of their own, behind all streams that wrote."""
        if not self.is_used:
            return
        if self._copy_stream is None:
            self._copy_stream = self._module.Stream(self.device)
            self._arrived = self._module.Event()
        for stream in self._streams.values():
            self._copy_stream.wait_stream(stream)
        with self._module.stream(self._copy_stream):
            self._pinned[:num_rows].copy_(self._stats[:num_rows], non_blocking=True)
            self._arrived.record(self._copy_stream)

    def finish(self, used: np.ndarray, wait: bool) -> int:
        """Move what has arrived into `used`; return the number of rows that have not."""
        if not self.is_used:
            return 0
        if wait and self._arrived is not None:
            with contextlib.suppress(RuntimeError):  # a device assert: what arrived before it is here all the same
                self._arrived.synchronize()
        here = np.flatnonzero(self.is_row[: len(used)])
        stats = self._pinned.numpy().view(STATS_DTYPE).reshape(-1)[here]
        has_arrived = stats["count"] != _NOT_ARRIVED
        for name in STATS_DTYPE.names or ():
            used[name][here[has_arrived]] = stats[name][has_arrived]
        used["flags"][here[~has_arrived]] |= np.uint16(Flag.DEGRADED)
        return int(np.count_nonzero(~has_arrived))

    def read_into(self, used: np.ndarray) -> None:
        """Put the statistics of the rows measured here into `used`, ROW_DTYPE. Waits for the device."""
        here = np.flatnonzero(self.is_row[: len(used)])
        self._module.synchronize(self.device)
        stats = self._stats[: len(used)].cpu().numpy().view(STATS_DTYPE).reshape(-1)[here]
        for name in STATS_DTYPE.names or ():
            used[name][here] = stats[name]

    def reset(self) -> None:
        """Forget the step. Makes no call to the device."""
        self.is_row[:] = False
        self.is_used = False
        self._streams.clear()
        self._pinned[:, 0] = _NOT_ARRIVED


def scaled_kinds(wgrads_are_scaled: bool) -> Sequence[int]:
    """Return the kinds whose rows carry the scale of the loss."""
    return SCALED_KINDS if wgrads_are_scaled else GRADIENT_KINDS


def divide_gradients(rows: np.ndarray, scale: float, kinds: Sequence[int]) -> None:
    """Make the statistics of scaled gradients among `rows`, ROW_DTYPE, those of the gradients: exact for powers of two.

    Counts stay, `num_zero` with them: |x| <= zero_eps was asked of the scaled element. So does the checksum.
    """
    at = np.flatnonzero(np.isin(rows["kind"], kinds))
    for name, power in (("mean", 1), ("m2", 2), ("m3", 3), ("m4", 4), ("min", 1), ("max", 1)):
        rows[name][at] /= scale**power


def _pin(capacity: int) -> torch.Tensor:
    """Return [capacity, 12] int64 in pinned memory, marked as not arrived."""
    pinned = torch.empty((capacity, WORDS), dtype=torch.int64, pin_memory=True)
    pinned[:, 0] = _NOT_ARRIVED
    return pinned
