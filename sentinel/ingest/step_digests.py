"""StepDigests: what the digests of all machines say together of one step, and what of it only rows tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.ingest.digest import Digest
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.node_digest import DigestedRank, DigestedSums, NodeDigest, carried_rows, row_ids
from sentinel.ingest.node_share import NodeShare
from sentinel.record import BAD_ROW_DTYPE, ROW_DTYPE


class StepDigests:
    """The digests of all machines of a step. They stand for its rows, but for those of `unsplit` and `odd` tensors."""

    def __init__(
        self, layout: ModelLayout, digests: Sequence[NodeDigest], shares: Sequence[NodeShare], said: Sequence[DigestedSums]
    ) -> None:
        """digests: one a machine, in the order of `by_machine`. shares, said: of each."""
        self._layout, self._digests, self._shares = layout, digests, shares
        sums = [one.sums for one in said]
        merge = layout.node_merges.of(shares, [one.has_rows for one in sums])
        is_here, is_bad, is_odd, is_lone = (np.zeros(len(layout.tensors), np.bool_) for _ in range(4))
        has_rows, none = np.zeros(layout.num_copies, np.bool_), np.empty(0, np.int64)
        for share, one in zip(shares, said, strict=True):
            is_here[share.tensor_of[one.sums.present]] = True
            has_rows[share.copy_of[one.sums.has_rows]] = True
            for which, own in ((is_bad, one.sums.is_bad), (is_odd, one.is_odd), (is_lone, one.is_lone)):
                # Of thousands of machines hardly any has one.
                if own.any():
                    which[share.tensor_of[own]] = True
        is_odd[merge.unequal([one.marks for one in said])] = True
        is_odd[merge.unsplit] = True
        stats = merge.merge([one.stats for one in sums])
        self.sums = Digest(stats, is_here, is_bad, none, none, has_rows)
        """What the rows come to; of `unsplit` tensors there are no statistics, and `odd_copies` are not known."""
        self.unsplit = merge.unsplit
        """Indices of tensors of which only the rows tell what they come to."""
        self.odd = frozenset(np.flatnonzero(is_odd).tolist()) & layout.replicated
        """Indices of tensors of which copies differ, or may: their rows tell."""
        self.lone = np.flatnonzero(is_lone)
        """As `ClosedStep.lone_weights`."""
        self.kinds = frozenset.intersection(*(frozenset(one.kinds) for one in digests))
        """Kinds of which all rows are carried."""
        self.has_bad_rows = any(one.bad for one in digests)
        """Whether there are rows that hold a non-finite value."""

    @classmethod
    def of(cls, layout: ModelLayout, digests: Sequence[NodeDigest], machines: Sequence[Sequence[int]]) -> StepDigests | None:
        """Return what digests say together; None: one was made of another layout than this. machines: the ranks of each."""
        shares = [layout.share_of(tuple(ranks)) for ranks in machines]
        said = [one.sums(share) for one, share in zip(digests, shares, strict=True)]
        known = [one for one in said if one is not None]
        return cls(layout, digests, shares, known) if len(known) == len(said) else None

    def sites(self, site_pos: npt.NDArray[np.int64]) -> None:
        """Write the place of each tensor's site in this step, by its lowest rank's first row, [num_tensors]; others stay."""
        lowest = np.full(len(site_pos), np.iinfo(np.int32).max, np.int32)
        for share, found in zip(self._shares, self._digests, strict=True):
            (first_ranks, own), at = found.sites, share.tensor_of
            is_first = (first_ranks >= 0) & (first_ranks < lowest[at])
            lowest[at[is_first]], site_pos[at[is_first]] = first_ranks[is_first], own[is_first]

    def tensors_of(self, rank: int) -> npt.NDArray[np.int32]:
        """Return the indices of the tensors of which a rank has a row; -1: unknown ones."""
        one = self._of_rank.get(rank)
        ids = np.empty(0, np.uint32) if one is None else row_ids(one, len(self._layout.table_of(rank)))
        return self._layout.logical_of(rank, ids)

    def carried(self) -> dict[int, npt.NDArray[np.void]]:
        """Return rank -> the rows that are carried."""
        rows, former = dict[int, npt.NDArray[np.void]](), (b"", np.empty(0, ROW_DTYPE))
        for rank, one in self._of_rank.items():
            if one.carried is not former[0]:
                former = one.carried, carried_rows(one)
            rows[rank] = former[1]
        return rows

    def carried_of(self, ids: Mapping[int, npt.NDArray[np.uint32]]) -> dict[int, npt.NDArray[np.void]]:
        """Return rank -> its carried rows of some tensors. ids: rank -> of these."""
        rows = {rank: carried_rows(self._of_rank[rank]) for rank in ids}
        return {rank: own[np.isin(own["tensor"], ids[rank])] for rank, own in rows.items()}

    def take_bad(self) -> tuple[npt.NDArray[np.void], dict[int, int]]:
        """Return what is looked at of the rows that hold a non-finite value, [rows] BAD_ROW_DTYPE, ranks rising, and rank ->
        how many are its own. Once: there may be millions, and they are not kept twice.
        """
        of_rank, nums = dict[int, memoryview](), dict[int, int]()
        for found in self._digests:
            at = 0
            for one in found.ranks if found.bad else ():
                num_bytes = one.num_bad * BAD_ROW_DTYPE.itemsize
                of_rank[one.rank], nums[one.rank] = memoryview(found.bad)[at : at + num_bytes], one.num_bad
                at += num_bytes
        table = np.frombuffer(b"".join([of_rank[rank] for rank in sorted(of_rank)]), BAD_ROW_DTYPE)
        of_rank.clear()
        self._digests = [msgspec.structs.replace(one, bad=b"") if one.bad else one for one in self._digests]
        return table, nums

    @cached_property
    def _of_rank(self) -> dict[int, DigestedRank]:
        return {one.rank: one for found in self._digests for one in found.ranks}
