"""ScalarWatch: a rule on logged values."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.detect import Scores
from sentinel.reference import Reference
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import healthy_gradients, wording
from sentinel.rules.watches.anomaly_records import any_place, finite, is_loss_scaling, moved_ranks, skip_note, value_text
from sentinel.rules.watches.loss_parts import is_of_evaluation, parts, sides, total_of
from sentinel.rules.watches.recurring import OFTEN, Recurring
from sentinel.rules.watches.reference_runs import ReferenceRuns, ReferenceScalars
from sentinel.rules.watches.watch import HIGHER, LASTING_STEPS, AnomalousPoints, SeriesWatch

if TYPE_CHECKING:
    from sentinel.rules.watches.fast_path import FastPath
    from sentinel.step_view import StepView

_LOSS = re.compile(r"(^|[._/ -])loss(es)?$", re.IGNORECASE)
RESTART = 1.5
"""A learning rate so many times the one of the step before restarts its schedule. Smaller: steps of a steep warm-up count as
restarts; larger: a restart at a fraction of the first peak is not seen."""
FAR_SIDE = 1.0
"""Share of its baseline by which one side of a game must have risen to be reported whatever the other does: it doubled.
Smaller: a trade between the sides is reported; larger: a side that is lost is reported later."""
SURE_BESIDE = 2.0
"""One point alone is certain at this score beside the reference runs."""
_GRAD_NORM = re.compile(r"grad(ient)?s?[._ -]?norm|total_norm", re.IGNORECASE)


class WatchedScalars(msgspec.Struct, frozen=True):
    """What one watch looks at in the steps that log one set of names."""

    names: list[str]
    at: np.ndarray
    """[num] int32: which of the step's names."""
    series: np.ndarray
    """[num] int32: places in the watch's state."""

    @property
    def num(self) -> int:
        """Names that the watch looks at."""
        return len(self.names)


class ScalarWatch(SeriesWatch):
    """Logged values, one series a name: the mean over the ranks that report it."""

    def __init__(self, rule: Rule, detector: Any, fast_path: FastPath | None = None) -> None:
        super().__init__(rule, detector, "value", "scalar")
        self.fast_path = fast_path
        """A fast path to take in points that are well, where there is one."""
        self._slot_of: dict[str, int] = {}
        self._last: tuple[int, int] | None = None
        self._rate: float | None = None
        self._recurring = Recurring() if self.declared.is_rolling else None
        """Of spikes: those that came and went."""
        self._references = (
            ReferenceRuns(rule.name, rule.reference, detector)
            if rule.reference is not None and self.declared.is_rolling
            else None
        )

    @property
    def identity(self) -> str:
        """What must be equal for the state to be kept over a reload: also the reference runs."""
        return identity_beside(super().identity, self.rule.reference)

    @property
    def blind(self) -> list[str]:
        """Reference runs that say nothing, in words."""
        return self._references.blind if self._references is not None else []

    def to_dict(self) -> dict[str, object]:
        """Return everything that changes, for a snapshot."""
        found = super().to_dict() | {"last": self._last, "rate": self._rate}
        if self._recurring is not None:
            found["recurring"] = self._recurring.to_dict()
        return found | {"sisters": self._references.to_dict()} if self._references is not None else found

    def take_dict(self, data: Mapping[str, Any]) -> None:
        """Take back what `to_dict` gave."""
        super().take_dict(data)
        self._last = tuple(data["last"]) if data.get("last") is not None else None
        self._rate = data.get("rate")
        if self._recurring is not None:
            self._recurring.take_dict(data.get("recurring", {}))
        if self._references is not None and "sisters" in data:
            self._references.take_dict(data["sisters"])

    def series_keys(self) -> object:
        """Return the names in order of slots."""
        return list(self._slot_of)

    def take_series_keys(self, keys: Any) -> None:
        """Take the names back."""
        self._slot_of = {key: slot for slot, key in enumerate(keys)}

    def find(self, names: Sequence[str]) -> WatchedScalars:
        """Return what the watch looks at where these names are logged, with room for all of it."""
        at = [i for i, name in enumerate(names) if self.rule.match.takes_name(name)]
        found = [names[i] for i in at]
        slots = [self._slot_of.setdefault(name, len(self._slot_of)) for name in found]
        self._grow(len(self._slot_of))
        return WatchedScalars(found, np.array(at, dtype=np.int32), np.array(slots, dtype=np.int32))

    def judge(self, view: StepView, named: WatchedScalars) -> list[Anomaly]:
        """Return the records of one step. named: as `find` says for its names, some."""
        names, slots = named.names, named.series.astype(np.int64)
        values = np.array([view.scalars[name].mean for name in names], dtype=np.float64)
        which = None if np.array_equal(slots, np.arange(self.num_series)) else slots
        moved: np.ndarray | None = None
        if self._references is None:
            scores, anomalous, settled = self._run(values, which)
        else:
            beside = self._references.judge(view.step, names, values)
            moved = beside.moved
            scores, anomalous, settled = self._run(values, which)
            scores, anomalous = _together(scores, beside)
        if settled is None and not anomalous.any() and not len(self.episodes):
            return []
        at = np.flatnonzero(anomalous)
        points = _ScalarPoints(self, view, slots[at], [names[i] for i in at], values[at], scores, at, moved)
        is_lone = np.array([points.is_lone_norm(i) for i in range(len(at))], dtype=bool)
        if at.size:
            points.traded = self._traded(names, slots, values, scores)[at]
            self._recall(points, view)
        agree = (self._certain(scores, at, names) & ~is_lone & ~points.recurs) | ~np.isfinite(values[at])
        rested = slots[settled] if settled is not None else slots[:0]
        found = self._emit(view, slots, points, rested, agree)
        return found + self.quiet(view)

    def judge_healthy(self, view: StepView, named: WatchedScalars) -> list[Anomaly]:
        """Return the records of a step at which all is well: the ends of episodes."""
        none = np.zeros(0, dtype=np.int64)
        return self._emit(view, named.series, AnomalousPoints(none), none, np.zeros(0, dtype=bool)) + self.quiet(view)

    def notice(self, here: tuple[int, int], rate: float | None) -> None:
        """Tell a detector of slow things when what came before is no measure any more: a resume, a restart of the schedule.

        here: attempt and step. rate: the largest finite learning rate logged, None for none; one that falls and is suddenly
        half as high again lifts the loss on purpose (warm restarts). For detectors that have `rearm`.
        """
        is_back = self._last is not None and (here[0] != self._last[0] or here[1] <= self._last[1])
        restarts = rate is not None and self._rate is not None and 0.0 < RESTART * self._rate <= rate
        if is_back or restarts:
            self.detector.rearm(self.state)
        self._last = here
        self._rate = rate if rate is not None else self._rate

    def _recall(self, points: _ScalarPoints, view: StepView) -> None:
        """Tell the points which of them are one more of a kind that came and went, and remember those that begin."""
        recurring = self._recurring
        if recurring is None:
            return
        known = self.episodes.locate(points.slots)
        for i, slot in enumerate(points.slots.tolist()):
            height = points.height_of(i)
            streak = int(self.episodes.streak[known[i]]) + 1 if known[i] >= 0 else 1
            points.recurs[i] = recurring.is_known(slot, view.step, height, view.stride)
            points.lasting[i] = recurring.lasting_steps(slot, view.step, view.stride, LASTING_STEPS)
            if streak == 1:
                recurring.see(slot, view.step, height)
            elif streak == LASTING_STEPS and not points.recurs[i]:
                recurring.forget(slot)

    def _traded(self, names: Sequence[str], slots: np.ndarray, values: np.ndarray, scores: Scores) -> np.ndarray:
        """Return which losses rise while another of the run does not, as terms of a sum and sides of a game may."""
        if not self.declared.trades:
            return np.zeros(len(names), dtype=bool)
        # Sides of a game sway about each other, no further than this; when all of them rise, nobody gains.
        side = np.array(sides(names), dtype=bool)
        is_near = values - scores.baseline < FAR_SIDE * np.abs(scores.baseline)
        traded: np.ndarray = side & is_near & bool((side & (scores.score < 1.0)).any())
        if self.declared.trades == "levels":
            trains = np.array([not is_of_evaluation(name) for name in names], dtype=bool)
            gains = (self.detector.improved(self.state)[slots] & trains).astype(np.int64)
            gained = gains.sum() > gains
            whole = total_of(names)
            if whole is not None:
                # What a total gains by a term it does not gain in every stretch of the term's rise.
                gained |= self.detector.paid_by(self.state, int(slots[whole]))[slots]
            traded |= np.array(parts(names), dtype=bool) & gained
        return traded

    def _certain(self, scores: Scores, at: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Return which anomalous points are certain alone: those the detector vouches for; the loss if it says nothing."""
        vouched = scores.evidence.get("corroborated") if at.size else None
        if vouched is not None:
            return np.asarray(vouched[at], dtype=bool)
        return np.array([bool(_LOSS.search(names[i])) for i in at], dtype=bool)


def identity_beside(identity: str, reference: Reference | None) -> str:
    """Return the identity of a watch that judges beside `reference`."""
    if reference is None:
        return identity
    digest = hashlib.blake2b(identity.encode(), digest_size=8)
    for name, series in sorted(reference.series.items()):
        digest.update(name.encode() + series.steps + series.values)
    return digest.hexdigest()


def _together(scores: Scores, found: ReferenceScalars) -> tuple[Scores, np.ndarray]:
    """Return one score for the run's own past and its reference runs: the higher where it is anomalous."""
    own, baseline, evidence = scores.score, scores.baseline, scores.evidence
    beside = found.score
    leads = (beside >= 1.0) & ((own < 1.0) | (found.moved >= 1.0))
    score = np.where(leads, beside, own)
    # What reference runs do not show, twice over what they allow, needs no third point. One point too low harms nobody
    # tonight.
    sure = evidence["corroborated"] | (leads & (beside >= SURE_BESIDE) & (found.direction > 0))
    direction = np.where(leads, found.direction, evidence["direction"]).astype(np.int8)
    forecast = np.where(leads, found.forecast, baseline)
    doubtful = evidence["doubtful"] & ~leads
    both = Scores.of(score, forecast, direction=direction, corroborated=sure, doubtful=doubtful, beside=beside >= 1.0)
    return both, score >= 1.0


class _ScalarPoints(AnomalousPoints):
    is_asked_again = True

    def __init__(
        self,
        watch: ScalarWatch,
        view: StepView,
        slots: np.ndarray,
        names: Sequence[str],
        values: np.ndarray,
        scores: Scores,
        at: np.ndarray,
        moved: np.ndarray | None = None,
    ) -> None:
        super().__init__(slots)
        self._watch, self._view, self._names = watch, view, names
        self._values, self._scores, self._at = values, scores, at
        self._moved = moved
        self.traded = np.zeros(len(at), dtype=bool)
        """[points] whether it rises while another loss of the run improves."""
        self.lasting = np.full(len(at), LASTING_STEPS)
        """[points] points in a row that corroborate it."""
        found = scores.evidence.get("doubtful") if len(at) else None
        self.doubtful = np.zeros(len(at), dtype=bool) if found is None else np.asarray(found[at], dtype=bool)
        """[points] whether it may as well be an ordinary batch."""

    def is_higher(self, i: int, onset: Anomaly) -> bool:
        """Whether the point is a spike of its own, higher than what its episode began with."""
        return not self.recurs[i] and onset.score is not None and self.score_of(i) >= HIGHER * onset.score

    def lasting_steps(self, i: int) -> int:
        return int(self.lasting[i])

    def height_of(self, i: int) -> float:
        """Return how far a point stands above its baseline."""
        return float(self._values[i] - self._scores.baseline[int(self._at[i])])

    def doubt_of(self, i: int) -> str:
        """Return why a point alone is only written down, in words; empty: it is reported."""
        if self.traded[i]:
            return "another loss of the run does not: terms of a sum and sides of a game trade"
        if self.recurs[i]:
            return f"it did so {OFTEN} times and more lately, and came back"
        return "alone it may be an ordinary batch" if self.doubtful[i] or self.is_lone_norm(i) else ""

    def score_of(self, i: int) -> float:
        return float(self._scores.score[int(self._at[i])])

    def is_lone_norm(self, i: int) -> bool:
        """Return whether it is a global norm, not far out, of gradients that are measured: those vouch for it, or do not."""
        near = self.score_of(i) < healthy_gradients.FAR and _GRAD_NORM.search(self._names[i]) is not None
        return near and healthy_gradients.are_measured(self._view)

    def anomaly(self, i: int, full: bool, why: str) -> tuple[Anomaly, bool]:
        rule, view, name, at = self._watch.rule, self._view, self._names[i], int(self._at[i])
        value, score, baseline = float(self._values[i]), float(self._scores.score[at]), float(self._scores.baseline[at])
        direction, level = self._scores.evidence.get("direction"), self._scores.evidence.get("level")
        # One point of a slow climb may lie below where it began: what is judged is reported.
        reported = float(level[at]) if level is not None and math.isfinite(value) else value
        by_rank = view.scalars[name].by_rank
        holders = tuple(sorted(by_rank))
        # A logged value is no tensor: alone it is shown, but unless it is the loss it pages nobody until it lasts.
        severity = rule.severity if full else min(rule.severity, Severity.WARNING, key=lambda s: s.level)
        if math.isfinite(value):
            phrase = self._watch.declared.phrase
            lasts = "; ".join(part for part in (phrase, why if "in a row" in why else "") if part)
            sign = int(direction[at]) if direction is not None else 0
            limit = self._watch.declared if self._watch.declared.is_limit else None
            named = name if level is None else f"the level of {name}"
            text = wording.excursion("scalar", named, "value", reported, baseline, score, sign, lasts, limit)
            doubt = self.doubt_of(i)
            if doubt and (self.traded[i] or not full):
                text += f"; {doubt}"
                severity, full = Severity.INFO, False
            bad: tuple[int, ...] = ()
        else:
            bad = tuple(rank for rank in holders if not math.isfinite(by_rank[rank])) or holders
            text = wording.bad_scalar(name, value_text(value), bad, len(holders))
            text += skip_note(view)
            if _GRAD_NORM.search(name) and is_loss_scaling(view):
                severity = min(severity, Severity.WARNING, key=lambda s: s.level)
        references = float(self._moved[at]) if self._moved is not None else math.nan
        if math.isfinite(references) and math.isfinite(value):
            text += "; " + wording.beside_references(references, bool(self._scores.evidence["beside"][at]))
            if references >= 1.0 and not self._scores.evidence["beside"][at]:
                # All runs on this data did the same: the batch, and nobody's fault tonight.
                severity, full = Severity.INFO, True
        at_ranks = bad or holders
        rank = at_ranks[0] if len(at_ranks) == 1 else None
        place = view.places.get(rank) if rank is not None else None
        sizes = any_place(view)
        anomaly = Anomaly(
            id=anomaly_id(view.run, view.attempt, view.step, None, rank, f"{name}/scalar/value", rule.name),
            run=view.run,
            attempt=view.attempt,
            rank=rank,
            ranks=at_ranks,
            step=view.step,
            micro_step=None,
            pp_stage=place.pp_rank if place is not None else 0,
            vpp_stage=0,
            call_id=None,
            tag_name=name,
            kind="scalar",
            statistic="value",
            rule=rule.name,
            detector=rule.detector,
            severity=severity,
            value=finite(reported),
            value_text=value_text(reported),
            baseline=finite(baseline),
            score=finite(score) if math.isfinite(value) else None,
            message=text,
            reference_score=finite(references),
            group_mates=holders,
            moved_ranks=moved_ranks(by_rank, value, baseline),
            time=view.time,
            place=place.coordinates() if place is not None else {},
            dp_size=sizes.dp_size,
            tp_size=sizes.tp_size,
            pp_size=sizes.pp_size,
            ep_size=sizes.ep_size,
        )
        return anomaly, full or severity is rule.severity
