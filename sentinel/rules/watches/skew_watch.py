"""SkewWatch: a rule on one number of each rank, held against the ranks that do the same work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.detect import GroupDetector, Scores
from sentinel.detect.group import StepPoints
from sentinel.kinds import MODULE_KINDS, is_of_kind, labels
from sentinel.place import Place
from sentinel.rules.language.schema import VALUE, Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.anomaly_records import finite, tensor_anomaly
from sentinel.rules.watches.rank_episodes import RankEpisodes

if TYPE_CHECKING:
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import Layout, LogicalTensor, StepView

IN_ALL = "wgrad_unreduced"
"""This kind is judged as one: the gradients of all parameters that a rank holds, before ranks are averaged."""
ALL_GRADIENTS = "all gradients"
MAX_SITES = 64
"""Sites of one kind and stage that are compared, where the detector does not say: a bound on time. What one site does wrong
shows in those behind it."""
BLOCK_ENTRIES = 32_768
"""Entries that are judged at a time, those of whole quantities. Too few: calls cost more than values; too many: what is
computed of them is fetched from memory for each operation."""
APART = ("pp", "tp", "cp")
"""Ranks that differ on these axes hold other parts of the model or of the sequence: their numbers never compare."""


@dataclass(frozen=True)
class _RankValues:
    """The values that the ranks of one step measured: one entry a rank and quantity."""

    quantity: list[tuple[str, str, int]]
    """(kind, name, index of the tensor or -1)."""
    number: np.ndarray
    """[entries] position in `quantity`."""
    rank: np.ndarray
    value: np.ndarray


_NOTHING = _RankValues([], np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class _Looked:
    """The rows of one layout that a rule looks at."""

    def __init__(self, layout: Layout, watched: np.ndarray, input_of: Mapping[int, int]) -> None:
        """watched: [tensors] bool; input_of: index of an output -> index of its input."""
        self.layout = layout
        tensors = layout.tensors
        self.own = own = layout.own_rows(watched, np.array([one.kind == IN_ALL for one in tensors], np.bool_))
        index, self.number = np.unique(own.index, return_inverse=True)
        """[entries] position of its quantity in `_quantity`."""
        self._quantity = [
            (tensors[at].kind, tensors[at].name, at) if at >= 0 else (IN_ALL, ALL_GRADIENTS, -1) for at in index.tolist()
        ]
        place = {at: number for number, at in enumerate(index.tolist())}
        self._input = np.array([place.get(input_of.get(at, -2), -1) for at in index.tolist()], np.int64)
        """[quantities] position of that of the input; -1: there is none."""
        self._input_entry = self._entries_of(self._input[self.number])
        """[entries] the entry of the same rank's input; -1: there is none."""
        self._known: tuple[bytes, _RankValues] = (b"", _NOTHING)

    def _entries_of(self, number: np.ndarray) -> np.ndarray:
        """Return the entry of each one's rank at another quantity, -1 where there is none. number: [entries] of these."""
        num_ranks = int(self.own.rank.max(initial=0)) + 1
        known, wanted = self.number * num_ranks + self.own.rank, number * num_ranks + self.own.rank
        at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        found: np.ndarray = np.where((number >= 0) & (known[at] == wanted), at, -1) if len(known) else at
        return found

    def of_several(self, is_here: np.ndarray) -> np.ndarray:
        """Return which entries are there, as that of another rank is."""
        several = np.bincount(self.number[is_here], minlength=len(self._quantity)) > 1
        found: np.ndarray = is_here & several[self.number]
        return found

    def over_inputs(self, values: np.ndarray, is_reported: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each output over its input, and which are known: where all ranks measured both, the input above 0."""
        num_reported = np.bincount(self.number[is_reported], minlength=len(self._quantity))
        below = np.where(self._input_entry >= 0, values[self._input_entry], np.nan)
        is_over = is_reported & (self._input_entry >= 0) & is_reported[self._input_entry] & (below > 0)
        is_whole = (np.bincount(self.number[is_over], minlength=len(num_reported)) == num_reported) & (num_reported > 0)
        is_whole &= num_reported[self._input] == num_reported
        return values / below, is_reported & is_whole[self.number]

    def reported(self, values: np.ndarray, is_reported: np.ndarray) -> _RankValues:
        """Return the known entries' slots and groups; nearly always they are those of the step before."""
        key = is_reported.tobytes()
        if self._known[0] != key:
            numbers = np.unique(self.number[is_reported])
            quantity = [self._quantity[one] for one in numbers.tolist()]
            number = np.searchsorted(numbers, self.number[is_reported])
            self._known = (key, _RankValues(quantity, number, self.own.rank[is_reported], values[:0]))
        return replace(self._known[1], value=values[is_reported])


class _Places(NamedTuple):
    """Where the entries of a step stand."""

    layout: Layout
    reported: _RankValues
    slots: np.ndarray
    """[entries] of the state."""
    group: np.ndarray
    """[entries] the number of its group."""
    blocks: list[slice]
    """Entries of whole groups each."""
    slots_of_blocks: list[np.ndarray | slice]
    """`slots` of each."""

    def are_of(self, layout: Layout, reported: _RankValues) -> bool:
        """Return whether the entries of a step stand there too."""
        known = self.reported
        return (
            self.layout is layout
            and (known.quantity is reported.quantity or known.quantity == reported.quantity)
            and (known.number is reported.number or np.array_equal(known.number, reported.number))
            and (known.rank is reported.rank or np.array_equal(known.rank, reported.rank))
        )


class SkewWatch(RankEpisodes):
    """Logged values by rank, and statistics of each rank's own rows. One episode a rank and quantity.

    What data-parallel ranks tell of the same site, shard and stage is compared; ranks apart on any other axis are not.
    """

    def __init__(self, rule: Rule, detector: GroupDetector, statistic: str, *, has_scalars: bool) -> None:
        """has_scalars: judge logged values too; one watch of a rule does."""
        super().__init__(rule, detector, statistic, "peers")
        self._kinds = frozenset(kind for kind in rule.match.kind if kind != "scalar")
        self._per_input = self.declared.per_input
        self._has_scalars = has_scalars and "scalar" in rule.match.kind
        self._slot_of: dict[tuple[str, str, int, int], int] = {}
        """(kind, name, rank, size of the world): when the world changes, ranks do other work."""
        self._layouts: list[_Looked] = []
        self._known: _Places | None = None
        """Where the entries of the last step stand."""

    @property
    def row_kinds(self) -> frozenset[str]:
        """Kinds of which it looks at each rank's own rows, in every step."""
        inputs = {"activation", "activation_in"} if self._per_input and self._kinds else set()
        return self._kinds | inputs | (labels(MODULE_KINDS) if "residual" in self._kinds else frozenset())

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the whole step."""
        plan.judge_whole(self.judge)

    def series_keys(self) -> object:
        """Return the ranks and quantities in order of slots."""
        return [list(key) for key in self._slot_of]

    def take_series_keys(self, keys: Any) -> None:
        """Take them back."""
        self._slot_of = {(kind, name, rank, size): slot for slot, (kind, name, rank, size) in enumerate(keys)}

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the records of one step."""
        reported = self._reported(view) if len(view.parts) > 1 else None
        if reported is None or not len(reported.value):
            return self.quiet(view) if len(self.episodes) else []
        places = self._places_of(view, reported)
        slots, group = places.slots, places.group
        is_own = np.array([kind != "scalar" for kind, _, _ in reported.quantity])[reported.number]
        scores = Scores.joined(
            [
                self._learned(reported.value[one], is_own[one], group[one] - group[one].min(), own)
                for one, own in zip(places.blocks, places.slots_of_blocks, strict=True)
            ]
        )
        self.num_points += len(reported.value)
        at = self._anomalous(scores)
        if self.rule.match.rank:
            at = at[np.isin(reported.rank[at], self.rule.match.rank)]
        found = self._emit(view, reported, group, scores, slots, at) if at.size else []
        return found + (self.quiet(view) if len(self.episodes) else [])

    def _learned(self, value: np.ndarray, is_own: np.ndarray, group: np.ndarray, slots: np.ndarray | slice) -> Scores:
        """Return the scores of the entries of some groups, and learn them."""
        state, points = self._gather(slots), StepPoints(value=value, is_own=is_own)
        scores: Scores = self.detector.score(points, group, state)
        self.detector.learn(points, group, state, scores.score >= 1.0)
        self._scatter(state, slots)
        return scores

    def _places_of(self, view: StepView, reported: _RankValues) -> _Places:
        """Return where each entry stands; the same from step to step as a rule."""
        known = self._known
        if known is not None and known.are_of(view.layout, reported):
            return known
        keys = [
            (*reported.quantity[number][:2], rank, view.places[rank].world_size)
            for number, rank in zip(reported.number.tolist(), reported.rank.tolist(), strict=True)
        ]
        slots = np.array([self._slot_of.setdefault(key, len(self._slot_of)) for key in keys], dtype=np.int64)
        self._grow(len(self._slot_of))
        blocks = [slice(0, len(slots))] if self.declared.takes_all else _blocks(reported.number)
        self._known = _Places(
            view.layout, reported, slots, self._groups(view, reported), blocks, [_as_slice(slots[one]) for one in blocks]
        )
        return self._known

    # -- what was reported -----------------------------------------------------------------------------------------------

    def _reported(self, view: StepView) -> _RankValues:
        scalars = self._of_scalars(view) if self._has_scalars else _NOTHING
        rows = self._of_rows(view) if self._kinds and view.num_rows else _NOTHING
        if not scalars.quantity or not rows.quantity:
            return scalars if scalars.quantity else rows
        return _RankValues(
            [*scalars.quantity, *rows.quantity],
            np.concatenate([scalars.number, rows.number + len(scalars.quantity)]),
            np.concatenate([scalars.rank, rows.rank]),
            np.concatenate([scalars.value, rows.value]),
        )

    def _of_scalars(self, view: StepView) -> _RankValues:
        quantity: list[tuple[str, str, int]] = []
        number: list[int] = []
        rank: list[int] = []
        value: list[float] = []
        for name, scalar in view.scalars.items():
            if len(scalar.by_rank) > 1 and self.rule.match.takes_name(name):
                number += [len(quantity)] * len(scalar.by_rank)
                quantity.append(("scalar", name, -1))
                by_rank = sorted(scalar.by_rank.items())
                rank += [one for one, _ in by_rank]
                value += [one for _, one in by_rank]
        return _RankValues(quantity, np.array(number, np.int64), np.array(rank, np.int64), np.array(value, np.float64))

    def _of_rows(self, view: StepView) -> _RankValues:
        """Return the statistic of each rank's own rows, NaN where they hold what is not finite; of two ranks and more."""
        looked = self._looked_at(view.layout)
        if not len(looked.number):
            return _NOTHING
        values, num_rows = looked.own.values(view, self.statistic)
        is_reported = looked.of_several(num_rows > 0)
        if self._per_input:
            values, is_reported = looked.over_inputs(values, is_reported)
        return looked.reported(values, is_reported)

    def _looked_at(self, layout: Layout) -> _Looked:
        for known in self._layouts:
            if known.layout is layout:
                return known
        mask = np.array([self._takes(tensor) for tensor in layout.tensors], np.bool_)
        input_of = _inputs(layout) if self._per_input else {}
        if self._per_input:
            mask[[one.index for one in layout.tensors if one.index not in input_of]] = False
        self._thin_out(layout, mask)
        mask[[at for index, at in input_of.items() if mask[index]]] = True
        looked = _Looked(layout, mask, input_of)
        self._layouts = [*self._layouts[-1:], looked]
        return looked

    def _thin_out(self, layout: Layout, mask: np.ndarray) -> None:
        """Leave so many sites of each stage, evenly over its depth, first and last among them: the cost is bounded."""
        most = self.declared.max_sites
        sites: dict[tuple[int, int, str], list[LogicalTensor]] = {}
        for tensor in layout.tensors:
            if mask[tensor.index] and tensor.kind != IN_ALL:
                sites.setdefault((tensor.pp_stage, tensor.vpp_stage, tensor.kind), []).append(tensor)
        for of_stage in sites.values():
            if len(of_stage) > most:
                of_stage.sort(key=lambda one: (one.site_pos, one.name))
                mask[[one.index for one in of_stage]] = False
                mask[[of_stage[at].index for at in np.linspace(0, len(of_stage) - 1, most).astype(int)]] = True

    def _takes(self, tensor: LogicalTensor) -> bool:
        if (len(tensor.ranks) < 2 and tensor.kind != IN_ALL) or tensor.is_partial:
            return False
        return is_of_kind(tensor.kind, tensor.border, self._kinds) and self.rule.match.takes_name(tensor.name)

    def _groups(self, view: StepView, reported: _RankValues) -> np.ndarray:
        """Return the number of each entry's group: same quantity, same place but for the data-parallel axis."""
        where: dict[tuple[int, ...], int] = {}
        place_of = {
            rank: where.setdefault(tuple(_coordinate(view.places[rank], axis) for axis in APART), len(where))
            for rank in np.unique(reported.rank).tolist()
        }
        places = np.array([place_of[rank] for rank in reported.rank.tolist()], dtype=np.int64)
        grouped: np.ndarray = reported.number * len(where) + places
        return grouped

    # -- anomalies -------------------------------------------------------------------------------------------------------

    def _emit(
        self, view: StepView, reported: _RankValues, group: np.ndarray, scores: Scores, slots: np.ndarray, at: np.ndarray
    ) -> list[Anomaly]:
        if "first" in scores.evidence:
            at = self._once_each(reported, scores, at)
        at = at[np.argsort(slots[at], kind="stable")]
        return self._onsets(
            view, slots, at, scores, lambda one, severity: self._anomaly(view, reported, group, scores, one, severity)
        )

    def _once_each(self, reported: _RankValues, scores: Scores, at: np.ndarray) -> np.ndarray:
        """Return of ranks that are duplicates the first, at the first quantity that shows it: one record says it."""
        at = at[scores.evidence["first"][at] == at]
        at = at[np.lexsort((reported.number[at], reported.rank[at]))]
        _, begins = np.unique(reported.rank[at], return_index=True)
        kept: np.ndarray = at[begins]
        return kept

    def _anomaly(
        self, view: StepView, reported: _RankValues, group: np.ndarray, scores: Scores, at: int, severity: Severity
    ) -> Anomaly:
        kind, name, index = reported.quantity[int(reported.number[at])]
        rank, value, score = int(reported.rank[at]), float(reported.value[at]), float(scores.score[at])
        middle, is_sure = float(scores.baseline[at]), bool(scores.evidence["is_sure"][at])
        peers = sorted(int(one) for one in reported.rank[(group == group[at]) & np.isfinite(reported.value)] if one != rank)
        statistic = VALUE if kind == "scalar" else wording.GAIN if self._per_input else self.statistic
        moved: tuple[int, ...] = (rank,) if is_sure else ()
        text = wording.skewed(kind, name, statistic, rank, value, middle, peers, is_sure)
        mates = tuple(sorted([rank, *peers]))
        if "first" in scores.evidence:
            same = (scores.evidence["first"] == at) & (group == group[at])
            mates = moved = tuple(sorted(reported.rank[same].tolist()))
            text = wording.duplicates(kind, name, statistic, mates, value)
        if index >= 0:
            tensor = view.tensors[index]
            anomaly = tensor_anomaly(
                view, self.rule, tensor, statistic, severity, rank, None, None, value, middle, score, text,
                f"{tensor.key}/peers",
            )  # fmt: skip
            return msgspec.structs.replace(anomaly, group_mates=mates, moved_ranks=moved)
        place = view.places[rank]
        return Anomaly(
            id=anomaly_id(view.run, view.attempt, view.step, None, rank, f"{name}/{kind}/{statistic}/peers", self.rule.name),
            run=view.run,
            attempt=view.attempt,
            rank=rank,
            ranks=(rank,),
            step=view.step,
            micro_step=None,
            pp_stage=place.pp_rank,
            vpp_stage=0,
            call_id=None,
            tag_name=name,
            kind=kind,
            statistic=statistic,
            rule=self.rule.name,
            detector=self.rule.detector,
            severity=severity,
            value=finite(value),
            baseline=finite(middle),
            score=score if math.isfinite(score) else None,
            message=text,
            group_mates=mates,
            moved_ranks=moved,
            time=view.time,
            place=place.coordinates(),
            dp_size=place.dp_size,
            tp_size=place.tp_size,
            pp_size=place.pp_size,
            ep_size=place.ep_size,
        )


def _inputs(layout: Layout) -> dict[int, int]:
    """Return output -> input of the modules of which both are measured, an input under whatever name it is."""
    of_module: dict[tuple[str, tuple[int, ...]], int] = {}
    for tensor in layout.tensors:
        if tensor.kind == "activation_in":
            of_module[tensor.name, tensor.ranks] = tensor.index
        if tensor.kind in ("activation_in", "activation"):
            for name in tensor.consumers:
                of_module.setdefault((name, tensor.ranks), tensor.index)
    outputs = (
        (one, of_module.get((name, one.ranks)))
        for one in layout.tensors
        for name in ((one.name,) if one.kind == "activation" else one.also if one.kind == "activation_in" else ())
    )
    return {one.index: at for one, at in outputs if at is not None and at != one.index}


def _coordinate(place: Place, axis: str) -> int:
    return place.coordinate(axis) if place.size(axis) > 1 else 0


def _blocks(number: np.ndarray) -> list[slice]:
    """Return the entries in blocks, in their order. number: [entries] of their quantities, rising."""
    ends, begin, found = [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)], 0, list[slice]()
    for end in ends:
        if end - begin >= BLOCK_ENTRIES or end == len(number):
            found.append(slice(begin, end))
            begin = end
    return found


def _as_slice(slots: np.ndarray) -> np.ndarray | slice:
    """Return slots as a slice where they follow each other, as they do but for ranks that joined later."""
    first = int(slots[0])
    return slice(first, first + len(slots)) if np.array_equal(slots, np.arange(first, first + len(slots))) else slots
