"""Pinned memory on the host into which accelerators write, kept for the life of the process.

Torch gives pinned memory back through the device: behind a copy it records an event where the memory was used, and after a
device assert or an illegal access that raises inside of a destructor, which ends the process by SIGABRT, before anybody has
said why it died. So what is taken from torch here is never given back; what nobody uses any more is handed out again.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import torch

SMALLEST = 64
"""Bytes of the smallest block: a line of memory."""
SLAB = 64 << 10
"""Bytes taken from torch at a time for blocks that are no larger."""


def _from_torch(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class PinnedMemory:
    """Blocks of pinned memory, each of a power of two of bytes, which come back when their tensor is dropped.

    At most what was in use at one time is held, rounded up. Any thread may take and drop.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] = _from_torch) -> None:
        """allocate: returns so many bytes of pinned memory, uint8 with one dimension."""
        self._allocate = allocate
        # Appended to by whoever collects garbage, also inside of a call of ours: nothing here may need a lock.
        self._free: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._used: dict[int, weakref.ref[torch.Tensor]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor on the host with anything in it. Keep it until what the device writes has arrived."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = max(SMALLEST, 1 << (num_bytes - 1).bit_length())
        free = self._free[size]
        try:
            block = free.popleft()
        except IndexError:
            block = self._cut(size)
        tensor = block[:num_bytes].view(dtype).view(shape)
        address = block.data_ptr()

        def dropped(_: object) -> None:
            self._used.pop(address, None)
            free.append(block)

        self._used[address] = weakref.ref(tensor, dropped)
        return tensor

    def _cut(self, size: int) -> torch.Tensor:
        """Return a new block of `size` bytes; where that is small, its neighbours are free from now on."""
        slab = self._allocate(max(size, SLAB))
        # One reference that nobody drops, not even the end of the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(slab))
        first, *others = (slab[begin : begin + size] for begin in range(0, len(slab), size))
        self._free[size].extend(others)
        return first


PINNED = PinnedMemory()
"""The memory of this process."""
