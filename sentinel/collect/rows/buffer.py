"""The rows of one step: preallocated, filled in place by the kernels, on the host or on the way to it.

A row measured on an accelerator travels by itself, as soon as it is finished: the kernel's last program writes it straight
into pinned host memory, which the device addresses as its own (or, from kernels that cannot, a small copy behind the
kernel takes it there). No call is needed to fetch it, so a step that ends in a device assert, after which every call
raises, still leaves what was finished before; and so does a step that hangs. A copy at the end of the step, or every so
many rows, would lose just the rows beside the fault; and a write of 128 bytes costs the kernel less than any copy.

Such a row lies in a slot of 16 words: its statistics, the epoch of the buffer, and a seal, which is a digest of both. The
host takes a slot whose seal fits and whose epoch is the running one. So no order of the writes is relied upon, a slot of
which only a part has arrived is not taken for a row, and to forget a step is to count the epoch on: no memory is touched.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sentinel import native
from sentinel.collect.accelerator import Accelerator
from sentinel.kinds import BACKWARD_KINDS, GRADIENT_KINDS
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, STATS_OFFSET, Flag, Kind

WORDS = STATS_DTYPE.itemsize // 8
"""Words of statistics a row: twelve."""
SLOT_WORDS = 16
"""Words of a slot in pinned memory: the statistics, epoch, seal, two that mean nothing. One line of memory."""
SLOT_BYTES = 8 * SLOT_WORDS
EPOCH, SEAL = WORDS, WORDS + 1
SEAL_FACTOR = 0x9E3779B97F4A7C15

DGRAD_KINDS = [int(kind) for kind in BACKWARD_KINDS]
UNDIVIDED_KINDS = [*DGRAD_KINDS, int(Kind.WGRAD_UNREDUCED)]
"""Read while a backward runs: nobody has divided them by the scale of the loss yet."""
SCALED_KINDS = [int(kind) for kind in GRADIENT_KINDS]

_META = struct.Struct("<IBBHiIIIIIii")
_EMPTY_ROW = np.zeros((), ROW_DTYPE)
_EMPTY_ROW["min"], _EMPTY_ROW["max"] = np.inf, -np.inf
_LUMP = np.dtype((np.void, ROW_DTYPE.itemsize))
"""A row without its fields: numpy copies such rows as they are, and others field by field."""
_EMPTY_LUMP = _EMPTY_ROW.view(_LUMP)


class StepRows:
    """A buffer of rows. One thread fills it, hands it over, another one finishes and resets it: never both at once.

    Rows of CPU tensors are written straight into `array`. Those of tensors on an accelerator go to pinned memory, each
    when it is finished; `finish` waits for the last of them and moves them into `array`.
    """

    def __init__(self, capacity: int = 4096, open_device: Callable[[torch.device, int], DeviceStats] | None = None) -> None:
        self.array = np.full(capacity, _EMPTY_ROW)
        """[capacity] ROW_DTYPE. Its rows up to num_rows count; complete after `finish`."""
        self.num_rows = 0
        """Rows begun so far."""
        self.capacity = capacity
        self.address = 0
        """Where the statistics of row 0 lie in memory; those of row i lie i * 136 bytes behind."""
        self.grad_scale: float | torch.Tensor = 1.0
        """What every gradient of the step is multiplied by, 0-dim on the host where it is a tensor: `finish` divides."""
        self.dgrad_divisor = 1.0
        """By what the gradients of activations are divided besides, as those of weights are when ranks are averaged."""
        self.dgrad_scaling: float | torch.Tensor = 1.0
        """By what the trainer multiplies weight gradients behind the last backward, and `finish` those of activations."""
        self.wgrads_are_scaled = True
        """The weight gradients carried that scale when they were read; false: only those of activations do."""
        self.is_read_early = False
        """An adapter reads the weight gradients before its trainer's scaler divides them."""
        self._bytes = memoryview(b"")
        self._lumps = np.empty(0, _LUMP)
        self._words = torch.empty(0)
        self._devices: dict[torch.device, DeviceStats] = {}
        self._open_device = open_device or DeviceStats
        self._point_into_array()

    def _point_into_array(self) -> None:
        self.address = self.array.ctypes.data + STATS_OFFSET
        self._bytes = memoryview(self.array.view(np.uint8).data)
        self._lumps = self.array.view(_LUMP)
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
            device.grow(capacity, self.num_rows)

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
        return self.on(device).staged(first_row, num_rows)

    def on(self, device: torch.device) -> DeviceStats:
        """Return the rows' statistics on an accelerator; the first call for a device allocates."""
        stats = self._devices.get(device)
        if stats is None:
            stats = self._devices[device] = self._open_device(device, self.capacity)
        return stats

    def send(self) -> None:
        """Send what `stats_on` was asked for and is written now on its way, behind the work that writes it."""
        for device in self._devices.values():
            device.send()

    def take_scale(self, scale: torch.Tensor | None, *, wgrads_are_scaled: bool) -> None:
        """Note what the loss was multiplied by; None: nothing, or an adapter said it already."""
        if scale is not None:
            self.grad_scale, self.wgrads_are_scaled = scale, wgrads_are_scaled or self.is_read_early

    def take_scaling(self, scaling: float | torch.Tensor) -> None:
        """Note by what the trainer multiplies the weight gradients of the step; 0-dim on the host where it is a tensor."""
        self.dgrad_scaling = scaling

    def begin_copy(self) -> None:
        """Note on every accelerator where the work that fills rows ends, so that `finish` can wait. Does not wait."""
        for device in self._devices.values():
            device.close()

    def finish(self, *, wait: bool = True) -> int:
        """Complete `array`; return the number of rows that never arrived (0, unless the device failed).

        Waits for the device, so it is called off the training thread. With wait=False it makes no call to the device, and
        takes what has arrived: after a device assert every call raises. Rows that did not arrive are empty and DEGRADED.
        """
        used = self.array[: self.num_rows]
        num_missing = sum(device.finish(used, wait) for device in self._devices.values())
        scale, self.grad_scale = float(self.grad_scale), 1.0
        if scale not in (0.0, 1.0) and math.isfinite(scale):
            divide_gradients(used, scale, scaled_kinds(self.wgrads_are_scaled))
        self.wgrads_are_scaled = True
        scaling, self.dgrad_scaling = float(self.dgrad_scaling), 1.0
        # What nothing counted is not scaled: there are no tokens in the whole batch.
        divisor = self.dgrad_divisor / scaling if scaling > 0.0 and math.isfinite(scaling) else self.dgrad_divisor
        if divisor != 1.0:
            divide_gradients(used, divisor, DGRAD_KINDS)
        native.point_at_own(self.array, self.num_rows)
        return num_missing

    def finish_arrived(self) -> bool:
        """Complete `array` if all rows have arrived; False: some are on their way, and nothing was done. Does not wait."""
        if not all(device.has_arrived() for device in self._devices.values()):
            return False
        self.finish(wait=False)
        return True

    def snapshot(self) -> np.ndarray:
        """Return a copy of the rows begun so far, complete: [num_rows] ROW_DTYPE. Waits for accelerators."""
        used = self.array[: self.num_rows].copy()
        for device in self._devices.values():
            device.read_into(used)
        return used

    def reset(self) -> None:
        """Make the buffer empty again."""
        self._lumps[: self.num_rows] = _EMPTY_LUMP
        self.num_rows = 0
        self.grad_scale, self.dgrad_divisor, self.dgrad_scaling, self.is_read_early = 1.0, 1.0, 1.0, False
        for device in self._devices.values():
            device.reset()


class DeviceStats:
    """Statistics of rows measured on one accelerator, and the pinned slots in which they reach the host."""

    def __init__(self, device: torch.device, capacity: int, accelerator: Accelerator | None = None) -> None:
        self.device = device
        self.accelerator = accelerator or Accelerator(device)
        self._raw_stream = self.accelerator.raw_stream
        self.stream = 0
        """The stream that was current when a slot was asked for last."""
        self.is_row = np.zeros(capacity, bool)
        """[capacity] which rows of the step are measured here."""
        self.is_used = False
        self.epoch = 1
        """How often this buffer was begun anew; in every slot that counts."""
        self.boundary = 0
        """Rows from this one on lie in the newest slots, those before in older ones: the buffer grew since."""
        self.address = 0
        """Where the slot of row 0 would lie among the newest; that of row i lies i * SLOT_BYTES behind."""
        self.counters = 0
        """Where on the device the int32 counter of row 0 lies, 0 between launches: how many parts of a row are done."""
        self._slots: list[tuple[int, torch.Tensor]] = []
        self._stage = torch.empty(0)
        self._kept: list[torch.Tensor] = []
        self.stage = 0
        """Where row 0 lies on the device: 16 words a row, as in the slots."""
        self._pending: list[tuple[int, int]] = []
        self._writers: set[int] = set()
        self._streams: dict[int, Any] = {}
        self._ends: list[Any] = []
        self._spare: list[Any] = []
        self._make(capacity, 0)

    def _make(self, capacity: int, first_row: int) -> None:
        slots = self.accelerator.pinned((capacity, SLOT_WORDS))
        counters = self.accelerator.zeros((capacity,), torch.int32)
        stage = self.accelerator.zeros((capacity, SLOT_WORDS), torch.int64)
        if self._kept:
            stage[: len(self._stage)].copy_(self._stage)
        # Never freed while the buffer lives: work that is on its way writes there, and no allocator knows of it.
        self._kept += [slots, counters, stage]
        self._slots.append((first_row, slots))
        self._stage = stage
        self.boundary, self.address = first_row, slots.data_ptr()
        self.counters, self.stage = counters.data_ptr(), stage.data_ptr()
        self._is_ready = self.accelerator.event()
        self._is_ready.record(self.accelerator.current_stream())
        self._streams.clear()

    def grow(self, capacity: int, num_rows: int) -> None:
        """Make room for more rows. The first num_rows stay where they are on their way to."""
        self.send()
        current = self.accelerator.current_stream()
        for stream in self._streams.values():
            self._end(stream)
            if stream != current:
                current.wait_stream(stream)
        old = len(self.is_row)
        self._make(capacity, num_rows)
        self.is_row = np.concatenate([self.is_row, np.zeros(capacity - old, bool)])

    def slot(self, row: int) -> int:
        """Return the address of the slot that a kernel on the current stream fills for `row`, sealed, when it is done."""
        self.stream = raw = self._raw_stream()
        if raw not in self._streams:
            self._meet(raw)
        self.is_row[row] = True
        self.is_used = True
        if row >= self.boundary:
            return self.address + row * SLOT_BYTES
        return self._slots_of(row).data_ptr() + row * SLOT_BYTES

    def slots(self, first_row: int, num_rows: int) -> int:
        """As `slot`, for rows that follow each other; 0 where they do not lie in one stretch."""
        if first_row < self.boundary:
            return 0
        address = self.slot(first_row)
        self.is_row[first_row : first_row + num_rows] = True
        return address

    def staged(self, first_row: int, num_rows: int) -> torch.Tensor:
        """Return [num_rows, 12] int64 on the device, to be read or written on the current stream.

        `send` takes what was written to the host, and `close` what was not sent before.
        """
        self.slot(first_row)
        self.is_row[first_row : first_row + num_rows] = True
        self._pending.append((first_row, num_rows))
        self._writers.add(self.stream)
        return self._stage[first_row : first_row + num_rows, :WORDS]

    def send(self) -> None:
        """Seal the staged rows and copy them into their slots, on the current stream: behind the work that wrote them."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        raw = self._raw_stream()
        if raw not in self._streams:
            self._meet(raw)
        for writer in self._writers - {raw}:
            self._streams[raw].wait_stream(self._streams[writer])
        self._writers.clear()
        first, last = pending[0][0], pending[0][0]
        for begin, number in [*pending, (-1, 0)]:
            if begin == last:
                last += number
                continue
            if last > first:
                self._send_rows(first, last)
            first, last = begin, begin + number

    def _send_rows(self, first: int, last: int) -> None:
        slots = self._slots_of(first)
        if slots is not self._slots_of(last - 1):
            self._send_rows(first, self.boundary)
            self._send_rows(self.boundary, last)
            return
        with torch.no_grad():
            stage = self._stage[first:last]
            stage[:, EPOCH] = self.epoch
            mixed = stage[:, :SEAL] * (SEAL_FACTOR - 2**64)
            mixed ^= (mixed >> 32) & 0xFFFFFFFF
            stage[:, SEAL] = (mixed * torch.arange(1, 2 * SEAL, 2, device=self.device)).sum(dim=1)
            slots[first:last].copy_(stage, non_blocking=True)

    def _slots_of(self, row: int) -> torch.Tensor:
        return next(slots for first, slots in reversed(self._slots) if row >= first)

    def _meet(self, raw: int) -> None:
        stream = self.accelerator.current_stream()
        # The counters were made zero on the stream of then.
        stream.wait_event(self._is_ready)
        self._streams[raw] = stream

    def _end(self, stream: Any) -> None:
        event = self._spare.pop() if self._spare else self.accelerator.event()
        event.record(stream)
        self._ends.append(event)

    def close(self) -> None:
        """Note on every stream that filled rows where it stands now."""
        if not self.is_used:
            return
        with contextlib.suppress(RuntimeError):  # a device assert: what arrived before it is here all the same
            self.send()
            for stream in self._streams.values():
                self._end(stream)

    def has_arrived(self) -> bool:
        """Whether nothing is on its way any more, `close` having been called. Does not wait."""
        try:
            return all(event.query() for event in self._ends)
        except RuntimeError:  # a device assert: nothing more comes
            return True

    def finish(self, used: np.ndarray, wait: bool) -> int:
        """Move what has arrived into `used`, with `wait` all that is on its way; return the number of rows that have not."""
        if not self.is_used:
            return 0
        if wait:
            self.accelerator.leave_captures_alone()
            with contextlib.suppress(RuntimeError):  # a device assert: what arrived before it is here all the same
                for event in self._ends:
                    event.synchronize()
        return self._take(used)

    def read_into(self, used: np.ndarray) -> None:
        """Put the statistics of the rows measured here into `used`, ROW_DTYPE. Waits for the device."""
        self.close()
        for event in self._ends:
            event.synchronize()
        self._take(used)

    def _take(self, used: np.ndarray) -> int:
        """Move what has arrived into `used`; return the number of rows that have not."""
        num_missing = 0
        for at, (first, slots) in enumerate(self._slots):
            last = self._slots[at + 1][0] if at + 1 < len(self._slots) else len(used)
            here = first + np.flatnonzero(self.is_row[first : min(last, len(used))])
            # A copy first: the device may be writing still.
            words = slots.numpy().view(np.uint64)[here]
            has_arrived = (words[:, EPOCH] == self.epoch) & (words[:, SEAL] == seals(words))
            stats = np.ascontiguousarray(words[has_arrived, :WORDS]).view(STATS_DTYPE).reshape(-1)
            for name in STATS_DTYPE.names or ():
                used[name][here[has_arrived]] = stats[name]
            used["flags"][here[~has_arrived]] |= np.uint16(Flag.DEGRADED)
            num_missing += int(np.count_nonzero(~has_arrived))
        return num_missing

    def reset(self) -> None:
        """Forget the step. Makes no call to the device."""
        self.is_row[:] = False
        self.is_used = False
        self.epoch += 1
        self.boundary = 0
        self._slots = [(0, self._slots[-1][1])]
        self._pending.clear()
        self._writers.clear()
        self._streams.clear()
        self._spare += self._ends
        self._ends = []


def seals(words: np.ndarray) -> np.ndarray:
    """Return the digest of epoch and statistics of each slot in `words`, [n, 16] uint64."""
    mixed = words[:, :SEAL] * np.uint64(SEAL_FACTOR)
    mixed ^= mixed >> np.uint64(32)
    factors = np.arange(1, 2 * SEAL, 2, dtype=np.uint64)
    return np.asarray((mixed * factors).sum(axis=1, dtype=np.uint64))


def scaled_kinds(wgrads_are_scaled: bool) -> Sequence[int]:
    """Return the kinds whose rows carry the scale of the loss."""
    return SCALED_KINDS if wgrads_are_scaled else UNDIVIDED_KINDS


def divide_gradients(rows: np.ndarray, scale: float, kinds: Sequence[int]) -> None:
    """Make the statistics of scaled gradients among `rows`, ROW_DTYPE, those of the gradients: exact for powers of two.

    Counts stay, `num_zero` with them: |x| <= zero_eps was asked of the scaled element. So does the checksum.
    """
    at = np.flatnonzero(np.isin(rows["kind"], kinds))
    for name, power in (("mean", 1), ("m2", 2), ("m3", 3), ("m4", 4), ("min", 1), ("max", 1)):
        rows[name][at] /= scale**power
