"""DigestedStep: a closed step whose rows are on the machines that measured them; StepExcerpt: some of its rows."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sentinel.decision import Decision
from sentinel.ingest.away_rows import AwayRankStep
from sentinel.ingest.copies import differing
from sentinel.ingest.digest import Digest, digest
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.row_tables import is_bad_row
from sentinel.ingest.step_digests import StepDigests
from sentinel.record import ROW_DTYPE
from sentinel.step_view import Differing, RankStep


class DigestedStep(ClosedStep):
    """A closed step made of digests. It says what its rows would say; those that somebody looks at are asked for."""

    def __init__(
        self,
        *,
        run: str,
        attempt: int,
        step: int,
        layout: ModelLayout,
        parts: Sequence[RankStep],
        digests: StepDigests,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(run=run, attempt=attempt, step=step, layout=layout, parts=parts, decision=decision)
        self._digests = digests
        self._had = frozenset[int]()
        """Tensors whose rows are in the excerpt."""
        self._rows_had: dict[int, npt.NDArray[np.void]] = {}
        """Rank -> its rows of them."""
        self._excerpt: StepExcerpt | None = None

    def _sums(self) -> Digest:
        found, unsplit = self._digests.sums, self._digests.unsplit
        if len(unsplit):
            # Copies are compared in every step: all is asked for at once.
            some = self.with_rows_of(self._compared.union(unsplit.tolist()))
            found.stats[unsplit] = digest(some.parts, self.layout).stats[unsplit]
        return found

    @cached_property
    def _compared(self) -> frozenset[int]:
        """Indices of tensors of whose copies only the rows tell whether they differ."""
        return self._digests.odd.union(one.index for one in self.layout.added_copies)

    @cached_property
    def differing(self) -> list[Differing]:
        """Copies of a weight, its state or its reduced gradient that should be bit-identical, and are not."""
        return differing(self.with_rows_of(self._compared)) if self._compared else []

    def carrying(self, kinds: frozenset[str]) -> ClosedStep:
        """As of `ClosedStep`; where digests do not carry these kinds, the whole step, of which all rows are asked for."""
        return self._carried if kinds <= self._digests.kinds else self

    def with_rows_of(self, tensors: Collection[int]) -> ClosedStep:
        """As of `ClosedStep`."""
        lacking = frozenset(tensors) - self._had
        if lacking or self._excerpt is None:
            carried = {at for at in lacking if self.tensors[at].kind in self._digests.kinds}
            for some in (self._digests.carried_of(self._ids(carried)), self._asked_for(self._ids(lacking - carried))):
                for rank, more in some.items():
                    had = self._rows_had.get(rank)
                    self._rows_had[rank] = more if had is None else np.concatenate([had, more])
            self._had |= lacking
            self._excerpt = StepExcerpt(self, self._rows_had)
        return self._excerpt

    def _ids(self, tensors: Collection[int]) -> dict[int, npt.NDArray[np.uint32]]:
        """Return rank -> the ids of some tensors there, rising; of those that hold any."""
        is_wanted = np.zeros(len(self.tensors) + 1, np.bool_)
        is_wanted[list(tensors)] = True
        ids: dict[int, npt.NDArray[np.uint32]] = {}
        known: dict[int, npt.NDArray[np.uint32]] = {}
        for part in self.parts if tensors else ():
            table = self.layout.table_of(part.rank)
            if id(table) not in known:
                known[id(table)] = np.flatnonzero(is_wanted[table]).astype(np.uint32)
            if len(known[id(table)]):
                ids[part.rank] = known[id(table)]
        return ids

    def _asked_for(self, ids: Mapping[int, npt.NDArray[np.uint32]]) -> dict[int, npt.NDArray[np.void]]:
        """Return rank -> its rows of some tensors; what is away of them is asked for. ids: rank -> of these."""
        away = [part for part in self.parts if isinstance(part, AwayRankStep)] if ids else []
        here = {part.rank: part.rows for part in self.parts if not isinstance(part, AwayRankStep) and part.rank in ids}
        found = {rank: own[np.isin(own["tensor"], ids[rank])] for rank, own in here.items()}
        return {**found, **(away[0].away.some(away, ids) if away else {})}

    def with_bad_rows(self) -> ClosedStep:
        """As of `ClosedStep`."""
        return self._bad if self._digests.has_bad_rows else self

    @cached_property
    def _bad(self) -> StepExcerpt:
        table, nums = self._digests.take_bad()
        ends = np.cumsum([nums.get(part.rank, 0) for part in self.parts]).tolist()
        slices = zip(self.parts, [0, *ends], ends, strict=False)
        return StepExcerpt(self, {part.rank: table[begin:end] for part, begin, end in slices}, table)

    @cached_property
    def _carried(self) -> StepExcerpt:
        return StepExcerpt(self, self._digests.carried())

    @cached_property
    def lone_weights(self) -> npt.NDArray[np.int64]:
        """As of `ClosedStep`."""
        return self._digests.lone

    @cached_property
    def bad_rows(self) -> npt.NDArray[np.int64]:
        """As of `ClosedStep`; where there are any, all rows are asked for: `with_bad_rows` has them at hand."""
        return np.flatnonzero(is_bad_row(self.rows)) if self._digests.has_bad_rows else np.empty(0, np.int64)

    @cached_property
    def site_pos(self) -> npt.NDArray[np.int64]:
        """As of `ClosedStep`."""
        found = np.array([tensor.site_pos for tensor in self.tensors], np.int64)
        self._digests.sites(found)
        return found

    def tensors_of(self, rank: int) -> npt.NDArray[np.int32]:
        """Return the indices of the tensors of which a rank has a row; -1: unknown ones."""
        return self._digests.tensors_of(rank)


class StepExcerpt(ClosedStep):
    """Some rows of a step, and no others; what it says of tensors is what the whole step says."""

    def __init__(
        self, whole: DigestedStep, rows: Mapping[int, npt.NDArray[np.void]], table: npt.NDArray[np.void] | None = None
    ) -> None:
        """rows: rank -> its rows. table: all of them, ranks rising, BAD_ROW_DTYPE, where these are parts of one."""
        none = np.empty(0, ROW_DTYPE)
        parts = [
            RankStep(
                rank=part.rank, descriptor=part.descriptor, rows=rows.get(part.rank, none), end_step=part.end_step,
                time=part.time, health=part.health, incarnation=part.incarnation, ended_mono_s=part.ended_mono_s,
            )
            for part in whole.parts
        ]  # fmt: skip
        super().__init__(
            run=whole.run, attempt=whole.attempt, step=whole.step, layout=whole.layout, parts=parts, decision=whole.decision
        )
        self._table = table
        # That one has this one: a step is freed with its last reference, for of a large one that is a gigabyte.
        self._whole_ref = weakref.ref(whole)

    @property
    def _whole(self) -> DigestedStep:
        if (found := self._whole_ref()) is None:
            raise ReferenceError(f"step {self.step}: some of its rows were asked what all of them say, which are gone")
        return found

    @cached_property
    def rows(self) -> npt.NDArray[np.void]:
        """[num_rows] ROW_DTYPE, or BAD_ROW_DTYPE: every rank's rows that are here, ranks in rising order."""
        return super().rows if self._table is None else self._table

    @property
    def digest(self) -> Digest:
        """Of the whole step."""
        return self._whole.digest

    @cached_property
    def odd_copies(self) -> npt.NDArray[np.int64]:
        """Numbers of replicated shards whose rows, of those that are here, do not all have one checksum."""
        return digest(self.parts, self.layout).odd_copies

    @property
    def differing(self) -> list[Differing]:
        """Of the whole step."""
        return self._whole.differing

    @property
    def lone_weights(self) -> npt.NDArray[np.int64]:
        """Of the whole step."""
        return self._whole.lone_weights

    @property
    def site_pos(self) -> npt.NDArray[np.int64]:
        """Of the whole step."""
        return self._whole.site_pos

    @cached_property
    def bad_rows(self) -> npt.NDArray[np.int64]:
        """Indices of rows that hold a non-finite value, of those that are here."""
        return np.flatnonzero(is_bad_row(self.rows))

    def carrying(self, kinds: frozenset[str]) -> ClosedStep:
        """Of the whole step."""
        return self._whole.carrying(kinds)

    def with_rows_of(self, tensors: Collection[int]) -> ClosedStep:
        """Of the whole step."""
        return self._whole.with_rows_of(tensors)

    def with_bad_rows(self) -> ClosedStep:
        """Of the whole step."""
        return self._whole.with_bad_rows()

    def has_clean_input(self, rank: int, module: str) -> bool:
        """Of the whole step."""
        return self._whole.has_clean_input(rank, module)

    def tensors_of(self, rank: int) -> npt.NDArray[np.int32]:
        """Of the whole step."""
        return self._whole.tensors_of(rank)
