"""Rows of one value each: ratios, norms and shares computed on the device. Nothing waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sentinel.collect.rows.buffer import WORDS
from sentinel.collect.rows.recording import Recording
from sentinel.collect.rows.tensor_table import TensorEntry

_COUNT, _MEAN, _, _, _, _MIN, _MAX, NUM_NAN, _POS_INF, _NEG_INF, _ZERO, _ = range(WORDS)


def value_words(values: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Return [n, 12] int64 words: row i has the statistics of the single element values[i], [n] of any float type.

    counts: [n] bool, whether the value is defined; the row of one that is not has count 0. None: all are.
    """
    wide = values.detach().double()
    words = torch.zeros((values.numel(), WORDS), dtype=torch.int64, device=values.device)
    real = words.view(torch.float64)
    is_there = torch.ones_like(wide, dtype=torch.bool) if counts is None else counts
    is_finite = wide.isfinite() & is_there
    words[:, _COUNT] = is_finite
    words[:, NUM_NAN] = wide.isnan() & is_there
    words[:, _POS_INF] = (wide == torch.inf) & is_there
    words[:, _NEG_INF] = (wide == -torch.inf) & is_there
    words[:, _ZERO] = is_finite & (wide == 0.0)
    real[:, _MEAN] = torch.where(is_finite, wide, 0.0)
    real[:, _MIN] = torch.where(is_finite, wide, torch.inf)
    real[:, _MAX] = torch.where(is_finite, wide, -torch.inf)
    return words


def observe_words(
    recording: Recording, entries: Sequence[TensorEntry], words: torch.Tensor, rows: dict[int, int], flags: int = 0
) -> None:
    """Write row i of words, [n, 12] int64 on any device, as the row of entries[i] in the running step.

    rows: id of an entry -> number of the row that the step has of it already, which is overwritten; new ones are added.
    flags: of the rows.
    """
    fresh = [at for at, entry in enumerate(entries) if entry.id not in rows]
    first = recording.reserve_all([entries[at] for at in fresh], [flags] * len(fresh))
    if len(fresh) == len(entries) and entries:
        recording.rows.stats_on(words.device, first, len(entries)).copy_(words)
    rows.update({entries[at].id: first + number for number, at in enumerate(fresh)})
    for at, entry in enumerate(entries) if len(fresh) < len(entries) else ():
        recording.rows.stats_on(words.device, rows[entry.id], 1)[0].copy_(words[at])
