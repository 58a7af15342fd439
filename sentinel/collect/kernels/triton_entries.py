"""The kernels as they are launched: for one tensor, and for many. Imported only where Triton is.

One kernel for each type of elements. Every parameter is an integer, so that a compiled kernel serves every call, and flags
are branches: nothing is compiled for values, and a launch has the same arguments in every version of Triton.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sentinel.collect.kernels.triton_moments import measure_part

_OF_ONE = (
    "address", "numel", "tiles_a_part", "first_part", "num_parts", "parts", "counter", "row", "out", "epoch", "eps",
    "checksum", "gate",
)  # fmt: skip
_OF_MANY = ("addresses", "shapes", "work", "parts", "counters", "rows", "out", "epoch", "eps", "checksum")


@triton.jit
def _one(
    address, numel, tiles_a_part, first_part, num_parts, parts, counter, row, out, epoch, eps, checksum, gate,
    ELEMENT: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    own_part = tl.program_id(0).to(tl.int64)
    address, row, out = address.to(tl.int64), row.to(tl.int64), out.to(tl.int64)
    epoch, eps = epoch.to(tl.int64), eps.to(tl.int64)
    is_open = gate == 0
    if gate != 0:
        # Four int64: whether to measure at all, the epoch, and where the rows lie, on the device and in pinned memory.
        cell = gate.to(tl.pointer_type(tl.int64))
        is_open = tl.load(cell) != 0
        epoch = tl.load(cell + 1)
        row += tl.load(cell + 2)
        out += tl.load(cell + 3)
    if is_open:
        measure_part(
            address, numel, tiles_a_part, own_part, first_part + own_part, num_parts, parts, counter, row, out, epoch,
            eps.to(tl.float64, bitcast=True).to(WIDE), checksum, ELEMENT, WIDE, VECTOR,
        )  # fmt: skip


@triton.jit
def _many(
    addresses, shapes, work, parts, counters, rows, out, epoch, eps, checksum,
    ELEMENT: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    epoch, eps = epoch.to(tl.int64), eps.to(tl.int64)
    tensor = tl.load(work.to(tl.pointer_type(tl.int32)) + program).to(tl.int64)
    shape = shapes.to(tl.pointer_type(tl.int64)) + tensor * 8
    address = tl.load(addresses.to(tl.pointer_type(tl.int64)) + tensor)
    numel = tl.load(shape)
    tiles_a_part = tl.load(shape + 1)
    first_program = tl.load(shape + 2)
    num_parts = tl.load(shape + 3)
    place = tl.load(shape + 4)
    part = program - first_program
    measure_part(
        address, numel, tiles_a_part, part, part, num_parts, parts + first_program * 96, counters + place * 4,
        rows + place * 128, out + place * 128, epoch, eps.to(tl.float64, bitcast=True).to(WIDE), checksum,
        ELEMENT, WIDE, VECTOR,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_ONE)
def one_fp32(
    address: tl.int64, numel: tl.int64, tiles_a_part: tl.int64, first_part: tl.int64, num_parts: tl.int64,
    parts: tl.int64, counter: tl.int64, row: tl.int64, out: tl.int64, epoch: tl.int64, eps: tl.int64,
    checksum: tl.int64, gate: tl.int64,
):  # fmt: skip
    _one(
        address, numel, tiles_a_part, first_part, num_parts, parts, counter, row, out, epoch, eps, checksum, gate,
        tl.float32, tl.float32, 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_ONE)
def one_bf16(
    address: tl.int64, numel: tl.int64, tiles_a_part: tl.int64, first_part: tl.int64, num_parts: tl.int64,
    parts: tl.int64, counter: tl.int64, row: tl.int64, out: tl.int64, epoch: tl.int64, eps: tl.int64,
    checksum: tl.int64, gate: tl.int64,
):  # fmt: skip
    _one(
        address, numel, tiles_a_part, first_part, num_parts, parts, counter, row, out, epoch, eps, checksum, gate,
        tl.bfloat16, tl.float32, 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_ONE)
def one_fp16(
    address: tl.int64, numel: tl.int64, tiles_a_part: tl.int64, first_part: tl.int64, num_parts: tl.int64,
    parts: tl.int64, counter: tl.int64, row: tl.int64, out: tl.int64, epoch: tl.int64, eps: tl.int64,
    checksum: tl.int64, gate: tl.int64,
):  # fmt: skip
    _one(
        address, numel, tiles_a_part, first_part, num_parts, parts, counter, row, out, epoch, eps, checksum, gate,
        tl.float16, tl.float32, 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_ONE)
def one_fp64(
    address: tl.int64, numel: tl.int64, tiles_a_part: tl.int64, first_part: tl.int64, num_parts: tl.int64,
    parts: tl.int64, counter: tl.int64, row: tl.int64, out: tl.int64, epoch: tl.int64, eps: tl.int64,
    checksum: tl.int64, gate: tl.int64,
):  # fmt: skip
    _one(
        address, numel, tiles_a_part, first_part, num_parts, parts, counter, row, out, epoch, eps, checksum, gate,
        tl.float64, tl.float64, 2,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_MANY)
def many_fp32(
    addresses: tl.int64, shapes: tl.int64, work: tl.int64, parts: tl.int64, counters: tl.int64, rows: tl.int64,
    out: tl.int64, epoch: tl.int64, eps: tl.int64, checksum: tl.int64,
):  # fmt: skip
    _many(
        addresses, shapes, work, parts, counters, rows, out, epoch, eps, checksum, tl.float32, tl.float32, 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_MANY)
def many_bf16(
    addresses: tl.int64, shapes: tl.int64, work: tl.int64, parts: tl.int64, counters: tl.int64, rows: tl.int64,
    out: tl.int64, epoch: tl.int64, eps: tl.int64, checksum: tl.int64,
):  # fmt: skip
    _many(
        addresses, shapes, work, parts, counters, rows, out, epoch, eps, checksum, tl.bfloat16, tl.float32, 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_MANY)
def many_fp16(
    addresses: tl.int64, shapes: tl.int64, work: tl.int64, parts: tl.int64, counters: tl.int64, rows: tl.int64,
    out: tl.int64, epoch: tl.int64, eps: tl.int64, checksum: tl.int64,
):  # fmt: skip
    _many(
        addresses, shapes, work, parts, counters, rows, out, epoch, eps, checksum, tl.float16, tl.float32, 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_MANY)
def many_fp64(
    addresses: tl.int64, shapes: tl.int64, work: tl.int64, parts: tl.int64, counters: tl.int64, rows: tl.int64,
    out: tl.int64, epoch: tl.int64, eps: tl.int64, checksum: tl.int64,
):  # fmt: skip
    _many(
        addresses, shapes, work, parts, counters, rows, out, epoch, eps, checksum, tl.float64, tl.float64, 2,
    )  # fmt: skip
