"""RankEpisodes: watches that hold ranks against one another, whose single steps are written down before they last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sentinel.anomaly import Anomaly, Severity
from sentinel.detect import Scores
from sentinel.rules.watches.watch import SEVERAL, Watch

if TYPE_CHECKING:
    from sentinel.step_view import StepView


class RankEpisodes(Watch):
    """One episode a rank and quantity: `info` for one step that is far out, the rule's severity once it lasts."""

    def _anomalous(self, scores: Scores) -> np.ndarray:
        """Return the positions of the members that are anomalous, or that one step alone is worth writing down for."""
        is_anomalous = scores.score >= 1.0
        if "alone" in scores.evidence:
            is_anomalous = is_anomalous | (scores.evidence["alone"] >= 1.0)
            if len(self.episodes):
                is_anomalous = is_anomalous | scores.evidence["is_out"]
        at: np.ndarray = np.flatnonzero(is_anomalous)
        return at

    def _onsets(
        self, view: StepView, slots: np.ndarray, at: np.ndarray, scores: Scores, make: Callable[[int, Severity], Anomaly]
    ) -> list[Anomaly]:
        """Return the onset records of what is news, and the ends of the `info` records that a graver one goes on from.

        slots: [members] the series of each; at: positions of the anomalous ones, by rising slot; make: the record of the
        member at a position, of a severity.
        """
        step, quiet = view.step, self.rule.episode_quiet_steps
        alone = scores.evidence.get("alone")
        known = self.episodes.locate(slots[at])
        self.episodes.continue_at(known[known >= 0], step)
        was_raised = [bool(self.episodes.raised[one]) if one >= 0 else False for one in known.tolist()]
        found: list[Anomaly] = []
        fresh: list[tuple[int, bool, Anomaly]] = []
        for one, is_open, was in zip(at.tolist(), (known >= 0).tolist(), was_raised, strict=True):
            full = bool(scores.score[one] >= 1.0)
            if not full and (is_open or alone is None or alone[one] < 1.0):
                continue
            is_reported = is_open and quiet and (was or self.rule.severity is Severity.INFO)
            onset = self.episodes.onset[int(slots[one])] if is_reported else None
            if onset is not None and scores.score[one] <= (onset.score or 0.0):
                continue
            anomaly = make(one, self.rule.severity if full else Severity.INFO)
            if onset is not None and not anomaly.excess >= SEVERAL * onset.excess > 0.0:
                continue
            found.append(anomaly)
            if is_open and quiet:
                found.append(self._end(self.episodes.raise_to(int(slots[one]), anomaly), view, anomaly.id))
            elif not is_open:
                fresh.append((int(slots[one]), full, anomaly))
        if fresh:
            keys = np.array([key for key, _, _ in fresh], dtype=np.int64)
            self.episodes.open(keys, step, np.array([full for _, full, _ in fresh]), [one for _, _, one in fresh])
        return found
