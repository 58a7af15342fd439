"""Beside: what a run has for itself once the data that its reference runs saw too is taken out."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from sentinel.detect import GradNormSpike, LossSpike
from sentinel.detect.residual import SAME, Beside, exponential, logarithm
from sentinel.reference import MOST_RUNS, combine
from sentinel.rules.watches.reference_runs import Lookup

POINTS = 180
OWN = 150
EARLY = 80


def make_runs(rng, num, own=0.001, shared=0.027):
    """Return [num, POINTS] losses of runs that share their batches."""
    course = 2.0 * (1.0 + 2.0 * np.exp(-np.arange(POINTS) / 40.0)) * np.exp(shared * rng.standard_normal(POINTS))
    return course * np.exp(own * rng.standard_normal((num, POINTS)))


class Trial:
    """One run judged beside its reference runs; what it says of each step."""

    def __init__(self, own, references, steps=None, detector=None):
        """reference runs: values at steps 0, 1, ..., or (steps, values)."""
        pairs = [one if isinstance(one, tuple) else (np.arange(len(one)), one) for one in references]
        lookup = Lookup(combine([{"loss": pair} for pair in pairs]).series["loss"])
        self.beside = Beside(detector or LossSpike(), lookup.num_kept)
        steps = np.arange(len(own)) if steps is None else steps
        said = [self.beside.judge(float(x), *lookup.around(int(step))) for step, x in zip(steps, own, strict=True)]
        self.signed = np.array([score * side for score, side, *_ in said])
        self.forecast = np.array([one[2] for one in said])
        self.moved = np.array([one[3] for one in said])
        self.steps = steps
        assert len(said) == len(own)

    @property
    def called(self) -> dict[int, int]:
        """Step -> +1 or -1, of the steps that are anomalous."""
        return {int(self.steps[at]): int(np.sign(self.signed[at])) for at in np.flatnonzero(np.abs(self.signed) >= 1.0)}


def with_steps(loss, factor, steps=(OWN,)):
    changed = loss.copy()
    changed[list(steps)] *= factor
    return changed


@pytest.mark.parametrize("num", [1, 2, 8, 24])
def test_one_step_of_two_percent_is_called_and_nothing_else(num, rng):
    own, *references = make_runs(rng, num + 1)

    clean, bad = Trial(own, references), Trial(with_steps(own, 1.02), references)

    assert clean.called == {}
    assert bad.called == {OWN: 1}
    assert bad.forecast[OWN] == pytest.approx(own[OWN], rel=0.01)
    assert bad.moved[OWN] < 1.0


@pytest.mark.parametrize("num", [3, 8])
def test_a_step_too_low_is_called_by_those_who_can_tell_who_is_astray(num, rng):
    own, *references = make_runs(rng, num + 1)

    assert Trial(with_steps(own, 0.98), references).called == {OWN: -1}
    assert Trial(with_steps(own, 0.98), references[:1]).called == {}


def test_several_steps_of_two_percent_are_called_each_and_the_run_is_judged_again_after(rng):
    own, *references = make_runs(rng, 6)
    several = range(OWN, OWN + 6)

    found = Trial(with_steps(with_steps(own, 1.02, several), 1.03, [OWN + 20]), references)

    assert found.called == dict.fromkeys([*several, OWN + 20], 1)


def test_a_lasting_level_of_its_own_becomes_the_forecast(rng):
    own, *references = make_runs(rng, 6)
    lasting = own * np.where(np.arange(POINTS) >= EARLY, 1.5, 1.0)

    found = Trial(with_steps(lasting, 1.03), references)

    assert EARLY in found.called
    assert [step for step in found.called if step > EARLY + 20] == [OWN]


@pytest.mark.parametrize("factor", [2.0, 0.7])
@pytest.mark.parametrize("num", [1, 5])
def test_what_the_batch_did_to_all_is_nobodys_own(num, factor, rng):
    runs = make_runs(rng, num + 1)
    runs[:, OWN] *= factor

    found = Trial(runs[0], runs[1:])

    assert found.called == {}
    assert (found.moved[OWN] >= 1.0) == (factor == 2.0)
    assert Trial(with_steps(runs[0], 1.03, [OWN + 20]), runs[1:]).called == {OWN + 20: 1}


def test_a_batch_that_divides_the_reference_runs_accuses_none(rng):
    runs = make_runs(rng, 8)
    runs[:, OWN] *= np.exp(0.03 * np.array([1, -1, 1, -1, 1, -1, 1, -1]))

    assert Trial(runs[0], runs[1:]).called == {}


@pytest.mark.parametrize(("num", "factor"), [(1, 0.5), (2, 3.0), (2, 0.5), (3, 3.0), (6, 0.5)])
def test_a_reference_run_that_goes_astray_by_itself_accuses_nobody(num, factor, rng):
    own, *references = make_runs(rng, num + 1)
    references[0][OWN] *= factor

    assert Trial(own, references).called == {}
    assert Trial(with_steps(own, 1.03, [OWN - 20]), references).called == {OWN - 20: 1}


USELESS = {
    "other data": lambda loss, rng: make_runs(rng, 1)[0],
    "far away, other data": lambda loss, rng: 300.0 * make_runs(rng, 1, shared=0.3)[0],
    "a constant": lambda loss, rng: np.full(POINTS, 2.0),
    "all NaN but one": lambda loss, rng: np.where(np.arange(POINTS) == 7, loss, np.nan),
    "not positive": lambda loss, rng: -loss,
    "much noise": lambda loss, rng: loss * np.exp(0.05 * rng.standard_normal(POINTS)),
    "too large for float32": lambda loss, rng: loss * 1e60,
}


@pytest.mark.parametrize("name", USELESS)
def test_a_useless_reference_run_does_no_harm(name, rng):
    own, *references = make_runs(rng, 5)
    useless = USELESS[name](references[0], np.random.default_rng(9))

    alone, beside = Trial(own, [useless]), Trial(with_steps(own, 1.02), [*references, useless])

    assert alone.called == {}
    assert beside.called == {OWN: 1}


USEFUL = {
    "another unit": lambda loss: loss / np.log(2.0),
    "fewer steps": lambda loss: loss[: OWN + 5],
    "NaN here and there": lambda loss: np.where(np.arange(POINTS) % 9 == 4, np.nan, loss),
    "counts from 1": lambda loss: (np.arange(POINTS) + 1, loss),
    "counts from -1": lambda loss: (np.arange(POINTS) - 1, loss),
    "resumed": lambda loss: (
        np.r_[np.arange(120), np.arange(90, POINTS)],
        np.r_[loss[:90], 1.3 * loss[90:120], loss[90:]],
    ),
    "in steps of its own order": lambda loss: (np.arange(POINTS)[::-1], loss[::-1]),
}


@pytest.mark.parametrize("name", USEFUL)
def test_a_reference_run_that_logs_otherwise_is_of_use(name, rng):
    own, *references = make_runs(rng, 2)

    found = Trial(with_steps(own, 1.03), [USEFUL[name](references[0])])

    assert found.called == {OWN: 1}


@pytest.mark.parametrize(("own_every", "reference_every"), [(10, 1), (1, 10), (10, 10)])
def test_another_interval_of_logging_is_matched_by_step(own_every, reference_every, rng):
    runs = make_runs(rng, 3)
    long = np.tile(runs, (1, 4))
    at = 600
    own, steps = with_steps(long[0], 1.03, [at])[::own_every], np.arange(0, long.shape[1], own_every)

    found = Trial(own, [(np.arange(0, long.shape[1], reference_every), one[::reference_every]) for one in long[1:]], steps)

    assert at in found.called
    assert len(found.called) <= 2


def test_the_run_itself_as_its_reference_run_is_told_and_set_aside(rng):
    own, other = make_runs(rng, 2)

    alone, beside = Trial(own, [own]), Trial(with_steps(own, 1.02), [with_steps(own, 1.02), other])
    copy = Trial(with_steps(own, 1.02), [own])

    assert alone.beside.copies.tolist() == [0] and alone.called == {}
    # What moved the run moved "its reference run" too: that must not acquit it.
    assert np.isnan(alone.moved[SAME + 1 :]).all()
    assert beside.beside.copies.tolist() == [0] and beside.called == {OWN: 1}
    # A run that was repeated bit for bit is a copy until it differs.
    assert copy.called == {OWN: 1}


def test_a_run_that_leaves_its_reference_runs_data_says_so_and_falls_silent(rng):
    own, *references = make_runs(rng, 6)
    left = np.where(np.arange(POINTS) >= EARLY, make_runs(rng, 1)[0], own)

    found = Trial(left, references)

    assert min(found.called) in range(EARLY, EARLY + 4)
    assert max(found.called) < EARLY + 60
    # Strangers neither acquit the batch nor convict it.
    assert np.isfinite(found.moved[EARLY - 1]) and np.isnan(found.moved[-10:]).all()


def test_a_noisy_beginning_is_judged_by_its_own_noise(rng):
    scale = np.where(np.arange(POINTS) < 70, 0.01, 0.001)
    runs = make_runs(rng, 6, own=0.0) * np.exp(scale * rng.standard_normal((6, POINTS)))

    found = Trial(with_steps(runs[0], 1.02, [OWN]), runs[1:])

    assert found.called == {OWN: 1}


def test_a_gradient_norm_must_rise_further(rng):
    own, *references = make_runs(rng, 5)

    assert Trial(with_steps(own, 1.05), references, detector=GradNormSpike()).called == {}
    assert Trial(with_steps(own, 1.2), references, detector=GradNormSpike()).called == {OWN: 1}


def test_numbers_that_are_none_change_nothing(rng):
    own, *references = make_runs(rng, 4)
    holed = own.copy()
    holed[[50, 120]] = np.nan, np.inf
    holed[130] = -1.0

    found = Trial(with_steps(holed, 1.02), references)

    assert found.called == {OWN: 1}
    assert np.isfinite(found.forecast[1:]).all()


def test_a_snapshot_goes_on_bit_for_bit(rng):
    own, *references = make_runs(rng, 9)
    own = with_steps(own, 1.02)
    lookup = Lookup(combine([{"loss": (np.arange(POINTS), one)} for one in references]).series["loss"])
    whole, first = Beside(LossSpike(), 8), Beside(LossSpike(), 8)

    straight = [whole.judge(x, *lookup.around(step)) for step, x in enumerate(own.tolist())]
    for step, x in enumerate(own[:120].tolist()):
        first.judge(x, *lookup.around(step))
    second = Beside(LossSpike(), 8)
    second.take_dict(deepcopy(first.to_dict()))
    after = [second.judge(x, *lookup.around(step)) for step, x in enumerate(own.tolist()) if step >= 120]

    assert after == straight[120:] and max(one[0] for one in after) >= 1.0
    sizes = {name: array.nbytes for name, array in whole.state.items()}
    assert sizes == {name: array.nbytes for name, array in Beside(LossSpike(), 8).state.items()}


def test_many_reference_runs_are_too_many_past_a_number(rng):
    runs = make_runs(rng, MOST_RUNS + 5)

    series = combine([{"loss": (np.arange(at + 10), one[: at + 10])} for at, one in enumerate(runs)]).series["loss"]
    steps, values = series.arrays()

    assert series.num_runs == MOST_RUNS + 5 and values.shape == (len(steps), MOST_RUNS)
    # Those with the fewest steps were left out.
    assert np.isfinite(values).sum(axis=0).min() == 15


def test_logarithms_come_back():
    values = np.array([1e-30, 0.003, 1.0, 2.7, 1e30])

    assert [exponential(z) for z in logarithm(values).tolist()] == pytest.approx(values, rel=1e-12)
    assert np.isnan(logarithm(np.array([0.0, -1.0, np.nan, np.inf]))).all()
