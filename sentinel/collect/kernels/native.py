"""The kernel for CPU tensors: the C library, straight into the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sentinel import native
from sentinel.collect.buffer import StepRows
from sentinel.collect.kernels.reading import pieces, plain
from sentinel.collect.placements import ORDINARY
from sentinel.errors import SentinelError
from sentinel.native import layout
from sentinel.record import ROW_DTYPE

CODES = {
    torch.float32: layout.F32,
    torch.float64: layout.F64,
    torch.bfloat16: layout.BF16,
    torch.float16: layout.F16,
    torch.bool: layout.U8,
    torch.uint8: layout.U8,
    torch.int8: layout.I8,
    torch.int16: layout.I16,
    torch.uint16: layout.U16,
    torch.int32: layout.I32,
    torch.uint32: layout.U32,
    torch.int64: layout.I64,
    torch.uint64: layout.U64,
    torch.float8_e4m3fn: layout.E4M3FN,
    torch.float8_e5m2: layout.E5M2,
    torch.float8_e4m3fnuz: layout.E4M3FNUZ,
    torch.float8_e5m2fnuz: layout.E5M2FNUZ,
}
"""Codes of the dtypes that the library reads."""

CHUNK = 262_144
"""Elements copied at a time, where a tensor is negated lazily: memory does not hold what it shows."""

WORTH_THREADS = 800_000
"""Below this the library would use one thread anyway; asking torch for its number costs a tenth of a microsecond."""

_ROW_BYTES = ROW_DTYPE.itemsize
_BEYOND_OFFSETS = 2**44
"""No storage has so many bytes: an address from here on is more than an offset. On Linux nearly every address is."""


def _lies_open(tensor: torch.Tensor) -> bool:
    """Return whether memory holds the tensor as it is, strided or not: nothing to copy or unwrap."""
    # A lazy negation (an imaginary part of a conjugate) is in the tensor, not in its memory.
    return (
        type(tensor) in ORDINARY
        and tensor.dtype in CODES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        # FSDP frees storages under living tensors: then only the offset is left of the address.
        and ((at := tensor.data_ptr()) >= _BEYOND_OFFSETS or at != tensor.storage_offset() * tensor.itemsize)
    )


class NativeKernel:
    """Measures CPU tensors. About two microseconds a call beyond the reading; many tensors in one call cost less."""

    def __init__(self) -> None:
        self.name = f"native ({native.implementation})"
        self._pointers = np.empty(0, np.uint64)
        self._numels = np.empty(0, np.int64)
        self._codes = np.empty(0, np.uint8)

    def measure(
        self,
        tensors: Sequence[torch.Tensor],
        rows: StepRows,
        first_row: int,
        *,
        zero_eps: float = 0.0,
        checksum: bool = False,
    ) -> None:
        """As Kernel.measure, for CPU tensors."""
        if len(tensors) == 1:
            tensor = tensors[0]
            if _lies_open(tensor):
                _measure_open(tensor, rows.address + first_row * _ROW_BYTES, zero_eps, checksum)
            else:
                self._measure_unwrapped(tensor, rows, first_row, zero_eps, checksum)
            return
        self._measure_many(tensors, rows, first_row, zero_eps, checksum)

    def _measure_many(
        self, tensors: Sequence[torch.Tensor], rows: StepRows, first_row: int, zero_eps: float, checksum: bool
    ) -> None:
        num = len(tensors)
        if num > len(self._pointers):
            self._pointers = np.empty(num, np.uint64)
            self._numels = np.empty(num, np.int64)
            self._codes = np.empty(num, np.uint8)
        slow = [i for i, t in enumerate(tensors) if not _lies_open(t)]
        read: Sequence[torch.Tensor] = tensors
        if slow:
            left_out = set(slow)
            # A row that is measured below all the same: nothing here, so that rows and tensors stay side by side.
            read = [_NOTHING if i in left_out else t for i, t in enumerate(tensors)]
        self._pointers[:num] = [t.data_ptr() for t in read]
        self._numels[:num] = [t.numel() for t in read]
        self._codes[:num] = [CODES[t.dtype] for t in read]
        layouts = None
        are_contiguous = [t.is_contiguous() for t in read]
        if not all(are_contiguous):
            layouts = native.pack_layouts(
                [None if dense else (t.shape, t.stride()) for t, dense in zip(read, are_contiguous, strict=True)]
            )
        native.measure(
            self._pointers[:num], self._numels[:num], self._codes[:num], rows.array[first_row : first_row + num],
            zero_eps, checksum, num_threads=torch.get_num_threads(), layouts=layouts,
        )  # fmt: skip
        failed: SentinelError | None = None
        for i in slow:
            try:
                self._measure_unwrapped(tensors[i], rows, first_row + i, zero_eps, checksum)
            except SentinelError as error:
                failed = failed or error
        if failed:
            raise failed

    def _measure_unwrapped(
        self, tensor: torch.Tensor, rows: StepRows, row: int, zero_eps: float, checksum: bool
    ) -> None:
        """Measure what is no plain tensor, or not what its memory holds."""
        local = plain(tensor)
        if not local.is_cpu:
            raise SentinelError(f"the native kernel reads CPU memory, got a tensor of dtype {local.dtype} on {local.device}")
        address = rows.address + row * _ROW_BYTES
        if not local.is_neg():
            _measure_open(local, address, zero_eps, checksum)
            return
        native.measure_one(0, 0, native.F32, address)
        for piece in pieces(local, CHUNK):
            if piece.numel() == 0:
                continue
            chunk = piece.to(piece.dtype, memory_format=torch.contiguous_format, copy=True)
            native.measure_one(chunk.data_ptr(), chunk.numel(), CODES[chunk.dtype], address, zero_eps, checksum, True)


_NOTHING = torch.empty(0)


def _measure_open(tensor: torch.Tensor, address: int, zero_eps: float, checksum: bool) -> None:
    """Measure a tensor that memory holds as it is into the twelve words at `address`."""
    numel = tensor.numel()
    shape, strides = (None, None) if tensor.is_contiguous() else (tensor.shape, tensor.stride())
    native.measure_one(
        tensor.data_ptr(), numel, CODES[tensor.dtype], address, zero_eps, checksum, False,
        1 if numel < WORTH_THREADS else torch.get_num_threads(), shape, strides,
    )  # fmt: skip
