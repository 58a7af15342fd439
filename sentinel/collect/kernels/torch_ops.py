"""The kernel for any device: plain torch, in chunks, never waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sentinel.collect.buffer import StepRows
from sentinel.collect.kernels.native import NativeKernel
from sentinel.collect.kernels.reading import CONVERTED, in_storage_order, is_dense, pieces, plain
from sentinel.errors import SentinelError

BLOCK = 2048
"""Elements that share a centre and a scale."""

CHUNK = {"cpu": 1 << 18}
"""Elements read at a time, by device: on a CPU so many that temporaries stay in its cache."""

LARGEST_CHUNK = 1 << 21
"""Elements read at a time elsewhere: 16 MiB in float64, and no temporary is larger."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchKernel:
    """Measures tensors with torch operations: some sixty launches a chunk, so it is for where nothing better runs."""

    def __init__(self, device: str = "cpu", on_cpu: NativeKernel | None = None) -> None:
        self.name = f"torch ({device})"
        self._on_cpu = on_cpu

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
                        _measure(local, rows.stats_on(local.device, row, 1)[0], zero_eps, checksum)
            except SentinelError as error:
                failed = failed or error
        if failed:
            raise failed


def _measure(tensor: torch.Tensor, out: torch.Tensor, zero_eps: float, checksum: bool) -> None:
    """Write the statistics of `tensor` into `out`, [12] int64 words on its device. Does not synchronize."""
    most = CHUNK.get(tensor.device.type, LARGEST_CHUNK)
    parts = [_chunk_stats(chunk, zero_eps, checksum) for chunk in _chunks(tensor, most)]
    if not parts:
        parts = [_nothing(tensor.device)]
    while len(parts) > 1:
        # In groups of a fixed size and order: the same tensor gives the same bits.
        parts = [_merged(torch.stack(parts[i : i + 1024])) for i in range(0, len(parts), 1024)]
    out.copy_(parts[0])


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


def _chunk_stats(chunk: torch.Tensor, zero_eps: float, checksum: bool) -> torch.Tensor:
    """Return [12] int64 words of the statistics of one contiguous chunk."""
    body = chunk.numel() - chunk.numel() % BLOCK
    parts = []
    if body:
        parts.append(_block_stats(chunk[:body].view(-1, BLOCK), zero_eps))
    if body < chunk.numel():
        parts.append(_block_stats(chunk[body:].view(1, -1), zero_eps))
    stats = _merged(torch.cat(parts))
    if checksum:
        width = chunk.element_size()
        bits = chunk.view(_BITS[width])
        total = bits.sum(dtype=torch.int64)
        if width < 8:
            # Patterns are unsigned, torch's integers are not: each negative one lacks 2^bits. Sums wrap modulo 2^64.
            total = total + (bits < 0).sum() * (1 << 8 * width)
        stats[11] = total
    return stats


def _block_stats(x: torch.Tensor, zero_eps: float) -> torch.Tensor:
    """Return [blocks, 12] int64 words of the statistics of each block of x: [blocks, size]."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    size = x.shape[1]
    is_finite = x.isfinite()
    # On a CPU looking costs no wait, and nearly every block is finite throughout.
    is_clean = x.is_cpu and bool(is_finite.all())
    out = torch.zeros((x.shape[0], 12), dtype=torch.int64, device=x.device)
    real = out.view(torch.float64)
    if is_clean:
        low, high = x.aminmax(dim=1)
        n = torch.full((x.shape[0],), size, dtype=torch.int64, device=x.device)
        total = x.sum(dim=1)
    else:
        n = is_finite.sum(dim=1)
        low = torch.where(is_finite, x, torch.inf).amin(dim=1)
        high = torch.where(is_finite, x, -torch.inf).amax(dim=1)
        total = torch.where(is_finite, x, 0.0).sum(dim=1)
        out[:, 7] = x.isnan().sum(dim=1)
        out[:, 8] = (x == torch.inf).sum(dim=1)
        out[:, 9] = (x == -torch.inf).sum(dim=1)
    zero = x == 0.0 if zero_eps == 0.0 else x.abs() <= _at_most(zero_eps, x.dtype)
    out[:, 10] = zero.sum(dim=1)
    out[:, 0] = n
    real[:, 5], real[:, 6] = low, high

    # The centre need only be near the mean, and inside the block's range where a sum overflowed.
    some = n > 0
    low, high = torch.where(some, low, 0.0), torch.where(some, high, 0.0)
    center = torch.clamp((total / n.clamp(min=1)).nan_to_num(), low, high)
    wide_center = center.double()
    reach = torch.maximum(high.double() - wide_center, wide_center - low.double())
    limit = 126 if x.dtype == torch.float32 else 1000
    exponent = torch.frexp(reach)[1].clamp(-limit, limit)
    unit = torch.ldexp(torch.ones_like(reach), exponent)
    scale = (1.0 / unit).to(x.dtype)[:, None]

    d = x * scale
    d -= center[:, None] * scale
    if not is_clean:
        d = torch.where(is_finite, d, 0.0)
    d1 = d.sum(dim=1).double()
    dd = d * d
    d2 = dd.sum(dim=1).double()
    d3 = d.mul_(dd).sum(dim=1).double()
    d4 = dd.mul_(dd).sum(dim=1).double()
    e = d1 / n.clamp(min=1)
    m2 = (d2 - e * d1).clamp(min=0.0)
    m3 = d3 - 3.0 * e * d2 + 2.0 * e * e * d1
    m4 = (d4 - 4.0 * e * d3 + 6.0 * e * e * d2 - 3.0 * e * e * e * d1).clamp(min=0.0)
    real[:, 1] = torch.clamp(wide_center + e * unit, low.double(), high.double())
    varied = reach > 0
    real[:, 2] = torch.where(varied, m2 * unit * unit, 0.0)
    real[:, 3] = torch.where(varied, m3 * unit * unit * unit, 0.0)
    real[:, 4] = torch.where(varied, m4 * unit * unit * unit * unit, 0.0)
    return out


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
    # About one of the means, so that a large common one costs no digits.
    origin = mean[weight.argmax()]
    whole = origin + (weight / n * (mean - origin)).sum()
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


def _at_most(zero_eps: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` that is not above zero_eps, so that the comparison is the exact one."""
    rounded = torch.tensor(zero_eps, dtype=dtype)
    if rounded.item() > zero_eps:
        rounded = torch.nextafter(rounded, torch.tensor(-torch.inf, dtype=dtype))
    return float(rounded.item())
