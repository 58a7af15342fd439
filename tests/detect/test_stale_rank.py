"""Who is to blame when nothing moves, from facts at a moment handed in; and what any detector of liveness owes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sentinel.detect import DETECTORS, StaleRank, grow, state_bytes
from sentinel.errors import ConfigError

NOW = 1000.0


def facts_of(*ranks: dict[str, Any]) -> dict[str, np.ndarray]:
    """Columns of ranks that are well, each changed by what is given: `silent` and `idle` in seconds."""
    usual = {
        "silent": 0.5, "idle": 0.5, "is_live": True, "step": 40, "call_id": 10, "num_calls": 100, "activity": "train",
        "has_stepped": True, "is_waiting": -1, "pp_stage": 0, "left": "", "waits_s": 0.0,
    }  # fmt: skip
    rows = [{**usual, "idle": rank.get("silent", usual["idle"]), **rank} for rank in ranks]
    columns = {name: np.array([row[name] for row in rows]) for name in usual}
    columns["received_at"], columns["moved_at"] = NOW - columns.pop("silent"), NOW - columns.pop("idle")
    return columns


def learned(detector: Any, num_ranks: int, step_s: float = 0.5, pause_s: float = 0.6, num_steps: int = 20) -> Any:
    state = detector.state(num_ranks)
    for _ in range(num_steps):
        detector.learn_step(np.full(num_ranks, step_s), np.full(num_ranks, pause_s), state)
    return state


def wild(rng: np.random.Generator, num_ranks: int = 12) -> dict[str, np.ndarray]:
    return facts_of(
        *(
            {
                "silent": rng.choice([0.1, 10.0, 500.0]), "idle": rng.choice([0.1, 40.0, 1e4]),
                "step": int(rng.integers(38, 42)), "call_id": int(rng.integers(0, 100)), "pp_stage": at % 3,
                "activity": rng.choice(["train", "train", "eval", "checkpoint", "init"]),
                "left": rng.choice(["", "", "", "exit"]), "is_live": bool(rng.integers(2)),
                "has_stepped": bool(rng.integers(2)), "is_waiting": int(rng.integers(-1, 2)),
                "waits_s": rng.choice([0.0, 0.0, 130.0]),
            }
            for at in range(num_ranks)
        )
    )  # fmt: skip


CASES = {name: cls() for name, cls in DETECTORS.items() if hasattr(cls, "score_at")}


@pytest.fixture(params=list(CASES))
def detector(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


def test_is_a_liveness_detector(detector: Any) -> None:
    assert detector.declares.summary and detector.declares.statistics


@pytest.mark.slow
def test_scores_are_finite_and_change_nothing(detector: Any) -> None:
    rng = np.random.default_rng(3)
    state = learned(detector, 12)
    num_blamed = 0

    for _ in range(300):
        before = {name: array.copy() for name, array in state.items()}
        facts = wild(rng)
        found, again = detector.score_at(facts, NOW, state), detector.score_at(facts, NOW, state)
        assert np.isfinite(found.score).all() and (found.score >= 0).all()
        assert np.array_equal(found.score, again.score)
        assert all(np.array_equal(before[name], state[name], equal_nan=True) for name in state)
        assert not (found.evidence["is_waiting"] & (found.score >= 1)).any()
        num_blamed += int((found.score >= 1).any())

    assert num_blamed > 50


@pytest.mark.slow
def test_the_order_of_ranks_and_the_zero_of_the_clock_are_of_no_account(detector: Any) -> None:
    rng = np.random.default_rng(4)
    state = learned(detector, 12)
    order = rng.permutation(12)

    for _ in range(100):
        facts = wild(rng)
        shuffled = {name: column[order] for name, column in facts.items()}
        later = {name: column + 5e5 if name in ("received_at", "moved_at") else column for name, column in facts.items()}
        straight = detector.score_at(facts, NOW, state).score
        assert np.allclose(straight[order], detector.score_at(shuffled, NOW, state).score)
        assert np.allclose(straight, detector.score_at(later, NOW + 5e5, state).score)


def test_memory_is_bounded_and_grows_by_ranks(detector: Any) -> None:
    early, late = learned(detector, 4, num_steps=5), learned(detector, 4, num_steps=500)

    assert state_bytes(early) == state_bytes(late) <= 4 * 256
    assert all(len(array) == 9 for array in grow(detector, late, 9).values())


def blamed(*ranks: dict[str, Any], detector: StaleRank | None = None, step_s: float = 0.5, pause_s: float = 0.6) -> Any:
    """(ranks to blame, reason, is_sure, ranks that wait)"""
    detector = detector or StaleRank()
    found = detector.score_at(facts_of(*ranks), NOW, learned(detector, len(ranks), step_s, pause_s))
    who = np.flatnonzero(found.score >= 1).tolist()
    waiting = np.flatnonzero(found.evidence["is_waiting"]).tolist()
    if not who:
        return [], "", False, waiting
    return who, str(found.evidence["reason"][who[0]]), bool(found.evidence["is_sure"][who].all()), waiting


WELL: dict[str, Any] = {}
WAITS = {"idle": 40.0, "call_id": 60}
FIRST = {"step": 0, "has_stepped": False, "is_waiting": 1}
NOBODY = ([], "", False, [])


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([WELL] * 4, NOBODY, id="all well"),
        pytest.param([WELL, {"silent": 31.0}, WELL], ([1], "silent", True, []), id="killed"),
        pytest.param([WELL, {"silent": 29.0}, WELL], NOBODY, id="not yet"),
        pytest.param(
            [WAITS, {"silent": 31.0, "idle": 41.0, "call_id": 20}, WAITS], ([1], "silent", True, [0, 2]), id="stopped"
        ),
        pytest.param(
            [WAITS, {"silent": 8.0, "idle": 41.0}, WAITS], NOBODY, id="quiet for a moment: it may be gone, wait for it"
        ),
        pytest.param([{"silent": 31.0}, {"silent": 29.0}, WELL], ([0, 1], "silent", True, []), id="silent together"),
        pytest.param(
            [{**FIRST, "idle": 130.0, "waits_s": 121.0}] * 3, ([0, 1, 2], "hung", False, []), id="deadlock at once"
        ),
        pytest.param([{**FIRST, "idle": 130.0, "waits_s": 110.0}] * 3, NOBODY, id="all wait, as yet"),
        pytest.param(
            [{**FIRST, "idle": 500.0, "waits_s": 400.0}] * 2 + [{**FIRST, "idle": 500.0, "waits_s": 0.0}], NOBODY,
            id="one that loads or compiles is waited for",
        ),
        pytest.param(
            [{"idle": 40.0, "call_id": 5, "waits_s": 39.0}, {"idle": 35.0, "call_id": 60, "waits_s": 34.0}],
            ([0, 1], "hung", False, []), id="all wait for each other: who came least far is not blamed",
        ),
        pytest.param(
            [{"idle": 40.0, "call_id": 5, "waits_s": 39.0}, {"idle": 20.0, "call_id": 60, "waits_s": 19.0}], NOBODY,
            id="all wait, one not for long",
        ),
        pytest.param(
            [{"idle": 40.0, "call_id": 5}, {"idle": 35.0, "call_id": 60, "waits_s": 34.0}], ([0], "hung", True, [1]),
            id="one does not wait, the other waits for it",
        ),
        pytest.param(
            [{"idle": 40.0, "waits_s": 39.0}, {"left": "exit", "silent": 38.0}, {"idle": 40.0, "waits_s": 39.0}],
            ([1], "left", True, [0, 2]), id="all wait for one that left",
        ),
        pytest.param([{"silent": 500.0, "is_live": False}] * 3, NOBODY, id="a recording of a dead run"),
        pytest.param([WELL, {"silent": 500.0, "left": "exit"}], NOBODY, id="ended in order"),
        pytest.param([WELL, {"silent": 60.0, "activity": "checkpoint"}], NOBODY, id="writes a checkpoint"),
        pytest.param([WELL, {"silent": 121.0, "activity": "checkpoint"}], ([1], "silent", True, []), id="died saving"),
        pytest.param([WAITS, {"idle": 41.0}, WAITS], ([1], "hung", True, [0, 2]), id="hangs first in its step"),
        pytest.param(
            [{"idle": 40.0, "step": 41, "call_id": 5}, {"idle": 41.0, "call_id": 90}], ([1], "hung", True, [0]),
            id="an earlier step, however far in it",
        ),
        pytest.param([WAITS, {"idle": 10.0}, WAITS], NOBODY, id="the one they wait for moves: slow, not hung"),
        pytest.param([{"idle": 40.0}] * 3, ([0, 1, 2], "hung", False, []), id="nothing tells them apart"),
        pytest.param(
            [{"idle": 40.0, "is_waiting": 1}, {"idle": 40.0, "is_waiting": 0}], ([1], "hung", True, [0]),
            id="one is not in the collective",
        ),
        pytest.param([{"idle": 31.0}], ([0], "hung", True, []), id="a single rank"),
        pytest.param(
            [{"idle": 40.0, "call_id": 100, "is_waiting": 1}, {"idle": 50.0, "call_id": 0, "is_waiting": 0}],
            ([1], "hung", True, [0]), id="the last collective of the step is waited in",
        ),
        pytest.param(
            [WAITS, {"idle": 40.0, "activity": "checkpoint", "call_id": 100}], NOBODY, id="they wait for a checkpoint"
        ),
        pytest.param(
            [WAITS, {"idle": 3601.0, "activity": "checkpoint", "call_id": 100, "step": 39}], ([1], "hung", True, [0]),
            id="a checkpoint that never ends",
        ),
        pytest.param(
            [{"idle": 400.0, "has_stepped": False, "call_id": 0}] * 2, NOBODY, id="compiles before its first step"
        ),
        pytest.param(
            [{"idle": 300.0, "call_id": 100}, {"idle": 300.0, "call_id": 0, "step": 41}], NOBODY,
            id="all are between two steps: an evaluation that nobody told of",
        ),
        pytest.param(
            [{"idle": 700.0, "call_id": 100}] * 2, ([0, 1], "hung", False, []), id="between two steps for too long"
        ),
        pytest.param(
            [{"idle": 50.0, "call_id": 0, "step": 41}, {"idle": 40.0, "step": 41, "call_id": 60}],
            ([0], "hung", True, [1]), id="stuck in its data loader, the other waits inside the step",
        ),
        pytest.param([WAITS, {"left": "exception", "silent": 40.0}, WAITS], ([1], "left", True, [0, 2]), id="raised"),
        pytest.param(
            [WAITS, {"left": "exit", "step": 12, "silent": 900.0}, {"idle": 41.0}], ([2], "hung", True, [0]),
            id="who left long ago is not blamed",
        ),
        pytest.param(
            [{"idle": 100.0, "call_id": 100}, {"left": "exit", "silent": 90.0}, {"left": "exit", "silent": 90.0}], NOBODY,
            id="saves after the others ended",
        ),
        pytest.param([WAITS, {"idle": 0.5, "call_id": 70}], NOBODY, id="the one it waited for has just gone on"),
        pytest.param([WAITS, {"idle": 0.5, "call_id": 0, "step": 41}], NOBODY, id="it has just gone on to the next step"),
        pytest.param([WAITS, {"left": "exit", "silent": 0.5}], NOBODY, id="it has just left, this one may leave too"),
        pytest.param([WAITS, {"idle": 6.0, "call_id": 70}], ([0], "hung", True, []), id="it went on, this one did not"),
        pytest.param([WAITS, {"idle": 0.5, "step": 42}], ([0], "hung", True, []), id="the other waits for nobody"),
    ],
)  # fmt: skip
def test_who_is_to_blame(ranks: list[dict[str, Any]], expected: Any) -> None:
    assert blamed(*ranks) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(
            [{"idle": 40.0, "call_id": 30}, {"idle": 40.0, "call_id": 70},
             {"idle": 40.0, "call_id": 20, "pp_stage": 1, "is_waiting": 1},
             {"idle": 40.0, "call_id": 70, "pp_stage": 1, "is_waiting": 1}],
            ([0], "hung", True, [1, 2, 3]), id="the neighbour at its border waits for it",
        ),
        pytest.param(
            [{"idle": 40.0, "call_id": 75, "is_waiting": 1}, {"idle": 40.0, "call_id": 52, "pp_stage": 1}],
            ([1], "hung", True, [0]), id="no replicas: the smaller share of its calls",
        ),
    ],
)  # fmt: skip
def test_between_pipeline_stages_calls_do_not_compare(ranks: list[dict[str, Any]], expected: Any) -> None:
    assert blamed(*ranks) == expected


def test_the_limit_follows_the_step_time_and_the_pauses_of_the_run() -> None:
    hangs = [{"idle": 200.0, "call_id": 60}, {"idle": 200.0}]
    pauses = [{"idle": 200.0, "call_id": 60}, {"idle": 200.0, "call_id": 0}]

    assert blamed(*hangs, step_s=15.0)[0] == [1]
    assert blamed(*hangs, step_s=25.0)[0] == []
    assert blamed(*pauses, pause_s=5.0)[0] == [1]
    assert blamed(*pauses, pause_s=150.0)[0] == []


def test_what_stands_still_between_steps_may_be_quiet_on_purpose() -> None:
    detector = StaleRank()
    idle = detector.score_at(facts_of({"idle": 700.0, "call_id": 0}), NOW, learned(detector, 1))
    hung = detector.score_at(facts_of({"idle": 700.0}), NOW, learned(detector, 1))

    assert idle.score[0] >= 1 and idle.evidence["is_idle"].all()
    assert hung.score[0] >= 1 and not hung.evidence["is_idle"].any()


def test_a_deadlock_between_steps_is_not_quiet_on_purpose() -> None:
    detector = StaleRank()
    stuck = {"idle": 130.0, "call_id": 0, "activity": "init", "has_stepped": False, "waits_s": 125.0}
    found = detector.score_at(facts_of(stuck, stuck), NOW, detector.state(2))

    assert (found.score >= 1).all() and not found.evidence["is_idle"].any()


def test_one_long_step_does_not_raise_the_limit() -> None:
    detector = StaleRank()
    state = detector.state(2)
    for step_s in (300.0, *[0.5] * 10):
        detector.learn_step(np.full(2, step_s), np.full(2, np.nan), state)

    assert (detector.score_at(facts_of({"idle": 40.0}, WAITS), NOW, state).score >= 1).tolist() == [True, False]


def test_nonsense_is_refused_when_built() -> None:
    with pytest.raises(ConfigError, match="hang_after_s must be above 0, got 0"):
        StaleRank(hang_after_s=0)
