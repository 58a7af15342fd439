"""Tensors read in parallel, in pieces of bounded size, and rows measured over tensors that are made piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from sentinel.collect.rows.buffer import WORDS, StepRows
from sentinel.collect.rows.recording import Recording
from sentinel.record import Kind

ROOM = 1 << 22
"""Elements of a piece: 16 MiB in fp32."""

_COUNT, _MEAN, _M2, _M3, _M4, _MIN, _MAX, _NAN, _POS_INF, _NEG_INF, _ZERO, _SUM = range(WORDS)


def side_by_side(tensors: Sequence[torch.Tensor], most: int = ROOM) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tuples of views, one of each tensor, of at most `most` elements each, that together cover them. No copy.

    tensors: of one shape, on any device.
    """
    first = tensors[0]
    if first.numel() <= most:
        yield tuple(tensors)
    elif all(one.is_contiguous() for one in tensors):
        yield from zip(*(torch.split(one.view(-1), most) for one in tensors), strict=True)
    else:
        axis = max(range(first.dim()), key=lambda d: (first.shape[d] > 1, first.stride(d)))
        slab = first.numel() // first.shape[axis]
        if slab > most:
            for at in range(first.shape[axis]):
                yield from side_by_side([one.select(axis, at) for one in tensors], most)
        else:
            yield from zip(*(torch.split(one, most // slab, axis) for one in tensors), strict=True)


class PiecedRow:
    """Measures a tensor that exists only piece by piece into one row. Does not wait for the device."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._parts = StepRows(16)

    def fill(self, row: int, pieces: Iterable[torch.Tensor]) -> None:
        """Measure all pieces into row `row` of the running step.

        A piece may be overwritten once the next one is asked for.
        """
        recording, parts = self._recording, self._parts
        elsewhere: list[torch.Tensor] = []
        for piece in pieces:
            if not piece.is_cpu:
                # A kernel there writes its rows straight to the host: nobody on the device could merge them.
                elsewhere.append(piece_words(piece, recording.zero_eps))
                continue
            if parts.num_rows >= parts.capacity:
                parts.grow(2 * parts.capacity)
            at = parts.add(0, Kind.UPDATE, 0, -1, 0, 0)
            recording.kernel.measure((piece,), parts, at, zero_eps=recording.zero_eps)
        if parts.num_rows or elsewhere:
            words = torch.stack(elsewhere) if elsewhere else parts.stats_on(torch.device("cpu"), 0, parts.num_rows)
            recording.rows.stats_on(words.device, row, 1)[0].copy_(merge_words(words))
        parts.reset()


def piece_words(piece: torch.Tensor, zero_eps: float) -> torch.Tensor:
    """Return [12] int64 words: the statistics of fp32 or fp64 elements, by torch operations, on any device.

    Deviations from the mean are scaled by the largest of them, so that fourth powers neither overflow nor vanish.
    """
    words = torch.zeros(WORDS, dtype=torch.int64, device=piece.device)
    real = words.view(torch.float64)
    is_finite = piece.isfinite()
    words[_COUNT] = count = is_finite.sum()
    words[_NAN], words[_POS_INF], words[_NEG_INF] = piece.isnan().sum(), piece.isposinf().sum(), piece.isneginf().sum()
    words[_ZERO] = (piece.abs() <= zero_eps).sum()
    size = count.clamp(min=1).double()
    mean = torch.where(is_finite, piece, 0.0).sum(dtype=torch.float64) / size
    away = torch.where(is_finite, piece - mean.to(piece.dtype), 0.0)
    largest = away.abs().amax().clamp(min=torch.finfo(piece.dtype).tiny)
    away /= largest
    # The mean was rounded to the type of the piece: what is left of it is in the first sum.
    unit, rest = largest.double(), away.sum(dtype=torch.float64) / size
    square = away * away
    sums = [one.sum(dtype=torch.float64) for one in (square, square * away, square * square)]
    real[_MEAN] = mean.to(piece.dtype).double() + rest * unit
    real[_M2] = (sums[0] - size * rest**2) * unit**2
    real[_M3] = (sums[1] - 3 * rest * sums[0] + 2 * size * rest**3) * unit**3
    real[_M4] = (sums[2] - 4 * rest * sums[1] + 6 * rest**2 * sums[0] - 3 * size * rest**4) * unit**4
    real[_MIN] = torch.where(is_finite, piece, torch.inf).amin()
    real[_MAX] = torch.where(is_finite, piece, -torch.inf).amax()
    return words


def merge_words(words: torch.Tensor) -> torch.Tensor:
    """Return [12] int64 words: the statistics of all rows of words, [n, 12], together.

    Source: the sums of each about the common mean; Pebay, SAND2008-6212, for many sets at once.
    """
    real = words.view(torch.float64)
    merged = words.sum(dim=0)
    out = merged.view(torch.float64)
    count = words[:, _COUNT].double()
    total = count.sum()
    mean = (count * real[:, _MEAN]).sum() / total.clamp(min=1.0)
    away = torch.where(count > 0, real[:, _MEAN] - mean, 0.0)
    m2, m3 = real[:, _M2], real[:, _M3]
    out[_MEAN] = mean
    out[_M2] = (m2 + count * away**2).sum()
    out[_M3] = (m3 + 3 * away * m2 + count * away**3).sum()
    out[_M4] = (real[:, _M4] + 4 * away * m3 + 6 * away**2 * m2 + count * away**4).sum()
    out[_MIN], out[_MAX] = real[:, _MIN].amin(), real[:, _MAX].amax()
    return merged
