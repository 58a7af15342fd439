"""RankWatch: a rule on the ranks of a step, held against one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.detect import GroupDetector, Scores
from sentinel.detect.group import StepPoints
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.anomaly_records import finite
from sentinel.rules.watches.rank_episodes import RankEpisodes

if TYPE_CHECKING:
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import RankStep, StepView

TRAIN = "train"


class RankWatch(RankEpisodes):
    """The ranks of each step, by how long they worked and how long they waited. One episode a rank.

    A step in which any rank evaluated or saved is not judged, nor is one in which ranks stood still, by turns or for each
    other: it is neither judged nor learned.
    """

    def __init__(self, rule: Rule, detector: GroupDetector) -> None:
        super().__init__(rule, detector, "busy_s", "ranks")
        self._slot_of: dict[tuple[int, int], int] = {}
        """(rank, size of the world): when the world changes, ranks do other work."""
        self._stood_until = -1
        """The newest step of the attempt in which ranks stood still, as another rule has reported; -1: none."""

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the whole step."""
        plan.judge_whole(self.judge)

    def series_keys(self) -> object:
        """Return the ranks in order of slots, and until which step ranks stood still."""
        return {"slots": [list(key) for key in self._slot_of], "stood_until": self._stood_until}

    def take_series_keys(self, keys: Any) -> None:
        """Take the ranks back."""
        # The snapshot of an older version has the slots alone.
        slots, self._stood_until = (keys, -1) if isinstance(keys, list) else (keys["slots"], keys["stood_until"])
        self._slot_of = {(rank, size): slot for slot, (rank, size) in enumerate(slots)}

    def stand_still(self, step: int) -> None:
        """Take in that ranks were reported as stale in a step: how long anybody worked or waited there, or before it,
        follows from that."""
        self._stood_until = max(self._stood_until, step)

    def stop(self, view: StepView) -> list[Anomaly]:
        """Return the end records of the open episodes: a new attempt began."""
        self._stood_until = -1
        return super().stop(view)

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the records of one step."""
        parts = [part for part in view.parts if part.rank in view.ended]
        ends = [part.end_step for part in parts if part.end_step is not None]
        if not parts or view.step <= self._stood_until or any(set(end.activities) - {TRAIN} for end in ends):
            return self.quiet(view) if len(self.episodes) else []
        # Plain logs, and trainers that tell no times: of every step there would be nothing to compare.
        if not any(end.step_time_s > 0 or end.wait_s >= 0 for end in ends):
            return self.quiet(view) if len(self.episodes) else []
        if len(view.places) == 1:
            # A group of one accuses nobody, and learns nothing that a larger world would go by.
            self.num_points += len(parts)
            return self.quiet(view) if len(self.episodes) else []
        keys = [(part.rank, part.descriptor.place.world_size) for part in parts]
        slots = np.array([self._slot_of.setdefault(key, len(self._slot_of)) for key in keys], dtype=np.int64)
        self._grow(len(self._slot_of))
        points = StepPoints(
            step_s=np.array([end.step_time_s if end.step_time_s > 0 else np.nan for end in ends]),
            wait_s=np.array([end.wait_s if end.wait_s >= 0 else np.nan for end in ends]),
        )
        stage = points["stage"] = np.array([part.descriptor.place.pp_rank for part in parts], dtype=np.int64)
        state, group = self._gather(slots), np.zeros(len(parts), dtype=np.int64)
        scores = self.detector.score(points, group, state)
        anomalous = scores.score >= 1.0
        at = self._anomalous(scores)
        if at.size:
            _ = scores.baseline
        self.detector.learn(points, group, state, anomalous)
        self._scatter(state, slots)
        self.num_points += len(parts)
        found = self._emit(view, parts, stage, scores, slots, at) if at.size else []
        return found + (self.quiet(view) if len(self.episodes) else [])

    def _emit(
        self, view: StepView, parts: list[RankStep], stage: np.ndarray, scores: Scores, slots: np.ndarray, at: np.ndarray
    ) -> list[Anomaly]:
        watched = self.rule.match.rank
        at = np.array([one for one in at if not watched or parts[one].rank in watched], dtype=np.int64)
        at = at[np.argsort(slots[at], kind="stable")]
        return self._onsets(
            view, slots, at, scores, lambda one, severity: self._anomaly(view, parts, stage, scores, one, severity)
        )

    def _anomaly(
        self, view: StepView, parts: list[RankStep], stage: np.ndarray, scores: Scores, at: int, severity: Severity
    ) -> Anomaly:
        part, evidence = parts[at], scores.evidence
        place = part.descriptor.place
        peers = [one.rank for one, of in zip(parts, stage.tolist(), strict=True) if of == stage[at] and one is not part]
        busy, usual = float(evidence["busy_s"][at]), float(scores.baseline[at])
        return Anomaly(
            id=anomaly_id(view.run, view.attempt, view.step, None, part.rank, f"rank {part.rank}/busy_s", self.rule.name),
            run=view.run,
            attempt=view.attempt,
            rank=part.rank,
            ranks=(part.rank,),
            step=view.step,
            micro_step=None,
            pp_stage=place.pp_rank,
            vpp_stage=0,
            call_id=None,
            tag_name="step",
            kind="health",
            statistic="busy_s",
            rule=self.rule.name,
            detector=self.rule.detector,
            severity=severity,
            value=busy,
            baseline=finite(usual),
            score=float(scores.score[at]),
            message=wording.slow(
                part.rank,
                busy,
                usual,
                float(evidence["ratio"][at]),
                float(evidence["wait_s"][at]),
                peers,
                is_alone=scores.score[at] < 1.0,
            ),
            group_mates=tuple(sorted([part.rank, *peers])),
            time=view.time,
            place=place.coordinates(),
            dp_size=place.dp_size,
            tp_size=place.tp_size,
            pp_size=place.pp_size,
            ep_size=place.ep_size,
        )
