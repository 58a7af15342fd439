"""Who arrives last, where all step times are alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sentinel.detect import SlowRank
from sentinel.errors import ConfigError


def run(
    busy: Any,
    group: Any,
    *,
    step_s: Any = None,
    num_steps: int = 40,
    begin: int = 20,
    jitter: float = 0.01,
    known: bool = True,
    detector: SlowRank | None = None,
    until: int = 10_000,
    unit_s: float = 1.0,
) -> list[list[int]]:
    """Return the ranks accused at each step: all work 1.0 unit, then from `begin` on as `busy` says, in steps of step_s."""
    detector = detector or SlowRank()
    rng = np.random.default_rng(1)
    group = np.array(group)
    state, found = detector.state(len(group)), []
    for step in range(num_steps):
        is_now = begin <= step < until
        work = np.array(busy if is_now else np.ones(len(group)), float) * np.exp(jitter * rng.standard_normal(len(group)))
        length = work.max() + 0.2 if step_s is None else step_s
        work, length = work * unit_s, length * unit_s
        wait = length - work if known else np.full(len(group), np.nan)
        points = {"step_s": np.full(len(group), length), "wait_s": wait, "stage": group}
        scores = detector.score(points, np.zeros_like(group), state)
        found.append(np.flatnonzero(scores.score >= 1).tolist())
        detector.learn(points, np.zeros_like(group), state, scores.score >= 1)
    return found


FOUR = [0, 0, 0, 0]


def test_the_last_to_arrive_is_named_once_it_lasts() -> None:
    found = run([1, 1, 1.5, 1], FOUR)

    assert found[:22] == [[]] * 22
    assert found[22:] == [[2]] * 18


@pytest.mark.parametrize(("unit_s", "first"), [(0.2, 22), (0.05, 22), (0.005, 26)])
def test_short_steps_must_have_cost_something(unit_s: float, first: int) -> None:
    found = run([1, 1, 4, 1], FOUR, unit_s=unit_s)

    assert found == [[]] * first + [[2]] * (40 - first)


@pytest.mark.parametrize(
    ("busy", "options"),
    [
        pytest.param([1, 1, 1.2, 1], {}, id="within the factor"),
        pytest.param([1, 1, 5, 1], {"unit_s": 0.004, "until": 25}, id="a core taken for some steps of milliseconds"),
        pytest.param([1.5, 1.5, 1.5, 1.5], {}, id="all slow alike"),
        pytest.param([1, 1, 3, 1], {"until": 22}, id="two steps"),
        pytest.param([1, 1, 3, 1], {"known": False}, id="waits not known"),
        pytest.param([1, 1, 1.6, 1], {"begin": 8, "until": 13}, id="a busy host while the run is young"),
        pytest.param([1, 1, 1.6, 1], {"unit_s": 0.065, "until": 26}, id="a burst of another program in short steps"),
        pytest.param([1, 1, 3, 1], {"begin": 0, "until": 8}, id="the first steps"),
        pytest.param([1, 1, 1.5, 1], {"jitter": 0.3}, id="work that varies as much anyway"),
        pytest.param([1, 1, 1.5, 1], {"step_s": 100.0}, id="too little of the step to matter"),
    ],
)
def test_nobody_is_named(busy: list[float], options: dict[str, Any]) -> None:
    assert not any(run(busy, FOUR, **options))


def test_one_that_is_slow_from_the_start_is_named() -> None:
    assert run([1, 1, 2, 1], FOUR, begin=0)[10:] == [[2]] * 30


def test_two_slow_ranks_are_both_named_and_two_ranks_are_enough() -> None:
    assert run([1, 2, 1, 2, 1, 1, 1, 1], [0] * 8)[-1] == [1, 3]
    assert run([1, 2], [0, 0])[-1] == [1]


def test_who_waits_for_something_else_is_no_sign() -> None:
    """Busy longer than its peers, which do not wait: another job of theirs."""
    detector, state = SlowRank(), SlowRank().state(4)
    points = {"step_s": np.array([1.0, 1.0, 2.0, 1.0]), "wait_s": np.full(4, 0.1), "stage": np.array(FOUR)}
    for _ in range(20):
        scores = detector.score(points, np.array(FOUR), state)
        detector.learn(points, np.array(FOUR), state, scores.score >= 1)

    assert (scores.score < 1).all()


def test_stages_are_not_held_against_each_other() -> None:
    stages = [0, 0, 1, 1]

    assert not any(run([1, 1, 1.6, 1.6], stages))
    assert run([1, 1, 1, 1.6], stages)[-1] == [3]


def test_a_rank_alone_on_its_stage_is_held_against_what_is_usual_between_stages() -> None:
    assert run([1, 1, 2], [0, 1, 2], step_s=None)[-1] == [2]
    assert run([1, 2], [0, 1])[-1] == [1]
    assert not any(run([2, 2, 2], [0, 1, 2]))


def test_a_stage_is_innocent_when_the_slow_one_beside_it_is_well_again_or_becomes_faster() -> None:
    assert not any(1 in blamed for blamed in run([4, 1], [0, 1], until=30, num_steps=60))
    assert not any(run([0.4, 1], [0, 1]))
    assert not any(1 in blamed for blamed in run([3, 1, 1, 1], [0, 1, 2, 3], until=30, num_steps=60))


@pytest.mark.parametrize("stages", [[0, 0], [0, 1], FOUR], ids=["replicas", "stages", "four replicas"])
def test_many_times_as_long_is_named_in_a_young_run_within_three_steps(stages: list[int]) -> None:
    busy = [1.0] * len(stages)
    busy[-1] = 50.0

    found = run(busy, stages, begin=5, until=15, num_steps=30)

    assert found[:7] == [[]] * 7
    assert found[7:15] == [[len(stages) - 1]] * 8
    assert not any(found[15:])


@pytest.mark.parametrize("size", [2.5, 3.3, 6.0])
@pytest.mark.parametrize("stages", [[0, 0], [0, 1], FOUR], ids=["replicas", "stages", "four replicas"])
def test_a_young_rank_that_kept_pace_and_then_is_as_slow_step_after_step_is_named_within_three(
    stages: list[int], size: float
) -> None:
    """Steps of 40 ms of which one rank takes some times as long from the sixth on."""
    busy = [1.0] * len(stages)
    busy[-1] = size

    found = run(busy, stages, begin=5, until=15, num_steps=20, unit_s=0.04, jitter=0.05)

    assert found[:7] == [[]] * 7
    assert found[7:15] == [[len(stages) - 1]] * 8
    assert not any(found[15:])


def test_one_odd_step_of_a_young_run_does_not_become_what_is_usual_between_stages() -> None:
    """Stages alone: the third step takes one of them 2.2 times as long, by chance; from the sixth on it is slow."""
    detector, state, group, found = SlowRank(), SlowRank().state(2), np.array([0, 1]), []
    for step, ratio in enumerate([1.0, 1.0, 2.2, 0.9, 1.35, *([3.1] * 8)]):
        work = np.array([0.05, 0.05 * ratio])
        points = {"step_s": np.full(2, work.max() + 0.02), "wait_s": work.max() + 0.02 - work, "stage": group}
        scores = detector.score(points, np.zeros(2, int), state)
        found += [(step, one) for one in np.flatnonzero(scores.score >= 1).tolist()]
        detector.learn(points, np.zeros(2, int), state, scores.score >= 1)

    assert found[0] == (7, 1)


@pytest.mark.parametrize("stages", [[0, 0], [0, 1]], ids=["replicas", "stages"])
def test_what_a_young_rank_is_step_after_step_does_not_become_its_usual_time_before_it_is_judged(stages: list[int]) -> None:
    """1.7 times as long from the sixth step on: too little to be told of a young rank, told when it is none."""
    found = run([1, 1.7], stages, begin=5, until=30, num_steps=30, jitter=0.05)

    assert found[:10] == [[]] * 10
    assert [1] in found[10:13]


def test_a_stage_is_innocent_that_varies_a_little_after_another_stage_has_compiled_for_long() -> None:
    """Busy seconds of a real run on a busy machine: the second stage compiles in steps 0, 2, 3, 4, 6 and 8."""
    first = [0.5, 0.109, 0.111, 0.110, 0.113, 0.111, 0.111, 0.118, 0.110, 0.152, 0.141, 0.146, 0.170, 0.116, 0.108, 0.122]
    second = [2.9, 0.149, 1.335, 0.611, 1.023, 0.111, 1.524, 0.127, 0.434, 0.127, 0.146, 0.114, 0.113, 0.120, 0.118, 0.116]
    detector, state, found = SlowRank(), SlowRank().state(2), []
    for work in np.array([first, second]).T:
        points = {"step_s": np.full(2, work.max() + 0.06), "wait_s": work.max() + 0.06 - work, "stage": np.array([0, 1])}
        scores = detector.score(points, np.zeros(2, int), state)
        found += np.flatnonzero(scores.score >= 1).tolist()
        detector.learn(points, np.zeros(2, int), state, scores.score >= 1)

    assert not found


BEGINNINGS = {
    "compiled twice, and once more for a new shape": {1: 40.0, 2: 9.0, 3: 3.0},
    "compiles new shapes at first": {2: 30.0, 3: 8.0, 4: 14.0, 6: 20.0},
    "caches of a file system that fill": {2: 6.0, 3: 4.5, 4: 3.0, 5: 1.6, 6: 1.0, 7: 0.5},
    "files that nobody has read": {3: 2.0, 4: 7.0, 5: 0.6, 6: 12.0},
    "autotuning": {2: 3.0, 3: 11.0, 4: 5.0},
    "one that trails from the start on": {2: 1.5, 3: 1.5, 4: 1.5, 5: 1.5},
    "a checkpoint": {5: 60.0},
    "a checkpoint that is written on while it trains": {5: 60.0, 6: 0.6, 7: 0.5, 8: 0.2},
}


@pytest.mark.parametrize("stages", [[0, 0], [0, 1], FOUR], ids=["replicas", "stages", "four replicas"])
@pytest.mark.parametrize("name", BEGINNINGS)
def test_what_belongs_to_a_beginning_blames_nobody(name: str, stages: list[int]) -> None:
    """One rank takes so many times a step longer, in steps of 0.3 s."""
    detector, rng, group = SlowRank(), np.random.default_rng(4), np.array(stages)
    state, found = detector.state(len(stages)), []
    for step in range(16):
        work = 0.3 * np.exp(0.03 * rng.standard_normal(len(stages)))
        work[0] += 0.3 * BEGINNINGS[name].get(step, 0.0)
        points = {"step_s": np.full(len(work), work.max() + 0.1), "wait_s": work.max() + 0.1 - work, "stage": group}
        scores = detector.score(points, np.zeros_like(group), state)
        found += np.flatnonzero(scores.score >= 1).tolist()
        detector.learn(points, np.zeros_like(group), state, scores.score >= 1)

    assert not found


@pytest.mark.parametrize("stages", [[0, 0], [0, 1]], ids=["replicas", "stages"])
def test_a_first_step_that_compiles_longer_on_one_rank_hides_nothing_and_blames_nobody(stages: list[int]) -> None:
    detector, state = SlowRank(), SlowRank().state(2)
    group, found = np.array(stages), []
    for step in range(14):
        work = np.array([30.0, 1.0] if step < 2 else [1.0, 50.0] if step >= 8 else [1.0, 1.0])
        points = {"step_s": np.full(2, work.max() + 0.2), "wait_s": work.max() + 0.2 - work, "stage": group}
        scores = detector.score(points, np.zeros(2, np.int64), state)
        found.append(np.flatnonzero(scores.score >= 1).tolist())
        detector.learn(points, np.zeros(2, np.int64), state, scores.score >= 1)

    assert found == [[]] * 10 + [[1]] * 4


@pytest.mark.parametrize(
    ("args", "says"),
    [({"factor": 1.0}, "factor"), ({"lasting": 0}, "lasting"), ({"warmup": 0}, "warmup"), ({"young": 1.1}, "young")],
)
def test_nonsense_is_refused_when_built(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SlowRank(**args)


def test_a_step_that_is_sudden_is_told_alone_and_the_next_like_it_is_not() -> None:
    detector, group = SlowRank(), np.zeros(4, dtype=np.int64)
    state = detector.state(4)

    def alone(busy: float) -> list[int]:
        work = np.array([1.0, 1.0, busy, 1.0])
        points = {"step_s": np.full(4, work.max() + 0.2), "wait_s": work.max() + 0.2 - work, "stage": group}
        scores = detector.score(points, group, state)
        detector.learn(points, group, state, scores.score >= 1.0)
        assert (scores.score < 1.0).all(), "it does not last"
        return np.flatnonzero(scores.evidence["alone"] >= 1.0).tolist()

    early = [alone(5.0 if step == 3 else 1.0) for step in range(30)]

    assert early == [[]] * 30, "the first steps compile"
    assert [alone(busy) for busy in (3.0, 1.0, 1.0, 2.9, 1.0, 1.9, 1.0, 4.0)] == [[2], [], [], [], [], [], [], [2]]


def by_turns(straggler: int | None, size: float = 3.0) -> list[tuple[int, int]]:
    """Return (step, rank) of all accusations where a busy host makes one rank after another late for four steps each."""
    detector, rng, group = SlowRank(), np.random.default_rng(3), np.zeros(4, int)
    state, found = detector.state(4), []
    for step in range(400):
        work = 0.1 * np.exp(0.02 * rng.standard_normal(4))
        if step >= 30 and step % 9 < 4:
            work[step // 9 % 4] *= 2.5
        if straggler is not None and step >= 300:
            work[straggler] = 0.1 * size
        points = {"step_s": np.full(4, work.max() + 0.02), "wait_s": work.max() + 0.02 - work, "stage": group}
        scores = detector.score(points, group, state)
        found += [(step, int(rank)) for rank in np.flatnonzero(scores.score >= 1)]
        detector.learn(points, group, state, scores.score >= 1)
    return found


@pytest.mark.slow
def test_ranks_that_are_late_by_turns_are_told_once_and_not_each_time() -> None:
    reported = by_turns(None)

    assert 1 <= len(reported) <= 4


@pytest.mark.slow
@pytest.mark.parametrize(("size", "within"), [(3.0, 12), (12.0, 3)])
def test_a_straggler_among_ranks_that_are_late_by_turns_is_told(size: float, within: int) -> None:
    found = [(step, rank) for step, rank in by_turns(1, size) if step >= 300]

    assert found[0][0] < 300 + within
    assert {rank for _, rank in found} == {1}
