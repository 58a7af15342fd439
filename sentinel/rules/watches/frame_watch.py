"""FrameWatch: a rule on frames that were left out because they say what is impossible."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from sentinel.anomaly import Anomaly, anomaly_id
from sentinel.detect.impossible import ImpossibleFrame
from sentinel.messages import IMPOSSIBLE
from sentinel.place import world_size_of
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches.watch import Watch
from sentinel.rules.watches.wording import ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import StepView


class FrameWatch(Watch):
    """All ranks of each step; one episode a rank. Frames that were left out, and ranks that contradict the others."""

    keeps_reported = True

    def __init__(self, rule: Rule, detector: ImpossibleFrame) -> None:
        super().__init__(rule, detector, "frames_left_out", "frames")

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the records of one step."""
        self.num_points += len(view.parts)
        texts: dict[int, list[str]] = {}
        for rank, health in view.health:
            if health.code == IMPOSSIBLE:
                texts.setdefault(rank, []).append(health.message)
        for rank, text in _of_another_world({rank: place.world_size for rank, place in view.places.items()}).items():
            texts.setdefault(rank, []).append(text)
        found = []
        for rank, said in texts.items():
            key = np.array([rank], dtype=np.int64)
            at = self.episodes.locate(key)
            if at[0] >= 0:
                self.episodes.continue_at(at, view.step)
            else:
                found.append(self._anomaly(view, rank, said))
                self.episodes.open(key, view.step, np.array([True]), found[-1:])
        return [*found, *self.quiet(view)]

    def _anomaly(self, view: StepView, rank: int, said: list[str]) -> Anomaly:
        place = view.places.get(rank)
        more = f" ({len(said)} such frames so far)" if len(said) > 1 else ""
        return Anomaly(
            id=anomaly_id(view.run, view.attempt, view.step, None, rank, "frames", self.rule.name),
            run=view.run,
            attempt=view.attempt,
            rank=rank,
            ranks=(rank,),
            step=view.step,
            micro_step=None,
            pp_stage=0 if place is None else place.pp_rank,
            vpp_stage=0,
            call_id=None,
            tag_name="frames",
            kind="health",
            statistic=self.statistic,
            rule=self.rule.name,
            detector=self.rule.detector,
            severity=self.rule.severity,
            value=float(len(said)),
            score=1.0,
            message=said[0] + more,
            time=view.time,
        )

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the whole step."""
        plan.judge_whole(self.judge)

    def series_keys(self) -> object:
        """Return nothing: ranks are their own keys."""
        return []

    def take_series_keys(self, keys: object) -> None:
        """Take nothing back."""


def _of_another_world(reported: Mapping[int, int]) -> dict[int, str]:
    """Return rank -> what to say of it, where ranks do not agree how many they are. reported: rank -> its number."""
    if len(set(reported.values())) < 2:
        return {}
    size = world_size_of(Counter(reported.values()), max(reported))
    agree = [rank for rank, said in reported.items() if said == size]
    others = f"{ranks(agree)} {'says' if len(agree) == 1 else 'say'}"
    return {
        rank: f"rank {rank} says that the run has {said} ranks, {others} {size}; {size} are waited for. Its launcher gave "
        "it another WORLD_SIZE, or its memory is wrong: restart the rank; where it happens again check the machine's memory"
        for rank, said in reported.items()
        if said != size
    }
