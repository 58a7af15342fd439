"""AggregateWatch: a rule on groups of tensors, each merged to one series."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel.aggregate import Group, Groups
from sentinel.anomaly import Anomaly, Severity
from sentinel.detect import Scores, SeriesDetector
from sentinel.moments import Moments, raw_statistic
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.anomaly_records import onset, skip_note, value_text
from sentinel.rules.watches.healthy_gradients import GRADIENTS
from sentinel.rules.watches.watch import BACKGROUND_RATE, LASTING_STEPS, AnomalousPoints, SeriesWatch

if TYPE_CHECKING:
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import Layout, StepView

MAX_MEMBERS = 32
"""Members of a group that an anomaly lists; of a larger group it gives an id and the size."""
MAX_SETS = 4
"""Sets of members that a group may have been measured with, each a series of its own; all further ones share one."""
OTHER_SETS = 0
"""Stands for those."""


@dataclass(frozen=True)
class Known:
    """What one layout says of a rule's groups."""

    layout: Layout
    groups: Groups
    names: np.ndarray
    """[num_tensors] uint64: a number for the key of each tensor, the same in every layout."""
    ends: np.ndarray
    """[num_groups + 1] where each group's members begin and end."""
    blind: list[Group]
    """Those without any."""


class Merged:
    """The groups of one rule in the newest step, merged once for all the statistics that it watches."""

    def __init__(self, rule: Rule, kinds: frozenset[str]) -> None:
        self._match, self._kinds = rule.match, kinds
        self._known: list[Known] = []
        self._view: Callable[[], StepView | None] = _nothing
        self._seen: tuple[Known | None, np.ndarray] = (None, np.zeros(0, np.bool_))
        self.sets = np.zeros(0, np.uint64)
        """[num_groups] which members the step has, as a number."""

    def take(self, view: StepView) -> None:
        """Merge the groups of a step, unless that is done."""
        if self._view() is view:
            return
        self._view = weakref.ref(view)
        self.known = known = self._meet(view.layout)
        self.groups = known.groups.groups
        if not self.groups:
            return
        self.stats = known.groups.merge(view.stats)
        if known is not self._seen[0] or not np.array_equal(view.present, self._seen[1]):
            self._seen = (known, view.present)
            # Sums modulo 2**64: the same members give the same number, in whatever order and layout.
            marks = np.where(view.present[known.groups.index], known.names[known.groups.index], np.uint64(0))
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(marks, dtype=np.uint64)])
            self.sets = sums[known.ends[1:]] - sums[known.ends[:-1]]
            self._has_members = known.groups.count(view.present) > 0
        self.is_here = self._has_members
        if len(view.parts) < len(view.places) or any(part.end_step is None for part in view.parts):
            # Without a shard the statistic is that of another tensor: neither judged nor learned.
            self.is_here = self.is_here & (known.groups.count(~view.is_whole) == 0)
        self._is_bad = np.zeros(len(self.groups), np.bool_)
        if view.is_bad.any():
            self._is_bad = known.groups.count(view.is_bad) > 0

    @property
    def blind(self) -> str:
        """Of which groups nothing can be merged, in words; empty where there are none."""
        groups = [] if self._seen[0] is None else self._seen[0].blind
        if not groups:
            return ""
        shown = ", ".join(f"{group.kind} {group.name}" for group in groups[:3])
        more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
        return f"{shown}{more}: their tensors have no known placement and stay with their ranks, so no group is judged"

    def raw(self, statistic: str) -> np.ndarray:
        """Return the statistic of each group as torch would give it, NaN and infinities in it."""
        return raw_statistic(self.stats, statistic)

    def clean(self, statistic: str) -> np.ndarray:
        """Return the statistic of each group, NaN where any member holds a non-finite element."""
        return np.where(self._is_bad, np.nan, Moments(self.stats).statistic(statistic))

    def _meet(self, layout: Layout) -> Known:
        for known in self._known:
            if known.layout is layout:
                return known
        groups = Groups(layout.tensors, self._match.aggregate, kinds=self._kinds, names=self._match.name)
        names = np.zeros(len(layout.tensors), np.uint64)
        for at in np.unique(groups.index):
            names[at] = int(_hash(layout.tensors[at].key), 16)
        ends = np.cumsum([0, *(len(group.members) for group in groups.groups)])
        known = Known(layout, groups, names, ends, [group for group in groups.groups if not len(group.members)])
        self._known = [*self._known[-1:], known]
        return known


def _nothing() -> None:
    return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_Key = tuple[str, str, str, int]
"""(group, kind, definition, set of members)"""


class AggregateWatch(SeriesWatch):
    """Groups of logical tensors, one series a group, kind and set of members.

    A group that is measured with other members than before (monitoring was switched on, a parameter stopped receiving
    gradients) is another series: its level says nothing about the former's.
    """

    def __init__(self, rule: Rule, detector: SeriesDetector, statistic: str, merged: Merged) -> None:
        super().__init__(rule, detector, statistic, "aggregate")
        self.merged = merged
        self._slot_of: dict[_Key, int] = {}
        self._num_sets: dict[tuple[str, str, str], int] = {}
        self._slots: tuple[Known, bytes, np.ndarray] | None = None
        """Of the last step: layout, sets, and the slots that they have."""

    @property
    def blind(self) -> list[str]:
        """Groups of which nothing can be merged, in words; of the watches of one rule the same."""
        return [f'rule "{self.rule.name}": {self.merged.blind}'] if self.merged.blind else []

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the whole step."""
        plan.judge_whole(self.judge)

    def series_keys(self) -> object:
        """Return the keys in order of slots."""
        return [list(key) for key in self._slot_of]

    def take_series_keys(self, keys: Any) -> None:
        """Take the keys back."""
        self._slot_of, self._num_sets, self._slots = {}, {}, None
        for slot, (name, kind, definition, number) in enumerate(keys):
            self._slot_of[name, kind, definition, number] = slot
            series = (name, kind, definition)
            self._num_sets[series] = self._num_sets.get(series, 0) + 1

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the records of one step."""
        merged = self.merged
        merged.take(view)
        at = np.flatnonzero(merged.is_here) if merged.groups else np.zeros(0, np.int64)
        if not len(at):
            return self.quiet(view)
        slots = self._slots_of(at)
        values = (merged.raw(self.statistic) if self.declared.raw_values else merged.clean(self.statistic))[at]
        whole = len(slots) == self.num_series and bool((slots == np.arange(self.num_series)).all())
        scores, anomalous, settled = self._run(values, None if whole else slots)
        if settled is None and not anomalous.any():
            self.background *= 1.0 - BACKGROUND_RATE
            if len(self.episodes):
                self._emit(view, slots, AnomalousPoints(slots[:0]), slots[:0], anomalous[:0])
            return self.quiet(view)
        bad = np.flatnonzero(anomalous)
        points = _GroupPoints(self, view, slots[bad], at[bad], values[bad], scores, bad)
        agree = self._corroborated(points, scores, bad)
        found = self._emit(view, slots, points, slots[settled] if settled is not None else slots[:0], agree)
        return found + self.quiet(view)

    def _slots_of(self, at: np.ndarray) -> np.ndarray:
        merged = self.merged
        sets = merged.sets[at]
        seen = at.tobytes() + sets.tobytes()
        if self._slots is not None and self._slots[0] is merged.known and self._slots[1] == seen:
            return self._slots[2]
        slots = [self._slot(merged.groups[group], int(number)) for group, number in zip(at, sets, strict=True)]
        self._grow(len(self._slot_of))
        found = np.array(slots, np.int64)
        self._slots = (merged.known, seen, found)
        return found

    def _slot(self, group: Group, number: int) -> int:
        series = (group.name, group.kind, group.definition)
        slot = self._slot_of.get((*series, number))
        if slot is not None:
            return slot
        if self._num_sets.get(series, 0) >= MAX_SETS:
            number = OTHER_SETS
            if (*series, number) in self._slot_of:
                return self._slot_of[*series, number]
        self._num_sets[series] = self._num_sets.get(series, 0) + 1
        return self._slot_of.setdefault((*series, number), len(self._slot_of))

    def _corroborated(self, points: _GroupPoints, scores: Scores, bad: np.ndarray) -> np.ndarray:
        """Return which points are certain at once: the detector vouches for them, enough groups rose afresh, no numbers."""
        known = self.episodes.locate(points.slots)
        streak = np.where(known >= 0, self.episodes.streak[known] if len(self.episodes) else 0, 0)
        fresh = (points.direction >= 0) & (streak < LASTING_STEPS)
        names = {self.merged.groups[int(at)].name for at in points.index[fresh]}
        agree: np.ndarray = (fresh & self._agree(len(names))) | ~np.isfinite(points.values)
        vouched = scores.evidence.get("corroborated")
        return agree if vouched is None or not bad.size else agree | vouched[bad].astype(bool)


class _GroupPoints(AnomalousPoints):
    def __init__(
        self,
        watch: AggregateWatch,
        view: StepView,
        slots: np.ndarray,
        index: np.ndarray,
        values: np.ndarray,
        scores: Scores,
        at: np.ndarray,
    ) -> None:
        super().__init__(slots)
        self._watch, self._view = watch, view
        self.index, self.values = index, values
        self.direction = np.zeros(len(at), dtype=np.int8)
        if at.size:
            self.score, self.baseline = scores.score[at], scores.baseline[at]
            direction = scores.evidence.get("direction")
            if direction is not None:
                self.direction = direction[at]

    def anomaly(self, i: int, full: bool, why: str) -> tuple[Anomaly, bool]:
        watch, view = self._watch, self._view
        rule, group = watch.rule, watch.merged.groups[int(self.index[i])]
        members = [view.tensors[at] for at in group.members[view.present[group.members]]]
        value, baseline, score = float(self.values[i]), float(self.baseline[i]), float(self.score[i])
        severity = rule.severity if full else Severity.INFO
        left_out = f"; {group.num_excluded} series not merged" if group.num_excluded else ""
        named = f"{group.name} ({wording.count(len(members), 'tensor')}{left_out})"
        if math.isfinite(value):
            sign = int(self.direction[i])
            text = wording.excursion(group.kind, named, watch.statistic, value, baseline, score, sign, why, watch.declared)
        else:
            text = f"{wording.subject(group.kind, named, watch.statistic)} is {value_text(value)}{skip_note(view)}"
        # It stands where the last of its members was made, so that each of them may be its cause.
        places = [(one.depth, int(view.site_pos[one.index]), one.index) for one in members]
        last = view.tensors[(min(places) if group.kind in GRADIENTS else max(places))[2]]
        ranks = tuple(sorted({rank for one in members for rank in one.ranks}))
        names = sorted(one.name for one in members)
        anomaly = onset(
            view,
            rule,
            f"{group.definition}/{group.name}/{group.kind}/{watch.statistic}",
            value,
            baseline,
            score,
            ranks=ranks,
            pp_stage=last.pp_stage,
            vpp_stage=last.vpp_stage,
            call_id=None,
            tag_name=group.name,
            kind=group.kind,
            statistic=watch.statistic,
            severity=severity,
            message=text,
            group_mates=ranks,
            depth=last.depth,
            site_pos=int(view.site_pos[last.index]),
            num_members=len(names),
            members=tuple(names) if len(names) <= MAX_MEMBERS else (),
            members_id="" if len(names) <= MAX_MEMBERS else _hash("\n".join(names)),
        )
        return anomaly, full or severity is rule.severity
