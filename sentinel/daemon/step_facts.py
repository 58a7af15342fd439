"""What verdicts ask of a closed step beside its anomalies, read from the step alone: a replay reads the same."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from sentinel.anomaly import Anomaly
from sentinel.ingest.merge import Layout, StepView
from sentinel.ingest.replicas import NAN_CHECKSUM, Differing
from sentinel.order.causal import is_nonfinite
from sentinel.order.phase import Phase, scalar_phase
from sentinel.order.step_facts import Divergence, FirstBad, StepFacts, Upstream
from sentinel.order.suspicion import is_narrow
from sentinel.record import Flag, Kind

MAX_DIVERGENCES = 32
"""Differing tensors that are looked at one by one (chosen); all are counted."""
MAX_BIRTHS = 8
"""Non-finite values of a step whose past is looked at (chosen)."""
UNLIKE = 8.0
"""Times that a tensor of one replica is larger or smaller than in the others, when it is not like them (chosen)."""
ODD_SPREADS, ODD_SHARE = 8.0, 0.2
"""Spreads, and share of the median, by which one replica's loss is above the others' when it stands apart (chosen)."""
ABSURD = 16.0
"""Times that a single element is beyond all others of its tensor (chosen)."""

_RATE = re.compile(r"(^|[._/-])(lr|learning_rate)([._/-]|_group\d+|_\d+|$)", re.IGNORECASE)
_SCALE = re.compile(r"(loss|grad|amp)[._ -]?scale", re.IGNORECASE)
_FORWARD = (int(Kind.ACTIVATION), int(Kind.ACTIVATION_IN))


class FactReader:
    """Reads the facts of steps; remembers tables of the layout, which change nothing."""

    def __init__(self) -> None:
        self._layout: weakref.ref[Layout] | None = None
        self._replicated = np.zeros(0, np.int64)
        self._weights = np.zeros(0, np.int64)
        self._lanes: dict[int, int] = {}
        self._num_lanes = 1
        self._has_narrow = False
        self._lane_of = np.zeros(1, np.int64)
        """[highest rank + 1] the data-parallel coordinate."""
        self._depth = np.zeros(0, np.int64)
        """[tensors]"""
        self._is_forward = np.zeros(0, np.bool_)
        """[tensors] whether it is of the forward, and merged over replicas."""

    def read(self, view: StepView, anomalies: Sequence[Anomaly], ongoing: Collection[str]) -> StepFacts:
        """Return the facts of a closed step. anomalies: of the step, in total order; ongoing: see `StepFacts`."""
        self._learn(view.layout)
        scalars = view.scalars
        scales = [one.mean for name, one in scalars.items() if _SCALE.search(name)]
        num_compared = int(np.count_nonzero(view.present[self._replicated])) if len(self._replicated) else 0
        differing = view.differing if num_compared or view.layout.added_copies else []
        ends = [part.end_step for part in view.parts if part.end_step is not None]
        is_whole = len(ends) >= len(view.places) and not any(end.is_partial for end in ends)
        first_bad = self._bad(view)
        return StepFacts(
            ongoing=frozenset(ongoing),
            lanes=self._lanes,
            num_lanes=self._num_lanes,
            is_whole=is_whole,
            num_compared=num_compared,
            num_weights=len(self._weights),
            num_differing=len({one.index for one in differing}),
            divergences=tuple(_divergence(view, one) for one in _first(view, differing)),
            upstream=self._upstream(anomalies, first_bad),
            first_bad=first_bad,
            results={
                name: one.mean
                for name, one in scalars.items()
                if scalar_phase(name) in (Phase.LOSS, Phase.NORM) and math.isfinite(one.mean)
            },
            odd_lanes=self._odd_lanes(view),
            rates={name: one.mean for name, one in scalars.items() if _RATE.search(name) and math.isfinite(one.mean)},
            loss_scale=scales[0] if scales and math.isfinite(scales[0]) else None,
            has_narrow=self._has_narrow,
            is_skipped=view.is_skipped,
            samples={part.rank: part.end_step.samples for part in view.parts if part.end_step and part.end_step.samples},
            num_samples_cut=sum(end.num_samples_cut for end in ends),
        )

    def _odd_lanes(self, view: StepView) -> tuple[int, ...]:
        found: set[int] = set()
        for name, one in view.scalars.items():
            if len(one.by_rank) > 2 and scalar_phase(name) is Phase.LOSS:
                ranks, values = list(one.by_rank), np.array(list(one.by_rank.values()))
                middle = float(np.median(values))
                spread = 1.4826 * float(np.median(np.abs(values - middle)))
                if math.isfinite(middle):
                    odd = values - middle > max(ODD_SPREADS * spread, ODD_SHARE * abs(middle))
                    found |= {self._lanes.get(ranks[at], 0) for at in np.flatnonzero(odd).tolist()}
        return tuple(sorted(found))

    def _learn(self, layout: Layout) -> None:
        if self._layout is not None and self._layout() is layout:
            return
        self._layout = weakref.ref(layout)
        is_weight = [tensor.kind == "param" for tensor in layout.tensors]
        self._weights = np.flatnonzero(np.array(is_weight, np.bool_))
        replicated = {one.index for one in layout.replicas} | {one.index for one in layout.added_copies}
        self._replicated = np.array(sorted(replicated & set(self._weights.tolist())), np.int64)
        self._lane_of = np.zeros(max(layout.places, default=0) + 1, np.int64)
        for rank, place in layout.places.items():
            self._lane_of[rank] = place.coordinate("dp")
        self._depth = np.array([tensor.depth for tensor in layout.tensors], np.int64)
        self._is_forward = np.array(
            [tensor.kind in _OF_FORWARD and "dp" not in tensor.place for tensor in layout.tensors], np.bool_
        )
        self._has_narrow = any(map(is_narrow, {tensor.dtype for tensor in layout.tensors}))
        self._lanes = {rank: place.coordinate("dp") for rank, place in layout.places.items()}
        self._num_lanes = max((place.dp_size for place in layout.places.values()), default=1)

    def _first_bad(self, view: StepView) -> dict[int, int]:
        """Return, for each replica whose forward was not finite, the place of its first bad row; masks of -inf are meant."""
        bad = view.bad_rows
        if not len(bad):
            return {}
        rows = view.rows
        some = rows[bad]
        meant = (some["num_nan"] == 0) & (some["num_pos_inf"] == 0)
        bad = bad[np.isin(some["kind"], _FORWARD) & ~meant & (view.row_logical[bad] >= 0)]
        logical, ranks = view.row_logical[bad], view.row_rank[bad]
        # An input stands before the output of the same site.
        is_output = rows["kind"][bad] != int(Kind.ACTIVATION_IN)
        order = np.lexsort((ranks, is_output, view.site_pos[logical], self._depth[logical]))
        lanes = self._lane_of[ranks[order]]
        some_lanes, first = np.unique(lanes, return_index=True)
        return {int(lane): int(bad[order[at]]) for lane, at in zip(some_lanes[:MAX_BIRTHS], first[:MAX_BIRTHS], strict=True)}

    def _bad(self, view: StepView) -> tuple[FirstBad, ...]:
        found = []
        for lane, at in self._first_bad(view).items():
            row, tensor = view.rows[at], view.tensors[int(view.row_logical[at])]
            num_nan, num_inf = int(row["num_nan"]), int(row["num_pos_inf"]) + int(row["num_neg_inf"])
            found.append(
                FirstBad(
                    lane=lane, rank=int(view.row_rank[at]), kind=tensor.kind, name=tensor.name, segment=tensor.segment,
                    border=tensor.border, depth=tensor.depth, dtype=tensor.dtype, num_bad=num_nan + num_inf,
                    is_inf=num_nan == 0, upstream=self._past(view, tensor.depth, int(view.site_pos[tensor.index]), lane),
                )
            )  # fmt: skip
        return tuple(found)

    def _upstream(self, anomalies: Sequence[Anomaly], first_bad: Sequence[FirstBad]) -> dict[str, Upstream]:
        """Return what lies before the anomalies that are the first of their replica in this step."""
        past = {(one.lane, one.kind, one.name): one.upstream for one in first_bad}
        found: dict[str, Upstream] = {}
        for one in anomalies:
            if one.event == "onset" and one.rank is not None and is_nonfinite(one):
                upstream = past.get((self._lanes.get(one.rank, 0), one.kind, one.tag_name))
                if upstream is not None:
                    found[one.id] = upstream
        return found

    def _past(self, view: StepView, depth: int, position: int, lane: int) -> Upstream:
        """Hold what a replica measured in forward before a place against the other replicas'."""
        rows = view.rows
        is_earlier = (self._depth < depth) | ((self._depth == depth) & (view.site_pos < position))
        before = self._is_forward & is_earlier
        mine = np.isin(rows["kind"], _FORWARD) & (view.row_logical >= 0)
        at = np.flatnonzero(mine)
        at = at[before[view.row_logical[at]]]
        if not len(at):
            return Upstream(num_measured=0, num_blocks=0)
        some = rows[at]
        count = np.maximum(some["count"].astype(np.float64), 1.0)
        with np.errstate(all="ignore"):
            rms = np.sqrt(some["m2"] / count + some["mean"] ** 2)
            peak = np.maximum(np.abs(some["min"]), np.abs(some["max"]))
        logical = view.row_logical[at]
        lanes = self._lane_of[view.row_rank[at]]
        is_bad = (some["num_nan"] | some["num_pos_inf"] | some["num_neg_inf"]) != 0
        # The largest of each tensor and replica.
        order = np.lexsort((lanes, logical))
        logical, lanes = logical[order], lanes[order]
        starts = np.flatnonzero(np.r_[True, (logical[1:] != logical[:-1]) | (lanes[1:] != lanes[:-1])])
        largest = [np.maximum.reduceat(values[order], starts) for values in (rms, peak)]
        was_bad = np.logical_or.reduceat(is_bad[order], starts)
        of_tensor, of_lane = logical[starts], lanes[starts]
        ends = np.flatnonzero(np.r_[of_tensor[1:] != of_tensor[:-1], True]) + 1
        num_measured = num_blocks = begin = 0
        unlike = ""
        for end in ends.tolist():
            own = np.flatnonzero(of_lane[begin:end] == lane) + begin
            if len(own) and end - begin > 1:
                info = view.tensors[int(of_tensor[begin])]
                num_measured += 1
                num_blocks += info.border == "block_output"
                for name, values in zip(("rms", "largest value"), largest, strict=True):
                    here = float(values[own[0]])
                    usual = float(np.median(np.delete(values[begin:end], own[0] - begin)))
                    is_unlike = not math.isfinite(here) or here > UNLIKE * usual or usual > UNLIKE * here
                    if not unlike and (was_bad[own[0]] or (is_unlike and usual > 0)):
                        unlike = f"the {name} of {info.kind} of {info.name} was {here:.3g} against {usual:.3g} elsewhere"
            begin = end
        return Upstream(num_measured=num_measured, num_blocks=num_blocks, unlike=unlike)


_OF_FORWARD = frozenset({"activation", "activation_in"})


def _first(view: StepView, differing: Iterable[Differing]) -> list[Differing]:
    """Return some of the differing tensors, weights before gradients."""
    order = {"param": 0, "exp_avg": 1, "exp_avg_sq": 1}
    return sorted(differing, key=lambda one: (order.get(view.tensors[one.index].kind, 2), one.index))[:MAX_DIVERGENCES]


def _divergence(view: StepView, one: Differing) -> Divergence:
    tensor = view.tensors[one.index]
    votes = {word: one.checksums.count(word) for word in one.checksums}
    most = max(votes.values())
    winners = [word for word, number in votes.items() if number == most]
    is_sure = len(winners) == 1
    healthy = winners[0]
    odd = [ranks for ranks, word in zip(one.members, one.checksums, strict=True) if word != healthy or not is_sure]
    accused = tuple(sorted({rank for ranks in odd for rank in ranks}))
    change, words, culprit = "", "", None
    if len(votes) == 2:
        (first, second) = sorted(votes, key=lambda word: (votes[word], word))
        ranks = tuple(
            next(ranks for ranks, word in zip(one.members, one.checksums, strict=True) if word == wanted)
            for wanted in (first, second)
        )
        if all(len(some) == 1 for some in ranks):
            change, words, culprit = _change(view, one.index, ranks[0][0], ranks[1][0], first, second)
    return Divergence(
        kind=tensor.kind, name=tensor.name, accused=accused, num_copies=len(one.members), is_sure=is_sure, change=change,
        change_words=words, culprit=culprit,
    )  # fmt: skip


def _change(
    view: StepView, index: int, one_rank: int, other_rank: int, one_sum: int, other_sum: int
) -> tuple[str, str, int | None]:
    """Return what parts two copies, in a word and in words, and the rank of an absurd value; empty: nothing so simple."""
    rows = [
        view.rows[np.flatnonzero((view.row_logical == index) & (view.row_rank == rank))] for rank in (one_rank, other_rank)
    ]
    if any(len(some) != 1 or some["flags"][0] & Flag.DEGRADED for some in rows):
        return "", "", None
    a, b = rows[0][0], rows[1][0]
    for odd, well, rank in ((a, b, one_rank), (b, a, other_rank)):
        words = _absurd(odd, well)
        if words:
            return "element", f"{words} on rank {rank}", rank
    if NAN_CHECKSUM in (one_sum, other_sum) or int(a["count"]) < 2 or a["count"] != b["count"]:
        return "", "", None
    difference = (one_sum - other_sum) % 2**64
    difference = min(difference, 2**64 - difference)
    # All elements doubled add to a power of two as well; then both ends move.
    is_scaled = a["min"] != b["min"] and a["max"] != b["max"]
    if difference and difference & (difference - 1) == 0 and not is_scaled:
        return "bit", f"the bit patterns differ by one bit, 2**{difference.bit_length() - 1}", None
    pair = _single_element(a, b) if difference < 2**32 else None
    if pair is not None:
        return "element", f"one element alone differs, {pair[0]:.4g} against {pair[1]:.4g}", None
    return "", "", None


def _single_element(a: np.void, b: np.void) -> tuple[float, float] | None:
    """Return the values of the one element in which two copies differ, as their moments tell; None: in more than one.

    With sums of powers s1 to s4 and one element x in place of y: s1 and s2 give x and y, s3 and s4 must agree.
    """
    with np.errstate(all="ignore"):
        first, second, third, fourth = (x - y for x, y in zip(_powers(a), _powers(b), strict=True))
        if first == 0.0 or abs(second) <= 1e-6 * _powers(b)[1]:
            return None
        x, y = (second / first + first) / 2.0, (second / first - first) / 2.0
        ends = [max(abs(float(row["min"])), abs(float(row["max"]))) for row in (a, b)]
        fits = abs(x) <= ends[0] * 1.001 and abs(y) <= ends[1] * 1.001
        fits = fits and abs(x**3 - y**3 - third) <= 0.01 * max(abs(x), abs(y)) ** 3
        fits = fits and abs(x**4 - y**4 - fourth) <= 0.01 * max(abs(x), abs(y)) ** 4
    return (x, y) if fits else None


def _powers(row: np.void) -> tuple[float, float, float, float]:
    """Return the sums of the first four powers, from central moments."""
    n, mean = float(row["count"]), float(row["mean"])
    m2, m3, m4 = float(row["m2"]), float(row["m3"]), float(row["m4"])
    return (
        n * mean,
        m2 + n * mean**2,
        m3 + 3 * mean * m2 + n * mean**3,
        m4 + 4 * mean * m3 + 6 * mean**2 * m2 + n * mean**4,
    )


def _absurd(odd: np.void, well: np.void) -> str:
    """Return words for the single element that explains all of a copy's difference; empty: there is none."""
    num_bad = [int(row["num_nan"]) + int(row["num_pos_inf"]) + int(row["num_neg_inf"]) for row in (odd, well)]
    if num_bad[1]:
        return ""
    if num_bad[0]:
        return "one element is not finite" if num_bad[0] == 1 else ""
    usual = max(abs(float(well["min"])), abs(float(well["max"])))
    ends = [(float(odd[name]), float(well[name])) for name in ("min", "max")]
    value = max((now for now, _ in ends), key=abs)
    if not math.isfinite(value) or abs(value) <= ABSURD * usual:
        return ""
    squares = [float(row["m2"]) + float(row["count"]) * float(row["mean"]) ** 2 for row in (odd, well)]
    rest = squares[0] - value * value
    if abs(rest) <= 1e-5 * value * value + 2.0 * squares[1]:
        return f"one element is {value:.3g}, where all others stay within {usual:.3g},"
    return ""
