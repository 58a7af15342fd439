"""ReplicaWatch: a rule on copies that must be bit-identical."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.detect import GroupDetector
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.anomaly_records import tensor_anomaly
from sentinel.rules.watches.watch import Watch

if TYPE_CHECKING:
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import Differing, StepView


MIN_WEIGHTS = 2
"""With one weight that has copies nobody can tell ranks that train models of their own from a broken one."""
NEVER_ALIKE = "never alike"
"""Key of the episode in which the ranks' models have nothing to do with each other."""


class ReplicaWatch(Watch):
    """Copies of weights, optimizer state and reduced gradients: only what differs reaches the detector.

    Where most weights differ when an attempt is first compared, its ranks do not hold copies at all: that is said once, and
    nobody is accused until most are alike.

    One episode for each set of copies, which lasts while the same ranks are accused, or fewer. Another rank is a new onset;
    so is one that turns out to be wrong of several that may have been.
    """

    def __init__(self, rule: Rule, detector: GroupDetector) -> None:
        super().__init__(rule, detector, "checksum", "copies")
        self._slot_of: dict[str, int] = {}
        self._attempt = -1
        """The attempt that was compared last."""
        self._are_unlike = False
        """Since this attempt was first compared, most of its weights differ."""

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the whole step."""
        plan.judge_whole(self.judge)

    def series_keys(self) -> object:
        """Return the sets of copies in order of slots, and how the attempt began."""
        return [list(self._slot_of), self._attempt, self._are_unlike]

    def take_series_keys(self, keys: Any) -> None:
        """Take back what `series_keys` gave."""
        slots, self._attempt, self._are_unlike = keys
        self._slot_of = {key: slot for slot, key in enumerate(slots)}

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the records of one step."""
        found: list[Anomaly] = []
        sets = [one for one in view.differing if self._takes(view, one)]
        if self._have_nothing_in_common(view):
            found.extend(self._report_unlike(view))
        elif sets:
            checksum = np.array([word for one in sets for word in one.checksums], dtype=np.uint64)
            group = np.repeat(np.arange(len(sets)), [len(one.members) for one in sets])
            scores = self.detector.score({"checksum": checksum}, group, {})
            self.num_points += len(checksum)
            accused = scores.score >= 1.0
            is_sure = scores.evidence["is_sure"]
            for number, one in enumerate(sets):
                of_set = group == number
                who = [members for members, is_it in zip(one.members, accused[of_set], strict=True) if is_it]
                if who:
                    found.extend(self._accuse(view, one, who, bool(is_sure[of_set].all())))
        if len(self.episodes):
            found.extend(self.quiet(view))
        return found

    def _have_nothing_in_common(self, view: StepView) -> bool:
        """Tell whether most weights differ, as they did when the attempt was first compared."""
        if view.attempt == self._attempt and not self._are_unlike:
            return False
        params = {index for index in view.layout.replicated if view.tensors[index].kind == "param"}
        replicas = [index for index in params if view.present[index]]
        if len(replicas) < MIN_WEIGHTS:
            return False  # Or no weights were measured in this step.
        differ = 2 * len({one.index for one in view.differing} & params) > len(replicas)
        if view.attempt != self._attempt:
            self._attempt, self._are_unlike = view.attempt, True
        self._are_unlike &= differ
        return self._are_unlike

    def _report_unlike(self, view: StepView) -> list[Anomaly]:
        slot = np.array([self._slot_of.setdefault(NEVER_ALIKE, len(self._slot_of))])
        at = self.episodes.locate(slot)
        if at[0] >= 0:
            self.episodes.continue_at(at, view.step)
            return []
        one = view.differing[0]
        text = (
            f"most weights were never the same on the ranks of attempt {view.attempt}: they began differently (a broadcast "
            "left out), train models of their own, or are stages of one (attach with place=, docs/trainers.md); no copies "
            "are compared until they are alike"
        )
        anomaly = tensor_anomaly(
            view, self.rule, view.tensors[one.index], "checksum", Severity.WARNING, None, None, None,
            float(len(view.differing)), 0.0, math.nan, text, NEVER_ALIKE,
        )  # fmt: skip
        self.episodes.open(slot, view.step, np.array([True]), [anomaly])
        return [anomaly]

    def _takes(self, view: StepView, one: Differing) -> bool:
        tensor, match = view.tensors[one.index], self.rule.match
        return tensor.kind in match.kind and match.takes_name(tensor.name)

    def _accuse(self, view: StepView, one: Differing, who: list[tuple[int, ...]], is_sure: bool) -> list[Anomaly]:
        tensor = view.tensors[one.index]
        key = f"{tensor.key}/{one.shard}" if one.shard else tensor.key
        if self.rule.match.rank and not {rank for ranks in who for rank in ranks} & set(self.rule.match.rank):
            return []
        slot = np.array([self._slot_of.setdefault(key, len(self._slot_of))])
        at = self.episodes.locate(slot)
        is_open, quiet = bool(at[0] >= 0), self.rule.episode_quiet_steps
        anomaly = self._anomaly(view, one, who, is_sure, key)
        if is_open and quiet:
            self.episodes.continue_at(at, view.step)
            onset = self.episodes.onset[int(slot[0])]
            was_sure = bool(self.episodes.raised[at[0]])
            known = set(onset.ranks)
            is_news = (is_sure and not was_sure) or (is_sure == was_sure and not set(anomaly.ranks) <= known)
            if not is_news:
                return []
            ended = self.episodes.raise_to(int(slot[0]), anomaly)
            self.episodes.raised[at[0]] = is_sure
            return [anomaly, self._end(ended, view, anomaly.id)]
        if not is_open:
            self.episodes.open(slot, view.step, np.array([is_sure]), [anomaly])
        return [anomaly]

    def _anomaly(self, view: StepView, one: Differing, who: list[tuple[int, ...]], is_sure: bool, key: str) -> Anomaly:
        tensor = view.tensors[one.index]
        accused = tuple(sorted({rank for ranks in who for rank in ranks}))
        holders = tuple(sorted({rank for ranks in one.members for rank in ranks}))
        rank = accused[0] if len(accused) == 1 else None
        text = wording.diverged(tensor.kind, tensor.name, one, who, is_sure)
        anomaly = tensor_anomaly(
            view, self.rule, tensor, "checksum", self.rule.severity, rank, None, None, float(len(who)),
            float(len(one.members)), math.nan, text, key,
        )  # fmt: skip
        named = anomaly_id(view.run, view.attempt, view.step, None, rank, f"{key}/{accused}/checksum", self.rule.name)
        return msgspec.structs.replace(anomaly, id=named, ranks=accused, group_mates=holders, score=1.0)
