"""Which pieces of a tensor make a copy of it, and which copies of one step are not the same, bit for bit.

Pieces that are equal are compared one by one. Where a tensor is cut in several ways, the pieces of each way make whole
copies, whose checksums add: 0:8 and 8:16 on two ranks against 0:16 on a third.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sentinel.record import Flag, Kind
from sentinel.step_view import NAN_CHECKSUM, CopySet, Differing, Holder, Replicas, Shard

if TYPE_CHECKING:
    from sentinel.ingest.merge import ClosedStep


def shard_words(shard: Shard) -> str:
    """Return `tp=0`, or the tensor's `part`; empty for the whole tensor."""
    return ",".join(str(at) if axis == "part" else f"{axis}={at}" for axis, at in shard)


def is_empty(shard: Shard) -> bool:
    """Whether a shard has no elements, as it says itself: two of those are no copies of anything."""
    stretch = _stretch(shard, 1)
    return stretch is not None and stretch[0] == stretch[1]


def is_cut_once(shards: Iterable[Shard], num_elements: int) -> bool:
    """Return whether a tensor is cut in one way, so that its pieces compare by themselves. shards: the different ones.

    num_elements: of the whole tensor.
    """
    flat, cuts = set[tuple[int, int]](), set[tuple[str, ...]]()
    for shard in shards:
        stretch = _stretch(shard, num_elements)
        if stretch is None:
            cuts.add(_axes(shard))
        elif stretch[0] < stretch[1]:
            flat.add(stretch)
    return len(cuts) + (1 if flat else 0) < 2 and not _overlap(flat)


def added_copies(index: int, num_elements: int, pieces: Mapping[Shard, Sequence[Holder]]) -> CopySet | None:
    """Return the whole copies of a tensor that is not `is_cut_once`, by holders of each piece; None: there are not several.

    num_elements: of the whole tensor. Pieces `a:b` of the flattened tensor tile it in any combination; others must be of one
    cut: all coordinates of the same axes. Whether a copy is complete is seen by its number of elements, when compared.
    """
    flat: dict[tuple[int, int], list[Holder]] = {}
    cuts: dict[tuple[str, ...], dict[Shard, list[Holder]]] = {}
    for shard, holders in pieces.items():
        stretch = _stretch(shard, num_elements)
        if stretch is not None:
            if stretch[0] < stretch[1]:
                flat.setdefault(stretch, []).extend(holders)
        else:
            cuts.setdefault(_axes(shard), {}).setdefault(shard, []).extend(holders)
    copies: list[tuple[Holder, ...]] = [tuple(sorted(copy)) for copy in _tilings(flat)]
    for cut in cuts.values():
        # The first holders of all pieces are one copy, the second ones another.
        copies.extend(tuple(sorted(copy)) for copy in zip(*map(sorted, cut.values()), strict=False))
    return CopySet(index, tuple(sorted(copies))) if len(copies) > 1 else None


def _stretch(shard: Shard, num_elements: int) -> tuple[int, int] | None:
    if not shard:
        return 0, num_elements
    if len(shard) == 1 and shard[0][0] == "part":
        start, colon, end = str(shard[0][1]).partition(":")
        if colon and start.isdigit() and end.isdigit():
            return int(start), int(end)
    return None


def _axes(shard: Shard) -> tuple[str, ...]:
    words = str(shard[0][1]).split(",") if shard[0][0] == "part" else [axis for axis, _ in shard]
    return tuple(word.partition("=")[0] for word in words)


def _overlap(flat: Iterable[tuple[int, int]]) -> bool:
    reached = 0
    for start, end in sorted(flat):
        if start < reached:
            return True
        reached = max(reached, end)
    return False


def _tilings(flat: Mapping[tuple[int, int], Sequence[Holder]]) -> list[list[Holder]]:
    """Return disjoint sets of holders, each of which tiles all that any of them reaches, as many as are found."""
    left = {stretch: sorted(holders) for stretch, holders in flat.items()}
    if not left:
        return []
    first, last = min(start for start, _ in left), max(end for _, end in left)
    tilings = []
    while (chain := _chain(first, last, left)) is not None:
        tilings.append([left[stretch].pop(0) for stretch in chain])
    return tilings


def _chain(first: int, last: int, left: Mapping[tuple[int, int], Sequence[Holder]]) -> list[tuple[int, int]] | None:
    after: dict[int, list[int]] = {}
    # The longest piece first: crumbs would use up what others need to be whole.
    for (start, end), holders in sorted(left.items(), reverse=True):
        if holders:
            after.setdefault(start, []).append(end)
    chain, dead = [first], set()
    while chain and chain[-1] != last:
        onward = next((end for end in after.get(chain[-1], ()) if end not in dead), None)
        if onward is None:
            dead.add(chain.pop())
        else:
            chain.append(onward)
    return list(itertools.pairwise(chain)) if chain else None


def differing(view: ClosedStep) -> list[Differing]:
    """Return the sets of copies of which two that came in this step are not the same; few, or none.

    Left out: ranks that are not there, rows without a checksum or of a failed hook, and gradients of a step that was skipped
    or that the rank did not end: those may not have been reduced. Copies that all hold a NaN are equal.
    """
    layout = view.layout
    found: list[Differing] = []
    if layout.replicated:
        wanted = view.odd_copies
        if len(wanted):
            known = layout.shards.replicas_of(wanted.tolist())
            copies = view.row_copy
            rows = np.flatnonzero(np.isin(copies, wanted))
            rows = rows[np.argsort(copies[rows], kind="stable")]
            starts = np.searchsorted(copies[rows], wanted)
            for number, of_copy in zip(wanted.tolist(), np.split(rows, starts[1:]), strict=True):
                for replicas in known[number]:
                    one = _compared(view, replicas, of_copy)
                    if one is not None:
                        found.append(one)
    if layout.added_copies:
        named = {one.index for one in found}
        found += _added(view, [one for one in layout.added_copies if one.index not in named])
    return found


def _compared(view: ClosedStep, replicas: Replicas, rows: np.ndarray) -> Differing | None:
    ranks = view.row_rank[rows].tolist()
    ids = view.rows["tensor"][rows].tolist()
    holders = set(replicas.holders)
    said: dict[Holder, tuple[int, int]] = {}
    for rank, local, at in zip(ranks, ids, rows.tolist(), strict=True):
        if (rank, local) in holders and (words := _words(view, at)) is not None:
            said[rank, local] = words
    members = [(rank,) for rank, _ in said]
    return _unequal(replicas.index, shard_words(replicas.shard), members, list(said.values()))


def _added(view: ClosedStep, sets: Sequence[CopySet]) -> list[Differing]:
    wanted = np.zeros(len(view.tensors) + 1, np.bool_)
    wanted[[one.index for one in sets]] = True
    rows = np.flatnonzero(wanted[view.row_logical])
    at = {
        (rank, local): row
        for rank, local, row in zip(
            view.row_rank[rows].tolist(), view.rows["tensor"][rows].tolist(), rows.tolist(), strict=True
        )
    }
    found = []
    for one in sets:
        members, totals = [], []
        for copy in one.copies:
            words = [_words(view, at[piece]) if piece in at else None for piece in copy]
            if None in words:
                continue
            whole = [word for word in words if word is not None]
            is_bad = any(checksum == NAN_CHECKSUM for checksum, _ in whole)
            total = NAN_CHECKSUM if is_bad else sum(checksum for checksum, _ in whole) % 2**64
            members.append(tuple(sorted({rank for rank, _ in copy})))
            totals.append((total, sum(count for _, count in whole)))
        unequal = _unequal(one.index, "", members, totals)
        if unequal is not None:
            found.append(unequal)
    return found


def _words(view: ClosedStep, at: int) -> tuple[int, int] | None:
    """Return (checksum, number of elements) of a row; None: it cannot be compared."""
    row = view.rows[at]
    if row["flags"] & Flag.DEGRADED:
        return None
    if row["kind"] == Kind.WGRAD and (view.is_skipped or int(view.row_rank[at]) not in view.ended):
        return None
    num_nan = int(row["num_nan"])
    count = int(row["count"]) + num_nan + int(row["num_pos_inf"]) + int(row["num_neg_inf"])
    if num_nan:
        return NAN_CHECKSUM, count
    checksum = int(row["checksum"])
    # 0 stands for "not asked for", but also for a tensor of zeros.
    is_zero = count == 0 or (row["min"] == 0.0 and row["max"] == 0.0 and int(row["count"]) == count)
    return (checksum, count) if checksum or is_zero else None


def _unequal(
    index: int, shard: str, members: Sequence[tuple[int, ...]], words: Sequence[tuple[int, int]]
) -> Differing | None:
    """Return the copies of the same number of elements, where they differ; of several numbers the one that most have."""
    counts = [count for _, count in words]
    if not counts:
        return None
    usual = max(sorted(set(counts)), key=counts.count)
    kept = [(ranks, checksum) for ranks, (checksum, count) in zip(members, words, strict=True) if count == usual]
    if len({checksum for _, checksum in kept}) < 2:
        return None
    return Differing(index, shard, tuple(ranks for ranks, _ in kept), tuple(checksum for _, checksum in kept))
