"""One battery over all detectors of groups: what each of them owes the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sentinel.detect import DETECTORS, GroupDetector, grow, state_bytes
from sentinel.detect.group import Points, members_of

Group = tuple[Points, np.ndarray]


def alike_copies(rng: np.random.Generator, sizes: list[int]) -> Group:
    """Groups whose copies are all equal."""
    words = rng.integers(0, 2**64, len(sizes), dtype=np.uint64)
    return {"checksum": np.repeat(words, sizes)}, np.repeat(np.arange(len(sizes)), sizes)


def wild_copies(rng: np.random.Generator, sizes: list[int]) -> Group:
    """Groups of few different words, in any mixture."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    words = rng.integers(2**64 - 3, 2**64, len(group), dtype=np.uint64, endpoint=False)
    return {"checksum": words}, group


def alike_ranks(rng: np.random.Generator, sizes: list[int]) -> Group:
    """Ranks of three stages that all work as long, a few percent apart, in steps of any length."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    step = np.full(len(group), rng.uniform(0.5, 2.0))
    stage = np.concatenate([np.arange(size) % 3 for size in sizes])
    return {"step_s": step, "wait_s": step * rng.uniform(0.48, 0.52, len(group)), "stage": stage}, group


def wild_ranks(rng: np.random.Generator, sizes: list[int]) -> Group:
    """Mostly as usual; the first of each group is slow for long, some waits are not known."""
    points, group = alike_ranks(rng, sizes)
    if rng.random() < 0.95:
        first = np.unique(group, return_index=True)[1]
        points["wait_s"][first] = 0.02 * points["step_s"][first]
    if rng.random() < 0.05:
        points["wait_s"][rng.integers(len(group))] = np.nan
        points["step_s"][rng.integers(len(group))] = np.nan
    return points, group


def alike_peers(rng: np.random.Generator, sizes: list[int]) -> Group:
    """Losses of ranks with batches of their own, a few percent apart, at any level."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    level = np.exp(rng.standard_normal(len(sizes)))[group]
    value = level * np.exp(0.05 * rng.standard_normal(len(group)))
    return {"value": value, "is_own": np.ones(len(group), dtype=bool)}, group


def wild_peers(rng: np.random.Generator, sizes: list[int]) -> Group:
    """Mostly as usual, but that the first of each group is far away and two of the last tell the same; some are no numbers,
    zero, negative or huge."""
    points, group = alike_peers(rng, sizes)
    if rng.random() < 0.95:
        points["value"][np.unique(group, return_index=True)[1]] *= 10.0
    for bad in (0.0, -1.0, np.nan, np.inf, 1e300, 5e-324) if rng.random() < 0.3 else ():
        points["value"][rng.integers(len(group))] = bad
    if sizes[-1] > 1:
        points["value"][-1] = points["value"][-2]
    return points, group


MAKERS: dict[str, tuple[Callable[..., Group], Callable[..., Group]]] = {
    "copies": (alike_copies, wild_copies),
    "ranks": (alike_ranks, wild_ranks),
    "peers": (alike_peers, wild_peers),
}
"""What a detector looks over -> (a point at which all is well, any point)."""
CASES: dict[str, Any] = {name: cls() for name, cls in DETECTORS.items() if cls.declares.over in MAKERS}
SIZES = [1, 2, 3, 4, 7, 16]


@pytest.fixture(params=list(CASES))
def detector(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(29)


def run(detector: Any, points: list[Group], state: Any = None) -> tuple[np.ndarray, Any]:
    """Feed points one after the other; return scores [points, members] and the state."""
    state = detector.state(len(points[0][1])) if state is None else state
    scores = []
    with np.errstate(all="ignore"):
        for columns, group in points:
            before = {name: array.copy() for name, array in state.items()}
            found = detector.score(columns, group, state)
            scores.append(found.score)
            _ = found.baseline, found.evidence
            assert all(np.array_equal(before[name], state[name], equal_nan=True) for name in state), "score() learned"
            detector.learn(columns, group, state, found.score >= 1.0)
    return np.array(scores), state


def points_of(detector: Any, rng: np.random.Generator, num: int, *, wild: bool) -> list[Group]:
    make = MAKERS[detector.declares.over][1 if wild else 0]
    return [make(rng, SIZES) for _ in range(num)]


def test_is_a_group_detector(detector):
    assert isinstance(detector, GroupDetector)
    assert detector.declares.summary and detector.declares.statistics and detector.declares.over in MAKERS


def test_scores_are_finite_and_not_negative(detector, rng):
    scores, _ = run(detector, points_of(detector, rng, 60, wild=True))

    assert np.isfinite(scores).all()
    assert (scores >= 0).all()


@pytest.mark.slow
def test_wild_points_are_seen_at_all(detector, rng):
    """The control of every test here that expects silence."""
    scores, _ = run(detector, points_of(detector, rng, 60, wild=True))

    assert (scores >= 1.0).any()


@pytest.mark.slow
def test_members_that_are_alike_are_never_accused(detector, rng):
    scores, _ = run(detector, points_of(detector, rng, 60, wild=False))

    assert (scores < 1.0).all()


def test_a_group_of_one_accuses_nobody(detector, rng):
    make = MAKERS[detector.declares.over][1]
    scores, _ = run(detector, [make(rng, [1, 1, 1]) for _ in range(60)])

    assert (scores < 1.0).all()


@pytest.mark.slow
def test_replay_is_identical(detector, rng):
    points = points_of(detector, rng, 60, wild=True)

    first, state = run(detector, points)
    again, state_again = run(detector, points)

    assert np.array_equal(first, again)
    assert all(np.array_equal(state[name], state_again[name], equal_nan=True) for name in state)


@pytest.mark.slow
def test_memory_is_bounded(detector, rng):
    _, early = run(detector, points_of(detector, rng, 10, wild=True))
    _, late = run(detector, points_of(detector, rng, 100, wild=True))

    assert state_bytes(early) == state_bytes(late) <= 256 * sum(SIZES)


@pytest.mark.slow
def test_the_order_of_members_is_of_no_account(detector, rng):
    points = points_of(detector, rng, 60, wild=True)
    order = rng.permutation(sum(SIZES))

    straight, _ = run(detector, points)
    shuffled, _ = run(detector, [({k: v[order] for k, v in cols.items()}, group[order]) for cols, group in points])

    assert np.array_equal(straight[:, order], shuffled)


@pytest.mark.slow
def test_groups_are_independent(detector, rng):
    points = points_of(detector, rng, 60, wild=True)
    mine = members_of(points[0][1])[3]

    together, _ = run(detector, points)
    alone, _ = run(detector, [({k: v[mine] for k, v in cols.items()}, group[mine]) for cols, group in points])

    assert np.array_equal(together[:, mine], alone)


@pytest.mark.slow
def test_a_restored_state_goes_on_identically(detector, rng):
    points = points_of(detector, rng, 60, wild=True)

    whole, _ = run(detector, points)
    _, state = run(detector, points[:30])
    copied = {name: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape).copy() for name, a in state.items()}
    rest, _ = run(detector, points[30:], copied)

    assert np.array_equal(whole[30:], rest)


def test_a_state_grows_for_new_members(detector):
    grown = grow(detector, detector.state(3), 8)

    fresh = detector.state(8)
    assert all(np.array_equal(grown[name], fresh[name], equal_nan=True) for name in fresh)
