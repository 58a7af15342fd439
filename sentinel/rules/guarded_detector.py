"""Guarded: a detector of another package at work among ours; when it fails, its rule reports that and judges no more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from sentinel.detect import Scores, State
from sentinel.detect.declaration import CONTRACTS, declared
from sentinel.detect.group import Points, StepPoints
from sentinel.detect.liveness import Facts
from sentinel.errors import RuleError
from sentinel.exception_words import described

log = logging.getLogger("sentinel.rules")

FAILED = "guard.failed"
"""Array of the state: a rule that failed stays off after a restart, and in a replay, as it did live."""


class Guarded:
    """A detector whose mistakes are its own.

    Its first exception, scores that are no scores, or a state that is no longer one switch it off for what it was judging:
    nothing scores any more. It cannot write into what it is shown, and is shown no value that is not finite, unless it
    declares `raw_values`. Two threads never judge through one engine, so `problem` needs no lock.
    """

    def __init__(self, detector: Any, name: str) -> None:
        """name: what messages call it. RuleError where it does not even make a state."""
        self._detector, self._name = detector, name
        self.problem = ""
        """Why it is off, in words; empty while it is well."""
        self._like: State = {}
        try:
            self.declares = msgspec.structs.replace(declared(detector), with_arguments=None)
            """What the detector declares, with what its arguments change of it."""
            for num in (1, 3):
                self._like = _checked(detector.state(num), num)
        except Exception as error:  # a user's code may fail in any way
            raise RuleError(f"state() of {name} failed: {described(error)}") from error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._detector, name)

    def state(self, num_series: int) -> State:
        """Return the detector's own arrays, and one that remembers a failure; none where it keeps none."""
        failed = np.zeros(num_series, dtype=bool)
        try:
            own = _checked(self._detector.state(num_series), num_series)
        except Exception as error:  # as above
            own = {name: np.zeros((num_series, *array.shape[1:]), array.dtype) for name, array in self._like.items()}
            failed[:] = True
            self._fail(error, {})
        return {**own, FAILED: failed} if own else {}

    def _scores(self, state: State, shape: tuple[int, ...], evidence: dict[str, Any], ask: Callable[[], Scores]) -> Scores:
        """Return its scores, checked; 0.0 throughout, with `evidence`, when it fails, or has failed."""
        if not self._is_off(state):
            scores = self._kept(state, lambda: _sound(ask(), shape))
            if scores is not None:
                return scores
        return _silent(shape, evidence)

    def _kept(self, state: State, act: Callable[[], Scores | None]) -> Scores | None:
        """Return what `act` does; its failure switches the rule off. `state` keeps its arrays, whatever was put for them."""
        own = dict(state)
        try:
            result = act()
            if len(state) != len(own) or any(state[name] is not array for name, array in own.items()):
                _write_back(state, own)
        except (Exception, SystemExit) as error:  # as above
            state.clear()
            state.update(own)
            self._fail(error, state)
            return None
        return result

    def _fit(self, values: np.ndarray) -> np.ndarray | None:
        """Return which values it may be shown; None for all of them."""
        if self.declares.raw_values:
            return None
        fit: np.ndarray = np.isfinite(values)
        return None if fit.all() else fit

    def _is_off(self, state: State) -> bool:
        return bool(state[FAILED].any()) if FAILED in state else bool(self.problem)

    def _fail(self, error: BaseException, state: State) -> None:
        if FAILED in state:
            state[FAILED][:] = True
        if not self.problem:
            self.problem = f"{self._name} is off, because it failed: {described(error)}"
            log.error("rules: %s", self.problem)


class GuardedSeries(Guarded):
    """A guarded SeriesDetector."""

    def for_statistic(self, statistic: str) -> Guarded:
        """Return the detector fitted to a statistic, guarded like this one."""
        return GuardedSeries(self._detector.for_statistic(statistic), self._name)

    def score(self, values: np.ndarray, state: State) -> Scores:
        """Return its scores; 0.0 for values that are not finite, and throughout when it fails, or has failed."""
        nothing, fit = {"direction": np.int8(0)}, self._fit(values)
        if fit is None:
            return self._scores(state, values.shape, nothing, lambda: self._detector.score(_shown(values), state))

        def ask() -> Scores:
            return _spread(state, fit, lambda part: self._detector.score(values[fit], part), nothing)

        return self._scores(state, values.shape, nothing, ask)

    def learn(self, values: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Let it learn, unless it has failed; a series whose value is not finite keeps its state."""
        fit = self._fit(values)
        if self._is_off(state):
            return
        if fit is None:
            self._kept(state, lambda: self._detector.learn(_shown(values), state, _shown(anomalous)))
        elif fit.any():
            self._kept(
                state, lambda: _apart(state, fit, lambda part: self._detector.learn(values[fit], part, anomalous[fit]))
            )


class GuardedGroup(Guarded):
    """A guarded GroupDetector."""

    def score(self, points: Points, group: np.ndarray, state: State) -> Scores:
        """Return its scores; 0.0 for members without a finite value, and throughout when it fails, or has failed."""
        nothing, fit = {"is_sure": False, "alone": 0.0, "is_out": False}, self._fit_members(points)
        if fit is None:
            return self._scores(state, group.shape, nothing, lambda: self._detector.score(points, _shown(group), state))

        def ask() -> Scores:
            return _spread(state, fit, lambda part: self._detector.score(_members(points, fit), group[fit], part), nothing)

        return self._scores(state, group.shape, nothing, ask)

    def learn(self, points: Points, group: np.ndarray, state: State, anomalous: np.ndarray) -> None:
        """Let it learn, unless it has failed; a member without a finite value keeps its state."""
        fit = self._fit_members(points)
        if self._is_off(state):
            return
        if fit is None:
            self._kept(state, lambda: self._detector.learn(points, _shown(group), state, _shown(anomalous)))
        elif fit.any():

            def learn(part: State) -> None:
                self._detector.learn(_members(points, fit), group[fit], part, anomalous[fit])

            self._kept(state, lambda: _apart(state, fit, learn))

    def _fit_members(self, points: Points) -> np.ndarray | None:
        """Return which members it may be shown, by the column that it compares; `wait_s` says NaN for what is not known."""
        compared = points.get({"peers": "value", "ranks": "step_s"}.get(self.declares.over, ""))
        return None if compared is None else self._fit(compared)


class GuardedLiveness(Guarded):
    """A guarded LivenessDetector."""

    def score_at(self, facts: Facts, now: float, state: State) -> Scores:
        """Return its scores; 0.0 throughout when it fails, or has failed."""
        shape = np.shape(next(iter(facts.values()), ()))
        nothing = {"reason": "", "seconds": 0.0, "is_sure": False, "is_waiting": False, "is_idle": False}
        return self._scores(state, shape, nothing, lambda: self._detector.score_at(facts, now, state))

    def learn_step(self, step_s: np.ndarray, pause_s: np.ndarray, state: State) -> None:
        """Let it learn, unless it has failed."""
        if not self._is_off(state):
            self._kept(state, lambda: self._detector.learn_step(_shown(step_s), _shown(pause_s), state))


def guarded(detector: Any, name: str) -> Guarded:
    """Return a detector of other people under the guard of its kind. RuleError where it makes no state."""
    return _GUARDS[CONTRACTS[detector.declares.over]](detector, name)


_GUARDS = {"SeriesDetector": GuardedSeries, "GroupDetector": GuardedGroup, "LivenessDetector": GuardedLiveness}


def _shown(array: np.ndarray) -> np.ndarray:
    """Return an array that other rules read too, for reading only."""
    view = array.view()
    view.flags.writeable = False
    return view


def _silent(shape: tuple[int, ...], evidence: dict[str, Any]) -> Scores:
    """Return scores of 0.0 throughout, without a baseline."""
    shaped = {name: np.full(shape, value) for name, value in evidence.items()}
    return Scores.of(np.zeros(shape), np.full(shape, np.nan), **shaped)


def _members(points: Points, fit: np.ndarray) -> Points:
    return StepPoints({name: column[fit] for name, column in points.items()})


def _apart(state: State, fit: np.ndarray, act: Callable[[State], Any]) -> Any:
    """Return what `act` does with the state of the series that `fit` marks; what it puts there is put into `state`."""
    own = {name: array[fit] for name, array in state.items()}
    part = dict(own)
    result = act(part)
    _write_back(part, own)
    for name, array in state.items():
        array[fit] = own[name]
    return result


def _spread(state: State, fit: np.ndarray, ask: Callable[[State], Any], nothing: dict[str, Any]) -> Scores:
    """Return scores of all series from those of the ones that `fit` marks: 0.0, without a baseline, for the others.

    nothing: evidence where there is nothing to ask.
    """
    if not fit.any():
        return _silent(fit.shape, nothing)
    found = _sound(_apart(state, fit, ask), (int(fit.sum()),))
    score, baseline, evidence = np.zeros(fit.shape), np.full(fit.shape, np.nan), {}
    score[fit], baseline[fit] = found.score, found.baseline
    for name, array in found.evidence.items():
        evidence[name] = np.zeros(fit.shape, array.dtype)
        evidence[name][fit] = array
    return Scores.of(score, baseline, **evidence)


def _checked(state: Any, num_series: int) -> State:
    if not isinstance(state, dict):
        raise ValueError(f"expected a dict of named arrays, got {type(state).__name__}")
    for name, array in state.items():
        got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        if not isinstance(array, np.ndarray) or array.dtype.hasobject or array.shape[:1] != (num_series,):
            raise ValueError(f'"{name}": expected an array of numbers, first axis the {num_series} series, got {got}')
    return state


def _sound(scores: Any, shape: tuple[int, ...]) -> Scores:
    if not isinstance(scores, Scores):
        raise ValueError(f"score() gave {type(scores).__name__}, expected Scores; see Scores.of")
    found = np.asarray(scores.score, dtype=np.float64)
    if found.shape != shape:
        raise ValueError(f"score() gave shape {found.shape} for {shape} values")
    if not np.isfinite(found).all() or (found < 0.0).any():
        raise ValueError("score() gave a score that is negative or no number")
    baseline = np.asarray(scores.baseline, dtype=np.float64)
    evidence = {name: np.broadcast_to(array, shape) for name, array in scores.evidence.items()}
    return Scores.of(found, np.broadcast_to(baseline, shape), **evidence)


def _write_back(state: State, own: State) -> None:
    """Put what stands in `state` instead of its own arrays into those: `state["mean"] = ...` is how many would write it."""
    if state.keys() != own.keys():
        raise ValueError(f"expected the state to keep its arrays {', '.join(own)}; got {', '.join(state)}")
    for name, array in own.items():
        if state[name] is not array:
            put = np.asarray(state[name])
            if put.shape != array.shape:
                raise ValueError(f'state "{name}": expected shape {array.shape}, got {put.shape}; change it in place')
            array[...] = put
            state[name] = array
