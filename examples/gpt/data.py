"""The text of Python's own standard library as bytes, and batches that depend on nothing but their place in the run."""

from __future__ import annotations

import sysconfig
import zlib
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

TEXT_BYTES = 2_000_000


class StandardLibrary:
    """Batches of source text: the same ones for the same (seed, step, dp_rank, micro_step), whatever came before."""

    def __init__(self, sequence: int, micro_batch: int, seed: int = 0) -> None:
        self.sequence, self.micro_batch, self.seed = sequence, micro_batch, seed
        self._text = np.frombuffer(_read_sources(TEXT_BYTES), np.uint8)

    @cached_property
    def _packed(self) -> np.ndarray:
        """What a data loader yields that took a compressed file for text."""
        return np.frombuffer(zlib.compress(self._text.data, 9), np.uint8)

    def micro_step(self, step: int, dp_rank: int, micro_step: int, *, is_corrupted: bool = False) -> torch.Tensor:
        """Return tokens, int64 [micro_batch, sequence + 1]: inputs and, shifted by one, targets."""
        source = self._packed if is_corrupted else self._text
        rng = np.random.default_rng((self.seed, step, dp_rank, micro_step))
        starts = rng.integers(0, len(source) - self.sequence - 1, self.micro_batch)
        rows = source[starts[:, None] + np.arange(self.sequence + 1)]
        return torch.from_numpy(rows.astype(np.int64))


def _read_sources(num_bytes: int) -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    if len(text) < 100_000:
        raise SystemExit(f"{folder}: expected the sources of the standard library, found {len(text)} bytes of *.py")
    return bytes(text[:num_bytes])
