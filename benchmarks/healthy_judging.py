"""A recorded training judged again by the real judging: what was said while it was healthy, and what after the fault."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from sentinel.anomaly import Anomaly, Severity
from sentinel.incident import Incident
from sentinel.ingest.merge import ClosedStep
from sentinel.judge.judge import Judge
from sentinel.judge.recorded import recorded_views
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Pack
from sentinel.store.run_paths import RunPaths


@dataclasses.dataclass
class JudgedStretch:
    """What judging one stretch of steps brought."""

    num_steps: int = 0
    num_rows: int = 0
    """Rows judged."""
    num_expected: int = 0
    """Rows that the ranks said they sent."""
    num_points: int = 0
    """Points scored, all rules: series x steps."""
    num_tensor_steps: int = 0
    """Logical tensors of which a step had a row, summed over steps."""
    onsets: list[Anomaly] = dataclasses.field(default_factory=list)
    paged: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """Incident -> step at which a page was due, and its title."""

    incidents: dict[str, Incident] = dataclasses.field(default_factory=dict)
    """Incident -> how it was told last."""

    def by_rule(self) -> Counter[tuple[str, str]]:
        """Return (rule, severity) -> onsets."""
        return Counter((one.rule, one.severity.value) for one in self.onsets)

    def num_of(self, severity: Severity) -> int:
        """Return the onsets of one severity."""
        return sum(one.severity is severity for one in self.onsets)


class Replay:
    """One judge, fed with recorded steps in order, as `sentinel replay --recompute` does."""

    def __init__(self, pack: Pack | None = None) -> None:
        self.judge = Judge(pack or load_pack())
        self._paged: set[str] = set()

    def take(self, views: Iterable[ClosedStep], said: JudgedStretch) -> JudgedStretch:
        """Judge these steps into `said`. AssertionError when a row that was sent was not judged."""
        rows, points = self.judge.num_rows_judged, sum(self.judge.num_points_judged.values())
        for view in views:
            judgement = self.judge.judge(view.decision, view)
            said.num_steps += 1
            said.num_expected += view.num_expected
            said.num_tensor_steps += int(view.present.sum())
            said.onsets.extend(one for one in judgement.anomalies if one.event == "onset")
            for incident in judgement.incidents:
                said.incidents[incident.id] = incident
                if incident.paged and incident.id not in self._paged:
                    self._paged.add(incident.id)
                    said.paged[incident.id] = (view.step, incident.title)
        said.num_rows += self.judge.num_rows_judged - rows
        said.num_points += sum(self.judge.num_points_judged.values()) - points
        assert said.num_rows == said.num_expected, f"{said.num_rows} rows judged, {said.num_expected} were sent"
        return said


def judge_recording(run_dir: Path, healthy_until: int, pack: Pack | None = None) -> tuple[JudgedStretch, JudgedStretch]:
    """Return what was said of the healthy steps, and of those from `healthy_until` on."""
    replay, healthy, faulty = Replay(pack), JudgedStretch(), JudgedStretch()
    for view, _ in recorded_views(RunPaths.of(run_dir), None, recompute=True):
        replay.take([view], faulty if view.step >= healthy_until else healthy)
    return healthy, faulty
