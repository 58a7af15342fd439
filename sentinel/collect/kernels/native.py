"""The kernel for CPU tensors: the C library, straight into the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sentinel import native
from sentinel.collect.buffer import StepRows
from sentinel.collect.kernels.reading import CONVERTED, in_storage_order, is_dense, pieces, plain
from sentinel.errors import SentinelError
from sentinel.record import ROW_DTYPE

CODES = {
    torch.float32: native.F32,
    torch.float64: native.F64,
    torch.bfloat16: native.BF16,
    torch.float16: native.F16,
}
"""Codes of the dtypes that the library reads."""

CHUNK = 262_144
"""Elements converted or copied at a time, where a tensor cannot be read as it lies: 2 MiB in float64."""

_ROW_BYTES = ROW_DTYPE.itemsize
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def _lies_open(tensor: torch.Tensor) -> bool:
    """Return whether memory holds the tensor as it is: nothing to convert, copy or unwrap."""
    # A lazy negation (an imaginary part of a conjugate) is in the tensor, not in its memory.
    return (
        type(tensor) in _ORDINARY
        and tensor.dtype in CODES
        and tensor.is_contiguous()
        and tensor.is_cpu
        and not tensor.is_neg()
        # FSDP frees storages under living tensors: then only the offset is left of the address.
        and tensor.data_ptr() != tensor.storage_offset() * tensor.itemsize
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
                code = CODES[tensor.dtype]
                numel = tensor.numel()
                native.measure_one(
                    tensor.data_ptr(), numel, code, rows.address + first_row * _ROW_BYTES, zero_eps, checksum, False,
                    1 if numel < 1_000_000 else torch.get_num_threads(),
                )  # fmt: skip
            else:
                self._measure_slowly(tensor, rows, first_row, zero_eps, checksum)
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
        if slow:
            left_out = set(slow)
            # A row that is measured below all the same: nothing here, so that rows and tensors stay side by side.
            read = [(0, 0, 0) if i in left_out else (t.data_ptr(), t.numel(), CODES[t.dtype]) for i, t in enumerate(tensors)]
            self._pointers[:num] = [pointer for pointer, _, _ in read]
            self._numels[:num] = [numel for _, numel, _ in read]
            self._codes[:num] = [code for _, _, code in read]
        else:
            self._pointers[:num] = [t.data_ptr() for t in tensors]
            self._numels[:num] = [t.numel() for t in tensors]
            self._codes[:num] = [CODES[t.dtype] for t in tensors]
        native.measure(
            self._pointers[:num], self._numels[:num], self._codes[:num], rows.array[first_row : first_row + num],
            zero_eps, checksum, num_threads=torch.get_num_threads(),
        )  # fmt: skip
        failed: SentinelError | None = None
        for i in slow:
            try:
                self._measure_slowly(tensors[i], rows, first_row + i, zero_eps, checksum)
            except SentinelError as error:
                failed = failed or error
        if failed:
            raise failed

    def _measure_slowly(
        self, tensor: torch.Tensor, rows: StepRows, row: int, zero_eps: float, checksum: bool
    ) -> None:
        """Measure what cannot be read as it lies, or is no plain tensor: converted or copied chunk by chunk."""
        local = plain(tensor)
        if not local.is_cpu:
            raise SentinelError(f"the native kernel reads CPU memory, got a tensor of dtype {local.dtype} on {local.device}")
        address = rows.address + row * _ROW_BYTES
        num_threads = torch.get_num_threads()
        dtype = CONVERTED.get(local.dtype, local.dtype)
        is_as_it_lies = is_dense(local) and not local.is_neg()
        if dtype is local.dtype and is_as_it_lies:
            native.measure_one(
                local.data_ptr(), local.numel(), CODES[dtype], address, zero_eps, checksum, False, num_threads
            )
            return
        native.measure_one(0, 0, native.F32, address)
        for piece in pieces(in_storage_order(local) if is_as_it_lies else local, CHUNK):
            if piece.numel() == 0:
                continue
            chunk = piece.to(dtype, memory_format=torch.contiguous_format, copy=True)
            native.measure_one(chunk.data_ptr(), chunk.numel(), CODES[dtype], address, zero_eps, checksum, True)
