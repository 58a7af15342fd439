"""Plain torch on the host: one chunk after the other, about a center guessed from the chunk before.

On a CPU looking at a value costs no wait, so a chunk is summed about a guess and the result looked at. As in the C library
the chunk is read again where the guess was poor: sums about a far center lose the digits that a kurtosis needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sentinel.collect.kernels.tensor_memory import CONVERTED
from sentinel.native import merge_rows
from sentinel.record import STATS_DTYPE

CHUNK = 1 << 19
"""Elements read at a time: 2 MiB of fp32, four times in the outer cache (measured 2^16 to 2^20); fp32 counts them."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 1024
_WORTH_A_SAMPLE = 1 << 16
"""Up to so many elements a second pass costs less than to look for a center first."""
_HALF = 0xFFFF_FFFF
_ALL = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True)
class Guess:
    """Elements count as (x - center) / 2^exponent."""

    center: float = 0.0
    exponent: int = 0


class HostSums:
    """Measures CPU tensors chunk by chunk. Keeps its scratch memory: fresh pages cost more than the sums."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}

    def measure(self, chunks: Iterator[torch.Tensor], zero_eps: float, checksum: bool) -> np.ndarray:
        """Return the statistics of all chunks, contiguous ones of one dtype, as one row: [1] STATS_DTYPE."""
        parts: list[tuple[float, ...]] = []
        guess: Guess | None = None
        for chunk in chunks:
            x, d, dd = self._widened(chunk)
            if guess is None:
                guess = _guess_from_sample(x)
            part = _measure_chunk(x, d, dd, guess, zero_eps)
            parts.append((*part, _checksum(chunk, x, d, dd) if checksum else 0))
        stats = np.array(parts or [_NOTHING], STATS_DTYPE)
        return stats if len(stats) == 1 else merge_rows(stats, np.zeros(len(stats), np.int32), 1)

    def _widened(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the values of a chunk in fp32 or fp64, and two vectors of that size to compute in."""
        dtype = torch.float64 if CONVERTED.get(chunk.dtype, chunk.dtype) is torch.float64 else torch.float32
        size = chunk.numel()
        scratch = self._scratch.get(dtype)
        if scratch is None or len(scratch[0]) < size:
            # Vectors at like offsets of their pages would fight for the same cache lines: four times slower.
            scratch = tuple(torch.empty(size + 2048, dtype=dtype, device="cpu")[at : at + size] for at in (0, 336, 672))
            self._scratch[dtype] = scratch
        room, d, dd = (vector[:size] for vector in scratch)
        return (chunk if chunk.dtype == dtype else room.copy_(chunk)), d, dd


_NOTHING = (0, 0.0, 0.0, 0.0, 0.0, math.inf, -math.inf, 0, 0, 0, 0, 0)


def _measure_chunk(x: torch.Tensor, d: torch.Tensor, dd: torch.Tensor, guess: Guess, zero_eps: float) -> tuple[float, ...]:
    """Return the words of STATS_DTYPE for x, all but the checksum; leave in `guess` one for the next chunk."""
    num_nan = num_pos = num_neg = 0
    size = count = x.numel()
    low, high = x.amin().item(), x.amax().item()
    has_zeros = low <= zero_eps and high >= -zero_eps  # nan: no; counted again below
    smallest = 2.0**-100 if x.dtype == torch.float32 else 2.0**-900
    values, is_finite = x, False
    for tries in range(5):
        scale, unit = math.ldexp(1.0, -guess.exponent), math.ldexp(1.0, guess.exponent)
        shift = guess.center * scale
        if x.dtype == torch.float32:
            shift = float(np.float32(shift))
        center = shift * unit
        d1, d2, d3, d4, lowest_square = _sum_powers(values, d, dd, scale, shift)
        if lowest_square > 0.0 and center == 0.0 and zero_eps == 0.0:
            has_zeros = False  # no square is zero
        if not is_finite and not math.isfinite(d1):
            # Something is not finite, or the sum overflows: from here on the center stands for what does not count.
            is_finite = True
            num_nan = int(torch.ne(x, x, out=d).sum().item())
            num_pos, num_neg = (int(torch.eq(x, bad, out=d).sum().item()) for bad in (math.inf, -math.inf))
            count = size - num_nan - num_pos - num_neg
            if count == 0:
                return (0, 0.0, 0.0, 0.0, 0.0, math.inf, -math.inf, num_nan, num_pos, num_neg, 0)
            if count < size:
                low = torch.nan_to_num(x, math.inf, math.inf, math.inf, out=d).amin().item()
                high = torch.nan_to_num(x, -math.inf, -math.inf, -math.inf, out=d).amax().item()
            has_zeros = low <= zero_eps and high >= -zero_eps
            middle = 0.5 * low + 0.5 * high
        elif math.isfinite(d4):
            e = d1 / count
            variance = d2 / count - e * e
            # Within a deviation of the mean, rounding is magnified by less than twenty.
            if low == high or tries >= 3 or (e * e <= variance and d4 >= smallest):
                break
            middle = center + e * unit
        else:
            middle = center + d1 / count * unit
        guess.center = min(max(middle, low), high)
        guess.exponent = _exponent_for(max(high - guess.center, guess.center - low), x.dtype)
        if count < size:
            bad = float(np.float32(guess.center)) if x.dtype == torch.float32 else guess.center
            guess.center = bad
            values = torch.nan_to_num(x, bad, bad, bad)
    counts = (num_nan, num_pos, num_neg, _num_zeros(x, zero_eps, d) if has_zeros else 0)
    if low == high:
        return (count, low, 0.0, 0.0, 0.0, low, high, *counts)
    e = d1 / count
    m2 = max(d2 - e * d1, 0.0)
    m3 = d3 - 3.0 * e * d2 + 2.0 * e * e * d1
    m4 = max(d4 - 4.0 * e * d3 + 6.0 * e * e * d2 - 3.0 * e * e * e * d1, 0.0)
    mean = min(max(center + e * unit, low), high)
    is_small = (mean * scale) * (mean * scale) <= 0.5 * (m2 / count)
    guess.center = 0.0 if is_small else mean
    guess.exponent = _exponent_for(max(high - guess.center, guess.center - low), x.dtype)
    # One factor after the other: zero times a power that overflows would be nan.
    powers = (m2 * unit * unit, m3 * unit * unit * unit, m4 * unit * unit * unit * unit)
    return (count, mean, *powers, low, high, *counts)


def _sum_powers(
    x: torch.Tensor, d: torch.Tensor, dd: torch.Tensor, scale: float, shift: float
) -> tuple[float, float, float, float, float]:
    """Return the sums of the first four powers of x * scale - shift, and the smallest of its squares.

    torch sums floats pairwise, so that a million of them cost no digits.
    """
    if scale != 1.0:
        x = torch.mul(x, scale, out=d)
    if shift != 0.0:
        x = torch.sub(x, shift, out=d)
    torch.mul(x, x, out=dd)
    d1, d2, lowest = x.sum().item(), dd.sum().item(), dd.amin().item() if shift == 0.0 else 0.0
    d3 = torch.mul(x, dd, out=d).sum().item()
    return d1, d2, d3, torch.mul(dd, dd, out=dd).sum().item(), lowest


def _exponent_for(reach: float, dtype: torch.dtype) -> int:
    limit = 126 if dtype == torch.float32 else 1000
    exponent = limit if reach == math.inf else math.frexp(reach)[1] - 1 if reach > 0.0 else 0
    # Ordinary sizes need no scaling: their fourth powers are far from the ends of the range.
    return 0 if -16 <= exponent <= 16 else min(max(exponent, -limit), limit)


def _guess_from_sample(x: torch.Tensor) -> Guess:
    """Return a guess from about a thousand elements. Zero is the cheapest center, and as good where the mean is small."""
    if x.numel() <= _WORTH_A_SAMPLE:
        return Guess()
    sample = x[:: max(1, x.numel() // _SAMPLE)].numpy().astype(np.float64)
    sample = sample[np.isfinite(sample)]
    if sample.size == 0:
        return Guess()
    low, high = float(sample.min()), float(sample.max())
    exponent = math.frexp(max(abs(low), abs(high)))[1]
    mean = float(np.ldexp(sample, -exponent).mean())
    std = float(np.ldexp(sample, -exponent).std())
    center = 0.0 if abs(mean) <= 0.7 * std else min(max(math.ldexp(mean, exponent), low), high)
    return Guess(center, _exponent_for(max(high - center, center - low), x.dtype))


def _num_zeros(x: torch.Tensor, zero_eps: float, d: torch.Tensor) -> int:
    """Return how many |x| <= zero_eps. Comparisons give floats here: six times faster than truth values, and as exact."""
    if zero_eps == 0.0:
        return x.numel() - int(torch.ne(x, 0.0, out=d).sum().item())
    torch.abs(x, out=d)
    return int(torch.le(d, at_most(zero_eps, x.dtype), out=d).sum().item())


def at_most(zero_eps: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` that is not above zero_eps, so that the comparison is the exact one."""
    rounded = torch.tensor(zero_eps, dtype=dtype, device="cpu")
    if rounded.item() > zero_eps:
        rounded = torch.nextafter(rounded, torch.tensor(-torch.inf, dtype=dtype, device="cpu"))
    return float(rounded.item())


def _checksum(chunk: torch.Tensor, x: torch.Tensor, d: torch.Tensor, dd: torch.Tensor) -> int:
    """Return the sum of the bit patterns of `chunk`, modulo 2^64; x: its values in fp32 or fp64; computes in d and dd."""
    if chunk.dtype == torch.bfloat16:
        return _checksum(x, x, d, dd) >> 16  # bf16 is the upper half of fp32
    width = chunk.element_size()
    if width == 8:
        return int(chunk.view(torch.int64).sum().item()) & _ALL
    # Eight bytes at a time: sums of int64 are many times faster than those of what is shorter.
    per_word = 8 // width
    start = min(-chunk.storage_offset() % per_word, chunk.numel())
    end = start + (chunk.numel() - start) // per_word * per_word
    edges = torch.cat((chunk[:start], chunk[end:])).view(_BITS[width]).tolist()
    total: int = sum(bits & (1 << 8 * width) - 1 for bits in edges)
    if start == end:
        return total
    words = chunk[start:end].view(torch.int64)
    first, second = (room[: 2 * len(words)].view(torch.int64) for room in (d, dd))
    if width == 2:
        torch.bitwise_and(words, 0x0000_FFFF_0000_FFFF, out=first)
        torch.bitwise_right_shift(words, 16, out=second).bitwise_and_(0x0000_FFFF_0000_FFFF)
        words = first.add_(second)
    uppers = torch.bitwise_right_shift(words, 32, out=second)
    upper = int((uppers.bitwise_and_(_HALF) if width == 4 else uppers).sum().item())
    # The lower halves add to less than 2^52: known here modulo 2^64, and so exactly.
    lower = int(words.sum().item()) - (upper << 32) & _ALL
    return total + upper + lower & _ALL
