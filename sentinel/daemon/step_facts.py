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
from sentinel.order.step_facts import Divergence, StepFacts, Upstream
from sentinel.record import Flag, Kind

MAX_DIVERGENCES = 32
"""Differing tensors that are looked at one by one (chosen); all are counted."""
MAX_BIRTHS = 8
"""Non-finite values of a step whose past is looked at (chosen)."""
UNLIKE = 8.0
"""Times that a tensor of one replica is larger or smaller than in the others, when it is not like them (chosen)."""
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

    def read(self, view: StepView, anomalies: Sequence[Anomaly], ongoing: Collection[str]) -> StepFacts:
        """Return the facts of a closed step. anomalies: of the step, in total order; ongoing: see `StepFacts`."""
        self._learn(view.layout)
        scalars = view.scalars
        scales = [one.mean for name, one in scalars.items() if _SCALE.search(name)]
        num_compared = int(np.count_nonzero(view.present[self._replicated])) if len(self._replicated) else 0
        differing = view.differing if num_compared or view.layout.added_copies else []
        ends = [part.end_step for part in view.parts if part.end_step is not None]
        is_whole = len(ends) >= len(view.places) and not any(end.is_partial for end in ends)
        return StepFacts(
            ongoing=frozenset(ongoing),
            lanes=self._lanes,
            num_lanes=self._num_lanes,
            is_whole=is_whole,
            num_compared=num_compared,
            num_weights=len(self._weights),
            num_differing=len({one.index for one in differing}),
            divergences=tuple(_divergence(view, one) for one in _first(view, differing)),
            upstream=self._upstream(view, anomalies),
            rates={name: one.mean for name, one in scalars.items() if _RATE.search(name) and math.isfinite(one.mean)},
            loss_scale=scales[0] if scales and math.isfinite(scales[0]) else None,
            is_skipped=view.is_skipped,
            samples={part.rank: part.end_step.samples for part in view.parts if part.end_step and part.end_step.samples},
            num_samples_cut=sum(end.num_samples_cut for end in ends),
        )

    def _learn(self, layout: Layout) -> None:
        if self._layout is not None and self._layout() is layout:
            return
        self._layout = weakref.ref(layout)
        is_weight = [tensor.kind == "param" for tensor in layout.tensors]
        self._weights = np.flatnonzero(np.array(is_weight, np.bool_))
        replicated = {one.index for one in layout.replicas} | {one.index for one in layout.added_copies}
        self._replicated = np.array(sorted(replicated & set(self._weights.tolist())), np.int64)
        self._lanes = {rank: place.coordinate("dp") for rank, place in layout.places.items()}
        self._num_lanes = max((place.dp_size for place in layout.places.values()), default=1)

    def _upstream(self, view: StepView, anomalies: Sequence[Anomaly]) -> dict[str, Upstream]:
        if self._num_lanes <= 1:
            return {}
        found: dict[str, Upstream] = {}
        seen: set[int] = set()
        for one in anomalies:
            if one.event != "onset" or one.rank is None or not is_nonfinite(one) or one.kind not in _OF_FORWARD:
                continue
            lane = self._lanes.get(one.rank, 0)
            if lane not in seen and len(found) < MAX_BIRTHS:
                seen.add(lane)
                # Whoever of the replica's ranks shows the same place: they have one past.
                past = self._past(view, one, lane)
                found |= {other.id: past for other in anomalies if _place(other) == _place(one) and self._is_of(other, lane)}
        return found

    def _is_of(self, anomaly: Anomaly, lane: int) -> bool:
        return anomaly.rank is not None and is_nonfinite(anomaly) and self._lanes.get(anomaly.rank, 0) == lane

    def _past(self, view: StepView, birth: Anomaly, lane: int) -> Upstream:
        """Hold what a replica measured in forward before a place against the other replicas'."""
        rows = view.rows
        until, site_pos = (birth.depth, birth.site_pos), view.site_pos
        before = np.array(
            [
                one.kind in _OF_FORWARD and "dp" not in one.place and (one.depth, int(site_pos[one.index])) < until
                for one in view.tensors
            ]
        )
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
        lanes = np.array([self._lanes.get(int(rank), 0) for rank in view.row_rank[at]])
        is_bad = (some["num_nan"] | some["num_pos_inf"] | some["num_neg_inf"]) != 0
        num_measured = num_blocks = 0
        unlike = ""
        for tensor in np.unique(logical).tolist():
            of = logical == tensor
            own, others = of & (lanes == lane), of & (lanes != lane)
            if not own.any() or not others.any():
                continue
            info = view.tensors[tensor]
            num_measured += 1
            num_blocks += info.border == "block_output"
            for name, values in (("rms", rms), ("largest value", peak)):
                here = float(values[own].max())
                usual = float(np.median([values[others & (lanes == other)].max() for other in set(lanes[others].tolist())]))
                is_unlike = not math.isfinite(here) or here > UNLIKE * usual or usual > UNLIKE * here
                if not unlike and (is_bad[own].any() or (is_unlike and usual > 0)):
                    unlike = (
                        f"the {name} of {info.kind} of {info.name} before it was {here:.3g} against {usual:.3g} elsewhere"
                    )
        return Upstream(num_measured=num_measured, num_blocks=num_blocks, unlike=unlike)


def _place(anomaly: Anomaly) -> tuple[int, int, str]:
    return anomaly.depth, anomaly.site_pos, anomaly.kind


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
    if NAN_CHECKSUM in (one_sum, other_sum):
        return "", "", None
    difference = (one_sum - other_sum) % 2**64
    difference = min(difference, 2**64 - difference)
    is_power = difference > 0 and difference & (difference - 1) == 0 and difference < 2**32
    # All elements doubled add to a power of two as well; then both ends move.
    moved = int(a["min"] != b["min"]) + int(a["max"] != b["max"])
    if is_power and int(a["count"]) >= 2 and moved < 2:
        return "bit", f"the bit patterns differ in bit {difference.bit_length() - 1} of one element alone", None
    return "", "", None


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
