"""Engine: a rule pack at work. One closed step in, its anomalies out; whole arrays, no record by record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel import native
from sentinel.anomaly import Anomaly
from sentinel.detect import GroupDetector, LivenessDetector, RunEnded, SeriesDetector, known_detectors, state_bytes
from sentinel.detect.dotted import why_not
from sentinel.detect.forms import Form
from sentinel.detect.impossible import ImpossibleFrame
from sentinel.detect.lost_rows import LostRows
from sentinel.errors import RuleError
from sentinel.moments import raw_statistic
from sentinel.record import STATISTICS
from sentinel.rules.guard import Guarded
from sentinel.rules.language.building import build_detector
from sentinel.rules.language.schema import Pack, Rule
from sentinel.rules.watches.aggregate_watch import AggregateWatch, Merged
from sentinel.rules.watches.compiled_plan import NO_HITS, CompiledPlan
from sentinel.rules.watches.end_watch import EndWatch
from sentinel.rules.watches.fast_path import quick_of
from sentinel.rules.watches.frame_watch import FrameWatch
from sentinel.rules.watches.liveness_watch import LivenessWatch
from sentinel.rules.watches.lost_rows_watch import LossWatch
from sentinel.rules.watches.new_start import begins_anew
from sentinel.rules.watches.own_row_watch import OwnRowWatch
from sentinel.rules.watches.rank_watch import RankWatch
from sentinel.rules.watches.replica_watch import ReplicaWatch
from sentinel.rules.watches.row_watch import RowWatch
from sentinel.rules.watches.scalar_step import ScalarStep
from sentinel.rules.watches.scalar_watch import ScalarWatch
from sentinel.rules.watches.scale_search import ScaleSearch, written_down_only
from sentinel.rules.watches.series_index import Selection, SeriesIndex
from sentinel.rules.watches.skew_watch import SkewWatch
from sentinel.rules.watches.tensor_watch import RowLookup, TensorWatch
from sentinel.rules.watches.watch import BACKGROUND_RATE, Watch, WatchPlan
from sentinel.rules.watches.zero_loss import well_beside_the_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sentinel.decision import RankFacts, Tick
    from sentinel.step_view import Layout, StepView

SNAPSHOT_VERSION = 4
MAX_LAYOUTS = 8
"""Layouts whose plans are kept: a run has one, or two for a while when it changes shape."""


class Engine:
    """Judges the steps of one run, in order. Pure: no clock, no I/O; the same steps give the same anomalies.

    Nothing is capped here: `judge` returns all records of a step, in no particular order; the caller orders, then caps.
    """

    def __init__(self, pack: Pack, *, run: str = "", detectors: Mapping[str, type[Any]] | None = None) -> None:
        self.pack = pack
        self.run = run
        """For people; anomalies carry the run of their view."""
        self._detectors = detectors if detectors is not None else known_detectors()
        self._watches = self._build(pack)
        self._series = SeriesIndex()
        self._plans: list[_LayoutPlan] = []
        self._scalars = _scalars_of(self._watches)
        self._attempt: int | None = None
        self._last_step = -1
        self._search = ScaleSearch()
        self.num_steps = 0
        """Steps judged."""
        self.num_rows_judged = 0
        """Rows judged, all steps: must equal the rows that ranks sent."""
        self.settled: tuple[str, ...] = ()
        """Ids of the onsets whose series settled at a new level in the last step judged."""

    @property
    def escalating(self) -> frozenset[str]:
        """Names of the rules that ask for more monitoring."""
        return frozenset(rule.name for rule in self.pack.rules if "escalate" in rule.actions)

    @property
    def num_points_judged(self) -> dict[str, int]:
        """Rule -> points it scored so far: rows, tensors x statistics, or scalars."""
        points = dict.fromkeys((rule.name for rule in self.pack.rules), 0)
        for watch in self._watches:
            points[watch.rule.name] += watch.num_points
        return points

    @property
    def state_bytes_per_tensor(self) -> float:
        """Bytes of detector state a logical tensor has, all rules together; scalars, which keep windows, left out."""
        watches = [watch for watch in self._watches if isinstance(watch, TensorWatch)]
        tensors = np.unique(np.concatenate([watch.series for watch in watches])) if watches else np.zeros(0)
        return sum(state_bytes(watch.state) for watch in watches) / max(len(tensors), 1)

    @property
    def blind_groups(self) -> list[str]:
        """What rules are blind to, in words: groups of which nothing can be merged, detectors of others that failed,
        sister runs that are the run itself, do not follow it, or lack what it logs."""
        merged = {watch.rule.name: watch.merged for watch in self._watches if isinstance(watch, AggregateWatch)}
        beside = [text for watch in self._watches if isinstance(watch, ScalarWatch) for text in watch.blind]
        return [f'rule "{rule}": {one.blind}' for rule, one in merged.items() if one.blind] + self.failures + beside

    @property
    def failures(self) -> list[str]:
        """Which detectors of others failed, so that their rules are off, and why."""
        return sorted({one.problem for watch in self._watches if isinstance(one := watch.detector, Guarded) and one.problem})

    def judge(self, view: StepView) -> list[Anomaly]:
        """Return the anomalies of one closed step: onsets, and ends of episodes; unordered and uncapped."""
        found: list[Anomaly] = []
        if self.settled:
            for watch in self._watches:
                watch.settled = []
        if self._attempt is not None and view.attempt != self._attempt:
            for watch in self._watches:
                found.extend(watch.stop(view))
            if begins_anew(view, self._last_step):
                self._forget()
        self._attempt, self._last_step = view.attempt, view.step
        plan = self._plan_for(view.layout)
        rows = RowLookup(view)
        # A statistic over what is invalid (NaN in, NaN out) is no news: the counts say it.
        with np.errstate(all="ignore"):
            if plan.programme is not None:
                found.extend(self._judge_forms(view, plan.programme, rows))
            if plan.tensors:
                columns = _Columns(view)
                for watch, its in plan.tensors:
                    column = columns.raw(watch.statistic) if watch.raw else columns.clean(watch.statistic)
                    found += watch.judge(view, its, column, view.present, rows)
            for row_watch, its in plan.rows:
                found += row_watch.judge(view, its)
            found += self._scalars.judge(view)
            for judge in plan.whole:
                found += judge(view)
            for learn in plan.learn:
                learn(view)
        if self._search.see(view):
            found = written_down_only(view, found)
        if found:
            found = well_beside_the_step(view, found)
        self.num_steps += 1
        self.num_rows_judged += view.num_rows
        self.settled = tuple([one for watch in self._watches if watch.settled for one in watch.settled])
        return found

    def ongoing(self, step: int) -> list[str]:
        """Return the ids of the onsets whose series are anomalous in `step`, the newest judged; few of a flood."""
        return [one for watch in self._watches if watch.episodes.onset for one in watch.episodes.ongoing(step)]

    def has_news(self, ranks: Sequence[RankFacts], now: float) -> bool:
        """Return whether any rule would say something of the ranks at `now`: then, and only then, a tick is due."""
        if any(isinstance(watch, LivenessWatch) and watch.has_news(ranks, now) for watch in self._watches):
            return True
        accused = self._accused
        return any(isinstance(watch, EndWatch) and watch.has_news(ranks, now, accused) for watch in self._watches)

    @property
    def stale_ranks(self) -> frozenset[int]:
        """Ranks that a liveness rule blames just now."""
        return frozenset(rank for watch in self._watches if isinstance(watch, LivenessWatch) for rank in watch.blamed_ranks)

    def judge_tick(self, tick: Tick) -> list[Anomaly]:
        """Return the anomalies of one moment: onsets and ends of what depends on time."""
        accused = self._accused
        found = [one for watch in self._watches if isinstance(watch, LivenessWatch) for one in watch.judge(tick)]
        if self.stale_ranks:
            for watch in self._watches:
                if isinstance(watch, RankWatch):
                    watch.stand_still(max(one.step for one in tick.ranks))
        return found + [one for watch in self._watches if isinstance(watch, EndWatch) for one in watch.judge(tick, accused)]

    @property
    def _accused(self) -> frozenset[int]:
        watches = (watch for watch in self._watches if isinstance(watch, LivenessWatch))
        return frozenset(rank for watch in watches for rank in watch.accused_ranks)

    def reload(self, pack: Pack) -> None:
        """Judge by `pack` from the next step on. Rules whose detector, args and statistic stay keep their state."""
        old = {watch.identity: watch for watch in self._watches}
        watches = self._build(pack)
        for watch in watches:
            if watch.identity in old:
                watch.take_over(old[watch.identity])
        self.pack, self._watches, self._plans = pack, watches, []
        self._scalars = _scalars_of(watches)

    def snapshot(self) -> bytes:
        """Return the whole state; an engine of the same pack that restores it goes on exactly as this one would."""
        return msgspec.msgpack.encode(
            {
                "version": SNAPSHOT_VERSION,
                "attempt": self._attempt,
                "last_step": self._last_step,
                "scale_search": self._search,
                "num_steps": self.num_steps,
                "num_rows_judged": self.num_rows_judged,
                "settled": list(self.settled),
                "series": self._series.to_bytes(),
                "watches": {watch.identity: watch.to_dict() for watch in self._watches},
            }
        )

    def restore(self, snapshot: bytes) -> None:
        """Go on where `snapshot` was taken; rules it does not know begin anew."""
        data = msgspec.msgpack.decode(snapshot)
        if data.get("version") != SNAPSHOT_VERSION:
            raise RuleError(f"engine snapshot of version {data.get('version')}, expected {SNAPSHOT_VERSION}; replay the run")
        self._attempt = data["attempt"]
        # An older version knew of the first steps alone.
        older = {"attempt": -1 if self._attempt is None else self._attempt, "num_first": data.get("num_skipped", -1)}
        self._search = msgspec.convert(data.get("scale_search", older), ScaleSearch)
        self._last_step = data.get("last_step", -1)
        self.num_steps, self.num_rows_judged = data["num_steps"], data["num_rows_judged"]
        self.settled = tuple(data["settled"])
        self._series.take_bytes(data["series"])
        for watch in self._watches:
            if watch.identity in data["watches"]:
                watch.take_dict(data["watches"][watch.identity])
        self._plans = []
        self._scalars = _scalars_of(self._watches)

    def _forget(self) -> None:
        """Begin all baselines anew; what was told of ranks and their ends stays told."""
        told = LivenessWatch | EndWatch | LossWatch | FrameWatch
        kept = {one.identity: one for one in self._watches if isinstance(one, told)}
        fresh = self._build(self.pack)
        for new, old in zip(fresh, self._watches, strict=True):
            new.num_points = old.num_points
        self._watches = [kept.get(one.identity, one) for one in fresh]
        self._plans, self._scalars = [], _scalars_of(self._watches)

    def _build(self, pack: Pack) -> list[Watch]:
        watches: list[Watch] = []
        for rule in pack.rules:
            if rule.detector not in self._detectors:
                why = why_not(rule.detector, self._detectors) or f'unknown detector "{rule.detector}"'
                raise RuleError(f'rule "{rule.name}": {why}')
            detector = build_detector(rule, self._detectors)
            watches.extend(_watches_of(rule, detector))
        return watches

    def _judge_forms(self, view: StepView, programme: CompiledPlan, rows: RowLookup) -> list[Anomaly]:
        """Judge all watches that are forms in one call; only those with something to say cost Python."""
        found: list[Anomaly] = []
        stats, present, is_bad = view.stats, view.present, view.is_bad
        hits = programme.judge(stats, present, is_bad, missing_scale(view))
        of_watch = iter(_apart(hits, len(programme.watches)) if len(hits) else ())
        for watch, its, num_points in zip(programme.watches, programme.plans, programme.num_points, strict=True):
            watch.num_points += num_points
            its_hits = next(of_watch, NO_HITS)
            if len(its_hits):
                found += watch.judge_hits(view, its, its_hits, present, rows)
            elif not num_points:
                found += watch.quiet(view)
            elif watch.episodes.onset:
                found += watch.judge_healthy(view, its, present)
            else:
                watch.background *= 1.0 - BACKGROUND_RATE
        return found

    def _plan_for(self, layout: Layout) -> _LayoutPlan:
        for at in range(len(self._plans) - 1, -1, -1):
            if self._plans[at].layout is layout:
                if at + 1 < len(self._plans):  # What was needed last goes last.
                    self._plans.append(self._plans.pop(at))
                return self._plans[-1]
        selection = Selection(layout, self._series)
        forms: list[tuple[TensorWatch, WatchPlan]] = []
        plan = _LayoutPlan(layout)
        for watch in self._watches:
            if isinstance(watch, TensorWatch):
                its = watch.plan(selection)
                is_formed = watch.form is not None and native.judge_forms is not None
                if len(its.index):
                    (forms if is_formed else plan.tensors).append((watch, its))
            elif isinstance(watch, RowWatch | OwnRowWatch):
                plan.rows.append((watch, watch.plan(selection)))
            elif isinstance(watch, LivenessWatch):
                plan.learn.append(watch.learn)
            elif isinstance(watch, ReplicaWatch | RankWatch | SkewWatch | AggregateWatch | LossWatch | FrameWatch):
                plan.whole.append(watch.judge)
            elif not isinstance(watch, ScalarWatch | EndWatch):
                raise AssertionError(f"{type(watch).__name__} of rule {watch.rule.name} is judged nowhere")
        if forms:
            plan.programme = CompiledPlan([watch for watch, _ in forms], [its for _, its in forms])
        self._plans = [*self._plans[-(MAX_LAYOUTS - 1) :], plan]
        return plan


class _LayoutPlan(msgspec.Struct):
    """What each watch looks at in one layout."""

    layout: Layout
    programme: CompiledPlan | None = None
    """The watches that are forms; None: there is no such watch, or no C library."""
    tensors: list[tuple[TensorWatch, WatchPlan]] = []
    """The other watches of tensors."""
    rows: list[tuple[RowWatch | OwnRowWatch, WatchPlan]] = []
    whole: list[Callable[[StepView], list[Anomaly]]] = []
    """What judges of watches that look at the whole step."""
    learn: list[Callable[[StepView], None]] = []
    """What learns from a step and judges at other times."""


def _scalars_of(watches: Sequence[Watch]) -> ScalarStep:
    return ScalarStep([watch for watch in watches if isinstance(watch, ScalarWatch)])


def _watches_of(
    rule: Rule, detector: SeriesDetector | GroupDetector | LivenessDetector | RunEnded | LostRows | ImpossibleFrame
) -> list[Watch]:
    """Return the watches of one rule: rows for detectors without a past, series for the others, scalars; groups."""
    watches: list[Watch] = []
    if isinstance(detector, RunEnded):
        return [EndWatch(rule, detector)]
    if isinstance(detector, GroupDetector):
        if detector.over == "peers":
            named = rule.statistics(tuple(detector.statistics))
            return [SkewWatch(rule, detector, one, has_scalars=at == 0) for at, one in enumerate(named)]
        return [ReplicaWatch(rule, detector) if detector.over == "copies" else RankWatch(rule, detector)]
    if isinstance(detector, LivenessDetector):
        return [LivenessWatch(rule, detector)]
    if isinstance(detector, LostRows):
        return [LossWatch(rule, detector)]
    if isinstance(detector, ImpossibleFrame):
        return [FrameWatch(rule, detector)]
    kinds = frozenset(kind for kind in rule.match.kind if kind != "scalar")
    if rule.match.aggregate:
        merged = Merged(rule, kinds)
        for statistic in rule.statistics(tuple(detector.statistics)):
            fitted = detector.for_statistic(statistic) if hasattr(detector, "for_statistic") else detector
            watches.append(AggregateWatch(rule, fitted, statistic, merged))
        return watches
    if kinds:
        statistics = rule.statistics(tuple(detector.statistics))
        if not detector.state(1):
            only_counts = getattr(detector, "raw_values", False) and getattr(detector, "threshold", None) is None
            first = statistics[:1] if only_counts and not getattr(detector, "compat", "") else statistics
            watches.extend(RowWatch(rule, detector, statistic, kinds) for statistic in first)
        else:
            for statistic in statistics:
                fitted = detector.for_statistic(statistic) if hasattr(detector, "for_statistic") else detector
                if getattr(detector, "compat", ""):
                    watches.append(OwnRowWatch(rule, fitted, statistic, kinds))
                else:
                    watches.append(TensorWatch(rule, fitted, statistic, kinds, _form_of(fitted, statistic)))
    if "scalar" in rule.match.kind and (rule.match.kind == ("scalar",) or getattr(detector, "raw_values", False)):
        fitted = detector.for_statistic("value") if hasattr(detector, "for_statistic") else detector
        scalars = ScalarWatch(rule, fitted)
        if getattr(rule, "reference", None) is None:
            scalars.quick = quick_of(fitted)
        watches.append(scalars)
    return watches


def _form_of(detector: Any, statistic: str) -> Form | None:
    """Return the form that a detector is for a statistic; None where it is none: then it scores and learns itself."""
    if not hasattr(detector, "form") or bool(getattr(detector, "raw_values", False)):
        return None
    form = detector.form(statistic) if statistic in STATISTICS else None
    return form if isinstance(form, Form) else None


def _apart(hits: np.ndarray, num_watches: int) -> list[np.ndarray]:
    """Return the hits of each watch, in their order."""
    ends = np.cumsum(np.bincount(hits["form"], minlength=num_watches))
    return np.split(hits[np.argsort(hits["form"], kind="stable")], ends[:-1])


class _Columns:
    """The statistics of one step, each formed once, when the first watch asks for it."""

    def __init__(self, view: StepView) -> None:
        self._view = view
        self._clean: dict[str, np.ndarray] = {}
        self._raw: dict[str, np.ndarray] = {}
        self._bad: np.ndarray | None = None

    def clean(self, statistic: str) -> np.ndarray:
        """Return the statistic, NaN for tensors with any non-finite element: what is left of them is no sample."""
        if statistic not in self._clean:
            values = np.asarray(self._view.moments.statistic(statistic), dtype=np.float64)
            if len(self._view.bad_rows):
                values = values.copy()
                bad = self._view.row_logical[self._view.bad_rows]
                values[bad[bad >= 0]] = np.nan
            scale = missing_scale(self._view) if statistic == "norm" else None
            if scale is not None:
                values = values * scale
            self._clean[statistic] = values
        return self._clean[statistic]

    def raw(self, statistic: str) -> np.ndarray:
        """Return the statistic as torch would give it, NaN and infinities in it."""
        if statistic not in self._raw:
            self._raw[statistic] = raw_statistic(self._view.stats, statistic)
        return self._raw[statistic]


def missing_scale(view: StepView) -> np.ndarray | None:
    """Return by tensor what its norm must be multiplied by for the ranks that a step closed without; None: none is missing.

    Shards are taken to be alike; a tensor of which each rank holds a copy is whole with any of them.
    """
    if len(view.parts) >= len(view.places):
        return None
    share = view.layout.held_share(frozenset(part.rank for part in view.parts))
    return np.asarray(1.0 / np.sqrt(share))
