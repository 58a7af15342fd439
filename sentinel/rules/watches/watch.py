"""Watches: one rule on one statistic, over all the series it matches; state, episodes and corroboration live here."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, anomaly_id
from sentinel.detect import Scores, State, declared, grow
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.episodes import EndedEpisode, Episodes

if TYPE_CHECKING:
    from sentinel.decision import RankFacts, Tick
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import StepView

LASTING_STEPS = 3
"""Points in a row that corroborate a lone excursion, of which healthy runs have many."""
AGREEING_TENSORS = 3
"""Tensors of one rule and step that corroborate each other."""
SEVERAL = 3.0
"""Times the score of its onset from which an episode that goes on is reported again. Smaller: an explosion is reported at
nearly each step; larger: an episode that turns grave goes unnoticed."""
HIGHER = 1.5
"""Times the score of its onset at which a point of an open episode, after a pause, is reported again; set on the labelled
public logs: of two spikes within 20 steps the second was the one that people mark."""
BACKGROUND_RATE = 0.02
"""Weight of the newest step in a rule's usual number of lone excursions a step: a memory of 50 steps. Larger: a slow cascade
becomes usual before it is reported; smaller: a run that became restless is reported for longer."""


class WatchPlan(msgspec.Struct, frozen=True):
    """What one watch looks at in one layout."""

    index: np.ndarray
    """[watched] indices into the layout's tensors, rising."""
    slots: np.ndarray
    """[watched] places in the watch's state."""
    all_slots: bool
    """The watched tensors are the state's first series, in order: no gathering needed."""

    def index_of(self, slots: np.ndarray) -> np.ndarray:
        """Return the tensor of each place in the state, -1 where the layout has none."""
        if self.all_slots:
            known = slots < len(self.index)
            at = slots
        else:
            order = np.argsort(self.slots, kind="stable")
            at = np.searchsorted(self.slots[order], slots)
            known = at < len(order)
            at = order[np.where(known, at, 0)] if len(order) else at
            known = known & (self.slots[np.where(known, at, 0)] == slots) if len(order) else known
        return np.where(known, self.index[np.where(known, at, 0)], -1) if len(self.index) else np.full(len(slots), -1)


class Watch:
    """One rule on one statistic. Subclasses say what its series are, and when they are judged."""

    keeps_reported: ClassVar[bool] = False
    """When baselines begin anew it stays as it is: what it reported of ranks and their ends stays reported."""

    def __init__(self, rule: Rule, detector: Any, statistic: str, mode: str) -> None:
        """detector: of the contract that the subclass is for."""
        self.rule, self.detector, self.statistic, self.mode = rule, detector, statistic, mode
        self.declared = declared(detector)
        self.scorer: Any = detector
        """What scores and learns: the detector, or the vectorised algorithm that it is."""
        self.state: State = {}
        self.num_series = 0
        self.episodes = Episodes()
        self.background = 0.0
        """Lone excursions that a step of this watch usually has."""
        self.num_points = 0
        """Points judged so far."""
        self.settled: list[str] = []
        """Ids of the onsets that settled in this step."""
        self.num_left_out = 0
        """Anomalies of this step, beside new ones, of which no record was made: they are too many."""

    @property
    def identity(self) -> str:
        """What must be equal for the state to be kept over a reload: rule name, detector, args, statistic."""
        parts = [self.rule.name, self.rule.detector, self.statistic, self.mode]
        text = msgspec.json.encode([*parts, self.rule.args], order="sorted")
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    @property
    def row_kinds(self) -> frozenset[str]:
        """Kinds of which it looks at each rank's own rows, in every step."""
        return frozenset()

    # -- when it judges: subclasses say so, all others keep still ----------------------------------------------------

    def take_place(self, plan: LayoutPlan) -> None:
        """Take its place among those that judge the steps of a layout."""

    def has_news(self, ranks: Sequence[RankFacts], now: float, accused: Collection[int]) -> bool:
        """Return whether a tick of these facts would say anything; changes nothing that a judgement depends on.

        accused: ranks of which an open episode says that the others wait for them.
        """
        return False

    def judge_tick(self, tick: Tick, accused: Collection[int]) -> list[Anomaly]:
        """Return the records of one moment."""
        return []

    def stand_still(self, step: int) -> None:
        """Take in that ranks were reported as stale in a step."""

    @property
    def blamed_ranks(self) -> tuple[int, ...]:
        """Ranks that it blames for standing still just now."""
        return ()

    @property
    def accused_ranks(self) -> tuple[int, ...]:
        """Those of them for which somebody was called."""
        return ()

    @property
    def blind(self) -> list[str]:
        """What the rule is blind to, in words."""
        return []

    # -- series ------------------------------------------------------------------------------------------------------

    def _grow(self, num_series: int) -> None:
        if num_series > self.num_series:
            self.state = grow(self.scorer, self.state, num_series)
            self.num_series = num_series

    def _gather(self, slots: np.ndarray | slice | None) -> State:
        """Return the state of some series, by itself: who fails while it learns leaves the whole as it was."""
        if slots is None:
            return self.state
        return {
            name: array[slots].copy() if isinstance(slots, slice) else array[slots] for name, array in self.state.items()
        }

    def _scatter(self, part: State, slots: np.ndarray | slice | None) -> None:
        if slots is not None:
            for name, array in part.items():
                self.state[name][slots] = array

    # -- judging -----------------------------------------------------------------------------------------------------

    def _run(self, values: np.ndarray, slots: np.ndarray | None) -> tuple[Scores, np.ndarray, np.ndarray | None]:
        """Score, then learn; return scores (read for the anomalous), the anomalous points, and the settled ones."""
        part = self._gather(slots)
        scores = self.scorer.score(values, part)
        anomalous = scores.score >= 1.0
        if anomalous.any():
            _ = scores.baseline
        self.scorer.learn(values, part, anomalous)
        self._scatter(part, slots)
        self.num_points += len(values)
        settled = part.get("settled")
        return scores, anomalous, settled if settled is not None and settled.any() else None

    def _agree(self, num_tensors: int) -> bool:
        """Whether so many tensors in one step are more than what chance brings this rule; learns what is usual.

        A Poisson count with mean b exceeds b + 6 sqrt(b) + 2 less than once in a million steps, for any b.
        """
        need = max(AGREEING_TENSORS, math.ceil(self.background + 6.0 * math.sqrt(self.background) + 2.0))
        self.background += BACKGROUND_RATE * (min(num_tensors, need) - self.background)
        return num_tensors >= need

    def quiet(self, view: StepView) -> list[Anomaly]:
        """Return the end records of episodes that are over."""
        quiet_steps = self.rule.episode_quiet_steps
        if quiet_steps == 0:
            self.episodes.end_quiet(view.step, 1)
            return []
        return [self._end(one, view) for one in self.episodes.end_quiet(view.step, quiet_steps * view.stride)]

    def stop(self, view: StepView) -> list[Anomaly]:
        """Return the end records of all open episodes: a new attempt began."""
        ended = self.episodes.end_all()
        return [self._end(one, view) for one in ended] if self.rule.episode_quiet_steps else []

    def _end(self, ended: EndedEpisode, view: StepView | Tick, goes_on_as: str = "") -> Anomaly:
        onset = ended.onset
        if ended.settled:
            self.settled.append(onset.id)
        return msgspec.structs.replace(
            onset,
            id=anomaly_id(view.run, view.attempt, view.step, onset.micro_step, onset.rank, onset.id, onset.rule, "end"),
            attempt=view.attempt,
            step=view.step,
            time=view.time,
            event="end",
            count=ended.count,
            onset_id=onset.id,
            message=wording.ending(onset, ended.count, ended.settled, goes_on_as),
        )

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def series_keys(self) -> object:
        """Return what says which series each slot is."""
        raise NotImplementedError

    def take_series_keys(self, keys: Any) -> None:
        """Take back what `series_keys` gave."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, object]:
        """Return everything that changes, for a snapshot."""
        return {
            "keys": self.series_keys(),
            "state": {n: [a.dtype.str, list(a.shape), np.ascontiguousarray(a).tobytes()] for n, a in self.state.items()},
            "num_series": self.num_series,
            "episodes": self.episodes.to_dict(),
            "background": self.background,
            "num_points": self.num_points,
        }

    def take_dict(self, data: Mapping[str, Any]) -> None:
        """Take back what `to_dict` gave; arrays that an older version did not have begin anew."""
        self.num_series = data["num_series"]
        known = {
            name: np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
            for name, (dtype, shape, raw) in data["state"].items()
        }
        self.state = grow(self.scorer, {}, self.num_series) | known if known else {}
        self.episodes = Episodes.from_dict(data["episodes"])
        self.background = data["background"]
        self.num_points = data["num_points"]
        self.take_series_keys(data["keys"])

    def take_over(self, old: Watch) -> None:
        """Go on where `old`, a watch of the same identity, stands."""
        self.take_dict(old.to_dict())


class AnomalousPoints:
    """The anomalous points of one watch and step; makes their anomalies on demand."""

    is_asked_again: ClassVar[bool] = False
    """Whether what was held back at a point may be reported at a later one of its episode."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        self.recurs = np.zeros(len(slots), dtype=bool)
        """[points] whether excursions as high came and went before."""

    def is_higher(self, i: int, onset: Anomaly) -> bool:
        """Whether point `i` is so much worse than the onset of its episode that it is reported as well."""
        return False

    def score_of(self, i: int) -> float:
        """Return the score of point `i`."""
        return 0.0

    def lasting_steps(self, i: int) -> int:
        """Return the points in a row that corroborate point `i` where nothing else does."""
        return LASTING_STEPS

    def anomaly(self, i: int, full: bool, why: str) -> tuple[Anomaly, bool]:
        """Return the onset record of point `i`, and whether it has the rule's full severity."""
        raise NotImplementedError


class SeriesWatch(Watch):
    """A watch whose series have baselines: corroboration, level shifts, episodes by series."""

    def _emit(
        self,
        view: StepView,
        slots: np.ndarray,
        points: AnomalousPoints,
        settled_slots: np.ndarray,
        agree: np.ndarray,
    ) -> list[Anomaly]:
        """Turn one step's anomalous points into onset and end records.

        slots: [seen] the series seen; points: those that were anomalous; agree: [points] corroborated by others.
        """
        found: list[Anomaly] = []
        open_keys = self.episodes
        if len(open_keys):
            seen = np.zeros(self.num_series, dtype=bool)
            seen[slots] = True
            seen[points.slots] = False
            open_keys.interrupt(np.flatnonzero(seen[open_keys.key]))
        if points.slots.size:
            at = open_keys.locate(points.slots)
            known = at >= 0
            before = open_keys.last_step[at[known]]
            open_keys.continue_at(at[known], view.step)
            streak = np.ones(len(at), dtype=np.int64)
            streak[known] = open_keys.streak[at[known]]
            lasting = np.array([streak[i] >= points.lasting_steps(i) for i in range(len(at))], dtype=bool)
            # What recurs for ever would hold one episode open for ever, and a jump in it would be no news.
            passing = np.array([points.recurs[i] for i in np.flatnonzero(known)], dtype=bool) & ~lasting[known]
            open_keys.last_step[at[known][passing]] = before[passing]
            # Read before anything opens: opening moves the positions that `at` holds.
            was_raised = np.where(known, open_keys.raised[at] if len(open_keys) else False, False)
            fresh: list[tuple[int, bool, Anomaly]] = []
            for i in range(len(at)):
                full = bool(agree[i] or lasting[i])
                is_news = bool(known[i]) and self._is_news(points, i, int(streak[i]))
                if known[i] and self.rule.episode_quiet_steps and not is_news and (was_raised[i] or not full):
                    continue
                why = "" if not full else "others show it too" if agree[i] else f"for {streak[i]} points in a row"
                anomaly, is_raised = points.anomaly(i, full, why)
                if known[i] and self.rule.episode_quiet_steps:
                    if not is_news and anomaly.severity is open_keys.onset[int(points.slots[i])].severity:
                        open_keys.raised[at[i]] = is_raised or not points.is_asked_again
                        continue
                    found.append(anomaly)
                    ended = open_keys.raise_to(int(points.slots[i]), anomaly, bool(was_raised[i] or is_raised))
                    found.append(self._end(ended, view, anomaly.id))
                elif known[i]:
                    found.append(anomaly)
                else:
                    found.append(anomaly)
                    fresh.append((int(points.slots[i]), is_raised, anomaly))
            if fresh:
                keys = np.array([key for key, _, _ in fresh], dtype=np.int64)
                open_keys.open(keys, view.step, np.array([up for _, up, _ in fresh]), [a for _, _, a in fresh])
        if settled_slots.size:
            found.extend(self._end(one, view) for one in self.episodes.end_settled(settled_slots))
        return found

    def _is_news(self, points: AnomalousPoints, i: int, streak: int) -> bool:
        """Return whether a point of an open episode is reported as well: it grew several times worse, or came back
        higher."""
        onset = self.episodes.onset[int(points.slots[i])]
        if onset.score is not None and points.score_of(i) >= SEVERAL * max(onset.score, 1.0):
            return True
        # A streak of one: the series was well for a while since the episode's last point.
        return streak == 1 and points.is_higher(i, onset)
