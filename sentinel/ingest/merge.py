"""One closed step as arrays: the ranks' rows side by side, and merged to the logical tensors of the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sentinel.decision import Decision
from sentinel.ingest.clean_inputs import clean_inputs
from sentinel.ingest.copies import differing
from sentinel.ingest.cut_tensors import cut_tensors
from sentinel.ingest.digest import Digest, digest
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.node_share import by_machine
from sentinel.ingest.row_tables import joined
from sentinel.messages import Health
from sentinel.moments import Moments, lone_rows
from sentinel.place import Place
from sentinel.record import ROW_DTYPE
from sentinel.step_view import Differing, LogicalTensor, RankStep, Scalar


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if len(values) > 1 else float(values[0])


def _rank(part: RankStep) -> int:
    return part.rank


class ClosedStep:
    """One closed step of a run, as `step_view.StepView` describes it. Its rows are here, or all are asked for with one."""

    def __init__(
        self,
        *,
        run: str,
        attempt: int,
        step: int,
        layout: ModelLayout,
        parts: Sequence[RankStep],
        decision: Decision | None = None,
    ) -> None:
        self.run = run
        self.attempt = attempt
        self.step = step
        self.layout = layout
        self.decision = decision
        self.stride = 1
        """Steps from one recorded step to the next, 10 in a log of every tenth; durations in steps are counted in it."""
        self.parts = sorted(parts, key=_rank)
        self._clean_inputs: dict[int, frozenset[str]] = {}
        self.time = 0.0
        self.is_skipped = False
        self.num_expected = 0
        """Number of rows by the ranks' end_steps, whether they came or not."""
        self.step_time_s = 0.0
        self.health: list[tuple[int, Health]] = []
        self.num_rows = 0
        """Rows judged."""
        for part in self.parts:
            self.num_rows += part.num_rows
            if part.time > self.time:
                self.time = part.time
            if part.health:
                self.health += [(part.rank, one) for one in part.health]
            end = part.end_step
            if end is not None:
                self.is_skipped |= end.is_skipped
                self.num_expected += end.num_rows
                if end.step_time_s > self.step_time_s:
                    self.step_time_s = end.step_time_s

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
    def odd_copies(self) -> npt.NDArray[np.int64]:
        """Numbers of replicated shards whose rows do not all have one checksum."""
        return self.digest.odd_copies

    @cached_property
    def digest(self) -> Digest:
        """Sums and flags of the rows, found in one pass over them."""
        found, is_cut = self.layout.formed.form(self, self._sums().of_any()), cut_tensors(self)
        return found if is_cut is None else found.without(self.layout.formed.spread(is_cut))

    def _sums(self) -> Digest:
        """Return what the rows come to; those of several machines machine by machine, where the decision says so."""
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

    def carrying(self, kinds: frozenset[str]) -> ClosedStep:
        """Return a step that has at least the rows of these kinds, and the sums that other values are formed of."""
        return self

    def with_rows_of(self, tensors: Collection[int]) -> ClosedStep:
        """Return a step that has at least the rows of these tensors, by their indices, each one's in their order; and says
        the same of everything else. What is away of them is asked for at once.
        """
        return self

    def with_bad_rows(self) -> ClosedStep:
        """Return a step that has at least the rows that hold a non-finite value, and says the same of everything else."""
        return self

    @cached_property
    def lone_weights(self) -> npt.NDArray[np.int64]:
        """Indices of the weights of which some row has one element that is nearly all (`moments.LONE_SHARE`), rising."""
        found = np.unique(self.row_logical[lone_rows(self.rows)]).astype(np.int64)
        return found[found >= 0]

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
        return self.digest.bad_rows

    @cached_property
    def is_whole(self) -> npt.NDArray[np.bool_]:
        """[num_tensors] whether each shard of the tensor has a holder whose end_step of this step came."""
        reported = {part.rank for part in self.parts if part.end_step is not None}
        return self.layout.held_by(reported)

    @cached_property
    def site_pos(self) -> npt.NDArray[np.int64]:
        """[num_tensors] place of the site in this step's forward: by its rows, else by the layout.

        A rank counts its sites anew when monitoring goes on or off, and the descriptor may still tell the former count;
        places of two counts do not compare.
        """
        found = np.array([tensor.site_pos for tensor in self.tensors], np.int64)
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
        found = self._clean_inputs.get(rank)
        if found is None:
            found = self._clean_inputs[rank] = clean_inputs(self, rank)
        return module in found

    def tensors_of(self, rank: int) -> npt.NDArray[np.int32]:
        """Return the indices of the tensors of which a rank has a row; -1: unknown ones."""
        part = self._part_of.get(rank)
        return np.empty(0, np.int32) if part is None else self.layout.logical_of(rank, part.rows["tensor"])

    @cached_property
    def _part_of(self) -> dict[int, RankStep]:
        return {part.rank: part for part in self.parts}

    @cached_property
    def scalars(self) -> dict[str, Scalar]:
        """Name -> what the ranks logged."""
        found: dict[str, dict[int, float]] = {}
        for part in self.parts:
            if part.end_step is not None:
                for name, value in part.end_step.scalars.items():
                    found.setdefault(name, {})[part.rank] = value
        return {name: Scalar(_mean(list(by.values())), by) for name, by in sorted(found.items())}

    def is_per_rank(self, tensor: LogicalTensor) -> bool:
        """Whether the series is one rank's own part."""
        return bool(tensor.place) or len(tensor.ranks) == 1
