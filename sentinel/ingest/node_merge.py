"""NodeMerge: how the sums of several machines become those of the whole tensors. The order is part of the result.

Sums in float64 depend on their order, so there is one order for all: the rows of each machine first, in the order of its
ranks, then what the machines came to, in the order of their lowest ranks. Of machines that hold copies of the same shards
the first one's sums stand for all. Where two hold some of the same shards, and each some of its own, neither sum may be
used, and all rows of that tensor are merged as those of one machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sentinel import native
from sentinel.ingest.node_share import NodeShare, no_sums
from sentinel.record import STATS_DTYPE

_NUM_WORDS = STATS_DTYPE.itemsize // 8
_MIX = np.uint64(0xD6E8FEB86659FD93)


class NodeMerge:
    """For some shares of a layout, and the shards of which each had rows; made once for as long as these stay."""

    def __init__(
        self,
        num_tensors: int,
        num_copies: int,
        shares: Sequence[NodeShare],
        has_rows: Sequence[npt.NDArray[np.bool_]],
    ) -> None:
        """num_tensors, num_copies: of the layout. has_rows: as `NodeSums.has_rows`, of each share."""
        self._num_tensors = num_tensors
        tensors, sets, sizes, at = [], [], [], []
        base, reached = 0, np.zeros(num_copies, np.bool_)
        tensor_of_copy = np.full(num_copies, -1, np.int64)
        for share, has in zip(shares, has_rows, strict=True):
            mark = np.zeros(len(share.tensor_of), np.uint64)
            words = (share.copy_of[has].astype(np.uint64) + np.uint64(1)) * _MIX
            words = (words ^ (words >> np.uint64(31))) * _MIX
            np.add.at(mark, share.tensor_of_copy[has], words ^ (words >> np.uint64(32)))
            num_here = np.bincount(share.tensor_of_copy[has], minlength=len(share.tensor_of))
            here = np.flatnonzero(num_here)
            tensors.append(share.tensor_of[here])
            sets.append(mark[here])
            sizes.append(num_here[here])
            at.append(base + here)
            base += len(share.tensor_of)
            reached[share.copy_of[has]] = True
            tensor_of_copy[share.copy_of] = share.tensor_of[share.tensor_of_copy]
        tensor, marks, size, place = (np.concatenate(one) for one in (tensors, sets, sizes, at))
        # One entry a machine and tensor; those of equal sets side by side, the lowest machine first.
        order = np.lexsort((place, marks, tensor))
        tensor, marks, size, place = tensor[order], marks[order], size[order], place[order]
        is_first = np.ones(len(tensor), np.bool_)
        is_first[1:] = (tensor[1:] != tensor[:-1]) | (marks[1:] != marks[:-1])
        self._first = place[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]][~is_first]
        self._again, self._tensor_of_again = place[~is_first], tensor[~is_first]
        tensor, size, place = tensor[is_first], size[is_first], place[is_first]
        num_held = np.bincount(tensor, size, num_tensors)
        num_shards = np.bincount(tensor_of_copy[reached], minlength=num_tensors)
        self.unsplit = np.flatnonzero(num_held != num_shards)
        """Indices of tensors of which machines hold overlapping sets of shards: only all their rows tell what they are."""
        kept = ~np.isin(tensor, self.unsplit)
        tensor, place = tensor[kept], place[kept]
        order = np.lexsort((place, tensor))
        tensor, place = tensor[order], place[order]
        num_parts = np.bincount(tensor, minlength=num_tensors)
        is_single = num_parts[tensor] == 1
        self._single_to, self._single_from = tensor[is_single], place[is_single]
        self._several_from = place[~is_single]
        self._several_to, self._group = np.unique(tensor[~is_single], return_inverse=True)

    def merge(self, stats: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
        """Return the merged statistics, [num_tensors] STATS_DTYPE; nothing where no machine has rows, or at `unsplit`.

        stats: of each share, as `NodeSums.stats`.
        """
        # As words: numpy copies records field by field.
        every = np.concatenate([one.view(np.uint64).reshape(-1, _NUM_WORDS) for one in stats])
        found = no_sums(self._num_tensors)
        words = found.view(np.uint64).reshape(-1, _NUM_WORDS)
        words[self._single_to] = every[self._single_from]
        if len(self._several_to):
            several = np.ascontiguousarray(every[self._several_from]).view(STATS_DTYPE).reshape(-1)
            merged = native.merge_rows(several, self._group.reshape(-1), len(self._several_to))
            words[self._several_to] = merged.view(np.uint64).reshape(-1, _NUM_WORDS)
        return found

    def unequal(self, marks: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.int64]:
        """Return the indices of tensors of which machines that hold the same shards do not hold the same bits, rising.

        marks: of each share, as `NodeShare.marks`.
        """
        every = np.concatenate(marks)
        found: npt.NDArray[np.int64] = np.unique(self._tensor_of_again[every[self._again] != every[self._first]])
        return found


class NodeMerges:
    """The newest merges of a layout; nearly every step is as the one before."""

    def __init__(self, num_tensors: int, num_copies: int) -> None:
        self._num_tensors, self._num_copies = num_tensors, num_copies
        self._newest: tuple[tuple[object, ...], NodeMerge] | None = None

    def of(self, shares: Sequence[NodeShare], has_rows: Sequence[npt.NDArray[np.bool_]]) -> NodeMerge:
        """Return the merge of shares with rows of these shards."""
        key = (*((share.ranks, has.tobytes()) for share, has in zip(shares, has_rows, strict=True)),)
        if self._newest is None or self._newest[0] != key:
            self._newest = (key, NodeMerge(self._num_tensors, self._num_copies, shares, has_rows))
        return self._newest[1]
