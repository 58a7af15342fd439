"""DeepSpeed, ZeRO stages 0 to 3, two gloo processes each: numbers, gradients, checkpoints, and nothing changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sentinel.record import Flag

from ..end_to_end.ranks import ROOT
from ..layouts.layout import differences, gradient_norm
from ..layouts.net import shifted_loss, tokens_of
from ..support.closed_steps import STATISTICS, closed_steps, statistics
from ..support.spools import SaidSoFar

pytest.importorskip("deepspeed")

from .deepspeed_ranks import EVERYTHING, JOBS, many, plain, run
from .deepspeed_stories import POISONED, STORIES, tell

pytestmark = pytest.mark.trainer

WORLD = 2


def truth_of(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, dict[str, float]]:
    """Return what `statistics` would, worked out the slow way in float64."""
    found = {}
    for name, tensor in tensors.items():
        x = tensor.double().flatten().numpy()
        d = x - x.mean()
        m2, m3, m4 = (float((d**n).mean()) for n in (2, 3, 4))
        with np.errstate(all="ignore"):
            found[f"{name}/{kind}"] = dict(
                zip(
                    STATISTICS,
                    (x.mean(), m2**0.5, float(np.sqrt((x**2).sum())), x.min(), x.max(),
                     np.float64(m3) / m2**1.5, np.float64(m4) / m2**2),
                    strict=True,
                ),
                count=float(x.size),
            )  # fmt: skip
    return found


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every job of JOBS, trained bare, watched and for the truth, in one pair of processes: a folder each."""
    folder = tmp_path_factory.mktemp("jobs")
    run(folder, WORLD, many, JOBS, ("bare", "watched", "truth"), timeout_s=400)
    return folder


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every story, lived through in one pair of processes: a folder each."""
    folder = tmp_path_factory.mktemp("stories")
    run(folder, WORLD, tell, tuple(STORIES)[:-1], timeout_s=400)
    run(folder, WORLD, tell, tuple(STORIES)[-1:])
    return folder


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The same model on the same data in one plain torch process: its steps as heard."""
    import sentinel

    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SENTINEL_DIR", str(folder))
        patch.setenv("SENTINEL_RUN", "run")
        model = plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
        monitor = sentinel.attach(model, optimizer, EVERYTHING)
        for step in range(3):
            optimizer.zero_grad()
            shifted_loss(model(tokens_of(step)), tokens_of(step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        monitor.detach()
    return closed_steps(folder / "run")


def said_by(folder: Path, what: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{what}-{rank}.pt", weights_only=False) for rank in range(WORLD)]


def is_true(folder: Path, views: list[Any]) -> None:
    """Whether params and gradients are, step by step, those that DeepSpeed itself gathered in the run for the truth."""
    truth = said_by(folder, "truth")[0]
    assert len(views) == len(truth["grads"]) > 0
    for view, grads, params in zip(views, truth["grads"], truth["params"], strict=True):
        for kind, expected in (("wgrad", grads), ("param", params)):
            wrong = differences(statistics(view, kind), truth_of(expected, kind), 1e-5)
            assert not wrong, "\n".join([f"{kind} of step {view.step}:", *wrong[:20], f"{len(wrong)} in all"])
        norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
        assert gradient_norm(view) == pytest.approx(float(norm), rel=1e-5)


def are_like(views: list[Any], alone: list[Any], kinds: tuple[str, ...]) -> None:
    """Whether names and statistics are those of one plain process."""
    assert views
    for view, whole in zip(views, alone, strict=False):
        for kind in kinds:
            wrong = differences(statistics(view, kind), statistics(whole, kind))
            assert not wrong, "\n".join([f"{kind} of step {view.step}:", *wrong[:20], f"{len(wrong)} in all"])


def flags_of(view: Any, kind: str) -> int:
    of_kind = [tensor.index for tensor in view.tensors if tensor.kind == kind]
    return int(np.bitwise_or.reduce(view.rows["flags"][np.isin(view.row_logical, of_kind)]))


# -- what every stage and setting owes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_nothing_is_changed_and_no_collective_is_added(name: str, jobs: Path) -> None:
    bare, watched = said_by(jobs / name, "bare"), said_by(jobs / name, "watched")

    for rank in range(WORLD):
        assert watched[rank]["losses"] == bare[rank]["losses"]
        assert torch.equal(watched[rank]["weights"], bare[rank]["weights"])
        assert watched[rank]["collectives"] == bare[rank]["collectives"] >= JOBS[name].num_steps  # The positive control.
        assert watched[rank]["health"] == []
    assert bare[0]["losses"][0] != bare[0]["losses"][-1]


@pytest.mark.parametrize("name", JOBS)
def test_gradients_are_whole_reduced_unscaled_and_unclipped(name: str, jobs: Path) -> None:
    job, views = JOBS[name], closed_steps(jobs / name / "run")

    assert [view.step for view in views] == list(range(1, job.num_steps + 1))  # As DeepSpeed prints them.
    if job.has_truth:
        is_true(jobs / name, views)
    for view, norm in zip(views, said_by(jobs / name, "watched")[0]["norms"], strict=True):
        if norm is not None:  # In fp32 without ZeRO DeepSpeed forgets it.
            assert gradient_norm(view) == pytest.approx(norm, rel=1e-2)
        assert gradient_norm(view) > 2 * job.clip  # The positive control: clipping changed the gradients.
        assert not flags_of(view, "wgrad") & (Flag.POST_CLIP | Flag.SKIPPED | Flag.DEGRADED)


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.is_plain])
def test_names_and_statistics_are_those_of_one_process(name: str, jobs: Path, alone: list[Any]) -> None:
    views = closed_steps(jobs / name / "run")

    if JOBS[name].precision == "fp32":
        kinds = ("wgrad", "param") if JOBS[name].accumulate > 1 else ("wgrad", "param", "activation")
        are_like(views, alone, kinds)
    else:
        for kind in ("wgrad", "param", "activation", "dgrad"):
            assert statistics(views[0], kind).keys() == statistics(alone[0], kind).keys()
        assert gradient_norm(views[0]) == pytest.approx(gradient_norm(alone[0]), rel=0.05)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shards_have_parts_and_replicas_have_none(stage: int, jobs: Path) -> None:
    for rank in range(WORLD):
        spoken = SaidSoFar(jobs / f"zero{stage}-fp32" / "run", rank)
        parts = {kind: {t.part for t in spoken.descriptor.tensors if t.kind == kind} for kind in ("wgrad", "param")}

        assert (parts["wgrad"] == {""}) == (stage == 0)
        assert (parts["param"] == {""}) == (stage < 3)


def test_the_black_box_has_its_borders_under_zero_3(jobs: Path, alone: list[Any]) -> None:
    view = closed_steps(jobs / "zero3-fp32" / "run")[0]

    assert {t.key: t.border for t in view.tensors} == {t.key: t.border for t in alone[0].tensors}
    assert {t.border for t in view.tensors} == {"", "block_input", "block_output", "chunk_output"}


def test_micro_steps_are_counted(jobs: Path) -> None:
    for rank in range(WORLD):
        ends = SaidSoFar(jobs / "zero2-accumulate-groups" / "run", rank).ends
        assert [end.num_micro_steps for end in ends.values()] == [2, 2]
        assert SaidSoFar(jobs / "zero2-fp32" / "run", rank).ends[1].num_micro_steps == 1


def test_a_recomputed_forward_is_counted_once(jobs: Path, alone: list[Any]) -> None:
    for name in ("zero2-checkpointing", "zero3-checkpointing"):
        views = closed_steps(jobs / name / "run")
        are_like(views, alone, ("wgrad", "param", "activation"))
        assert {end.num_micro_steps for end in SaidSoFar(jobs / name / "run", 0).ends.values()} == {1}


# -- stories -----------------------------------------------------------------------------------------------------------


def test_step_number_is_the_one_deepspeed_prints(stories: Path) -> None:
    folder = stories / "printed"
    said = said_by(folder, "said")
    lr_of_samples = [line.split(",") for line in (folder / "csv" / "Train_Samples_lr.csv").read_text().split()[1:]]
    printed = [(number, lr) for number, lr in said[0]["printed"] if number]

    for rank in range(WORLD):
        ends = SaidSoFar(folder / "run", rank).ends
        assert [number for number, _ in printed] == said[rank]["numbers"] == list(ends) == [1, 2, 3, 4]
        for at, (number, lr) in enumerate(printed):
            scalars = ends[number].scalars
            assert scalars["loss"] == pytest.approx(said[rank]["losses"][at], rel=1e-6)
            assert scalars["grad_norm"] == pytest.approx(said[rank]["norms"][at], rel=1e-6)
            assert scalars["lr"] == lr == float(lr_of_samples[at][1])
            assert scalars["after"] == at  # Logged by the user behind engine.step().
            assert int(lr_of_samples[at][0]) == number * 4
            assert not ends[number].is_partial
            assert not ends[number].is_skipped
    assert len({lr for _, lr in printed}) > 2


@pytest.mark.parametrize("name", [f"overflow-{stage}-fp16" for stage in range(4)] + ["overflow-2-fp32"])
def test_a_skipped_step_is_a_step_and_keeps_its_bad_gradients(name: str, stories: Path) -> None:
    folder = stories / name
    said, views = said_by(folder, "said")[0], closed_steps(folder / "run")

    assert said["skipped"] == [0, 1, 1, 1]
    assert said["same"] == [False, True, False, False]
    assert [view.step for view in views] == [1, 2, 3, 4]
    assert [view.is_skipped for view in views] == [False, True, False, False]
    for at, view in enumerate(views):
        nans = sum(int(view.stats["num_nan"][n]) for n, tensor in enumerate(view.tensors) if tensor.kind == "wgrad")
        assert (nans > 0) == (at == POISONED)
        assert bool(flags_of(view, "wgrad") & Flag.SKIPPED) == (at == POISONED)
        assert not any(view.stats["num_nan"][n] for n, tensor in enumerate(view.tensors) if tensor.kind == "param")
    if name.endswith("fp16"):
        assert [view.scalars["loss_scale"].mean for view in views] == said["scales"]
        assert len(set(said["scales"])) == 2
        # The gradients of two scales are of one size.
        norms = [gradient_norm(view) for at, view in enumerate(views) if at != POISONED]
        assert max(norms) < 3 * min(norms)


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_under_torchs_own_scaler_are_unscaled(stage: int, stories: Path, alone: list[Any]) -> None:
    views = closed_steps(stories / f"autocast-{stage}" / "run")

    assert [(view.step, view.is_skipped) for view in views] == [(1, False), (2, True), (3, False)]
    assert views[0].scalars["loss_scale"].mean == 65536.0
    assert gradient_norm(views[0]) == pytest.approx(gradient_norm(alone[0]), rel=1e-2)
    assert np.isnan(gradient_norm(views[1])) or gradient_norm(views[1]) > 0
    for view in views:
        assert bool(flags_of(view, "wgrad") & Flag.SKIPPED) == view.is_skipped
        assert not flags_of(view, "wgrad") & Flag.POST_CLIP


def test_a_pipeline_of_deepspeed_is_one_model(stories: Path) -> None:
    views = closed_steps(stories / "pipeline" / "run")
    linear = ["4.weight", "4.bias", *[f"{n}.fc.{kind}" for n in (1, 2, 3) for kind in ("weight", "bias")]]

    for said in said_by(stories / "pipeline", "said"):
        assert said["watched"] == said["bare"]
        losses, norms, _, collectives = said["watched"]
        assert collectives > 0
        for at, view in enumerate(views):
            assert view.step == at + 1
            assert view.scalars["loss"].mean == pytest.approx(losses[at], rel=1e-6)
            assert gradient_norm(view) == pytest.approx(norms[at], rel=1e-5)
            assert {t.name for t in view.tensors if t.kind == "wgrad"} == {"0.weight", *linear}
            assert {t.depth for t in view.tensors} == {0, 1}
    assert {end.num_micro_steps for end in SaidSoFar(stories / "pipeline" / "run", 1).ends.values()} == {4}
    assert len(views) == 3


def test_a_model_compiled_after_attach_is_measured_inside_too(stories: Path, alone: list[Any]) -> None:
    views = closed_steps(stories / "compiled" / "run")

    are_like(views, alone, ("wgrad", "param", "activation"))
    assert [view.step for view in views] == [1, 2, 3]
    for rank in range(WORLD):
        assert not SaidSoFar(stories / "compiled" / "run", rank).health


def test_a_new_engine_on_the_same_model_is_followed(stories: Path) -> None:
    for rank, said in enumerate(said_by(stories / "anew", "said")):
        assert said == {"is_alive": False, "is_new": True}
        assert list(SaidSoFar(stories / "anew" / "run", rank).ends) == [1]
        second = SaidSoFar(stories / "anew" / "second", rank)
        assert list(second.ends) == [1]
        assert second.of(1, "wgrad")


def test_evaluation_in_the_loop_is_not_measured(stories: Path, alone: list[Any]) -> None:
    views = closed_steps(stories / "evaluated" / "run")

    are_like(views, alone, ("wgrad", "param", "activation"))
    for rank in range(WORLD):
        assert [end.num_micro_steps for end in SaidSoFar(stories / "evaluated" / "run", rank).ends.values()] == [2, 2, 2]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resumed_run_goes_on_with_the_number(stage: int, stories: Path) -> None:
    folder = stories / f"resumed-{stage}"
    for rank, said in enumerate(said_by(folder, "said")):
        assert said["inside"]["step"] == 3
        assert said["client before"] == {"epoch": 7}  # Ours is taken out again.
        assert said["client after"]["epoch"] == 7
        for name in ("before", "after"):
            assert said[f"third {name}"] == said["third"]
            assert said[f"number {name}"] == 3
            spoken = SaidSoFar(folder / name, rank)
            assert list(spoken.ends) == [3]
            assert spoken.ends[3].scalars["loss"] == pytest.approx(said["third"], rel=1e-6)
        assert list(SaidSoFar(folder / "run", rank).ends) == [1, 2, 3]


@pytest.mark.parametrize("where", ["backward", "step"])
def test_rows_of_a_step_that_raises_are_on_disk(where: str, stories: Path) -> None:
    folder = stories / f"breaking-{where}"
    for rank, said in enumerate(said_by(folder, "said")):
        assert "broke" in said["raised"]
        for path, size in said["sizes"].items():  # As it was when the exception came out of DeepSpeed.
            (folder / path).write_bytes((folder / path).read_bytes()[:size])
        spoken = SaidSoFar(folder / "run", rank)
        assert list(spoken.ends) == [1, 2]
        assert [end.is_partial for end in spoken.ends.values()] == [False, True]
        assert len(spoken.of(2, "activation")) > 10
        assert bool(spoken.of(2, "wgrad")) == (where == "step")
        assert "loss" in spoken.ends[2].scalars


def test_disabled_touches_nothing(stories: Path) -> None:
    for said in said_by(stories / "disabled", "said"):
        assert said["kind"] == "Unmeasured"
        assert said["is_same"]
        assert not said["exists"]
        assert not set(said["new"]) & {"step", "backward", "_take_model_step", "save_checkpoint", "load_checkpoint"}


def test_attached_twice_is_watched_once_and_a_failure_is_told(stories: Path) -> None:
    for said in said_by(stories / "twice", "said"):
        assert said["is_replaced"]
        assert said["broken"] == said["bare"]
        assert said["cost"][0] == said["cost"][1]
        assert said["health"] == ["hook_failed"]


def test_what_is_no_engine_is_refused() -> None:
    import sentinel
    from sentinel.errors import ConfigError

    with pytest.raises(ConfigError, match=r"the engine that deepspeed\.initialize returns first, got Linear"):
        sentinel.attach_deepspeed(torch.nn.Linear(2, 2))


def test_the_example_runs_watched(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sentinel.cli", "run", "--dir", str(tmp_path), "--name", "run", "--"]
    ended = subprocess.run(
        [*command, sys.executable, str(ROOT / "examples" / "deepspeed_train.py"), "--steps", "6"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    ends = SaidSoFar(tmp_path / "run", 0).ends
    assert [line["step"] for line in printed] == list(ends) == [1, 2, 3, 4, 5, 6]
    for line in printed:
        assert ends[line["step"]].scalars["loss"] == pytest.approx(line["loss"], abs=1e-4)
