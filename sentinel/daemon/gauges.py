"""What a run's gauges show: counted while judging, handed out as plain numbers."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel.anomaly import Anomaly
from sentinel.incident import Incident
from sentinel.rank_identity import RankIdentity
from sentinel.report.metrics import NormAggregate, RunMetrics

if TYPE_CHECKING:
    from sentinel.ingest.follow import RunFollower
    from sentinel.ingest.steps import StepAssembler
    from sentinel.step_view import Layout, StepView

WATCHED_FACT = "watched"
"""Name under which the journal keeps how many ranks and tensors the newest layout has."""
RECENT_POINTS = 2000
"""Newest values kept of each scalar, for the page and the API; a bound on memory: 128,000 points of 64 scalars."""
RECENT_SCALARS = 64
RECENT_STEP_TIMES = 9
"""Newest steps whose median duration is the run's: up to four odd ones (a compilation, a checkpoint) change nothing."""


class RunGauges:
    """Written by the loop alone; what it hands out is new each time, so that other threads may keep it."""

    def __init__(self, run: str, rules: Sequence[str]) -> None:
        self.metrics = RunMetrics(run=run, rules=tuple(rules))
        self._anomalies: Counter[tuple[str, str]] = Counter()
        self._health: Counter[str] = Counter()
        self.watched: dict[str, int] = {}
        """How many ranks and tensors the newest layout has."""
        self.late: tuple[int, ...] = ()
        """Ranks that the newest judged step was closed without, because they were late."""
        self._bad: dict[tuple[int, str], tuple[int, int]] = {}
        """(pipeline stage, kind) -> (NaN elements, infinite elements) so far."""
        self._layout: Layout | None = None
        self._groups: dict[tuple[int, str], np.ndarray] = {}
        self._step_times: deque[float] = deque(maxlen=RECENT_STEP_TIMES)
        self._recent: dict[str, deque[tuple[int, int, float]]] = {}

    def take_step(self, view: StepView, anomalies: Iterable[Anomaly], *, is_new: bool) -> None:
        """Count one judged step. is_new: false for a step judged again after a restart, which shows but does not count."""
        missing = view.decision.missing if view.decision is not None else {}
        metrics = self.metrics
        metrics.attempt, metrics.judged_step = view.attempt, view.step
        self.watched = {"ranks": len(view.places), "tensors": len(view.tensors)}
        self._take_scalars(view)
        num_compared, num_weights = view.layout.num_weights_compared
        metrics.weights = {"compared": num_compared, "unchecked": num_weights - num_compared}
        self.late = tuple(rank for rank, why in missing.items() if why == "late")
        if not is_new:
            return
        self._take_bad(view)
        metrics.num_steps_judged += 1
        metrics.num_records += view.num_rows
        if view.step_time_s > 0:
            self._step_times.append(view.step_time_s)
            metrics.step_time_s = statistics.median(self._step_times)
        if missing:
            metrics.num_steps_late += 1
        for part in view.parts:
            if part.end_step is not None:
                metrics.num_rows_folded += part.end_step.num_folded_rows
        for _, health in view.health:
            self._health[health.code] += health.count
        scores = [one.score for one in anomalies if one.score is not None]
        metrics.top_scores = tuple(sorted(scores, reverse=True)[:16])
        metrics.health = dict(self._health)
        self.take_anomalies(anomalies)

    def take_anomalies(self, anomalies: Iterable[Anomaly]) -> None:
        """Count onsets."""
        for one in anomalies:
            if one.event == "onset":
                self._anomalies[one.rule, one.severity.value] += 1
        self.metrics.anomalies = dict(self._anomalies)

    def _take_scalars(self, view: StepView) -> None:
        self.metrics.scalars = {name: scalar.mean for name, scalar in view.scalars.items()}
        for name, scalar in view.scalars.items():
            points = self._recent.get(name)
            if points is None:
                if len(self._recent) >= RECENT_SCALARS:
                    continue
                points = self._recent[name] = deque(maxlen=RECENT_POINTS)
            points.append((view.attempt, view.step, scalar.mean))

    def take_norms(self, view: StepView) -> None:
        """Aggregate the norms of the newest judged step, by pipeline stage and kind; once a batch of steps is enough."""
        norms = view.moments.statistic("norm")
        is_there = view.present & np.isfinite(norms)
        shown = []
        for (stage, kind), at in self._groups_of(view).items():
            values = norms[at[is_there[at]]]
            num_nan, num_inf = self._bad.get((stage, kind), (0, 0))
            if not len(values) and not num_nan and not num_inf:
                continue
            shown.append(
                NormAggregate(
                    pp_stage=stage,
                    kind=kind,
                    min=float(values.min()) if len(values) else math.nan,
                    mean=float(values.mean()) if len(values) else math.nan,
                    max=float(values.max()) if len(values) else math.nan,
                    num_nan_total=num_nan,
                    num_inf_total=num_inf,
                )
            )
        self.metrics.norms = tuple(shown)

    def _groups_of(self, view: StepView) -> dict[tuple[int, str], np.ndarray]:
        """Return (pipeline stage, kind) -> indices of its tensors; the same layout is asked for every step."""
        if self._layout is not view.layout:
            groups: dict[tuple[int, str], list[int]] = {}
            for tensor in view.tensors:
                groups.setdefault((tensor.pp_stage, tensor.kind), []).append(tensor.index)
            self._layout = view.layout
            self._groups = {key: np.array(at, np.int64) for key, at in sorted(groups.items())}
        return self._groups

    def _take_bad(self, view: StepView) -> None:
        """Count the non-finite elements of a step."""
        view = view.with_bad_rows()
        bad = view.bad_rows
        if len(bad):
            bad = bad[view.row_logical[bad] >= 0]
        if not len(bad):
            return
        num_nan, num_inf = np.zeros(len(view.tensors), np.int64), np.zeros(len(view.tensors), np.int64)
        rows, logical = view.rows, view.row_logical[bad]
        np.add.at(num_nan, logical, rows["num_nan"][bad])
        np.add.at(num_inf, logical, rows["num_pos_inf"][bad] + rows["num_neg_inf"][bad])
        for key, at in self._groups_of(view).items():
            nans, infs = self._bad.get(key, (0, 0))
            self._bad[key] = (nans + int(num_nan[at].sum()), infs + int(num_inf[at].sum()))

    @property
    def replica_words(self) -> str:
        """Say of how many weights the copies are compared; that none can be is not "ok"."""
        num_compared, num_unchecked = (self.metrics.weights.get(state, 0) for state in ("compared", "unchecked"))
        if not num_compared + num_unchecked:
            return "cannot be checked: no weights were measured yet"
        if not num_compared:
            return f"cannot be checked: of {num_unchecked} weights no rank holds a copy of what another one holds"
        rest = f"; {num_unchecked} cannot be checked, they have one copy" if num_unchecked else ""
        return f"{num_compared} weights are compared with their copies{rest}"

    def take_incidents(self, incidents: Iterable[Incident]) -> None:
        """Show which incidents are open."""
        self.metrics.open_incidents = dict(Counter(one.severity.value for one in incidents))

    def take_progress(self, follower: RunFollower, assembler: StepAssembler) -> None:
        """Take note of what the spool brought: frames, ranks, the newest step."""
        metrics = self.metrics
        metrics.newest_step = assembler.newest_step if assembler.newest_step >= 0 else None
        newest = max((incarnation.last_wall_ns for incarnation in follower.incarnations.values()), default=0)
        metrics.last_record_time = newest / 1e9 if newest else None
        places = [
            incarnation.descriptor.place
            for incarnation in follower.incarnations.values()
            if incarnation.descriptor is not None
        ]
        self._take_place(follower)
        metrics.num_ranks_expected = places[-1].world_size if places else 0
        metrics.num_frames = sum(incarnation.num_frames for incarnation in follower.incarnations.values())
        metrics.num_frames_duplicate = follower.num_duplicates
        metrics.num_frames_missing = follower.num_lost
        metrics.num_rows_late = assembler.num_late_rows_total
        metrics.num_rows_dropped, metrics.num_steps_dropped = assembler.losses.num_rows, assembler.losses.num_steps_gone
        metrics.frame_faults = {
            "torn": follower.num_torn, "corrupt": follower.num_corrupt + follower.num_undecodable,
            "foreign": follower.num_foreign,
        }  # fmt: skip

    def _take_place(self, follower: RunFollower) -> None:
        """Say where the run trains: of the lowest rank that writes, the newest of its processes."""
        described = [one for one in follower.incarnations.values() if one.descriptor is not None]
        if not described:
            return
        lowest = min(described, key=lambda one: (one.rank, -one.last_wall_ns))
        assert lowest.descriptor is not None
        said, metrics = lowest.descriptor.environment, self.metrics
        identity = RankIdentity.reported_by(lowest.rank, said)
        metrics.host, metrics.pod, metrics.job_id = identity.node or identity.host, identity.pod, identity.job
        metrics.torch = said.get("torch", "")

    def recent(self, name: str | None) -> list[tuple[str, list[tuple[int, int, float]]]]:
        """Return (scalar, [(attempt, step, value)]) oldest first; of all scalars when `name` is None."""
        return [(one, list(points)) for one, points in list(self._recent.items()) if name in (None, one)]


def progress_of(metrics: RunMetrics) -> dict[str, Any]:
    """Return where a run stands, for the API."""
    return {
        "attempt": metrics.attempt,
        "newest_step": metrics.newest_step,
        "judged_step": metrics.judged_step,
        "ranks": {"expected": metrics.num_ranks_expected, **metrics.ranks},
        "scalars": dict(metrics.scalars),
        "step_time_s": metrics.step_time_s,
        "last_record_time": metrics.last_record_time,
        "open_incidents": dict(metrics.open_incidents),
        "num_steps_judged": metrics.num_steps_judged,
        "is_monitoring": metrics.is_monitoring,
    }
