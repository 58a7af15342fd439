"""The arithmetic of RollingMedian over many series: in C where the library is there, else numpy with the same bits."""

from __future__ import annotations

import numpy as np

from sentinel.detect.detector import State
from sentinel.native import rolling as native

MAD_TO_SIGMA = 1.4826
"""A Gaussian's standard deviation over its median absolute deviation."""
HALF_TO_SIGMA = 0.7413011092528009
"""And over the width of its middle half, 1 / (2 * 0.67449)."""
MOST_TO_SIGMA = 0.19507602886806754
"""Half of what it is over the width of its middle four fifths, 1 / (2 * 1.28155): it is used where values printed with few
digits leave the middle half no width, and nowhere else."""
STEP_TO_SIGMA = 1.0483565417151464
"""And over the median absolute difference of neighbours, 1.4826 / sqrt(2)."""
UNIT_EVERY = 16
"""Points between two looks at whether a series has come to zero."""

LATEST = 8
"""Points whose largest is the baseline where it lies below the median: a loss in steep fall lies below it all the time."""
YOUNG = 128
"""Residuals until which a rise that began with the series is no spike: there the least of the latest points is the baseline
where all lie above the median, as under a learning rate's warm-up."""
FEW = 16.0
"""Until then the deviation, of few residuals, counts for 1 + FEW / their number - FEW / YOUNG times itself."""
PLACE = (5, 8)
"""Share of the window behind which the point lies whose residual is kept. At the end of the window, trends and steps of the
level would count as noise; in the middle, what neighbours share would not be seen; 5/8 lies between."""
APART, APART_RISE = 0.5, 1.3862943611198906
"""A point is anomalous, whatever the deviation, above the largest residual kept by this share of it and log(4): excursions
that were not flagged cannot hide one that is far above them all."""
TWICE = 1.2
"""A point is normal, whatever the deviation, up to so many times the second largest residual kept: what came twice comes
again, in noise with long tails, in rows of a harder task, where most losses are exactly zero. At 1.25 one event of the
labelled logs is lost."""
STEPS = 50.0
"""Smallest steps between neighbours that are linear at the least where a window comes to zero: digits are no ratio."""

LOW, QUARTER, THREE, HIGH, TOP = range(5)
"""Marks: order statistics of the residuals at a tenth, a quarter, three quarters and nine tenths, and the largest."""
MANY, EVERY, OUTER_EVERY = 64, 32, 64
"""From so many residuals on, marks are formed anew every 32nd point, the outer ones every 64th: few new ones among many
move them little."""

RollingParameters = native.RollingParameters
"""The numbers of a RollingMedian: k, floor (on the scale), near_zero, window, memory, warmup, settle_after."""


def new_state(p: RollingParameters, num_series: int) -> State:
    """Return the state of series before their first point: 16 * window + 4 * memory + 8 * settle_after + 81 bytes each."""
    return {
        "points": np.full((num_series, p.window), np.nan),
        "recent": np.full((num_series, _width(p.window)), np.inf, dtype=np.float32),
        "ordered": np.full((num_series, _width(p.window)), np.inf, dtype=np.float32),
        "residuals": np.full((num_series, _width(p.memory)), np.inf, dtype=np.float32),
        "marks": np.zeros((num_series, 5), dtype=np.float32),
        "held": np.full((num_series, max(p.settle_after, 1)), np.nan),
        "unit": np.full(num_series, 1e-300),
        "center": np.full(num_series, np.nan),
        "seen": np.zeros(num_series, dtype=np.int64),
        "kept": np.zeros(num_series, dtype=np.int64),
        "run": np.zeros(num_series, dtype=np.int64),
        "filled": np.zeros(num_series, dtype=np.int32),
        "at": np.zeros(num_series, dtype=np.int32),
        "settled": np.zeros(num_series, dtype=bool),
        "second": np.zeros(num_series, dtype=np.float32),
    }


def _width(size: int) -> int:
    """Return the room of a window: whole lanes of 16, what is not there +inf."""
    return (size + 15) & ~15


def score(p: RollingParameters, values: np.ndarray, state: State) -> np.ndarray:
    """Return the score of one point of each series: [series] float64, 0.0 where it is not above the median."""
    if native.available:
        return np.asarray(native.run(p, state, values[None], native.SCORE)[0])
    return _score(p, values, state)


def learn(p: RollingParameters, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
    """Take one point of each series into the state, in place."""
    if native.available:
        native.run(p, state, values[None], native.LEARN, anomalous[None])
    else:
        _learn(p, values, state, anomalous)


def scan(p: RollingParameters, values: np.ndarray, state: State) -> np.ndarray:
    """Score and take in [points, series] values, anomalous where the score reaches 1; return the scores."""
    if native.available:
        return native.run(p, state, values, native.SCORE | native.LEARN)
    scores = np.zeros(values.shape)
    for row, point in enumerate(values):
        scores[row] = _score(p, point, state)
        _learn(p, point, state, scores[row] >= 1.0)
    return scores


def baseline(p: RollingParameters, state: State) -> np.ndarray:
    """Return what points are measured from, on the asinh scale: [series] float64, the median or less (see LATEST)."""
    return _base(p, state, np.arange(len(state["center"])))


# -- the reference: plain numpy, in the order of native/rolling.h --------------------------------------------------------


def asinh(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Return asinh(values / unit), finite for every finite value; the same bits on every machine."""
    with np.errstate(over="ignore"):
        y = np.clip(values / unit, -1e300, 1e300)
    size = np.abs(y)
    near = np.minimum(size, 1e8)
    z = log(np.where(size < 1e8, size + np.sqrt(near * near + 1.0), size + size))
    return np.where(y < 0.0, -z, z)


_POLYNOMIAL = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip
"""Source: fdlibm, e_log.c, Lg1 to Lg7. numpy's own logarithm differs in its last bit from one machine to the next."""


def log(x: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of positive normal numbers; the same bits on every machine."""
    m, exponent = np.frexp(x)
    is_low = m < 0.70710678118654752440
    m = np.where(is_low, m + m, m)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = z * _POLYNOMIAL[-1]
    for coefficient in _POLYNOMIAL[-2::-1]:
        series = z * (coefficient + series)
    return np.asarray((exponent - is_low).astype(np.float64) * 0.69314718055994530942 + (s + s + s * series))


def _held(x: np.ndarray) -> np.ndarray:
    """Return numbers as windows hold them: zero without a sign, so that equal ones are the same bits in any order."""
    return np.asarray(x.astype(np.float32) + np.float32(0.0))


def _middle(ordered: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the median of the first `count` of each ascending row, at least one."""
    rows = np.arange(len(ordered))
    low = ordered[rows, (count - 1) // 2].astype(np.float64)
    return np.asarray(0.5 * (low + ordered[rows, count // 2].astype(np.float64)))


def _bound(p: RollingParameters, marks: np.ndarray, second: np.ndarray, kept: np.ndarray) -> np.ndarray:
    half = (marks[:, THREE] - marks[:, QUARTER]) * HALF_TO_SIGMA
    most = (marks[:, HIGH] - marks[:, LOW]) * MOST_TO_SIGMA
    bound = p.k * np.where(half > most, half, most)
    num = np.where(kept < MANY, kept, kept - kept % EVERY).astype(np.float64)
    bound = np.where(num < YOUNG, bound * (1.0 + (FEW / num - FEW / YOUNG)), bound)
    top = np.where(marks[:, TOP] > 0.0, marks[:, TOP], 0.0)
    again = TWICE * second
    bound = np.where(bound > again, bound, again)
    more = APART * top
    apart = top + np.where(more > APART_RISE, more, APART_RISE)
    bound = np.where(bound < apart, bound, apart)
    return np.where(bound > p.floor, bound, p.floor)


def _base(p: RollingParameters, state: State, rows: np.ndarray) -> np.ndarray:
    """Return the median of each row's window, or the nearest of its latest points where all of them lie below it.

    Above it too, while a series is young.
    """
    center: np.ndarray = state["center"][rows]
    if p.window < LATEST:
        return center
    latest = (state["at"][rows, None].astype(np.int64) - 1 - np.arange(LATEST)) % p.window
    points = np.take_along_axis(state["recent"][rows], latest, axis=1)
    largest, least = points.max(axis=1).astype(np.float64), points.min(axis=1).astype(np.float64)
    base = np.where(largest < center, largest, np.where((state["kept"][rows] < YOUNG) & (least > center), least, center))
    found: np.ndarray = np.where(state["filled"][rows] >= LATEST, base, center)
    return found


def _score(p: RollingParameters, values: np.ndarray, state: State) -> np.ndarray:
    found = np.zeros(len(values))
    at = np.flatnonzero((state["seen"] >= 2 * p.warmup) & (state["kept"] > 0) & np.isfinite(values))
    if at.size:
        marks = state["marks"][at].astype(np.float64)
        z = asinh(values[at], state["unit"][at]).astype(np.float32).astype(np.float64)
        rise, second = z - _base(p, state, at), state["second"][at].astype(np.float64)
        found[at] = np.maximum(rise / _bound(p, marks, second, state["kept"][at]), 0.0)
    return found


def _learn(p: RollingParameters, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
    state["settled"].fill(False)
    finite = np.isfinite(values)
    taken = np.flatnonzero(finite & ~anomalous)
    if taken.size:
        _take(p, values, state, taken)
    if p.settle_after:
        for row in np.flatnonzero(finite & anomalous).tolist():
            _hold(p, float(values[row]), state, row)


def _take(p: RollingParameters, values: np.ndarray, state: State, rows: np.ndarray) -> None:
    new = values[rows]
    point = _held(asinh(new, state["unit"][rows]))
    at = state["at"][rows]
    state["recent"][rows, at] = point
    state["points"][rows, at] = new
    state["at"][rows] = np.where(at + 1 == p.window, 0, at + 1)
    filled = np.minimum(state["filled"][rows] + 1, p.window)
    state["filled"][rows] = filled
    _center(state, rows)
    due = rows[state["seen"][rows] >= p.warmup]
    if due.size:
        # Of a point amid the window, from the median about it: a trend or a step of the level is hardly noise.
        kept, count = state["kept"][due], state["filled"][due]
        first = np.where(count < p.window, 0, state["at"][due])
        middle = state["recent"][due, (first + PLACE[0] * count // PLACE[1]) % p.window].astype(np.float64)
        state["residuals"][due, kept % p.memory] = _held(middle - state["center"][due])
        state["kept"][due] = kept + 1
        _mark(p, state, due)
    seen = state["seen"][rows] + 1
    state["seen"][rows] = seen
    state["run"][rows] = 0
    came_down = (seen % UNIT_EVERY == 0) & (seen > p.warmup) & (state["recent"][rows] <= 0.0).any(axis=1)
    for row in rows[(seen == p.warmup) | came_down].tolist():
        _choose_unit(p, state, row)


def _mark(p: RollingParameters, state: State, rows: np.ndarray) -> None:
    kept = state["kept"][rows]
    rows = rows[(kept < MANY) | (kept % EVERY == 0)]
    if not rows.size:
        return
    kept = state["kept"][rows]
    ordered, count, here = np.sort(state["residuals"][rows], axis=1), np.minimum(kept, p.memory), np.arange(len(rows))
    for mark, index in ((QUARTER, count // 4), (THREE, (3 * count) // 4), (TOP, count - 1)):
        state["marks"][rows, mark] = ordered[here, index]
    state["second"][rows] = ordered[here, np.maximum(count - 2, 0)]
    outer = (kept < MANY) | (kept % OUTER_EVERY == 0)
    for mark, index in ((LOW, count // 10), (HIGH, (9 * count) // 10)):
        state["marks"][rows[outer], mark] = ordered[here, index][outer]


def _center(state: State, rows: np.ndarray) -> None:
    state["ordered"][rows] = ordered = np.sort(state["recent"][rows], axis=1)
    state["center"][rows] = _middle(ordered, state["filled"][rows])


def _choose_unit(p: RollingParameters, state: State, row: int) -> None:
    """Decide below what the scale is linear: at the end of the warm-up, and when a window comes to zero and below.

    The noise is estimated from the median step, which a decay does not move much, and where most steps are none from the
    smallest: few digits.
    """
    points = state["points"][row, : state["filled"][row]]
    if len(points) < 2:
        return
    steps = np.abs(np.diff(points))
    is_close = bool((points <= 0.0).any())
    if not is_close and state["seen"][row] != p.warmup:
        return
    unit = p.near_zero * _median(np.abs(points))
    if is_close:
        noise, least = STEP_TO_SIGMA * _median(steps), float(np.where(steps > 0.0, steps, np.inf).min())
        unit = max(4.0 * noise, STEPS * least if least < np.inf else 0.0)
    if unit > state["unit"][row]:
        state["unit"][row] = min(unit, 1e300)
        _rescale(p, state, row)


def _rescale(p: RollingParameters, state: State, row: int) -> None:
    """Put everything in the window on the scale of another unit."""
    filled = int(state["filled"][row])
    z = _held(asinh(state["points"][row, :filled], state["unit"][row]))
    state["recent"][row] = np.inf
    state["recent"][row, :filled] = z
    _center(state, np.array([row]))


def _hold(p: RollingParameters, value: float, state: State, row: int) -> None:
    """Keep a flagged point apart, the newest `settle_after` of them, until they are a level of their own."""
    size = p.settle_after
    state["held"][row, state["run"][row] % size] = value
    state["run"][row] += 1
    if state["run"][row] < size:
        return
    held = np.roll(state["held"][row], -int(state["run"][row] % size))
    z = asinh(held, state["unit"][row])
    half = size // 2
    # Still climbing is no level: the two halves of what is held must agree but for the noise within them.
    if half:
        noise = max(_noise(z[:half]), _noise(z[half:]))
        if abs(_median(z[half:]) - _median(z[:half])) > max(p.floor, 2.0 * noise):
            return
    num = min(size, p.window)
    state["points"][row, :num] = held[size - num :]
    state["filled"][row] = num
    state["at"][row] = 0 if num == p.window else num
    _rescale(p, state, row)
    state["run"][row] = 0
    state["settled"][row] = True


def _median(values: np.ndarray) -> float:
    ordered = np.sort(values)
    return 0.5 * (float(ordered[(len(ordered) - 1) // 2]) + float(ordered[len(ordered) // 2]))


def _noise(values: np.ndarray) -> float:
    return MAD_TO_SIGMA * _median(np.abs(values - _median(values)))
