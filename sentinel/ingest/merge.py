"""One closed step as arrays: the ranks' rows side by side, and merged to the logical tensors of the model."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sentinel.decision import Decision
from sentinel.ingest.away_rows import AwayRankStep
from sentinel.ingest.copies import differing
from sentinel.ingest.digest import Digest, digest
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.node_digest import DigestedRank, NodeDigest, carried_rows, input_ids
from sentinel.ingest.node_share import NodeShare, by_machine
from sentinel.ingest.row_tables import is_bad_row, joined
from sentinel.messages import Health
from sentinel.moments import LONE_SHARE, Moments, tails
from sentinel.place import Place
from sentinel.record import ROW_DTYPE, Kind
from sentinel.step_view import Differing, LogicalTensor, RankStep, Replicas, Scalar


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if len(values) > 1 else float(values[0])


def _rank(part: RankStep) -> int:
    return part.rank


class ClosedStep:
    """One closed step of a run, as `step_view.StepView` describes it."""

    def __init__(
        self,
        *,
        run: str,
        attempt: int,
        step: int,
        layout: ModelLayout,
        parts: Sequence[RankStep],
        decision: Decision | None = None,
        digests: Sequence[NodeDigest] = (),
        of: ClosedStep | None = None,
    ) -> None:
        """digests: those of all machines, in the order of `by_machine`; empty: the rows are looked at.

        of: the step of which this one has some of the rows: what it says of tensors is what that one says.
        """
        self.run = run
        self.attempt = attempt
        self.step = step
        self.layout = layout
        self.decision = decision
        self.stride = 1
        """Steps from one recorded step to the next, 10 in a log of every tenth; durations in steps are counted in it."""
        self.parts = sorted(parts, key=_rank)
        # That one has this one: a step is freed with its last reference, for of a large one that is a gigabyte.
        self._digests, self._whole = tuple(digests), None if of is None else weakref.ref(of)
        self._clean_inputs: dict[int, frozenset[str]] = {}
        self._some: tuple[frozenset[int], dict[int, npt.NDArray[np.void]], ClosedStep] | None = None
        """Tensors, the rows of them by rank, and the step that has those."""
        self.time = 0.0
        self.is_skipped = False
        self.num_expected = 0
        """Number of rows by the ranks' end_steps, whether they came or not."""
        self.step_time_s = 0.0
        self.health: list[tuple[int, Health]] = []
        self.num_rows = 0
        """Rows judged."""
        for part in self.parts:
            self.time = max(self.time, part.time)
            self.num_rows += part.num_rows
            self.health += [(part.rank, one) for one in part.health]
            end = part.end_step
            if end is not None:
                self.is_skipped |= end.is_skipped
                self.num_expected += end.num_rows
                self.step_time_s = max(self.step_time_s, end.step_time_s)

    @property
    def _of(self) -> ClosedStep | None:
        """The step of which this one has some of the rows; None: it has all of them."""
        if self._whole is None:
            return None
        if (found := self._whole()) is None:
            raise ReferenceError(f"step {self.step}: some of its rows were asked what all of them say, which are gone")
        return found

    @cached_property
    def rows(self) -> npt.NDArray[np.void]:
        """[num_rows] ROW_DTYPE, read only: every rank's rows, ranks in rising order."""
        return joined([part.rows for part in self.parts])

    @cached_property
    def row_words(self) -> npt.NDArray[np.int64] | None:
        """[parts, 3] where the rows of each part lie in memory, how many they are, and bytes from one to the next; None: not
        all are laid out as ROW_DTYPE."""
        words, former = np.empty((len(self.parts), 3), np.int64), None
        for at, part in enumerate(self.parts):
            rows = part.rows
            if rows is former:
                # Of ranks that carry the same there is one table.
                words[at] = words[at - 1]
                continue
            if rows.dtype != ROW_DTYPE:
                return None
            words[at], former = (rows.ctypes.data, len(rows), rows.strides[0]), rows
        return words

    @cached_property
    def row_rank(self) -> npt.NDArray[np.int32]:
        """[num_rows] the rank of each row."""
        return np.repeat(np.array([part.rank for part in self.parts], np.int32), [len(part.rows) for part in self.parts])

    @cached_property
    def row_logical(self) -> npt.NDArray[np.int32]:
        """[num_rows] index into `tensors`; -1: the descriptor does not know the row's tensor."""
        if not self.parts:
            return np.empty(0, np.int32)
        return np.concatenate([self.layout.logical_of(part.rank, part.rows["tensor"]) for part in self.parts])

    @property
    def tensors(self) -> list[LogicalTensor]:
        """Logical tensors of the layout; `stats` and `present` are indexed alike."""
        return self.layout.tensors

    @property
    def places(self) -> dict[int, Place]:
        """Rank -> place."""
        return self.layout.places

    @cached_property
    def row_copy(self) -> npt.NDArray[np.int32]:
        """[num_rows] number of the shard that a row is a copy of; `layout.num_copies` where no descriptor has the tensor."""
        if not self.parts:
            return np.empty(0, np.int32)
        copies = np.concatenate([self.layout.copies_of(part.rank, part.rows["tensor"]) for part in self.parts])
        return copies if not len(copies) or copies.min() >= 0 else np.where(copies >= 0, copies, self.layout.num_copies)

    @cached_property
    def ended(self) -> frozenset[int]:
        """Ranks whose end_step came and is of a whole step (not `EndStep.is_partial`)."""
        ends = [(part.rank, part.end_step) for part in self.parts]
        return frozenset(rank for rank, end in ends if end is not None and not end.is_partial)

    @cached_property
    def differing(self) -> list[Differing]:
        """Copies of a weight, its state or its reduced gradient that should be bit-identical, and are not."""
        return differing(self)

    @cached_property
    def digest(self) -> Digest:
        """Sums and flags of the rows, found in one pass over them."""
        if self._of is not None:
            return self._of.digest
        found = self.layout.formed.form(self, self._sums().of_any())
        if not self.cut_ranks and not self._left_out:
            return found
        return found.without(self.layout.formed.spread(self._is_cut))

    def _sums(self) -> Digest:
        """Return what the rows come to; those of several machines machine by machine, where the decision says so."""
        if self._shipped is not None:
            return self._shipped
        found, layout = digest(self.parts, self.layout), self.layout
        if self.decision is None or self.decision.is_by_machine is not True:
            return found
        parts = by_machine(self.parts)
        shares = [layout.share_of(tuple(part.rank for part in own)) for own in parts]
        sums = [share.sums(own) for share, own in zip(shares, parts, strict=True)]
        merge = layout.node_merges.of(shares, [one.has_rows for one in sums])
        stats = merge.merge([one.stats for one in sums])
        stats[merge.unsplit] = found.stats[merge.unsplit]
        return found._replace(stats=stats)

    @cached_property
    def _shipped(self) -> Digest | None:
        """What the digests come to; None where there are none, or the rows are to be looked at."""
        layout, parts = self.layout, by_machine(self.parts) if self._digests else []
        is_by_machine = self.decision is not None and self.decision.is_by_machine is True
        if not parts or (len(parts) > 1 and not is_by_machine):
            return None
        shares = [layout.share_of(tuple(part.rank for part in own)) for own in parts]
        known = [one.sums(share) for one, share in zip(self._digests, shares, strict=True)]
        made = [one for one in known if one is not None]
        if len(made) < len(known):
            return None
        sums = [one for one, _ in made]
        merge = layout.node_merges.of(shares, [one.has_rows for one in sums])
        if len(merge.unsplit) or not merge.are_equal([marks for _, marks in made]):
            return None
        present, has_rows = np.zeros(len(self.tensors), np.bool_), np.zeros(layout.num_copies, np.bool_)
        is_bad = np.zeros(len(self.tensors), np.bool_)
        for share, one in zip(shares, sums, strict=True):
            present[share.tensor_of[one.present]] = True
            is_bad[share.tensor_of[one.is_bad]] = True
            has_rows[share.copy_of[one.has_rows]] = True
        stats, none = merge.merge([one.stats for one in sums]), np.empty(0, np.int64)
        return Digest(stats, present, is_bad, none, none, has_rows)

    def _shares(self) -> Iterator[tuple[NodeShare, tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]]]:
        """Yield what each machine holds, and `NodeDigest.sites`."""
        for found in self._digests:
            yield self.layout.share_of(tuple(one.rank for one in found.ranks)), found.sites

    @property
    def is_of_digests(self) -> bool:
        """Whether it was made of digests, so that its rows need not be here."""
        return self._shipped is not None

    def carrying(self, kinds: frozenset[str]) -> ClosedStep:
        """Return a step that has at least the rows of these kinds, and the sums that other values are formed of.

        That is this one, unless its rows are away and digests carry those.
        """
        if self._of is not None:
            return self._of.carrying(kinds)
        if self._shipped is None or not all(kinds.issubset(one.kinds) for one in self._digests):
            return self
        return self._carried

    def with_rows_of(self, tensors: Collection[int]) -> ClosedStep:
        """Return a step that has at least the rows of these tensors, by their indices, each one's in their order; and says
        the same of everything else. What is away of them is asked for at once.
        """
        if self._of is not None:
            return self._of.with_rows_of(tensors)
        if self._shipped is None:
            return self
        had, rows, step = self._some or (frozenset[int](), dict[int, npt.NDArray[np.void]](), self)
        lacking = frozenset(tensors) - had
        if not lacking:
            return step
        kinds = frozenset.intersection(*(frozenset(one.kinds) for one in self._digests))
        carried = {at for at in lacking if self.tensors[at].kind in kinds}
        for some in (carried, lacking - carried):
            for rank, more in self._rows_of_some(some, is_carried=some is carried).items() if some else ():
                rows[rank] = np.concatenate([rows[rank], more]) if rank in rows else more
        self._some = (had | lacking, rows, step := self._with_rows(rows))
        return step

    def _rows_of_some(self, tensors: Collection[int], *, is_carried: bool) -> dict[int, npt.NDArray[np.void]]:
        """Return rank -> its rows of some tensors. is_carried: digests have them; others are asked for."""
        is_wanted = np.zeros(len(self.tensors) + 1, np.bool_)
        is_wanted[list(tensors)] = True
        ids: dict[int, npt.NDArray[np.uint32]] = {}
        known: dict[int, npt.NDArray[np.uint32]] = {}
        for part in self.parts:
            table = self.layout.table_of(part.rank)
            if id(table) not in known:
                known[id(table)] = np.flatnonzero(is_wanted[table]).astype(np.uint32)
            if len(known[id(table)]):
                ids[part.rank] = known[id(table)]
        if is_carried:
            rows = {rank: carried_rows(self._digested[rank]) for rank in ids}
            return {rank: own[np.isin(own["tensor"], ids[rank])] for rank, own in rows.items()}
        away = [part for part in self.parts if isinstance(part, AwayRankStep)]
        here = {part.rank: part.rows for part in self.parts if not isinstance(part, AwayRankStep) and part.rank in ids}
        found = {rank: own[np.isin(own["tensor"], ids[rank])] for rank, own in here.items()}
        return {**found, **(away[0].away.some(away, ids) if away else {})}

    def with_bad_rows(self) -> ClosedStep:
        """Return a step that has at least the rows that hold a non-finite value, and says the same of everything else."""
        if self._of is not None:
            return self._of.with_bad_rows()
        return self._bad if self._shipped is not None and self._has_bad_rows else self

    @property
    def _has_bad_rows(self) -> bool:
        """Whether a digest has rows that hold a non-finite value."""
        return any(one.has_bad_rows for one in self._digests)

    @cached_property
    def _bad(self) -> ClosedStep:
        ranks = (one for found in self._digests if found.has_bad_rows for one in found.ranks)
        carried = {one.rank: carried_rows(one) for one in ranks}
        return self._with_rows({rank: rows[is_bad_row(rows)] for rank, rows in carried.items()})

    def _with_rows(self, rows: Mapping[int, npt.NDArray[np.void]]) -> ClosedStep:
        """Return this step with these rows of its ranks, and no others."""
        none = np.empty(0, ROW_DTYPE)
        parts = [
            RankStep(
                rank=part.rank, descriptor=part.descriptor, rows=rows.get(part.rank, none), end_step=part.end_step,
                time=part.time, health=part.health, incarnation=part.incarnation, ended_mono_s=part.ended_mono_s,
            )
            for part in self.parts
        ]  # fmt: skip
        return ClosedStep(
            run=self.run, attempt=self.attempt, step=self.step, layout=self.layout, parts=parts, decision=self.decision,
            of=self,
        )  # fmt: skip

    @cached_property
    def _carried(self) -> ClosedStep:
        rows, former = dict[int, npt.NDArray[np.void]](), (b"", np.empty(0, ROW_DTYPE))
        for one in (one for found in self._digests for one in found.ranks):
            if one.carried is not former[0]:
                former = one.carried, carried_rows(one)
            rows[one.rank] = former[1]
        return self._with_rows(rows)

    @cached_property
    def lone_weights(self) -> npt.NDArray[np.int64]:
        """Indices of rows of weights of which one element is nearly all (`moments.LONE_SHARE`)."""
        if self._shipped is not None and not any(one.has_lone_weight for one in self._digests):
            return np.empty(0, np.int64)
        of_weights = np.flatnonzero((self.rows["kind"] == Kind.PARAM) & (self.row_logical >= 0))
        return of_weights[tails(self.rows[of_weights]) >= LONE_SHARE]

    @cached_property
    def cut_ranks(self) -> frozenset[int]:
        """Ranks of which rows of this step were lost."""
        ranks = self.decision.ranks if self.decision is not None else ()
        return frozenset(one.rank for one in ranks if one.num_lost)

    @cached_property
    def _left_out(self) -> dict[int, tuple[str, ...]]:
        """Rank -> kinds that it did not measure in this step for their cost; empty where all ranks left out the same."""
        found = {part.rank: part.end_step.left_out if part.end_step is not None else () for part in self.parts}
        return found if len({frozenset(kinds) for kinds in found.values()}) > 1 else {}

    @property
    def _is_cut(self) -> npt.NDArray[np.bool_]:
        """[num_tensors] whether a rank that lost rows, or left some out, holds the tensor and has no row of it.

        The others' are a part.
        """
        is_cut = np.zeros(len(self.tensors), np.bool_)
        for part in self.parts:
            kinds = self._left_out.get(part.rank, ())
            if part.rank not in self.cut_ranks and not kinds:
                continue
            held, came = self.layout.table_of(part.rank), self.layout.logical_of(part.rank, part.rows["tensor"])
            lacking = np.zeros(len(self.tensors), np.bool_)
            lacking[held[held >= 0]] = True
            lacking[came[came >= 0]] = False
            if part.rank not in self.cut_ranks:
                lacking &= np.isin(self.layout.kinds, kinds)
            is_cut |= lacking
        return is_cut

    @property
    def stats(self) -> npt.NDArray[np.void]:
        """[num_tensors] STATS_DTYPE: shards and micro-steps merged; of copies, the rows of the lowest rank that is there."""
        return self.digest.stats

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """[num_tensors] whether the step has a row of the tensor with any element: of none there is no statistic."""
        return self.digest.present

    @property
    def is_bad(self) -> npt.NDArray[np.bool_]:
        """[num_tensors] whether any row of the tensor holds a non-finite value."""
        return self.digest.is_bad

    @cached_property
    def bad_rows(self) -> npt.NDArray[np.int64]:
        """Indices of rows that hold a non-finite value."""
        if self._of is None and self._shipped is None:
            return self.digest.bad_rows
        if self._of is None and not self._has_bad_rows:
            return np.empty(0, np.int64)
        return np.flatnonzero(is_bad_row(self.rows))

    @cached_property
    def is_whole(self) -> npt.NDArray[np.bool_]:
        """[num_tensors] whether each shard of the tensor has a holder whose end_step of this step came."""
        reported = {part.rank for part in self.parts if part.end_step is not None}
        return self.layout.held_by(reported)

    @cached_property
    def flags(self) -> npt.NDArray[np.uint16]:
        """[num_tensors] the Flags of its rows, or-ed."""
        found = np.zeros(len(self.tensors), np.uint16)
        known = self.row_logical >= 0
        np.bitwise_or.at(found, self.row_logical[known], self.rows["flags"][known])
        return found

    @cached_property
    def site_pos(self) -> npt.NDArray[np.int64]:
        """[num_tensors] place of the site in this step's forward: by its rows, else by the layout.

        A rank counts its sites anew when monitoring goes on or off, and the descriptor may still tell the former count;
        places of two counts do not compare.
        """
        if self._of is not None:
            return self._of.site_pos
        found = np.array([tensor.site_pos for tensor in self.tensors], np.int64)
        if self._shipped is not None:
            lowest = np.full(len(found), np.iinfo(np.int32).max, np.int32)
            for share, (first_ranks, site_pos) in self._shares():
                at = share.tensor_of
                is_first = (first_ranks >= 0) & (first_ranks < lowest[at])
                lowest[at[is_first]], found[at[is_first]] = first_ranks[is_first], site_pos[is_first]
            return found
        known = self.row_logical >= 0
        # Ranks rise along the rows: written backwards, the lowest is the last to be written.
        found[self.row_logical[known][::-1]] = self.rows["site_pos"][known][::-1]
        return found

    @cached_property
    def moments(self) -> Moments:
        """[num_tensors] the derived statistics."""
        return Moments(self.stats)

    def has_clean_input(self, rank: int, module: str) -> bool:
        """Return whether a rank measured the gradient of a module's input by itself in this step, and it is finite.

        A module whose input is another's output has no such row: that gradient was measured once, under the other's name.
        """
        if self._of is not None:
            return self._of.has_clean_input(rank, module)
        found = self._clean_inputs.get(rank)
        if found is None:
            found = self._clean_inputs[rank] = self._names(self._inputs_of(rank)) - self._names(self._bad_inputs_of(rank))
        return module in found

    def _inputs_of(self, rank: int) -> npt.NDArray[np.int32]:
        """Return the indices of the tensors, gradients of a module's input, of which a rank has a row; -1: unknown ones."""
        if self._shipped is None:
            rows = self._rows_of(rank)
            return self.layout.logical_of(rank, rows["tensor"][rows["kind"] == Kind.DGRAD_IN])
        one = self._digested.get(rank)
        ids = np.empty(0, np.uint32) if one is None else input_ids(one, len(self.layout.table_of(rank)))
        return self.layout.logical_of(rank, ids)

    def _bad_inputs_of(self, rank: int) -> npt.NDArray[np.int32]:
        rows = self.with_bad_rows()._rows_of(rank)
        rows = rows[(rows["kind"] == Kind.DGRAD_IN) & is_bad_row(rows)]
        return self.layout.logical_of(rank, rows["tensor"])

    def _rows_of(self, rank: int) -> npt.NDArray[np.void]:
        part = self._part_of.get(rank)
        return np.empty(0, ROW_DTYPE) if part is None else part.rows

    @cached_property
    def _part_of(self) -> dict[int, RankStep]:
        return {part.rank: part for part in self.parts}

    @cached_property
    def _digested(self) -> dict[int, DigestedRank]:
        return {one.rank: one for found in self._digests for one in found.ranks}

    def _names(self, logical: npt.NDArray[np.int32]) -> frozenset[str]:
        return frozenset(self.tensors[at].name for at in logical.tolist() if at >= 0)

    @cached_property
    def scalars(self) -> dict[str, Scalar]:
        """Name -> what the ranks logged."""
        found: dict[str, dict[int, float]] = {}
        for part in self.parts:
            if part.end_step is not None:
                for name, value in part.end_step.scalars.items():
                    found.setdefault(name, {})[part.rank] = value
        return {name: Scalar(_mean(list(by.values())), by) for name, by in sorted(found.items())}

    def checksums(self) -> list[tuple[Replicas, dict[int, int]]]:
        """Return, for each set of copies of which several came with a checksum, rank -> checksum; equal when all is well."""
        checksums = self.rows["checksum"]
        at = {
            (int(rank), int(tensor)): int(row)
            for row, (rank, tensor) in enumerate(zip(self.row_rank, self.rows["tensor"], strict=True))
            if checksums[row]
        }
        found = []
        for copies in self.layout.shards.replicas:
            by_rank = {rank: int(checksums[at[rank, tensor]]) for rank, tensor in copies.holders if (rank, tensor) in at}
            if len(by_rank) > 1:
                found.append((copies, by_rank))
        return found

    def is_per_rank(self, tensor: LogicalTensor) -> bool:
        """Whether the series is one rank's own part."""
        return bool(tensor.place) or len(tensor.ranks) == 1
