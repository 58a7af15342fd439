"""RowWatch: a rule without a past on each rank's own rows, so that the rank is named."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel.anomaly import Anomaly, Severity
from sentinel.detect import SeriesDetector
from sentinel.kinds import ELEMENT_KINDS, FORWARD_KINDS, labels
from sentinel.moments import raw_statistic
from sentinel.record import NONE_ID
from sentinel.rules.language.schema import Rule
from sentinel.rules.watches import wording
from sentinel.rules.watches.anomaly_records import is_loss_scaling, tensor_anomaly
from sentinel.rules.watches.healthy_gradients import GRADIENTS
from sentinel.rules.watches.series_index import SeriesSelection
from sentinel.rules.watches.watch import AGREEING_TENSORS, LASTING_STEPS, Watch, WatchPlan

if TYPE_CHECKING:
    from sentinel.rules.watches.layout_plan import LayoutPlan
    from sentinel.step_view import StepView

SERIES_SHIFT = 36
"""Bits of a key below the series: 20 of the rank, 16 of the micro-step."""
MAX_PLACES = 64
"""Ranks and micro-steps of one tensor that are recorded one by one, those that came first before others. Once a weight is
not finite all of a job's ranks hold it, millions of rows, and a record of each says nothing more. Too small: a rank that
another problem befalls is not named; too large: the step of a NaN in a large job is judged for minutes."""
MAX_FRESH = 8192
"""New records of a rule in one step: where more tensors are bad, fewer of each are recorded. As of `MAX_PLACES`; of a step
1,000 anomalies are written."""
_MASKED = (labels(ELEMENT_KINDS) & labels(FORWARD_KINDS)) | {"attention"}
"""Kinds that may hold minus infinity by design: scores before a softmax, and what passes modules on the way to it."""


class RowWatch(Watch):
    """Each rank's own rows, by a rule that needs no past: non-finite values, absolute limits."""

    def __init__(self, rule: Rule, detector: SeriesDetector, statistic: str, kinds: frozenset[str]) -> None:
        super().__init__(rule, detector, statistic, "row")
        self.kinds = kinds
        self.counts_only = self.declared.judges == "counts"
        """The counts of the row decide; no statistic is formed."""

    def take_place(self, plan: LayoutPlan) -> None:
        """Judge the rows of the tensors that the rule matches."""
        its = self.plan(plan.selection)
        plan.judge_rows(lambda view: self.judge(view, its))

    @property
    def row_kinds(self) -> frozenset[str]:
        """As of `Watch`; rows that hold a non-finite value are at hand whatever their kind."""
        return frozenset() if self.counts_only else self.kinds

    def plan(self, selection: SeriesSelection) -> WatchPlan:
        """Return the numbers of the series by tensor, -1 where the rule does not look."""
        takes = selection.takes(self.rule.match, self.kinds)
        numbers = selection.shared(np.where(takes, selection.keys, np.int32(-1)))
        return WatchPlan(numbers[:0], numbers, False)

    def series_keys(self) -> object:
        """Return nothing: the numbers are those of the engine's SeriesIndex."""
        return None

    def take_series_keys(self, keys: Any) -> None:
        """Take nothing back."""

    def judge(self, view: StepView, plan: WatchPlan) -> list[Anomaly]:
        """Return the records of one step."""
        self.num_points += view.num_rows
        view = view.with_bad_rows() if self.counts_only else view.with_rows_of(np.flatnonzero(plan.slots >= 0).tolist())
        bad = self._bad_rows(view, plan)
        if bad.size and self.rule.match.rank:
            bad = bad[np.isin(view.row_rank[bad], self.rule.match.rank)]
        found: list[Anomaly] = []
        if bad.size:
            rows, is_all = view.rows, bad.size == len(view.rows)
            fields = rows["micro_step"], rows["bad_micro_step"], view.row_logical, view.row_rank
            own, first, logical, rank = fields if is_all else (one[bad] for one in fields)
            micro = np.where(own >= 0, own, first).astype(np.int64)
            series = plan.slots[logical].astype(np.int64)
            key = (series << SERIES_SHIFT) | (rank.astype(np.int64) << 16) | ((micro + 1) & 0xFFFF)
            is_open = self.episodes.locate(key) >= 0
            kept = self._kept(view, key, is_open, bad, micro)
            found.extend(self._emit(view, key[kept], bad[kept], micro[kept]))
            if any(one.event == "onset" for one in found):
                key = np.sort(key)
                self.num_left_out = 1 + int(np.count_nonzero(key[1:] != key[:-1])) - len(kept)
        if len(self.episodes):
            found.extend(self.quiet(view))
        return found

    def _kept(self, view: StepView, key: np.ndarray, is_open: np.ndarray, bad: np.ndarray, micro: np.ndarray) -> np.ndarray:
        """Return the positions of the keys that are looked at, each once and rising by key: open ones, and of each series
        the first to come while there are fewer than `MAX_PLACES`, and of all series `MAX_FRESH` new ones at most, but one of
        each. key, is_open, micro: of all bad rows.
        """
        series = key >> SERIES_SHIFT
        has_fresh = np.zeros(int(series.max()) + 1, dtype=bool)
        has_fresh[series[~is_open]] = True
        fresh_series = np.flatnonzero(has_fresh)
        most = min(MAX_PLACES, max(1, MAX_FRESH // max(1, len(fresh_series))))
        series_open = self.episodes.key >> SERIES_SHIFT
        num_open = np.searchsorted(series_open, fresh_series, "right") - np.searchsorted(series_open, fresh_series)
        has_room = np.zeros_like(has_fresh)
        has_room[fresh_series[num_open < most]] = True
        looked_at = np.flatnonzero(is_open | has_room[series])
        # Of what has several rows, a module that is called twice say, the first.
        keys, first = np.unique(key[looked_at], return_index=True)
        at: np.ndarray = looked_at[first]
        # By when and where: within one tensor that is the order of causes.
        fresh = np.flatnonzero(~is_open[at])
        rows, of_fresh = view.rows, bad[at[fresh]]
        call = np.where(
            rows["bad_call_id"][of_fresh] != NONE_ID, rows["bad_call_id"][of_fresh], rows["call_id"][of_fresh]
        )  # fmt: skip
        order = fresh[np.lexsort((keys[fresh], call, micro[at[fresh]], keys[fresh] >> SERIES_SHIFT))]
        ordered = keys[order] >> SERIES_SHIFT
        place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
        place += np.searchsorted(series_open, ordered, "right") - np.searchsorted(series_open, ordered)
        is_kept = is_open[at]
        is_kept[order[place < most]] = True
        kept: np.ndarray = at[is_kept]
        return kept

    def _emit(self, view: StepView, key: np.ndarray, bad: np.ndarray, micro: np.ndarray) -> list[Anomaly]:
        """Turn one step's bad rows, one a key, into onset records; see `SeriesWatch` for the rule of corroboration."""
        found: list[Anomaly] = []
        at = self.episodes.locate(key)
        known = at >= 0
        self.episodes.continue_at(at[known], view.step)
        is_limit = self._is_limit(view.rows[bad])
        full = ~is_limit
        if is_limit.any():
            full |= len(set(view.row_logical[bad[is_limit]].tolist())) >= AGREEING_TENSORS
            full[known] |= self.episodes.streak[at[known]] >= LASTING_STEPS
        quiet = self.rule.episode_quiet_steps
        fresh: list[tuple[int, bool, Anomaly]] = []
        for i in np.flatnonzero(~known if quiet else np.ones(len(key), dtype=bool)):
            anomaly = self._anomaly(view, int(bad[i]), int(micro[i]), bool(full[i]))
            found.append(anomaly)
            if not known[i]:
                fresh.append((int(key[i]), bool(full[i]), anomaly))
        if quiet and is_limit.any():
            for i in np.flatnonzero(known & full & is_limit):
                if not self.episodes.raised[at[i]]:
                    anomaly = self._anomaly(view, int(bad[i]), int(micro[i]), True)
                    found.append(anomaly)
                    found.append(self._end(self.episodes.raise_to(int(key[i]), anomaly), view, anomaly.id))
        if fresh:
            keys, raised = np.array([one[0] for one in fresh]), np.array([one[1] for one in fresh])
            self.episodes.open(keys, view.step, raised, [one[2] for one in fresh])
        return found

    def _is_limit(self, rows: np.ndarray) -> np.ndarray:
        """Return which bad rows are finite values past an absolute limit."""
        if self.counts_only:
            return np.zeros(len(rows), dtype=bool)
        return np.asarray(np.isfinite(raw_statistic(rows, self.statistic)))

    def _bad_rows(self, view: StepView, plan: WatchPlan) -> np.ndarray:
        if self.counts_only:
            bad: np.ndarray = view.bad_rows
        else:
            if not len(view.rows):
                return np.zeros(0, dtype=np.int64)
            scores = self.detector.score(raw_statistic(view.rows, self.statistic), {})
            bad = np.flatnonzero(scores.score >= 1.0)
        if bad.size:
            logical = view.row_logical[bad]
            is_taken = (logical >= 0) & (plan.slots[logical] >= 0)
            bad = bad if is_taken.all() else bad[is_taken]
        return bad

    def _anomaly(self, view: StepView, at: int, micro: int, full: bool) -> Anomaly:
        row, rank = view.rows[at], int(view.row_rank[at])
        tensor = view.tensors[int(view.row_logical[at])]
        num_nan, num_inf = int(row["num_nan"]), int(row["num_pos_inf"]) + int(row["num_neg_inf"])
        micro_step = micro if micro >= 0 else None
        is_bad = bool(num_nan or num_inf)
        call = int(row["bad_call_id"]) if is_bad and row["bad_call_id"] != NONE_ID else int(row["call_id"])
        call_id = call if call != NONE_ID else None
        severity = self.rule.severity
        baseline, score = math.nan, math.nan
        if is_bad and (self.counts_only or not math.isfinite(self._raw(row))):
            statistic = "nans" if num_nan else "infs"
            value = float(num_nan or num_inf)
            total = int(row["count"]) + num_nan + num_inf
            text = wording.nonfinite(tensor.kind, tensor.name, num_nan, num_inf, total, rank, micro_step, view.is_skipped)
            # Collectives carry the gradients; a forward that is bad says so itself.
            if (tensor.kind in GRADIENTS or tensor.kind == "comm") and is_loss_scaling(view):
                severity = min(severity, Severity.WARNING, key=lambda s: s.level)
            if tensor.kind in _MASKED and not num_nan and not int(row["num_pos_inf"]):
                # Attention scores before a softmax are masked with -inf by design; a -inf that does harm turns into a NaN.
                severity = Severity.INFO
        else:
            statistic, value = self.statistic, self._raw(row)
            baseline = float(self.detector.score(np.array([value]), {}).baseline[0]) or math.nan
            score = abs(value) / baseline if baseline > 0 else math.nan
            text = f"{wording.subject(tensor.kind, tensor.name, statistic)} is {wording.number(value)} on rank {rank}"
            text += f", past the limit {wording.number(baseline)}"
            # An absolute limit is the user's own word, yet a lone finite excursion pages nobody.
            severity = severity if full else Severity.INFO
        key = f"{tensor.key}/{'nonfinite' if statistic in ('nans', 'infs') else statistic}"
        return tensor_anomaly(
            view, self.rule, tensor, statistic, severity, rank, micro_step, call_id, value, baseline, score, text, key
        )

    def _raw(self, row: np.void) -> float:
        return float(raw_statistic(np.array([row]), self.statistic)[0])
