"""Nanoseconds a point: the rolling median in C and in numpy against an exponential mean in the same style, in turns.

Called by detection.py. Processor time, so that other work on the machine counts less; the best of several turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from sentinel import native
from sentinel.detect import GradNormSpike, LossSpike, rolling
from sentinel.native import rolling as kernel
from sentinel.native.library import ISAS

TURNS = 9


def speed() -> None:
    """Print two tables: by shape, and by instruction set."""
    rng = np.random.default_rng(0)
    shapes = ((200_000, 1), (20_000, 10), (200, 1000))
    print(f"\n## Speed: ns a point, processor time, best of {TURNS} turns ({native.implementation})\n")
    print("| points x series | LossSpike | GradNormSpike | exponential mean | ratio | LossSpike, numpy | mean, numpy |")
    print("|---|---|---|---|---|---|---|")
    for points, series in shapes:
        values = 2.0 * np.exp(0.03 * rng.standard_normal((points, series)))
        small = values[: max(1, min(points, 40_000 // series))][:400]
        fast = _best([_scan(LossSpike()), _scan(GradNormSpike()), _mean_in_c], values, TURNS)
        slow, slow_mean = _best([_in_numpy, _mean_in_numpy], small, 3)
        loss, norm, mean = fast
        fast_text = f"{loss:.1f} | {norm:.1f} | {mean:.1f} | {loss / mean:.1f}"
        print(f"| {points} x {series} | {fast_text} | {slow:.0f} | {slow_mean:.0f} |")
    print("\n| LossSpike by instruction set | " + " | ".join(ISAS[: kernel.isa + 1]) + " |")
    print("|---|" + "---|" * (kernel.isa + 1))
    cases = [(f"{points} x {series}", points, series, _scan) for points, series in shapes]
    for name, points, series, how in [*cases, ("400 x 1000, a point a call", 400, 1000, _one_by_one)]:
        values = 2.0 * np.exp(0.03 * rng.standard_normal((points, series)))
        found = _best(_by_isa(how(LossSpike())), values, TURNS)
        print(f"| {name} | " + " | ".join(f"{one:.1f}" for one in found) + " |")


def _best(contenders: Sequence[Callable[[np.ndarray], object]], values: np.ndarray, turns: int) -> list[float]:
    """Return the nanoseconds a point of each, the best of so many turns."""
    best = [np.inf] * len(contenders)
    for _ in range(turns):
        for at, call in enumerate(contenders):
            began = time.process_time()
            call(values)
            best[at] = min(best[at], (time.process_time() - began) / values.size * 1e9)
    return best


def _by_isa(call: Callable[[np.ndarray], object]) -> list[Callable[[np.ndarray], object]]:
    """Return the call once for each instruction set that this machine has."""

    def under(isa: int) -> Callable[[np.ndarray], object]:
        def run(values: np.ndarray) -> object:
            best, kernel.isa = kernel.isa, isa
            try:
                return call(values)
            finally:
                kernel.isa = best

        return run

    return [under(isa) for isa in range(kernel.isa + 1)]


def _scan(detector: LossSpike | GradNormSpike) -> Callable[[np.ndarray], object]:
    return lambda values: detector.scan(values, detector.state(values.shape[1]))


def _one_by_one(detector: LossSpike) -> Callable[[np.ndarray], object]:
    def run(values: np.ndarray) -> None:
        state = detector.state(values.shape[1])
        for point in values:
            detector.scan(point[None], state)

    return run


def _mean_in_c(values: np.ndarray) -> object:
    """Score and learn with an exponential mean and variance of log(x): the yardstick in native/rolling.h."""
    return kernel.exponential(values, 8.0, 1.0 / 64.0)


def _in_numpy(values: np.ndarray) -> object:
    detector = LossSpike()
    state, numbers = detector.state(values.shape[1]), detector.numbers
    was, kernel.available = kernel.available, False
    try:
        return rolling.scan(numbers, values, state)
    finally:
        kernel.available = was


def _mean_in_numpy(values: np.ndarray) -> object:
    mean, var = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    for point in values:
        away = np.log(point) - mean
        _ = away / (8.0 * np.sqrt(var) + 1e-9)
        mean += away / 64.0
        var += (away * away - var) / 64.0
    return mean
