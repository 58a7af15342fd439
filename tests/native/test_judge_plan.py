"""Compiled plans judged in C against the numpy of sentinel/detect/vectorised.py, on streams that no trainer would dare."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sentinel.detect import grow
from sentinel.detect.vectorised import Vectorised, VectorisedBaseline, VectorisedLimit, VectorisedStillness
from sentinel.moments import Moments
from sentinel.native.layout import HIT, HIT_SETTLED, PLAN_ROW
from sentinel.native.library import ISAS, Library, find_library
from sentinel.record import STATISTICS, STATS_DTYPE
from sentinel.rules.watches.compiled_plan import describe

pytestmark = pytest.mark.slow

PATH = find_library()
needs_library = pytest.mark.skipif(PATH is None, reason="the C library was not built")

ALGORITHMS: list[tuple[Vectorised, str]] = [
    *((VectorisedBaseline(domain="log", sides=sides, warmup=5, settle_after=4), "norm") for sides in ("both", "up", "down")),
    *(
        (VectorisedBaseline(domain="linear", sides=sides, warmup=12, settle_after=6, k=6.0), "mean")
        for sides in ("both", "up")
    ),
    (VectorisedBaseline(domain="linear", sides="down", warmup=3, memory=1.0, threshold=0.1), "min"),
    (VectorisedBaseline(domain="log", threshold=0.0, memory=500.0, settle_after=0), "rms"),
    (VectorisedBaseline(domain="log", sides="up", minimum=20.0, threshold=2.0), "kurtosis"),
    (VectorisedBaseline(domain="linear", threshold=0.0), "skew"),
    (VectorisedBaseline(common=True, peaks=False, memory=100.0, warmup=6), "norm"),
    (VectorisedBaseline(common=True, domain="linear", sides="up", warmup=6), "max"),
    (VectorisedStillness(zero_steps=2, unchanged_steps=3, after=3), "norm"),
    (VectorisedStillness(zero_steps=1, unchanged_steps=2, after=1), "zeros"),
    (VectorisedLimit(above=50.0, below=-50.0, lasting=3), "max"),
    (VectorisedLimit(below=1e-3, after=4), "absmax"),
    (VectorisedLimit(above=0.3, lasting=2, after=2), "zeros"),
    *((VectorisedBaseline(warmup=4, settle_after=3), name) for name in ("std", "var", "absmax", "nans", "infs", "zeros")),
]  # fmt: skip


def wild_stats(rng: np.random.Generator, step: int, num: int) -> np.ndarray:
    """Moments that no kernel gave: calm series, shifts, storms, zeros, constants, what overflows, what is unknown."""
    scale = np.exp(0.2 * rng.standard_normal(num))
    mood = np.arange(num) % 12
    scale[mood == 1] *= 1e6 if step > 30 else 1.0
    scale[mood == 2] = 1.0
    scale[mood == 3] *= np.exp(rng.normal(0, 8, num))[mood == 3]
    scale[mood == 4] *= 1e-37 if step % 7 else 1.0
    scale[mood == 5] *= 1e140 if step % 11 == 5 else 1.0
    scale[mood == 6] *= 1.2**step
    stats = np.zeros(num, STATS_DTYPE)
    stats["count"] = np.where(mood == 7, rng.integers(0, 3, num), 1000)
    stats["m2"] = scale**2
    with np.errstate(all="ignore"):
        stats["m3"] = scale**3 * rng.normal(0, 0.02, num)
        stats["m4"] = scale**4 * rng.uniform(3, 4, num) / 1000 * np.where(rng.random(num) < 0.02, 100.0, 1.0)
    stats["mean"] = scale * rng.normal(0, 0.1, num)
    stats["min"], stats["max"] = -scale * 3, scale * 3
    stats["num_zero"] = rng.integers(0, 500, num)
    stats["num_nan"] = np.where(rng.random(num) < 0.02, 3, 0)
    stats["num_pos_inf"] = np.where(rng.random(num) < 0.02, 1, 0)
    zero = (mood == 8) & (rng.random(num) < 0.3)
    for name in ("mean", "m2", "m3", "m4", "min", "max"):
        stats[name][zero] = 0.0
    nothing = stats["count"] == 0
    stats["min"][nothing], stats["max"][nothing] = np.inf, -np.inf
    only_norm = mood == 9
    stats["mean"][only_norm], stats["m3"][only_norm], stats["m4"][only_norm] = 0.0, np.inf, np.nan
    stats["num_zero"][mood == 10] = -1
    calm = (mood == 11) & (step % 10 < 7)
    stats["m2"][calm], stats["mean"][calm], stats["num_zero"][calm] = 4.0, 0.0, 7
    return stats


class InC:
    """The plan over a number of series that grows, as the engine runs them."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.states = [algorithm.state(0) for algorithm, _ in ALGORITHMS]

    def judge(self, stats: np.ndarray, present: np.ndarray, bad: np.ndarray, slots: np.ndarray | None) -> np.ndarray:
        for at, (algorithm, _) in enumerate(ALGORITHMS):
            self.states[at] = grow(algorithm, self.states[at], len(stats))
        index, plan = np.arange(len(stats), dtype=np.int32), np.zeros(len(ALGORITHMS), PLAN_ROW)
        for row, (algorithm, statistic), state in zip(plan, ALGORITHMS, self.states, strict=True):
            describe(row, algorithm, statistic, state, index, slots)
        hits = np.empty(len(ALGORITHMS) * len(stats), HIT)
        num_hits = self.library.judge_plan(stats, present, bad, None, plan, hits)
        assert (plan["num_points"] == present.sum()).all()
        return hits[:num_hits]


def stream(num_steps: int):
    rng = np.random.default_rng(11)
    for step in range(num_steps):
        num = 600 if step < 20 else 1000
        stats = wild_stats(rng, step, num)
        yield stats, rng.random(num) < (0.9 if step % 3 else 2.0), rng.random(num) < 0.01


@needs_library
# All instruction sets give the same bits, as the test behind it shows.
@pytest.mark.parametrize("isa", [ISAS[0], *(pytest.param(one, marks=pytest.mark.long) for one in ISAS[1:])])
def test_c_and_numpy_flag_the_same_points_with_the_same_scores(isa):
    assert PATH is not None
    in_c = InC(Library(PATH, isa))
    states = [algorithm.state(0) for algorithm, _ in ALGORITHMS]
    num_hits, num_settled = 0, 0
    for stats, present, bad in stream(60):
        hits = in_c.judge(stats, present, bad, None)
        here = np.flatnonzero(present)
        for at, (algorithm, statistic) in enumerate(ALGORITHMS):
            states[at] = grow(algorithm, states[at], len(stats))
            with np.errstate(all="ignore"):
                values = np.where(bad, np.nan, Moments(stats).statistic(statistic))[here]
                part = {name: array[here] for name, array in states[at].items()}
                scores = algorithm.score(values, part)
                anomalous = scores.score >= 1.0
                baseline, direction = scores.baseline, scores.evidence["direction"]
                algorithm.learn(values, part, anomalous)
            for name, array in part.items():
                states[at][name][here] = array
            mine = hits[hits["plan_row"] == at]
            where = f"{algorithm} on {statistic}"
            np.testing.assert_array_equal(mine["entry"], here[anomalous], where)
            np.testing.assert_allclose(mine["score"], scores.score[anomalous], rtol=1e-5, err_msg=where)
            np.testing.assert_allclose(mine["baseline"], baseline[anomalous], rtol=1e-5, err_msg=where)
            np.testing.assert_allclose(mine["value"], values[anomalous], rtol=1e-12, err_msg=where)
            np.testing.assert_array_equal(mine["direction"], direction[anomalous], where)
            settled = part["settled"] if "settled" in part else np.zeros(len(here), bool)
            np.testing.assert_array_equal(mine["entry"][mine["what"] & HIT_SETTLED != 0], here[settled], where)
            for name, array in states[at].items():
                np.testing.assert_allclose(in_c.states[at][name], array, rtol=1e-5, atol=1e-30, err_msg=f"{where}: {name}")
            num_hits += len(mine)
            num_settled += int(settled.sum())
    assert num_hits > 5000 and num_settled > 300


@needs_library
def test_bits_depend_neither_on_the_instruction_set_nor_on_where_a_series_lies():
    assert PATH is not None
    runs = []
    for isa, is_shuffled in itertools.product(ISAS, (False, True)):
        in_c, found = InC(Library(PATH, isa)), []
        for stats, present, bad in stream(60):
            # Every other series, then the rest: nothing lies side by side.
            slots = np.argsort(np.arange(len(stats)) % 2, kind="stable").astype(np.int32) if is_shuffled else None
            if slots is not None and len(stats) > 600:
                slots = np.concatenate([np.argsort(np.arange(600) % 2, kind="stable"), np.arange(600, len(stats))])
                slots = slots.astype(np.int32)
            found.append(np.sort(in_c.judge(stats, present, bad, slots), order=["plan_row", "entry"]).tobytes())
        runs.append(found)
    assert all(run == runs[0] for run in runs)
    assert sum(map(len, runs[0])) > 1000 * HIT.itemsize


@needs_library
def test_statistics_in_c_are_those_of_moments():
    assert PATH is not None
    rng = np.random.default_rng(5)
    algorithm = VectorisedLimit(above=math.nextafter(-math.inf, 0.0))
    num_seen = 0
    for step in range(40):
        stats = wild_stats(rng, step, 500)
        present, bad = np.ones(500, bool), np.zeros(500, bool)
        index, plan = np.arange(500, dtype=np.int32), np.zeros(len(STATISTICS), PLAN_ROW)
        states = [algorithm.state(500) for _ in STATISTICS]
        for row, statistic, state in zip(plan, STATISTICS, states, strict=True):
            describe(row, algorithm, statistic, state, index, None)
        hits = np.empty(len(plan) * 500, HIT)
        hits = hits[: Library(PATH).judge_plan(stats, present, bad, None, plan, hits)]
        for at, statistic in enumerate(STATISTICS):
            with np.errstate(all="ignore"):
                expected = Moments(stats).statistic(statistic)
            mine = hits[hits["plan_row"] == at]
            np.testing.assert_array_equal(mine["entry"], np.flatnonzero(np.isfinite(expected)), statistic)
            np.testing.assert_allclose(mine["value"], expected[np.isfinite(expected)], rtol=1e-14, err_msg=statistic)
            num_seen += len(mine)
    assert num_seen > 40 * 500 * 8
