"""Rows whose statistics a probe computes itself: of shares, or of some elements of a small tensor. Nothing waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sentinel.collect.rows.buffer import WORDS
from sentinel.collect.rows.recording import Recording
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import STATS_DTYPE

_COUNT, _MEAN, _M2, _M3, _M4, _MIN, _MAX, _NAN, _POS_INF, _NEG_INF, _ZERO, _ = range(WORDS)


def share_words(hits: torch.Tensor, total: torch.Tensor | int) -> torch.Tensor:
    """Return [n, 12] int64 words: row i has the statistics of `total` elements, of which hits[i] are 1 and the others 0.

    hits: [n] integers. The mean of such a row is the share, so that shares of shards, ranks and micro-steps of any size
    merge exactly.
    """
    if hits.is_cpu:
        return torch.from_numpy(_host_shares(hits.numpy().astype(np.int64), int(total)))
    return device_shares(hits, total)


def _host_shares(hits: np.ndarray, total: int) -> np.ndarray:
    rows = np.zeros(len(hits), STATS_DTYPE)
    share = hits / max(1, total)
    spread = total * share * (1.0 - share)
    rows["count"], rows["mean"], rows["num_zero"] = total, share, total - hits
    rows["m2"], rows["m3"] = spread, spread * (1.0 - 2.0 * share)
    rows["m4"] = spread * (1.0 - 3.0 * share * (1.0 - share))
    rows["min"] = hits == total if total else np.inf
    rows["max"] = hits > 0 if total else -np.inf
    return rows.view(np.int64).reshape(-1, WORDS)


def device_shares(hits: torch.Tensor, total: torch.Tensor | int) -> torch.Tensor:
    """As `share_words`, on any device, in some twenty small launches."""
    hits = hits.to(torch.int64)
    words = torch.zeros((hits.numel(), WORDS), dtype=torch.int64, device=hits.device)
    real = words.view(torch.float64)
    words[:, _COUNT] = total
    count = words[:, _COUNT]
    size = count.double()
    share = hits.double() / size.clamp(min=1.0)
    spread = size * share * (1.0 - share)
    real[:, _MEAN] = share
    real[:, _M2] = spread
    real[:, _M3] = spread * (1.0 - 2.0 * share)
    real[:, _M4] = spread * (1.0 - 3.0 * share * (1.0 - share))
    is_empty = count == 0
    real[:, _MIN] = torch.where(is_empty, torch.inf, (hits == count).double())
    real[:, _MAX] = torch.where(is_empty, -torch.inf, (hits > 0).double())
    words[:, _ZERO] = count - hits
    return words


def moments_words(values: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Return [1, 12] int64 words: the statistics of a small tensor's elements.

    counts: of the same shape, bool, which elements count; None: all. Selecting them before would wait for the device. Two
    passes in float64.
    """
    words = torch.zeros((1, WORDS), dtype=torch.int64, device=values.device)
    real = words.view(torch.float64)
    real[0, _MIN], real[0, _MAX] = torch.inf, -torch.inf
    if values.numel() == 0:
        return words
    wide = values.detach().double()
    is_finite = wide.isfinite()
    if counts is not None:
        words[0, _NAN] = (wide.isnan() & counts).sum()
        words[0, _POS_INF] = ((wide == torch.inf) & counts).sum()
        words[0, _NEG_INF] = ((wide == -torch.inf) & counts).sum()
        is_finite = is_finite & counts
    else:
        words[0, _NAN] = wide.isnan().sum()
        words[0, _POS_INF] = (wide == torch.inf).sum()
        words[0, _NEG_INF] = (wide == -torch.inf).sum()
    words[0, _COUNT] = count = is_finite.sum()
    size = count.clamp(min=1).double()
    mean = torch.where(is_finite, wide, 0.0).sum() / size
    away = torch.where(is_finite, wide - mean, 0.0)
    square = away * away
    real[0, _MEAN] = mean
    real[0, _M2] = square.sum()
    real[0, _M3] = (square * away).sum()
    real[0, _M4] = (square * square).sum()
    real[0, _MIN] = torch.where(is_finite, wide, torch.inf).amin()
    real[0, _MAX] = torch.where(is_finite, wide, -torch.inf).amax()
    words[0, _ZERO] = (is_finite & (wide == 0.0)).sum()
    return words


def write_rows(recording: Recording, entries: Sequence[TensorEntry], words: torch.Tensor, micro_step: int) -> None:
    """Write words, [n, 12] int64 on any device, as n rows of the running step, one for each entry."""
    first = recording.reserve_all(entries, [0] * len(entries), micro_step)
    recording.rows.stats_on(words.device, first, len(entries)).copy_(words)


def observe_some(
    recording: Recording, entry: TensorEntry, values: torch.Tensor, counts: torch.Tensor | None, micro_step: int
) -> None:
    """Write one row of the elements of a small tensor. counts: of the same shape, bool, which count; None: all."""
    if not values.is_cpu:
        write_rows(recording, [entry], moments_words(values, counts), micro_step)
    else:
        recording.observe(entry, values if counts is None else values[counts], micro_step)
