"""SeriesIndex: which series have been met, as numbers; and which tensors of a layout a rule watches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from sentinel.kinds import is_of_kind
from sentinel.rules.language.schema import Match

if TYPE_CHECKING:
    from sentinel.step_view import Layout, LogicalTensor

MAX_REMEMBERED = 20_000
"""Most names of a layout that are remembered for the next one: a bound on memory. A layout with more takes 25 ms longer to
index, where remembering them would take 10 MB."""

_T = TypeVar("_T")


class SeriesIndex:
    """The series that an engine has met, numbered in order of first appearance; all its watches share it.

    A key is kept as 64 bits of its hash: a million names would be most of what an engine holds, and no two of a million
    hashes are equal but once in 3e7 runs.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(0, np.uint64)
        self._hash_of: dict[str, int] = {}
        self._taken: dict[tuple[str, ...], dict[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._hashes.nbytes

    def numbers(self, hashes: np.ndarray) -> np.ndarray:
        """Return the number of each key; new ones get the next. [n] uint64 -> [n] int32."""
        order = np.argsort(self._hashes, kind="stable")
        known = self._hashes[order]
        if len(known):
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            found = np.where(known[at] == hashes, order[at], -1)
        else:
            found = np.full(len(hashes), -1, np.int64)
        new = hashes[found < 0]
        if len(new):
            unique, first, inverse = np.unique(new, return_index=True, return_inverse=True)
            rank = np.empty(len(unique), np.int64)
            rank[np.argsort(first, kind="stable")] = np.arange(len(unique))
            found[found < 0] = len(self._hashes) + rank[inverse]
            self._hashes = np.concatenate([self._hashes, new[np.sort(first)]])
        numbers: np.ndarray = found.astype(np.int32)
        return numbers

    def hashes_of(self, keys: Sequence[str]) -> np.ndarray:
        """Return the 64 bits of each key: [n] uint64. Layouts follow each other with much the same keys."""
        if len(keys) > MAX_REMEMBERED:
            return np.fromiter(map(hash_of, keys), np.uint64, len(keys))
        known = _room_for(self._hash_of, len(keys))
        for key in keys:
            if key not in known:
                known[key] = hash_of(key)
        return np.fromiter((known[key] for key in keys), np.uint64, len(keys))

    def takes(self, match: Match, names: Sequence[str]) -> np.ndarray:
        """Return which names a rule watches: [n] bool."""
        if len(names) > MAX_REMEMBERED:
            return np.fromiter(map(match.takes_name, names), np.bool_, len(names))
        known = _room_for(self._taken.setdefault(match.name, {}), len(names))
        for name in names:
            if name not in known:
                known[name] = match.takes_name(name)
        return np.fromiter((known[name] for name in names), np.bool_, len(names))

    def to_bytes(self) -> bytes:
        """Return everything, for a snapshot."""
        return self._hashes.astype("<u8").tobytes()

    def take_bytes(self, data: bytes) -> None:
        """Take back what `to_bytes` gave."""
        self._hashes = np.frombuffer(data, "<u8").astype(np.uint64)


def hash_of(key: str) -> int:
    """Return the 64 bits that stand for a key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def series_key(layout: Layout, tensor: LogicalTensor) -> str:
    """Return what names the baseline of a tensor: a merged one keeps it on any layout, a rank's own in its world."""
    if not tensor.place:
        return tensor.key
    return f"{tensor.key}#{layout.places[tensor.ranks[0]].world_size}"


class SeriesSelection:
    """The tensors of one layout as columns, so that a rule finds its own among a million in milliseconds."""

    def __init__(self, layout: Layout, series: SeriesIndex) -> None:
        tensors = layout.tensors
        self._layout = layout
        self._series = series
        self.hashes = series.hashes_of([series_key(layout, one) for one in tensors])
        self.keys = series.numbers(self.hashes)
        """[tensors] the number of each one's series."""
        self._kinds, self._kind = _coded([(one.kind, one.border) for one in tensors])
        self._names, self._name = _coded([one.name for one in tensors])
        self._shared: dict[bytes, np.ndarray] = {}

    def takes(self, match: Match, kinds: frozenset[str]) -> np.ndarray:
        """Return which tensors a rule watches: [tensors] bool."""
        of_kind = np.array([is_of_kind(kind, border, kinds) for kind, border in self._kinds], np.bool_)
        taken: np.ndarray = of_kind[self._kind] if len(of_kind) else np.zeros(0, np.bool_)
        if match.name != ("*",) and len(taken):
            taken = taken & self._series.takes(match, self._names)[self._name]
        return taken

    def of_single_rank(self, ranks: tuple[int, ...]) -> np.ndarray:
        """Return which tensors belong to one of these ranks alone: [tensors] bool."""
        held = (len(one.ranks) == 1 and one.ranks[0] in ranks for one in self._layout.tensors)
        return np.fromiter(held, np.bool_, len(self._layout.tensors))

    def shared(self, array: np.ndarray) -> np.ndarray:
        """Return an array that equals this one and that others use too: rules of a pack watch the same tensors."""
        key = hashlib.blake2b(array.tobytes(), digest_size=16).digest() + array.dtype.str.encode()
        return self._shared.setdefault(key, array)


def _room_for(known: dict[str, _T], num_more: int) -> dict[str, _T]:
    """Return it, emptied where it might grow too long."""
    if len(known) + num_more > 2 * MAX_REMEMBERED:
        known.clear()
    return known


def _coded(values: Sequence[_T]) -> tuple[list[_T], np.ndarray]:
    """Return the distinct values in order of first appearance, and the place of each value among them."""
    places: dict[_T, int] = {}
    codes = np.fromiter((places.setdefault(one, len(places)) for one in values), np.int32, len(values))
    return list(places), codes
