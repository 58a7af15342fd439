"""Ids of the samples that a rank trains on in the current step: what a skip list names."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

MAX_IDS = 4096
"""Most ids of samples written of one step and rank; a bound on the spool: further ones are only counted."""
MAX_CHARS = 64 * 1024
"""Most characters of all of them together."""
_INTEGER_CHARS = 9
"""What an integer counts for: it is shipped in as many bytes at most."""
MAX_ID_CHARS = 256
"""Characters of the longest id that is taken: a cut one would name another sample, or none."""


class Samples:
    """What was logged as `sample_ids` since the step began."""

    def __init__(self) -> None:
        self._ids: list[int | str] = []
        self._num_chars = 0
        self._num_cut = 0

    def note(self, ids: Any) -> None:
        """Take integers or strings: one, a list, an array, or a tensor on the host; each call adds to the step's.

        A tensor elsewhere is refused, as reading it would wait for its device: ids come out of the data loader on the host.
        ValueError for what is no id.
        """
        if ids is None:
            return
        if isinstance(ids, torch.Tensor):
            ids = getattr(ids, "_local_tensor", ids)
            if ids.device.type != "cpu":
                raise ValueError(f"monitor.log(sample_ids=...): expected ids on the host, got a tensor on {ids.device}")
            if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
                raise ValueError(f"monitor.log(sample_ids=...): expected integers or strings, got a tensor of {ids.dtype}")
        room = max(0, MAX_IDS - len(self._ids))
        if hasattr(ids, "reshape"):
            flat = ids.reshape(-1)
            self._num_cut += max(0, len(flat) - room)
            ids = flat[:room].tolist()
        elif isinstance(ids, (str, int)) or not isinstance(ids, Iterable):
            ids = [ids]
        for one in ids:
            self._take(one)

    def _take(self, one: Any) -> None:
        if len(self._ids) >= MAX_IDS:
            self._num_cut += 1
            return
        known = _as_id(one)
        num_chars = len(known) if isinstance(known, str) else _INTEGER_CHARS
        if self._num_chars + num_chars > MAX_CHARS:
            self._num_cut += 1
            return
        self._num_chars += num_chars
        self._ids.append(known)

    def take(self) -> tuple[tuple[int | str, ...], int]:
        """Hand out the ids of the step that ends, and how many were left out; begin anew."""
        taken = tuple(self._ids), self._num_cut
        if self._ids or self._num_cut:
            self._ids, self._num_chars, self._num_cut = [], 0, 0
        return taken


def _as_id(one: Any) -> int | str:
    if isinstance(one, str):
        if len(one) > MAX_ID_CHARS:
            raise ValueError(f"monitor.log(sample_ids=...): an id has at most {MAX_ID_CHARS} characters, got {len(one)}")
        return one if one.isascii() else one.encode("utf-8", "backslashreplace").decode()
    try:
        if isinstance(one, bool):
            raise TypeError
        number = operator.index(one)
    except TypeError:
        raise ValueError(f"monitor.log(sample_ids=...): expected integers or strings, got {type(one).__name__}") from None
    return number if -(2**63) <= number < 2**63 else str(number)
