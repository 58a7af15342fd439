"""The kernel for CPU tensors: the C library, straight into the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sentinel import native
from sentinel.collect.kernels.tensor_memory import pieces, plain
from sentinel.collect.parallel.placements import ORDINARY
from sentinel.collect.rows.buffer import StepRows
from sentinel.errors import SentinelError
from sentinel.native import layout
from sentinel.native.library import ISAS
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
_reader = native.tensor_reader
if _reader is not None:
    _reader.know_tensors(tuple(ORDINARY), CODES, torch.strided, ISAS.index(native.implementation))
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
        # FSDP frees storages under tensors that are in use: then only the offset is left of the address.
        and ((at := tensor.data_ptr()) >= _BEYOND_OFFSETS or at != tensor.storage_offset() * tensor.itemsize)
    )


class NativeKernel:
    """Measures CPU tensors. About two microseconds a call beyond the reading; many tensors in one call cost less."""

    def __init__(self) -> None:
        self.name = f"native ({native.implementation})"

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
        address = rows.address + first_row * _ROW_BYTES
        if len(tensors) == 1:
            if _reader is None or not _reader.measure_tensor(tensors[0], address, zero_eps, checksum):
                _measure_any(tensors[0], address, zero_eps, checksum)
            return
        left: Sequence[int] = range(len(tensors))
        if _reader is not None:
            left = _reader.measure_tensors(list(tensors), address, _ROW_BYTES, zero_eps, checksum, torch.get_num_threads())
        failed: SentinelError | None = None
        for i in left:
            try:
                _measure_any(tensors[i], address + i * _ROW_BYTES, zero_eps, checksum)
            except SentinelError as error:
                failed = failed or error
        if failed:
            raise failed


def _measure_any(tensor: torch.Tensor, address: int, zero_eps: float, checksum: bool) -> None:
    """Measure a tensor of any kind into the twelve words at `address`."""
    if _lies_open(tensor):
        _measure_open(tensor, address, zero_eps, checksum)
        return
    local = plain(tensor)
    if not local.is_cpu:
        raise SentinelError(f"the native kernel reads CPU memory, got a tensor of dtype {local.dtype} on {local.device}")
    if not local.is_neg():
        _measure_open(local, address, zero_eps, checksum)
        return
    native.measure_one(0, 0, native.F32, address)
    for piece in pieces(local, CHUNK):
        if piece.numel() == 0:
            continue
        chunk = piece.to(piece.dtype, memory_format=torch.contiguous_format, copy=True)
        native.measure_one(chunk.data_ptr(), chunk.numel(), CODES[chunk.dtype], address, zero_eps, checksum, True)


def _measure_open(tensor: torch.Tensor, address: int, zero_eps: float, checksum: bool) -> None:
    """Measure a tensor that memory holds as it is into the twelve words at `address`."""
    numel = tensor.numel()
    shape, strides = (None, None) if tensor.is_contiguous() else (tensor.shape, tensor.stride())
    native.measure_one(
        tensor.data_ptr(), numel, CODES[tensor.dtype], address, zero_eps, checksum, False,
        1 if numel < WORTH_THREADS else torch.get_num_threads(), shape, strides,
    )  # fmt: skip
