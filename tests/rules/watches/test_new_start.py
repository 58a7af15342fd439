"""A relaunch under the same name that trains anew begins with new baselines; a resume goes on with those it had."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.anomaly import Anomaly
from sentinel.decision import Tick
from sentinel.judge.replay import judged_again
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths
from sentinel.testing import SyntheticRun


def losses_of(run: SyntheticRun, level: float) -> None:
    """Have the run log a loss around a level."""
    original = run._values.scalars

    def scalars(place: object, step: int) -> dict[str, float]:
        reported: dict[str, float] = dict(original(place, step))  # type: ignore[arg-type]
        reported["loss"] = level * (1.0 + 0.01 * ((step * 7919) % 13 - 6) / 6.0)
        return reported

    run._values.scalars = scalars  # type: ignore[method-assign,assignment]


def judged(run: SyntheticRun) -> list[Anomaly]:
    judgements = judged_again(RunPaths.of(run.directory), None, pack=load_pack(), recompute=True)
    return [one for what, judgement in judgements if not isinstance(what, Tick) for one in judgement.anomalies]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "is_resumed", "is_reported"),
    [(0, False, False), (300, True, True), (40, False, False), (0, True, True)],
    ids=["from step 0", "from our checkpoint", "further on, without one", "from our checkpoint of step 0"],
)
def test_a_relaunch_is_held_against_the_former_life_only_if_it_resumed(
    tmp_path: Path, first: int, is_resumed: bool, is_reported: bool
) -> None:
    run = SyntheticRun(tmp_path / "run", dp=1, layers=1, d_model=16, elements=8)
    losses_of(run, 0.001)
    run.write(320)
    run.end()
    run.restart(first, attempt=1, is_resumed=is_resumed)
    losses_of(run, 4.25)
    run.write(3)
    run.end()

    found = [one for one in judged(run) if one.tag_name == "loss" and one.attempt == 1 and one.event == "onset"]
    assert bool(found) == is_reported


def test_a_step_that_goes_on_is_a_resume_whoever_says_so(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", dp=1, layers=1, d_model=16, elements=8)
    losses_of(run, 0.001)
    run.write(100)
    run.end()
    run.restart(100, attempt=1, is_resumed=False)
    losses_of(run, 4.25)
    run.write(3)
    run.end()

    assert any(one.rule == "loss-spike" and one.step == 100 for one in judged(run))


def test_baselines_begin_anew_within_one_process_too(tmp_path: Path) -> None:
    """The same life goes back to step 0: another training under its monitor."""
    run = SyntheticRun(tmp_path / "run", dp=1, layers=1, d_model=16, elements=8)
    losses_of(run, 0.001)
    run.write(100)
    run.step = 0
    losses_of(run, 4.25)
    run.write(60)
    losses_of(run, 400.0)
    run.write(1)

    found = [one for one in judged(run) if one.tag_name == "loss" and one.event == "onset"]
    assert {one.step for one in found} == {60}, "and they judge again when they have learned"
