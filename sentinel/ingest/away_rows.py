"""Rows that lie on another machine until somebody asks for them: where they are, and how a step gets them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sentinel.ingest.node_digest import NodeDigest
from sentinel.ingest.step_parts import AwayFrame, RankPartOfStep
from sentinel.step_view import RankStep
from sentinel.wire.frame import Buffer

MAX_SELECTED = 4096
"""Tensors of a rank whose rows are asked for by themselves; of more the frames are asked for. A bound on what is asked: each
is named."""


class RowSource(Protocol):
    """Where the digests of a run are, and the rows that its spools here have not got."""

    def digest(self, step: int, of: tuple[tuple[bytes, int, int], ...], folders: Sequence[str]) -> NodeDigest | None:
        """Return the digest that a machine made of these frames (`NodeDigest.of`); None: there is none.

        folders: of the spools that they lie in.
        """

    def fetch(self, frames: Sequence[AwayFrame]) -> Mapping[tuple[bytes, int], Buffer]:
        """Return (process, number of the frame) -> payload, or what of it is wanted. Waits; what cannot be had any more is
        not in it.
        """


class AwayParts:
    """The parts of one step of which rows are away; all are asked for at once, when the first is looked at."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._parts: list[tuple[RankPartOfStep, int]] = []
        """Each with the number of the last frame that belongs to the step."""
        self._fetched: Mapping[tuple[bytes, int], Buffer] | None = None

    def add(self, part: RankPartOfStep, last_seq: int) -> bool:
        """Take in a part; return whether any of its rows are away."""
        if not part.has_away_until(last_seq):
            return False
        self._parts.append((part, last_seq))
        return True

    def of(self, incarnation: bytes) -> Mapping[int, Buffer]:
        """Return the payloads of one process's frames, by number."""
        if self._fetched is None:
            self._fetched = self._source.fetch([one for part, last in self._parts for one in part.away_until(last)])
        return {seq: payload for (process, seq), payload in self._fetched.items() if process == incarnation}

    def some(
        self, parts: Iterable[AwayRankStep], tensors: Mapping[int, npt.NDArray[np.uint32]]
    ) -> dict[int, npt.NDArray[np.void]]:
        """Return rank -> its rows of some tensors, in their order: [rows] ROW_DTYPE. tensors: rank -> ids, rising."""
        wanted = [one for one in parts if one.rank in tensors]
        frames = [
            frame
            for one in wanted
            if not one.rows_seen
            for frame in (
                one.part.some_away_until(one.last_seq, one.descriptor, tensors[one.rank])
                if len(tensors[one.rank]) <= MAX_SELECTED
                else one.part.away_until(one.last_seq)
            )
        ]
        payloads: dict[bytes, dict[int, Buffer]] = {}
        for (process, seq), payload in (self._source.fetch(frames) if frames else {}).items():
            payloads.setdefault(process, {})[seq] = payload
        found = {}
        for one in wanted:
            fetched = payloads.get(one.incarnation, {})
            rows = one.rows if one.rows_seen else one.part.rows_until(one.last_seq, one.descriptor, fetched)
            found[one.rank] = rows[np.isin(rows["tensor"], tensors[one.rank])]
        return found


class AwayRankStep(RankStep, frozen=True, kw_only=True):
    """A rank's part whose rows are fetched when they are asked for."""

    part: RankPartOfStep
    last_seq: int
    away: AwayParts
    rows_seen: list[npt.NDArray[np.void]] = []
    """The rows, once they were asked for."""

    @property  # type: ignore[misc] # what lies in the field of this name is never looked at
    def rows(self) -> npt.NDArray[np.void]:
        """[num_rows] ROW_DTYPE."""
        if not self.rows_seen:
            fetched = self.away.of(self.incarnation)
            self.rows_seen.append(self.part.rows_until(self.last_seq, self.descriptor, fetched))
        return self.rows_seen[0]

    @property
    def num_rows(self) -> int:
        """Number of `rows`, by what their frames say."""
        return self.part.num_rows_until(self.last_seq)
