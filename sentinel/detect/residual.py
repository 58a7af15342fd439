"""A scalar beside its reference runs: the residual of a run once what the data do to all of them is taken out.

Of 36 public runs on the same data nearly every excursion recurs at the same step in all: it is the batch. What remains of
a loss beside its reference runs is 0.1 to 0.3 % instead of 2.7 to 5 %, so that a corruption of 2 % shows.

Each reference run forecasts the run: its own number, moved by how far the two have lain apart of late (logarithms
throughout).
The forecasts are weighted by the covariance of their past errors (Markowitz's portfolio of least variance; Bates and
Granger 1969 for forecasts), so that a reference run with another optimizer, on other data or in another unit counts for
little.
What the run is away from the weighted forecast is judged by the deviation of the last such residuals, wider where this
very batch divides the reference runs or moved them far.
"""

from __future__ import annotations

import math

import numpy as np

from sentinel.detect import rolling
from sentinel.detect.detector import State
from sentinel.detect.windowed import RollingMedian

LAGS = (0, -1, 1)
"""Steps by which a reference run's counting may be off: some trainers count from 0, others from 1."""
CLOSE_K = 4.5
"""Deviations of the residual that are normal beside many reference runs; beside few, (1 + FEW_K / their number) times that.
This and the constants below are set on 36 public logs of one project that share their data
(benchmarks/detection_references.py says how)."""
FEW_K = 0.6
CLOSE_FLOOR = 0.14
"""Share of the rule's own floor, in logarithms, that is always normal: 1.2 % for a loss, 9 % for a gradient norm."""
LEVEL = 8
"""Points over which the distance to a reference run is followed."""
SCALE = 48
"""Points over which the residual's deviation is taken."""
WEIGHING = 96
"""Points over which the reference runs' errors are compared."""
SHRINK = 0.2
"""Share by which the covariance of errors is drawn to one without correlation but for the run's own noise."""
CLIP = 4.0
"""Deviations to which an error is cut before it is learned."""
UNREST = 0.6
"""Three reference runs in four lie usually so near together; times how far they lie apart at this step widens what is
normal."""
FAR, FAR_K = 3.0, 0.3
"""A batch that moves the reference runs by more than so many deviations widens it by this much each."""
ASTRAY = 6.0
"""Deviations past which a reference run among many has gone astray by itself at this step, and is not asked."""
LONELY = 2.5
"""Reference runs near the best below which the run cannot be distinguished from a reference run that is itself astray: only
a rise counts there, and only if it is the run, not the reference run, that left its own course."""
GAIN = 0.5
"""Share of the run's own noise that the residual may have: what is no quieter comes from other data, and says nothing."""
ENOUGH = 32
"""Points after which a reference run is asked."""
SAME = 64
"""Points in a row of the very same numbers that make a reference run the run itself, or its copy: it knows nothing of its
own."""
SOON = 8
"""Points within which two anomalies on either side are noise that has grown."""
REWEIGH = 8
"""Points between two looks at the weights."""

_UNIT = 1e-200
_UNITS = np.full(1, _UNIT)
_ONE = float(rolling.asinh(np.ones(1), np.full(1, _UNIT))[0])


def logarithm(values: np.ndarray) -> np.ndarray:
    """Return the logarithm of positive values, but for a constant; NaN of all others. The same bits on every machine."""
    good = np.isfinite(values) & (values > 0.0)
    out = np.full(values.shape, np.nan)
    out[good] = rolling.asinh(np.asarray(values[good], np.float64), np.full(int(good.sum()), _UNIT))
    return out


def exponential(z: float) -> float:
    """Return the inverse of `logarithm`. The same bits on every machine, where the C library's exp differs in the last
    bit."""
    x = z - _ONE
    if not -700.0 < x < 700.0:
        return math.inf if x > 0.0 else 0.0
    twos = math.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - twos * 6.93147180369123816490e-01) - twos * 1.90821492927058770002e-10
    total = 1.0
    for n in range(14, 0, -1):
        total = 1.0 + total * rest / n
    return math.ldexp(total, twos)


class Beside:
    """One scalar beside its reference runs. Constant memory; score before learn, as detectors do."""

    def __init__(self, detector: RollingMedian, num_references: int) -> None:
        n = num_references
        self._own = detector
        self._floor = CLOSE_FLOOR * math.log1p(detector.floor)
        self.shared: State = detector.state(1)
        """What the reference runs forecast, judged as the run's own values are: has the batch moved all?"""
        self.state: State = {
            "level": np.zeros((n, len(LAGS))),
            "error": np.zeros((n, len(LAGS))),
            "count": np.zeros((n, len(LAGS)), np.int64),
            "lag": np.zeros(n, np.int64),
            "same": np.zeros(n, np.int64),
            "together": np.zeros((n, n)),
            "pairs": np.zeros((n, n), np.int64),
            "asked": np.zeros(n, bool),
            "weight": np.zeros(n),
            "width": np.ones(n),
            "residual": np.zeros(1),
            "course": np.zeros(1),
            "moves": np.zeros(2),
            "seen": np.zeros(1, np.int64),
            "run": np.zeros(1, np.int64),
            "side": np.zeros(2, np.int64),
        }
        """level, error, count: [reference runs, lags], how far the run lies from each, the variance of that, points; lag:
        which of
        LAGS holds; same: points in a row with the same number; together, pairs: [reference runs, reference runs], products
        of errors in
        units of the residual, points; asked, weight, width: of the last weighing; residual: its variance; course: the
        run's level; moves: variance of the shared and of the run's movement; seen: points; run: flagged ones in a row;
        side: of the last flagged point, and points since."""

    @property
    def copies(self) -> np.ndarray:
        """Return the reference runs that are, for all that can be seen, the run itself."""
        return np.flatnonzero(self.state["same"] >= SAME)

    @property
    def is_apart(self) -> bool:
        """Whether no reference run had a number at any step of the run so far, once there were enough."""
        return bool(self.state["seen"][0] >= 2 * ENOUGH) and not self.state["count"].any()

    @property
    def is_strange(self) -> bool:
        """Whether reference runs that were followed for long enough do not follow the run: nothing is judged beside them."""
        is_known = bool((np.diagonal(self.state["pairs"]) >= ENOUGH).any())
        return is_known and bool(self.state["seen"][0] >= 2 * ENOUGH) and not self._follows()

    def judge(self, value: float, references: np.ndarray, numbers: np.ndarray) -> tuple[float, int, float, float]:
        """Score one point and take it in; return (score, direction, forecast, how far the reference runs moved).

        reference runs: [lags, reference runs] logarithms as `logarithm` gives them, NaN where none; numbers: the same, as
        logged, float32.
        The score is 0.0 where nothing can be said. The forecast is in the unit of the value, NaN where there is none. The
        last is in units of the rule's own score, NaN while the reference runs do not follow the run.
        """
        state = self.state
        here = np.arange(references.shape[1])
        x = references[state["lag"], here]
        forecast = x + state["level"][here, state["lag"]]
        same = numbers[state["lag"], here] == np.float32(value)
        asked, can_judge = self._asked(np.isfinite(x) & ~(same & (state["same"] >= SAME)))
        y = float(rolling.asinh(np.array([value]), _UNITS)[0]) if 0.0 < value < math.inf else math.nan
        expected = math.nan
        score, direction, moved = 0.0, 0, math.nan
        if asked.any():
            weight = self._weigh(asked)
            expected, crowd, unrest = self._expect(forecast, asked, weight)
            follows = can_judge and self._follows()
            moved = self._move(expected, follows)
            if follows and math.isfinite(y):
                score, direction = self._score(y, expected, crowd, unrest)
        if math.isfinite(y):
            self._learn(y, expected, references, same, score >= 1.0)
        return score, direction, exponential(expected) if math.isfinite(expected) else math.nan, moved

    # -- what the reference runs say ---------------------------------------------------------------------------------------

    def _asked(self, present: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return which reference runs forecast this point, and whether they have been followed long enough to judge by."""
        state = self.state
        known = present & (state["count"][np.arange(len(present)), state["lag"]] > 0)
        able = known & (np.diagonal(state["pairs"]) >= ENOUGH)
        return (able, True) if able.any() else (known, False)

    def _weigh(self, asked: np.ndarray) -> np.ndarray:
        """Return the weights of those asked; formed anew when others are asked, and now and then."""
        state = self.state
        if int(state["seen"][0]) % REWEIGH == 0 or (asked != state["asked"]).any():
            at = np.flatnonzero(asked)
            weight, width = _weights(state["together"][np.ix_(at, at)], state["pairs"][at, at])
            state["asked"] = asked.copy()
            state["weight"], state["width"] = np.zeros(len(asked)), np.ones(len(asked))
            state["weight"][at], state["width"][at] = weight, width
        return state["weight"]

    def _expect(self, forecast: np.ndarray, asked: np.ndarray, weight: np.ndarray) -> tuple[float, float, float]:
        """Return the forecast of all, the number of reference runs near the best, and how far all lie apart (1: as
        usual)."""
        state = self.state
        at = np.flatnonzero(asked)
        each, shares = forecast[at], weight[at]
        scale = max(math.sqrt(state["residual"][0]), 1e-9)
        unrest = 0.0
        if len(at) > 1:
            widths = state["width"][at] * scale
            if len(at) == 2:
                unrest = abs(float(each[0] - each[1])) / math.sqrt(float(widths[0] ** 2 + widths[1] ** 2))
            else:
                away = np.abs(each - _median(each)) / widths
                unrest = float(np.sort(away)[math.ceil(0.75 * (len(at) - 1))])
                astray = away > ASTRAY
                if astray.any() and 3 * int(astray.sum()) <= len(at):
                    kept = at[~astray]
                    shares = np.zeros(len(at))
                    shares[~astray] = _weights(state["together"][np.ix_(kept, kept)], state["pairs"][kept, kept])[0]
        error = np.diagonal(state["together"])[at]
        best = max(float(error.min()), 1e-6)
        crowd = float(np.sum(best / np.maximum(error, best)))
        return float(np.sum(shares * each)), crowd, unrest

    def _follows(self) -> bool:
        """Whether the run has been nearer to the forecast than to its own level."""
        state = self.state
        return bool(state["seen"][0] >= ENOUGH and state["residual"][0] <= GAIN * GAIN * state["moves"][1])

    def _move(self, expected: float, follows: bool) -> float:
        """Return how far the reference runs moved at this point, judged as the run itself is by its past."""
        moved = float(self._own.scan(np.array([[exponential(expected)]]), self.shared)[0, 0])
        return moved if follows else math.nan

    # -- what the run has for itself --------------------------------------------------------------------------------

    def _score(self, y: float, expected: float, crowd: float, unrest: float) -> tuple[float, int]:
        state = self.state
        residual, shared = y - expected, expected - float(state["course"][0])
        moves = max(float(state["moves"][0]), 1e-18)
        far = 1.0 + FAR_K * max(0.0, abs(shared) / math.sqrt(moves) - FAR)
        bound = CLOSE_K * (1.0 + FEW_K / crowd) * math.sqrt(state["residual"][0]) * max(1.0, UNREST * unrest) * far
        score = abs(residual) / max(bound, self._floor)
        if crowd < LONELY:
            own = residual + shared
            # Of two Gaussian courses the unlikelier: by more than e the reference run's, then it fell, and the run did not
            # rise.
            if residual < 0.0 or own * own - shared * shared < -2.0 * moves:
                return 0.0, 0
        return score, 1 if residual > 0.0 else -1

    def _learn(self, y: float, expected: float, references: np.ndarray, same: np.ndarray, flagged: bool) -> None:
        state = self.state
        seen = int(state["seen"][0])
        residual = y - expected
        held = self._hold(flagged, residual)
        self._follow_run(y, residual, seen, held)
        state["seen"][0] = seen + 1
        here, lag = np.arange(references.shape[1]), state["lag"]
        state["same"] = np.where(np.isnan(references[lag, here]), state["same"], np.where(same, state["same"] + 1, 0))
        if held:
            return
        apart = (y - references).T
        there = np.isfinite(apart)
        count, level, error = state["count"], state["level"], state["error"]
        away = np.where(there, apart - level, 0.0)
        limit = np.where(count >= 16, CLIP * np.sqrt(error), np.inf)
        cut = np.where(count > 0, np.clip(away, -limit, limit), 0.0)
        if math.isfinite(residual):
            self._compare(cut[here, lag], there[here, lag] & (count[here, lag] > 4), residual)
        fresh = 1.0 / (count + 1.0)
        state["level"] = np.where(
            count > 0, level + np.where(there, np.maximum(1.0 / LEVEL, fresh) * cut, 0.0), np.where(there, apart, 0.0)
        )
        state["error"] = np.where(there & (count > 0), error + _rate(count, SCALE) * (cut * cut - error), error)
        state["count"] = count + there
        if seen % REWEIGH == 0:
            self._choose_lags()

    def _hold(self, flagged: bool, residual: float) -> bool:
        """Whether this point must not move a baseline; `settle_after` flagged ones in a row are the new normal."""
        state = self.state
        state["side"][1] += 1
        if not flagged:
            state["run"][0] = 0
            return False
        side = 1 if residual > 0.0 else -1
        # Now above, now below: no fault does that, but a run that has left the reference runs' data does.
        contradicts = side == -int(state["side"][0]) and int(state["side"][1]) <= SOON
        state["side"][:] = side, 0
        if contradicts:
            return False
        state["run"][0] += 1
        if not self._own.settle_after or state["run"][0] < self._own.settle_after:
            return True
        state["run"][0] = 0
        # This point is the level; what follows is averaged from here on, quickly at first.
        state["count"] = np.zeros_like(state["count"])
        return False

    def _follow_run(self, y: float, residual: float, seen: int, held: bool) -> None:
        """Take in how far the run moved, how far the reference runs say it should have, and what it has for itself."""
        state = self.state
        if not seen:
            state["course"][0] = y
        own = y - float(state["course"][0])
        moves = [("moves", 1, own)]
        if math.isfinite(residual):
            moves.append(("moves", 0, own - residual))
            if not held:
                moves.append(("residual", 0, residual))
        rate = float(_rate(np.int64(seen), SCALE))
        for name, at, away in moves:
            variance = float(state[name][at])
            square = away * away if seen < 16 else min(away * away, CLIP * CLIP * variance)
            state[name][at] = max(variance + rate * (square - variance), 1e-18)
        limit = CLIP * math.sqrt(state["moves"][1])
        state["course"][0] += max(1.0 / LEVEL, 1.0 / (seen + 1.0)) * (own if seen < 16 else min(max(own, -limit), limit))

    def _compare(self, errors: np.ndarray, there: np.ndarray, residual: float) -> None:
        """Take this point's errors into what is known of how they go together."""
        state = self.state
        errors = errors / max(math.sqrt(state["residual"][0]), 1e-9)
        both = there[:, None] & there[None, :]
        pairs = state["pairs"]
        rate = _rate(pairs, WEIGHING)
        product = errors[:, None] * errors[None, :]
        state["together"] = np.where(both, state["together"] + rate * (product - state["together"]), state["together"])
        state["pairs"] = pairs + both

    def _choose_lags(self) -> None:
        """Take up another counting where it fits a reference run far better than the one in use."""
        state = self.state
        here, lag = np.arange(len(state["lag"])), state["lag"]
        ready = state["count"] >= ENOUGH
        error = np.where(ready, state["error"], np.inf)
        best = np.argmin(error, axis=1)
        now = np.where(ready[here, lag], state["error"][here, lag], state["moves"][1])
        for j in np.flatnonzero((best != lag) & (error[here, best] < 0.25 * now)).tolist():
            state["lag"][j] = best[j]
            state["same"][j] = 0
            state["together"][j, :] = state["together"][:, j] = 0.0
            state["pairs"][j, :] = state["pairs"][:, j] = 0

    # -- snapshots --------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, dict[str, list[object]]]:
        """Return everything that changes, for a snapshot."""
        return {
            which: {n: [a.dtype.str, list(a.shape), np.ascontiguousarray(a).tobytes()] for n, a in state.items()}
            for which, state in (("beside", self.state), ("shared", self.shared))
        }

    def take_dict(self, data: dict[str, dict[str, list[object]]]) -> None:
        """Take back what `to_dict` gave."""
        for which, state in (("beside", self.state), ("shared", self.shared)):
            for name, (dtype, shape, raw) in data[which].items():
                state[name] = np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()  # type: ignore[call-overload]


def _rate(count: np.ndarray | np.int64, points: int) -> np.ndarray:
    """Return the share of the next point in a mean over `points`, or the last quarter of them while there are fewer.

    For noise falls fast while a run is young: what its first points show is no measure a hundred later.
    """
    return np.asarray(1.0 / np.minimum(np.maximum(count // 4, np.minimum(count + 1, 8)), points))


def _weights(together: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of least variance, sum 1, and each reference run's own deviation; both [reference runs].

    together: [reference runs, reference runs] covariance of errors, in squared residuals; points: how many each was formed
    from.
    """
    n = len(together)
    variance = np.maximum(np.diagonal(together), 1e-6)
    if n == 1:
        return np.ones(1), np.sqrt(variance)
    # The run's own noise is in all errors alike: the mean of what two share.
    common = (float(np.sum(together)) - float(np.sum(np.diagonal(together)))) / (n * (n - 1))
    common = min(max(common, 0.0), float(variance.min()))
    alone = np.maximum(variance - common, 0.05 * variance)
    shrink = max(SHRINK, 16.0 / (16.0 + float(points.min())))
    matrix = (1.0 - shrink) * together + shrink * common
    matrix[np.arange(n), np.arange(n)] = (1.0 - shrink) * variance + shrink * (common + alone) + 1e-3 * variance
    weight = _solve(matrix)
    if not np.isfinite(weight).all() or float(np.abs(weight).max()) > 2.0:
        weight = 1.0 / alone
        weight = weight / float(np.sum(weight))
    return weight, np.sqrt(alone)


def _solve(matrix: np.ndarray) -> np.ndarray:
    """Return the x of matrix x = 1, divided by its sum. By elimination: a library's threads and machine change last bits."""
    n = len(matrix)
    rows = np.concatenate([matrix, np.ones((n, 1))], axis=1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for i in range(n):
            rows[i + 1 :, i:] -= (rows[i + 1 :, i] / rows[i, i])[:, None] * rows[i, i:]
        x = np.zeros(n)
        for i in range(n - 1, -1, -1):
            x[i] = (rows[i, n] - float(np.sum(rows[i, i + 1 : n] * x[i + 1 :]))) / rows[i, i]
        return np.asarray(x / float(np.sum(x)))


def _median(values: np.ndarray) -> float:
    ordered = np.sort(values)
    return 0.5 * float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])
