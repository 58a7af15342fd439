"""ScalarWatch: a rule on logged values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.detect import Scores, SeriesDetector
from sentinel.rules import wording
from sentinel.rules.facts import any_place, finite, is_loss_scaling, moved_ranks, skip_note, value_text
from sentinel.rules.schema import Rule
from sentinel.rules.watch import HIGHER, Points, SeriesWatch

if TYPE_CHECKING:
    from sentinel.ingest.merge import StepView

_LOSS = re.compile(r"(^|[._/ -])loss(es)?$", re.IGNORECASE)
_GRAD_NORM = re.compile(r"grad(ient)?s?[._ -]?norm|total_norm", re.IGNORECASE)


class ScalarWatch(SeriesWatch):
    """Logged values, one series a name: the mean over the ranks that report it."""

    def __init__(self, rule: Rule, detector: SeriesDetector) -> None:
        super().__init__(rule, detector, "value", "scalar")
        self._slot_of: dict[str, int] = {}
        self._seen: tuple[str, ...] | None = None
        self._names: list[str] = []
        self._slots = np.zeros(0, dtype=np.int64)
        self._whole = False

    def series_keys(self) -> object:
        """Return the names in order of slots."""
        return list(self._slot_of)

    def take_series_keys(self, keys: Any) -> None:
        """Take the names back."""
        self._slot_of = {key: slot for slot, key in enumerate(keys)}
        self._seen = None

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the records of one step."""
        names = tuple(view.scalars)
        if names != self._seen:
            self._seen = names
            self._names = [name for name in names if self.rule.match.takes_name(name)]
            slots = [self._slot_of.setdefault(name, len(self._slot_of)) for name in self._names]
            self._slots = np.array(slots, dtype=np.int64)
            self._grow(len(self._slot_of))
            self._whole = slots == list(range(self.num_series))
        if not self._names:
            return self.quiet(view)
        values = np.array([view.scalars[name].mean for name in self._names], dtype=np.float64)
        scores, anomalous, settled = self._run(values, None if self._whole else self._slots)
        if settled is None and not anomalous.any() and not len(self.episodes):
            return []
        at = np.flatnonzero(anomalous)
        points = _ScalarPoints(self, view, self._slots[at], [self._names[i] for i in at], values[at], scores, at)
        agree = self._certain(scores, at) | ~np.isfinite(values[at])
        rested = self._slots[settled] if settled is not None else self._slots[:0]
        found = self._emit(view, self._slots, points, rested, agree)
        return found + self.quiet(view)

    def _certain(self, scores: Scores, at: np.ndarray) -> np.ndarray:
        """Return which anomalous points are certain alone: those the detector vouches for; the loss if it says nothing."""
        vouched = scores.evidence.get("corroborated") if at.size else None
        if vouched is not None:
            return np.asarray(vouched[at], dtype=bool)
        return np.array([bool(_LOSS.search(self._names[i])) for i in at], dtype=bool)


class _ScalarPoints(Points):
    def __init__(
        self,
        watch: ScalarWatch,
        view: StepView,
        slots: np.ndarray,
        names: Sequence[str],
        values: np.ndarray,
        scores: Scores,
        at: np.ndarray,
    ) -> None:
        super().__init__(slots)
        self._watch, self._view, self._names = watch, view, names
        self._values, self._scores, self._at = values, scores, at

    def is_higher(self, i: int, onset: Anomaly) -> bool:
        """Whether the point is a spike of its own, higher than what its episode began with."""
        return onset.score is not None and float(self._scores.score[int(self._at[i])]) >= HIGHER * onset.score

    def anomaly(self, i: int, full: bool, why: str) -> tuple[Anomaly, bool]:
        rule, view, name, at = self._watch.rule, self._view, self._names[i], int(self._at[i])
        value, score, baseline = float(self._values[i]), float(self._scores.score[at]), float(self._scores.baseline[at])
        direction = self._scores.evidence.get("direction")
        by_rank = view.scalars[name].by_rank
        holders = tuple(sorted(by_rank))
        # A logged value is no tensor: alone it is shown, but unless it is the loss it pages nobody until it lasts.
        severity = rule.severity if full else min(rule.severity, Severity.WARNING, key=lambda s: s.level)
        if math.isfinite(value):
            phrase = str(getattr(self._watch.detector, "phrase", ""))
            lasts = "; ".join(part for part in (phrase, why if "in a row" in why else "") if part)
            sign = int(direction[at]) if direction is not None else 0
            text = wording.excursion("scalar", name, "value", value, baseline, score, sign, lasts)
            bad: tuple[int, ...] = ()
        else:
            bad = tuple(rank for rank in holders if not math.isfinite(by_rank[rank])) or holders
            text = wording.bad_scalar(name, value_text(value), bad, len(holders))
            text += skip_note(view)
            if _GRAD_NORM.search(name) and is_loss_scaling(view):
                severity = min(severity, Severity.WARNING, key=lambda s: s.level)
        named = bad or holders
        rank = named[0] if len(named) == 1 else None
        place = view.places.get(rank) if rank is not None else None
        sizes = any_place(view)
        anomaly = Anomaly(
            id=anomaly_id(view.run, view.attempt, view.step, None, rank, f"{name}/scalar/value", rule.name),
            run=view.run,
            attempt=view.attempt,
            rank=rank,
            ranks=named,
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
            value=finite(value),
            value_text=value_text(value),
            baseline=finite(baseline),
            score=finite(score) if math.isfinite(value) else None,
            message=text,
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
