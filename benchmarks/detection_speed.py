"""Nanoseconds a point: the rolling median in C and in numpy against an exponential mean in the same style, in turns.

Called by detection.py. Processor time, so that other work on the machine counts less; the best of several turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from sentinel import native
from sentinel.detect import GradNormSpike, LossSpike, rolling
from sentinel.native import rolling as kernel

TURNS = 9


def speed() -> None:
    """Print a table."""
    rng = np.random.default_rng(0)
    shapes = ((200_000, 1), (20_000, 10), (200, 1000))
    print(f"\n## Speed: ns a point, processor time, best of {TURNS} turns ({native.implementation})\n")
    print("| points x series | LossSpike | GradNormSpike | exponential mean | ratio | LossSpike, numpy | mean, numpy |")
    print("|---|---|---|---|---|---|---|")
    for points, series in shapes:
        values = 2.0 * np.exp(0.03 * rng.standard_normal((points, series)))
        small = values[: max(1, min(points, 40_000 // series))]
        contenders: list[tuple[Callable[[np.ndarray], object], np.ndarray]] = [
            (_scan(LossSpike()), values), (_scan(GradNormSpike()), values), (_mean_in_c, values),
            (_in_numpy, small[:400]), (_mean_in_numpy, small[:400]),
        ]  # fmt: skip
        best = [np.inf] * len(contenders)
        for turn in range(TURNS):
            for at, (call, given) in enumerate(contenders):
                if turn >= 3 and at >= 3:
                    continue
                began = time.process_time()
                call(given)
                best[at] = min(best[at], (time.process_time() - began) / given.size * 1e9)
        loss, norm, mean, slow, slow_mean = best
        fast = f"{loss:.1f} | {norm:.1f} | {mean:.1f} | {loss / mean:.1f}"
        print(f"| {points} x {series} | {fast} | {slow:.0f} | {slow_mean:.0f} |")


def _scan(detector: LossSpike | GradNormSpike) -> Callable[[np.ndarray], object]:
    return lambda values: detector.scan(values, detector.state(values.shape[1]))


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
