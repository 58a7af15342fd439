"""Healthy series of many kinds: what no detector may page for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ..support.series import scores_of

Maker = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


def _autoregressive(g: np.ndarray) -> np.ndarray:
    x = np.zeros_like(g)
    for i in range(1, len(g)):
        x[i] = 0.95 * x[i - 1] + 0.1 * g[i]
    return x


def _volatile(g: np.ndarray) -> np.ndarray:
    x, spread = np.zeros_like(g), np.full(g.shape[1], 0.1)
    for i in range(len(g)):
        x[i] = spread * g[i]
        spread = np.sqrt(0.001 + 0.85 * spread**2 + 0.1 * x[i] ** 2)
    return x


HEALTHY: dict[str, Maker] = {
    "gaussian": lambda t, g, rng: np.exp(0.15 * g),
    "tight": lambda t, g, rng: np.exp(0.001 * g),
    "wide": lambda t, g, rng: np.exp(0.8 * g),
    "laplace": lambda t, g, rng: np.exp(0.2 * rng.laplace(size=g.shape)),
    "student_t3": lambda t, g, rng: np.exp(0.1 * rng.standard_t(3, size=g.shape)),
    "chi": lambda t, g, rng: np.sqrt(rng.chisquare(3, size=g.shape)),
    "pareto": lambda t, g, rng: 1.0 + rng.pareto(3, size=g.shape),
    "decay": lambda t, g, rng: (0.05 + np.exp(-t / 30.0)) * np.exp(0.1 * g),
    "random_init": lambda t, g, rng: (1.0 + 50.0 * np.exp(-t / 5.0)) * np.exp(0.15 * g),
    "warmup_cosine": lambda t, g, rng: (
        (0.05 + np.minimum(t / 100.0, 1.0) * (0.1 + 0.45 * (1.0 + np.cos(np.pi * t / len(t))))) * np.exp(0.1 * g)
    ),
    "autoregressive": lambda t, g, rng: np.exp(_autoregressive(g)),
    "random_walk": lambda t, g, rng: np.exp(np.cumsum(0.03 * g, axis=0)),
    "growth": lambda t, g, rng: np.exp(4.0 * t / len(t)) * np.exp(0.1 * g),
    "volatile": lambda t, g, rng: np.exp(_volatile(g)),
    "printed": lambda t, g, rng: np.round(1.0 + 0.02 * g, 2),
    "zero_init": lambda t, g, rng: np.minimum(t / 20.0, 1.0) * np.exp(0.1 * g),
    "zero": lambda t, g, rng: np.zeros_like(g),
    "constant": lambda t, g, rng: np.ones_like(g),
}


@pytest.fixture
def healthy() -> Callable[[str, int, int], np.ndarray]:
    """Return a maker: name, points, series -> positive values [points, series], scales e**N(0, 2)."""

    def make(name: str, points: int, series: int) -> np.ndarray:
        rng = np.random.default_rng(list(HEALTHY).index(name))
        scale = np.exp(2.0 * rng.standard_normal((1, series)))
        g = rng.standard_normal((points, series))
        return scale * HEALTHY[name](np.arange(points)[:, None].astype(np.float64), g, rng)

    return make


@pytest.fixture
def follow() -> Callable[[Any, np.ndarray], np.ndarray]:
    """Return a function: detector, values [points, series] -> scores of the same shape, learned as the engine does."""
    return scores_of


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture
def healthy_kinds() -> list[str]:
    """Return the names that `healthy` knows."""
    return list(HEALTHY)
