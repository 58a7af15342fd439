"""Engine: a rule pack at work. One closed step in, its anomalies out; whole arrays, no record by record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly
from sentinel.detect import known_detectors, state_bytes
from sentinel.errors import RuleError
from sentinel.rules.guarded_detector import Guarded
from sentinel.rules.language.schema import Pack
from sentinel.rules.watches.binding import watches_of_pack
from sentinel.rules.watches.layout_plan import LayoutPlan
from sentinel.rules.watches.new_start import begins_anew
from sentinel.rules.watches.scalar_step import ScalarStep
from sentinel.rules.watches.scale_search import ScaleSearch, written_down_only
from sentinel.rules.watches.series_index import SeriesIndex, SeriesSelection
from sentinel.rules.watches.tensor_watch import TensorWatch
from sentinel.rules.watches.zero_loss import well_beside_the_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sentinel.decision import RankFacts, Tick
    from sentinel.step_view import Layout, StepView

SNAPSHOT_VERSION = 5
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
        self._watches = watches_of_pack(pack, self._detectors)
        self._series = SeriesIndex()
        self._plans: list[LayoutPlan] = []
        self._scalars = ScalarStep(self._watches)
        self._attempt: int | None = None
        self._last_step = -1
        self._search = ScaleSearch()
        self.num_steps = 0
        """Steps judged."""
        self.num_rows_judged = 0
        """Rows judged, all steps: must equal the rows that ranks sent."""
        self.settled: tuple[str, ...] = ()
        """Ids of the onsets whose series settled at a new level in the last step judged."""
        self.num_left_out = 0
        """Anomalies of the newest step of which no record was made, for they are too many."""

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
        reference runs that are the run itself, do not follow it, or lack what it logs."""
        groups = [text for watch in self._watches for text in watch.blind]
        return [*dict.fromkeys(groups), *self.failures]

    @property
    def row_kinds(self) -> frozenset[str]:
        """Kinds of which some rule looks at each rank's own rows, in every step."""
        return frozenset().union(*(watch.row_kinds for watch in self._watches))

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
        if self.num_left_out:
            for watch in self._watches:
                watch.num_left_out = 0
        if self._attempt is not None and view.attempt != self._attempt:
            for watch in self._watches:
                found.extend(watch.stop(view))
            if begins_anew(view, self._last_step):
                self._forget()
        self._attempt, self._last_step = view.attempt, view.step
        plan = self._plan_for(view.layout)
        # A statistic over what is invalid (NaN in, NaN out) is no news: the counts say it.
        with np.errstate(all="ignore"):
            found += plan.series(view)
            found += self._scalars.judge(view)
            found += plan.whole(view)
        if self._search.see(view):
            found = written_down_only(view, found)
        if found:
            found = well_beside_the_step(view, found)
        self.num_steps += 1
        self.num_rows_judged += view.num_rows
        self.num_left_out = sum(watch.num_left_out for watch in self._watches) if found else 0
        self.settled = tuple([one for watch in self._watches if watch.settled for one in watch.settled])
        return found

    def ongoing(self, step: int) -> list[str]:
        """Return the ids of the onsets whose series are anomalous in `step`, the newest judged; few of a flood."""
        return [one for watch in self._watches if watch.episodes.onset for one in watch.episodes.ongoing(step)]

    def has_news(self, ranks: Sequence[RankFacts], now: float) -> bool:
        """Return whether any rule would say something of the ranks at `now`: then, and only then, a tick is due."""
        accused = self._accused
        return any(watch.has_news(ranks, now, accused) for watch in self._watches)

    @property
    def stale_ranks(self) -> frozenset[int]:
        """Ranks that a liveness rule blames just now."""
        return frozenset(rank for watch in self._watches for rank in watch.blamed_ranks)

    def judge_tick(self, tick: Tick) -> list[Anomaly]:
        """Return the anomalies of one moment: onsets and ends of what depends on time."""
        accused = self._accused
        found = [one for watch in self._watches for one in watch.judge_tick(tick, accused)]
        if self.stale_ranks:
            newest = max(one.step for one in tick.ranks)
            for watch in self._watches:
                watch.stand_still(newest)
        return found

    @property
    def _accused(self) -> frozenset[int]:
        return frozenset(rank for watch in self._watches for rank in watch.accused_ranks)

    def reload(self, pack: Pack) -> None:
        """Judge by `pack` from the next step on. Rules whose detector, args and statistic stay keep their state."""
        old = {watch.identity: watch for watch in self._watches}
        watches = watches_of_pack(pack, self._detectors)
        for watch in watches:
            if watch.identity in old:
                watch.take_over(old[watch.identity])
        self.pack, self._watches, self._plans = pack, watches, []
        self._scalars = ScalarStep(watches)

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
        self._scalars = ScalarStep(self._watches)

    def _forget(self) -> None:
        """Begin all baselines anew; what was reported of ranks and their ends stays reported."""
        kept = {one.identity: one for one in self._watches if one.keeps_reported}
        fresh = watches_of_pack(self.pack, self._detectors)
        for new, old in zip(fresh, self._watches, strict=True):
            new.num_points = old.num_points
        self._watches = [kept.get(one.identity, one) for one in fresh]
        self._plans, self._scalars = [], ScalarStep(self._watches)

    def _plan_for(self, layout: Layout) -> LayoutPlan:
        for at in range(len(self._plans) - 1, -1, -1):
            if self._plans[at].layout is layout:
                if at + 1 < len(self._plans):  # What was needed last goes last.
                    self._plans.append(self._plans.pop(at))
                return self._plans[-1]
        plan = LayoutPlan(layout, SeriesSelection(layout, self._series), self._watches)
        self._plans = [*self._plans[-(MAX_LAYOUTS - 1) :], plan]
        return plan
