"""The kernel for any device: plain torch, in chunks, never waiting for the device. Chunks on the host: torch_host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sentinel.collect.kernels import torch_host
from sentinel.collect.kernels.native import NativeKernel
from sentinel.collect.kernels.tensor_memory import CONVERTED, in_storage_order, is_dense, pieces, plain
from sentinel.collect.rows.buffer import StepRows
from sentinel.errors import SentinelError

BLOCK = 2048
"""Elements that share a centre and a scale."""

CHUNK = {"cpu": torch_host.CHUNK}
"""Elements read at a time, by device."""

LARGEST_CHUNK = 1 << 21
"""Elements read at a time elsewhere: 16 MiB in float64, and no temporary is larger."""

MOST_BLOCKS = 1 << 17
"""Blocks whose sums are kept apart before they are merged: vectors of a megabyte."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchKernel:
    """Measures tensors with torch operations: some forty launches a chunk, so it is for where nothing better runs."""

    def __init__(self, device: str = "cpu", on_cpu: NativeKernel | None = None, *, may_look: bool = True) -> None:
        """on_cpu: measures tensors on the CPU instead. may_look: false measures those too without looking at a value."""
        self.name = f"torch ({device})"
        self._on_cpu = on_cpu
        self._may_look = may_look
        self._host = torch_host.HostSums()

    def measure(
        self,
        tensors: Sequence[torch.Tensor],
        rows: StepRows,
        first_row: int,
        *,
        zero_eps: float = 0.0,
        checksum: bool = False,
    ) -> None:
        """As Kernel.measure, on any device."""
        failed: SentinelError | None = None
        for row, tensor in enumerate(tensors, first_row):
            try:
                if tensor.is_cpu and self._on_cpu is not None:
                    self._on_cpu.measure((tensor,), rows, row, zero_eps=zero_eps, checksum=checksum)
                else:
                    local = plain(tensor)
                    with torch.no_grad():
                        self._measure_one(local, rows.stats_on(local.device, row, 1)[0], zero_eps, checksum)
            except SentinelError as error:
                failed = failed or error
        # On their way now: after a device assert nothing could send them.
        rows.send()
        if failed:
            raise failed

    def _measure_one(self, tensor: torch.Tensor, out: torch.Tensor, zero_eps: float, checksum: bool) -> None:
        """Write the statistics of `tensor` into `out`, [12] int64 words on its device. Does not synchronize."""
        most = CHUNK.get(tensor.device.type, LARGEST_CHUNK)
        if tensor.is_cpu and self._may_look:
            stats = self._host.measure(_chunks(tensor, most), zero_eps, checksum)
            out.copy_(torch.from_numpy(stats.view(np.int64)))
            return
        scratch = _room(tensor, most)
        parts: list[torch.Tensor] = []
        sums: list[Sums] = []
        num_blocks = 0
        for chunk in _chunks(tensor, most):
            body = chunk.numel() - chunk.numel() % BLOCK
            if body:
                sums.append(_sum_blocks(chunk[:body].view(-1, BLOCK), zero_eps, scratch))
            if body < chunk.numel():
                sums.append(_sum_blocks(chunk[body:].view(1, -1), zero_eps, scratch))
            if checksum:
                sums[-1].checksum = _checksum(chunk)
            num_blocks += chunk.numel() // BLOCK + 1
            if num_blocks >= MOST_BLOCKS:
                parts.append(_joined(sums))
                sums, num_blocks = [], 0
        if sums:
            parts.append(_joined(sums))
        if parts:
            out.copy_(_merged(torch.stack(parts)))
        else:
            out.copy_(_nothing(tensor.device))


def _room(tensor: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Return three vectors as long as a chunk, in the arithmetic type: room for what is computed."""
    dtype = torch.float64 if CONVERTED.get(tensor.dtype, tensor.dtype) is torch.float64 else torch.float32
    size = min(most, tensor.numel())
    return tuple(torch.empty(size, dtype=dtype, device=tensor.device) for _ in range(3))


def _chunks(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield the elements in contiguous, one-dimensional chunks of floats."""
    dtype = CONVERTED.get(tensor.dtype, tensor.dtype)
    if is_dense(tensor) and not tensor.is_neg():
        for chunk in torch.split(in_storage_order(tensor), most):
            if chunk.numel():
                yield chunk.to(dtype)
        return
    for piece in pieces(tensor, most):
        if piece.numel():
            yield piece.to(dtype, memory_format=torch.contiguous_format, copy=True).view(-1)


def _checksum(chunk: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bit patterns, modulo 2^64, as one int64 word."""
    width = chunk.element_size()
    bits = chunk.view(_BITS[width])
    total = bits.sum(dtype=torch.int64)
    if width < 8:
        # Patterns are unsigned, torch's integers are not: each negative one lacks 2^bits. Sums wrap modulo 2^64.
        total = total + (bits < 0).sum() * (1 << 8 * width)
    return total


@dataclass(slots=True)
class Sums:
    """Sums over some blocks: every field but the last two [blocks], on the tensor's device."""

    num: torch.Tensor
    """int64: finite elements."""
    low: torch.Tensor
    high: torch.Tensor
    center: torch.Tensor
    unit: torch.Tensor
    """Deviations below are in this unit, a power of two."""
    d1: torch.Tensor
    d2: torch.Tensor
    d3: torch.Tensor
    d4: torch.Tensor
    """Sums of powers of the deviations from `center`."""
    counts: list[torch.Tensor]
    """0-dim int64, all blocks together: zeros, NaN, +inf, -inf."""
    checksum: torch.Tensor | None = None


def _sum_blocks(x: torch.Tensor, zero_eps: float, scratch: tuple[torch.Tensor, ...]) -> Sums:
    """Return the sums of each block of x: [blocks, size] floats. Looks at no value: that would be a wait."""
    rows, size = x.shape
    room, d, dd = (flat[: rows * size].view(rows, size) for flat in scratch)
    if x.dtype != room.dtype:
        x = room.copy_(x)
    is_finite = x.isfinite()
    num = is_finite.sum(dim=1)
    low = torch.where(is_finite, x, torch.inf).amin(dim=1)
    high = torch.where(is_finite, x, -torch.inf).amax(dim=1)
    total = torch.where(is_finite, x, 0.0).sum(dim=1)
    # Near the mean is near enough; inside the block's range also where the sum overflowed.
    near = torch.clamp((total / num.clamp(min=1)).nan_to_num(), low, high)
    center = torch.where(num > 0, near, 0.0)
    zero = x == 0.0 if zero_eps == 0.0 else x.abs() <= torch_host.at_most(zero_eps, x.dtype)
    counts = [zero.sum(), x.isnan().sum(), (x == torch.inf).sum(), (x == -torch.inf).sum()]
    wide = center.double()
    reach = torch.where(num > 0, torch.maximum(high.double() - wide, wide - low.double()), 0.0)
    limit = 126 if x.dtype == torch.float32 else 1000
    unit = torch.ldexp(torch.ones_like(reach), torch.frexp(reach)[1].clamp(-limit, limit))
    scale = (1.0 / unit).to(x.dtype)[:, None]
    torch.mul(x, scale, out=d)
    d -= center[:, None] * scale
    d.masked_fill_(~is_finite, 0.0)
    torch.mul(d, d, out=dd)
    d1, d2 = d.sum(dim=1), dd.sum(dim=1)
    d3, d4 = d.mul_(dd).sum(dim=1), dd.mul_(dd).sum(dim=1)
    return Sums(num, low, high, center, unit, d1, d2, d3, d4, counts)


def _joined(sums: list[Sums]) -> torch.Tensor:
    """Return [12] int64 words: the statistics of all blocks in `sums`."""
    num = torch.cat([s.num for s in sums])
    stats = torch.zeros((len(num), 12), dtype=torch.int64, device=num.device)
    real = stats.view(torch.float64)
    low, high, center = (torch.cat(v).double() for v in zip(*((s.low, s.high, s.center) for s in sums), strict=True))
    d1, d2, d3, d4 = (torch.cat(v).double() for v in zip(*((s.d1, s.d2, s.d3, s.d4) for s in sums), strict=True))
    unit = torch.cat([s.unit for s in sums])
    e = d1 / num.clamp(min=1)
    square = unit * unit
    stats[:, 0] = num
    real[:, 1] = torch.where(num > 0, torch.clamp(center + e * unit, low, high), 0.0)
    is_varied = high > low
    for word, power in (
        (2, (d2 - e * d1).clamp(min=0.0) * square),
        (3, (d3 - 3.0 * e * d2 + 2.0 * e * e * d1) * unit * square),
        (4, (d4 - 4.0 * e * d3 + 6.0 * e * e * d2 - 3.0 * e * e * e * d1).clamp(min=0.0) * unit * unit * square),
    ):
        real[:, word] = torch.where(is_varied, power, 0.0)
    real[:, 5], real[:, 6] = low, high
    whole = _merged(stats).clone()
    for word, position in ((10, 0), (7, 1), (8, 2), (9, 3)):
        whole[word] = torch.stack([s.counts[position] for s in sums]).sum()
    checksums = [s.checksum for s in sums if s.checksum is not None]
    if checksums:
        whole[11] = torch.stack(checksums).sum()
    return whole


def _merged(stats: torch.Tensor) -> torch.Tensor:
    """Return [12] int64 words: the statistics of all rows of stats, [n, 12] int64 words, about their common mean.

    Source: Pebay, SAND2008-6212, for many parts at once.
    """
    if stats.shape[0] == 1:
        return stats[0]
    real = stats.view(torch.float64)
    count, mean, m2, m3, m4 = stats[:, 0], real[:, 1], real[:, 2], real[:, 3], real[:, 4]
    out = stats.sum(dim=0)
    weight = count.double()
    n = out[0].clamp(min=1).double()
    # Twice, so that a large common mean costs no digits (and no indexing: an index from the device is a wait).
    share = weight / n
    whole = (share * mean).sum()
    whole = whole + (share * (mean - whole)).sum()
    d = torch.where(count > 0, mean - whole, 0.0)
    dd = d * d
    wide = out.view(torch.float64)
    wide[1] = torch.where(out[0] > 0, whole, 0.0)
    wide[2] = (m2 + weight * dd).sum()
    wide[3] = (m3 + 3.0 * d * m2 + weight * dd * d).sum()
    wide[4] = (m4 + 4.0 * d * m3 + 6.0 * dd * m2 + weight * dd * dd).sum()
    wide[5] = real[:, 5].amin()
    wide[6] = real[:, 6].amax()
    return out


def _nothing(device: torch.device) -> torch.Tensor:
    """Return [12] int64 words of the statistics of no elements."""
    out = torch.zeros(12, dtype=torch.int64, device=device)
    out.view(torch.float64)[5].fill_(torch.inf)
    out.view(torch.float64)[6].fill_(-torch.inf)
    return out
