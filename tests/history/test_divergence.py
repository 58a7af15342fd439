"""Where two runs diverge: the step and the tensor that a fault was planted in, and nothing between runs of plain noise."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from sentinel.daemon.config import DaemonConfig
from sentinel.errors import ConfigError, StoreError
from sentinel.exports.series import MergedStep
from sentinel.history import divergence
from sentinel.history.config import HistoryConfig
from sentinel.history.divergence import RunDivergence, divergence_of
from sentinel.testing import BlowUp, Nan

from ..support.merged_steps import FlatLayout, merged_step
from ..support.serving import judge_run, small_run
from .test_writer import writing

STEPS, PART = 300, 200
LAYOUT = FlatLayout(5)
HISTORY = DaemonConfig(history=HistoryConfig(enabled=True, flush_s=0.1))


def step_of(seq: int, noise: float, seed: int, fault: dict[int, float]) -> MergedStep:
    """Return a step whose tensors are `noise` apart from those of another seed; fault: tensor -> times its size."""
    one = merged_step(LAYOUT, seq, loss=2.0 - seq / 1000)
    rng = np.random.default_rng((seed, seq))
    size = np.exp(noise * rng.standard_normal(len(one.stats))) if noise else np.ones(len(one.stats))
    for at, times in fault.items():
        size[at] *= times
    one.stats["m2"] *= size**2
    return one


def run_of(directory: Path, *, noise: float = 0.0, seed: int = 0, fault: dict[int, tuple[int, float]] | None = None) -> Path:
    """Write a history of `STEPS` steps. fault: tensor -> (its first step, times its size)."""
    with writing(directory) as one:
        for seq in range(1, STEPS + 1):
            planted = {at: times for at, (first, times) in (fault or {}).items() if seq - 1 >= first}
            one.take(step_of(seq, noise, seed, planted))
    return directory


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("divergence") / "a", noise=0.02, seed=1)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("divergence") / "exact")


def between(one: Path, other: Path) -> RunDivergence:
    return divergence_of({"a": one, "b": other})


def test_runs_of_plain_noise_do_not_diverge(healthy: Path, tmp_path: Path) -> None:
    told = between(healthy, run_of(tmp_path / "b", noise=0.02, seed=2))

    assert (told.first, told.others, told.num_diverged) == (None, (), 0)
    assert (told.first_step, told.last_step, told.num_series, told.num_lacking) == (0, STEPS - 1, 6, 0)
    assert told.num_apart == 5, "tensors differ from the beginning, the loss does not"


def test_a_lasting_change_beyond_noise_is_found_at_its_step_and_the_first_tensor_first(
    healthy: Path, tmp_path: Path
) -> None:
    told = between(
        healthy, run_of(tmp_path / "b", noise=0.02, seed=2, fault={1: (PART, 3.0), 3: (PART, 3.0), 4: (PART + 9, 3.0)})
    )

    assert told.first is not None
    # Weight gradients are made from the last layer to the first.
    assert [(one.name, one.step) for one in (told.first, *told.others)] == [
        ("layers.3.weight", PART), ("layers.1.weight", PART), ("layers.4.weight", PART + 9),
    ]  # fmt: skip
    assert told.width == 1 and told.first.difference == pytest.approx(-1.0, abs=0.1)
    assert told.first.noise == pytest.approx(0.02 * 2**0.5, rel=0.5) and abs(told.first.usual or 0.0) < 0.02


def test_equal_runs_are_equal_and_part_at_the_first_difference_however_small(exact: Path, tmp_path: Path) -> None:
    same = between(exact, run_of(tmp_path / "same"))
    parted = between(exact, run_of(tmp_path / "b", fault={2: (PART, 1.0 + 1e-5)}))

    assert (same.first, same.num_apart) == (None, 0)
    assert parted.first is not None
    assert (parted.first.name, parted.first.step, parted.first.noise) == ("layers.2.weight", PART, 0.0)


def test_a_spike_of_one_step_is_no_divergence(healthy: Path, tmp_path: Path) -> None:
    with writing(tmp_path / "b") as one:
        for seq in range(1, STEPS + 1):
            one.take(step_of(seq, 0.02, 2, {1: 5.0} if seq == PART else {}))

    assert between(healthy, tmp_path / "b").first is None


def test_what_is_not_finite_in_one_run_alone_is_a_divergence_at_once(healthy: Path, tmp_path: Path) -> None:
    with writing(tmp_path / "b") as one:
        for seq in range(1, STEPS + 1):
            one.take(merged_step(LAYOUT, seq, num_nan=1000 if seq > PART else 0, loss=2.0 - seq / 1000))

    told = between(healthy, tmp_path / "b")

    assert told.first is not None
    assert (told.first.name, told.first.step, told.first.difference) == ("layers.0.weight", PART, None)
    assert told.first.values[0] is not None and told.first.values[1] is None


def test_a_long_run_is_looked_at_in_buckets_first_and_then_step_by_step(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run_of(tmp_path / "b", noise=0.02, seed=2, fault={3: (PART, 3.0)})
    monkeypatch.setattr(divergence, "MOST_ROWS_READ", 400)
    looks = []
    look = divergence._Histories.look
    monkeypatch.setattr(divergence._Histories, "look", lambda self, *asked: looks.append(asked) or look(self, *asked))

    told = between(healthy, other)

    assert [width for _, _, width in looks] == [16, 1]
    assert told.first is not None and (told.first.name, told.first.step, told.width) == ("layers.3.weight", PART, 1)


def test_runs_without_a_step_in_common_are_said_to_have_none(healthy: Path, tmp_path: Path) -> None:
    with writing(tmp_path / "b") as one:
        one.take(merged_step(LAYOUT, 1, step=10_000))

    told = between(healthy, tmp_path / "b")

    assert (told.first, told.first_step, told.last_step, told.num_series) == (None, 0, -1, 6)


def test_kinds_that_are_measured_every_few_steps_are_compared_too(tmp_path: Path) -> None:
    for name, times in (("a", 1.0), ("b", 3.0)):
        with writing(tmp_path / name) as one:
            for seq in range(1, STEPS * 10 + 1, 10):
                one.take(step_of(seq, 0.02, ord(name), {3: times} if seq > PART * 10 else {}))

    told = between(tmp_path / "a", tmp_path / "b")

    assert told.first is not None and (told.first.name, told.first.step) == ("layers.3.weight", PART * 10)


@pytest.mark.parametrize(
    ("runs", "statistic", "error", "words"),
    [
        (("a",), "std", ConfigError, "expected two different runs"),
        (("a", "b"), "stdd", ConfigError, 'did you mean "std"'),
        (("a", "nowhere"), "std", StoreError, "expected a run with a history"),
    ],
)
def test_what_cannot_be_compared_is_said(
    healthy: Path, tmp_path: Path, runs: tuple[str, ...], statistic: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        divergence_of({name: tmp_path if name == "nowhere" else healthy for name in runs}, statistic)


@pytest.mark.slow
def test_faults_planted_in_a_pipeline_are_found_in_the_module_that_had_them(tmp_path: Path) -> None:
    """Judged runs of four ranks with the same data: an activation grows in one of them, and a NaN is born in another."""
    made = functools.partial(small_run, layers=4)
    made(tmp_path / "a").write(60)
    made(tmp_path / "grown").plant(BlowUp(step=40, module="layers.1.mlp", factor=3.0, in_gradients=0.5)).write(60)
    made(tmp_path / "nan").plant(Nan(step=45, module="layers.2.attn")).write(60)
    for name in ("a", "grown", "nan"):
        judge_run(tmp_path / name, HISTORY)

    grown, bad = (between(tmp_path / "a", tmp_path / name).first for name in ("grown", "nan"))

    assert grown is not None and (grown.name, grown.kind, grown.step) == ("layers.1.mlp", "activation", 40)
    assert bad is not None and (bad.name, bad.kind, bad.step) == ("layers.2.attn", "activation", 45)
