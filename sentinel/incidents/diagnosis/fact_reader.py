"""What diagnoses ask of a closed step beside its anomalies, read from the step alone: a replay reads the same."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from sentinel.anomaly import Anomaly, is_nonfinite
from sentinel.anomaly_words import told_apart
from sentinel.incidents.diagnosis.claim import is_narrow
from sentinel.incidents.diagnosis.evidence import is_entry
from sentinel.incidents.diagnosis.forward_past import FORWARD_NUMBERS, ForwardPast
from sentinel.incidents.diagnosis.maker_reader import MakerReader
from sentinel.incidents.diagnosis.step_facts import (
    Divergence,
    FirstBad,
    OddWeight,
    Outlier,
    ReplicaDeviation,
    StepFacts,
    Upstream,
)
from sentinel.kinds import ACTIVATION_KINDS, Phase, labels
from sentinel.moments import lone_rows, tails
from sentinel.order.phase import scalar_phase
from sentinel.record import Flag, Kind
from sentinel.step_view import NAN_CHECKSUM, Differing, Layout, StepView

MAX_DIVERGENCES = 32
"""Most differing tensors whose copies are compared one by one, a bound on time; all are counted."""
MAX_ORIGINS = 8
"""Most non-finite values of a step whose past is read, a bound on time."""
ODD_SPREADS, ODD_SHARE = 8.0, 0.2
"""Spreads, and share of the median, by which one replica's loss is above the others' when it stands apart. Smaller: a hard
batch does; larger: a replica with broken weights may not."""
ABSURD = 16.0
"""Times that a single element is beyond all others of its tensor when it stands out. Smaller: the largest of a long tail
does; at this, flips of the lowest three exponent bits (2, 4, 16 times) are missed."""

ALONE = 0.9
"""Share of the kurtosis that one element alone would make, from which it counts as alone: two equal ones make half of it.
Smaller: one of few large elements counts as alone; larger: one beside ordinary noise may not."""
EVERY = 16
"""Steps between two looks at weights while nothing is anomalous: a bound on time. What is older than that is not found at
the onset of an incident."""
APART = 1.3
"""Times by which an output of one replica is larger or smaller than the others' when it is unlike them: batches of one
distribution are alike within some percent. Smaller: a batch is named; larger: bad data that moved it by less is not."""
LIKE = 3.0
"""Times by which the kurtosis of one replica may differ from the others' when all of its elements grew alike. Smaller: noise
of the tail hides that; larger: a few large elements pass for all."""

_RATE = re.compile(r"(^|[._/-])(lr|learning_rate)([._/-]|_group\d+|_\d+|$)", re.IGNORECASE)
_SCALE = re.compile(r"(loss|grad|amp)[._ -]?scale", re.IGNORECASE)


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
        self._by_name: dict[tuple[str, str], list[int]] = {}
        """(kind, name) -> places of tensors; made when it is asked for."""
        self._makers = MakerReader()
        self._is_gradient = np.zeros(0, np.bool_)
        """[tensors] whether it is a weight gradient."""

    def read(self, view: StepView, anomalies: Sequence[Anomaly], ongoing: Collection[str]) -> StepFacts:
        """Return the facts of a closed step. anomalies: of the step, in total order; ongoing: see `StepFacts`."""
        self._learn(view.layout)
        scalars = view.scalars
        scales = [one.mean for name, one in scalars.items() if _SCALE.search(name)]
        num_compared = int(np.count_nonzero(view.present[self._replicated])) if len(self._replicated) else 0
        differing = view.differing if num_compared or view.layout.added_copies else []
        ends = [part.end_step for part in view.parts if part.end_step is not None]
        is_whole = len(ends) >= len(view.places) and not any(end.is_partial for end in ends)
        received = {part.rank for part in view.parts if part.end_step is not None and not part.end_step.is_partial}
        first_bad = self._bad(view)
        rates = {name: one.mean for name, one in scalars.items() if _RATE.search(name) and math.isfinite(one.mean)}
        onsets = [one for one in anomalies if one.event == "onset"]
        return StepFacts(
            ongoing=frozenset(ongoing),
            lanes=self._lanes,
            num_lanes=self._num_lanes,
            is_whole=is_whole,
            missing=tuple(sorted(set(view.places) - received)) if not is_whole else (),
            num_compared=num_compared,
            num_weights=len(self._weights),
            num_differing=_num_differing(view, differing),
            divergences=tuple(_divergence(view, one) for one in _first(view, differing)),
            upstream=self._upstream(anomalies, first_bad),
            first_bad=first_bad,
            makers=self._makers.read(view.carrying(_OF_FORWARD), anomalies, first_bad),
            num_gradients=self._num_finite_gradients(view),
            results={
                name: one.mean
                for name, one in scalars.items()
                if scalar_phase(name) in (Phase.LOSS, Phase.NORM) and math.isfinite(one.mean)
            },
            odd_lanes=self._odd_lanes(view),
            num_outputs=int(np.count_nonzero(self._is_forward & view.present)) if onsets or ongoing else 0,
            outliers=self._outliers(view, onsets),
            odd_weights=self._odd_weights(view, max(rates.values(), default=1.0))
            if onsets or view.step % EVERY == 0
            else (),
            apart=self._apart(view) if any(scalar_phase(one.tag_name) is Phase.LOSS for one in onsets) else {},
            rates=rates,
            loss_scale=scales[0] if scales and math.isfinite(scales[0]) else None,
            has_narrow=self._has_narrow,
            is_skipped=view.is_skipped,
            samples={part.rank: part.end_step.samples for part in view.parts if part.end_step and part.end_step.samples},
            num_samples_cut=sum(end.num_samples_cut for end in ends),
        )

    def _num_finite_gradients(self, view: StepView) -> int:
        if (self._is_gradient & view.is_bad).any():
            return 0
        return int(np.count_nonzero(self._is_gradient & view.present))

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
        self._by_name, self._makers = {}, MakerReader()
        self._is_gradient = np.array([tensor.kind == "wgrad" for tensor in layout.tensors], np.bool_)
        is_weight = [tensor.kind == "param" for tensor in layout.tensors]
        self._weights = np.flatnonzero(np.array(is_weight, np.bool_))
        replicated = layout.replicated | {one.index for one in layout.added_copies}
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

    def _places(self, view: StepView, kind: str, names: Collection[str]) -> list[int]:
        """Return the places of tensors of a kind, in forward order."""
        if not self._by_name:
            for tensor in view.tensors:
                self._by_name.setdefault((tensor.kind, tensor.name), []).append(tensor.index)
        found = [index for name in names for index in self._by_name.get((kind, name), ())]
        return sorted(found, key=lambda index: (view.tensors[index].depth, view.tensors[index].site_pos, index))

    def _outliers(self, view: StepView, onsets: Sequence[Anomaly]) -> dict[str, Outlier]:
        names = {one.tag_name for one in onsets if one.kind == "activation" and not is_nonfinite(one)}
        found: dict[str, Outlier] = {}
        indices = self._places(view, "activation", names)[:MAX_ORIGINS] if names else []
        if not indices:
            return found
        view = view.carrying(_OF_FORWARD)
        past = self._past(view)
        for index in indices:
            tensor = view.tensors[index]
            at = np.flatnonzero(view.row_logical == index)
            lanes, peaks, shares = self._lane_of[view.row_rank[at]], _peaks(view.rows[at]), tails(view.rows[at])
            if not len(at) or not np.isfinite(peaks).all():
                continue
            # Where one element makes the tail, that says more than which is the largest.
            odd = int(np.lexsort((peaks, shares >= ALONE))[-1])
            others = lanes != lanes[odd]
            usual = float(np.median(peaks[others])) if others.any() else 0.0
            counts = view.rows["count"][at].astype(np.float64)
            tail = float(np.median((shares * counts)[others])) if others.any() else 0.0
            own, position = float(shares[odd] * counts[odd]), int(view.site_pos[index])
            is_earlier = (self._depth < tensor.depth) | ((self._depth == tensor.depth) & (view.site_pos < position))
            before = self._is_forward & is_earlier & view.present
            found[tensor.name] = Outlier(
                lane=int(lanes[odd]), rank=int(view.row_rank[at[odd]]), value=float(peaks[odd]), usual=usual,
                is_alone=bool(shares[odd] >= ALONE), is_whole=tail > 0.0 and tail / LIKE <= own <= tail * LIKE,
                num_before=int(np.count_nonzero(before)),
                upstream=past.upstream(tensor.depth, position, int(lanes[odd])), functions=tensor.functions,
            )  # fmt: skip
        return found

    def _odd_weights(self, view: StepView, rate: float) -> tuple[OddWeight, ...]:
        found, lone = [], view.lone_weights[:MAX_ORIGINS].tolist()
        if not lone:
            return ()
        gradients = {at: self._places(view, "wgrad", [view.tensors[at].name]) for at in lone}
        view = view.with_rows_of({*lone, *(one for own in gradients.values() for one in own)})
        places = lone_rows(view.rows)
        places = places[np.isin(view.row_logical[places], lone)]
        # Rows of different tensors are in no order.
        order = np.lexsort((view.row_logical[places], view.row_rank[places]))
        for at in places[order][:MAX_ORIGINS].tolist():
            row, rank, index = view.rows[at], int(view.row_rank[at]), int(view.row_logical[at])
            rows = np.flatnonzero(np.isin(view.row_logical, gradients[index]) & (view.row_rank == rank))
            found.append(
                OddWeight(
                    step=view.step, name=view.tensors[index].name, rank=rank,
                    value=max(float(row["min"]), float(row["max"]), key=abs),
                    num_elements=int(row["count"]), rate=rate,
                    gradient=float(np.max(_peaks(view.rows[rows]))) if len(rows) else 0.0,
                )
            )  # fmt: skip
        return tuple(found)

    def _apart(self, view: StepView) -> dict[int, ReplicaDeviation]:
        """Return, for each replica, its first output that is not like the others'."""
        view = view.carrying(_OF_FORWARD)
        at = np.flatnonzero((view.rows["kind"] == Kind.ACTIVATION) & (view.row_logical >= 0))
        at = at[self._is_forward[view.row_logical[at]]]
        found: dict[int, ReplicaDeviation] = {}
        if not len(at) or self._num_lanes < 2:
            return found
        logical, lanes = view.row_logical[at], self._lane_of[view.row_rank[at]]
        # In forward order, and of one tensor by replica.
        place = np.argsort(np.lexsort((view.site_pos, self._depth)))
        order = np.argsort(place[logical] * (int(lanes.max()) + 1) + lanes, kind="stable")
        logical, lanes, at = logical[order], lanes[order], at[order]
        fields = {name: view.rows[name][at] for name in ("m2", "count", "mean")}
        with np.errstate(all="ignore"):
            rms = np.sqrt(fields["m2"] / np.maximum(fields["count"].astype(np.float64), 1.0) + fields["mean"] ** 2)
        ends = np.flatnonzero(np.r_[logical[1:] != logical[:-1], True]) + 1
        begin = 0
        for end in ends.tolist():
            tensor, values = view.tensors[int(logical[begin])], rms[begin:end]
            if end - begin > 1:
                # Of three and more the middle one; of two, the other.
                usual = values[::-1] if end - begin == 2 else np.full(end - begin, np.median(values))
                with np.errstate(all="ignore"):
                    times = np.where(usual > 0.0, values / usual, 1.0)
                    is_apart = np.isfinite(values) & ~((times >= 1.0 / APART) & (times <= APART))
                front = is_entry(tensor.depth, tensor.border, tensor.segment)
                for own in np.flatnonzero(is_apart).tolist():
                    deviation = ReplicaDeviation(name=tensor.name, times=float(times[own]), is_entry=front)
                    found.setdefault(int(lanes[begin + own]), deviation)
            begin = end
        return found

    def _first_bad(self, view: StepView) -> dict[int, int]:
        """Return, for each replica whose forward was not finite, the place of its first bad row; masks of -inf are meant."""
        bad = view.bad_rows
        if not len(bad):
            return {}
        rows = view.rows
        meant = (rows["num_nan"][bad] == 0) & (rows["num_pos_inf"][bad] == 0)
        bad = bad[np.isin(rows["kind"][bad], FORWARD_NUMBERS) & ~meant & (view.row_logical[bad] >= 0)]
        logical, lanes = view.row_logical[bad], self._lane_of[view.row_rank[bad]]
        # An input stands before the output of the same site.
        is_output = rows["kind"][bad] != int(Kind.ACTIVATION_IN)
        place = (self._depth[logical] << 34) + (view.site_pos[logical] << 1) + is_output
        first_place = np.full(int(lanes.max(initial=0)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first_place, lanes, place)
        # Of these the lowest rank's, for ranks rise along the rows.
        is_first = place == first_place[lanes]
        some_lanes, first = np.unique(lanes[is_first], return_index=True)
        pairs = zip(some_lanes[:MAX_ORIGINS], bad[is_first][first[:MAX_ORIGINS]], strict=True)
        return {int(lane): int(at) for lane, at in pairs}

    def _bad(self, view: StepView) -> tuple[FirstBad, ...]:
        found, view = [], view.with_bad_rows()
        first_bad = self._first_bad(view)
        if not first_bad:
            return ()
        past = self._past(view.carrying(_OF_FORWARD))
        for lane, at in first_bad.items():
            row, tensor = view.rows[at], view.tensors[int(view.row_logical[at])]
            num_nan, num_inf = int(row["num_nan"]), int(row["num_pos_inf"]) + int(row["num_neg_inf"])
            found.append(
                FirstBad(
                    lane=lane, rank=int(view.row_rank[at]), kind=tensor.kind, name=tensor.name, segment=tensor.segment,
                    border=tensor.border, depth=tensor.depth, dtype=tensor.dtype, num_bad=num_nan + num_inf,
                    is_inf=num_nan == 0, upstream=past.upstream(tensor.depth, int(view.site_pos[tensor.index]), lane),
                )
            )  # fmt: skip
        return tuple(found)

    def _past(self, view: StepView) -> ForwardPast:
        return ForwardPast(view, depth=self._depth, is_forward=self._is_forward, lane_of=self._lane_of)

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


def _peaks(rows: np.ndarray) -> np.ndarray:
    """Return the largest value of each row, without its sign; infinite where some value is not finite."""
    is_bad = (rows["num_nan"] | rows["num_pos_inf"] | rows["num_neg_inf"]) != 0
    peaks = np.maximum(np.abs(rows["min"].astype(np.float64)), np.abs(rows["max"].astype(np.float64)))
    return np.where(is_bad, np.inf, peaks)


_OF_FORWARD = labels(ACTIVATION_KINDS)


def _first(view: StepView, differing: Iterable[Differing]) -> list[Differing]:
    """Return some of the differing tensors, weights before gradients."""
    order = {"param": 0, "exp_avg": 1, "exp_avg_sq": 1}
    found = sorted(differing, key=lambda one: (order.get(view.tensors[one.index].kind, 2), one.index))
    last = [one for one in found[MAX_DIVERGENCES:] if order.get(view.tensors[one.index].kind, 2) == 2][:1]
    return [*found[: MAX_DIVERGENCES - len(last)], *last]  # However many weights differ, one gradient is among them.


def _num_differing(view: StepView, differing: Iterable[Differing]) -> int:
    """Return how many tensors differ by themselves: where weights do, their gradients and states of the step follow.

    Ranks of a tensor-parallel group hold copies of norms and biases: one bit in one of these parts all gradients before it.
    """
    found = {one.index for one in differing}
    return len({index for index in found if view.tensors[index].kind == "param"} or found)


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
    view = view.with_rows_of([index])
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
        return "element", "one element alone differs, {} against {}".format(*told_apart(*pair)), None
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
