"""torchtitan's own Trainer on CPU: its numbers, its loss and its gradients are ours, and nothing of its training changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..layouts.layout import differences, gradient_norm
from ..support.closed_steps import closed_steps, statistics
from ..support.ports import free_port
from ..support.spools import SaidSoFar, norm

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.trainer

ROOT = Path(__file__).parents[2]
EVERYTHING = {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}
Results = list[dict[str, dict[str, Any]]]


def train_all(folder: Path, runs: list[dict[str, Any]], world: int = 1) -> Results:
    """Do these trainings one after the other, on `world` processes; returns rank -> run -> what the trainer said."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "runs.json").write_text(json.dumps(runs))
    port = free_port()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")}
    shared = {
        **clean, "PYTHONPATH": str(ROOT), "SENTINEL_DIR": str(folder), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks = []
    for rank in range(world):
        with (folder / f"log.{rank}").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("torchtitan_train.py")), "runs.json", "results"],
                    cwd=folder, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    try:
        codes = [process.wait(150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * world, (folder / "log.0").read_text()[-6000:]
    return [json.loads((folder / f"results.{rank}").read_text()) for rank in range(world)]


USUAL = ["--steps", "5", "--global-batch", "8", "--max-norm", "0.05", "--validate", "2"]
"""Two micro-steps, clipped hard, validation after steps 1, 2 and 4."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Many trainings in one process."""
    folder = tmp_path_factory.mktemp("alone")
    kept = ["--global-batch", "8", "--output", "kept", "--checkpoint", "3"]
    older = ["--global-batch", "8", "--output", "older", "--checkpoint", "3"]
    runs: list[dict[str, Any]] = [
        {"name": "bare", "options": USUAL, "counts_syncs": True},
        {"name": "seen", "options": USUAL, "counts_syncs": True, "config": EVERYTHING},
        {"name": "rare", "options": [*USUAL, "--log-freq", "3"], "config": {}},
        {"name": "disabled", "options": USUAL, "disabled": True, "config": EVERYTHING},
        {"name": "first", "options": [*kept, "--steps", "3"], "config": EVERYTHING},
        {"name": "resumed", "options": [*kept, "--steps", "6"], "config": EVERYTHING},
        {"name": "before", "options": [*older, "--steps", "3"]},
        {"name": "after", "options": [*older, "--steps", "5"], "config": {}},
        {"name": "poisoned", "options": USUAL, "config": EVERYTHING, "poison_step": 3},
        {"name": "failed", "options": USUAL, "config": EVERYTHING, "fail_step": 3},
        {"name": "replayed", "options": USUAL, "config": EVERYTHING, "replays": True},
        {"name": "emptied", "options": [*USUAL, "--batches", "5"], "config": {}},
        {"name": "full", "options": [*USUAL, "--recompute", "full"], "config": EVERYTHING},
        {"name": "selective", "options": [*USUAL, "--recompute", "selective"], "config": EVERYTHING},
        {"name": "chunked", "options": [*USUAL, "--chunks", "4"], "config": EVERYTHING},
        {"name": "chunked_bare", "options": [*USUAL, "--chunks", "4"]},
    ]
    return folder, train_all(folder, runs)[0]


def test_step_number_is_the_trainers(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone
    printed, spoken = results["seen"]["printed"], SaidSoFar(folder / "seen", 0)

    assert sorted(spoken.ends) == sorted(spoken.rows) == [1, 2, 3, 4, 5] == sorted(map(int, printed))
    assert spoken.descriptor is not None
    assert spoken.descriptor.first_step == 1
    for step, end in spoken.ends.items():
        loss, grad_norm = printed[str(step)]
        assert f"{end.scalars['loss']:.5f}" == loss
        assert f"{end.scalars['grad_norm']:.4f}" == grad_norm
        assert end.num_micro_steps == 2
        assert end.scalars["tokens"] == 2 * 4 * 16
        assert not end.is_partial
        assert not end.is_skipped
        assert end.num_dropped_rows == end.num_folded_rows == 0
    assert not spoken.health


def test_every_step_has_its_scalars_also_where_torchtitan_logs_none(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone
    ends = SaidSoFar(folder / "rare", 0).ends

    assert sorted(results["rare"]["printed"]) == ["1", "3"]
    for step in range(1, 6):
        loss, grad_norm = results["bare"]["printed"][str(step)]
        assert f"{ends[step].scalars['loss']:.5f}" == loss
        assert f"{ends[step].scalars['grad_norm']:.4f}" == grad_norm


def test_learning_rate_is_the_one_the_step_is_taken_with(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone
    rates = {int(step): rate for step, rate in results["seen"]["rates"].items()}

    assert {step: end.scalars["lr"] for step, end in SaidSoFar(folder / "seen", 0).ends.items()} == rates
    assert len(set(rates.values())) > 2  # They do change.


def test_training_is_bit_identical_without_a_further_wait(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    _, results = alone

    assert results["seen"]["shares"] == results["bare"]["shares"]
    assert results["seen"]["weights"] == results["bare"]["weights"]
    assert results["seen"]["syncs"] == results["bare"]["syncs"] > 5
    assert results["chunked"]["weights"] == results["chunked_bare"]["weights"]
    # The positive control: another training has other weights.
    assert results["seen"]["weights"] != results["first"]["weights"]


@pytest.mark.parametrize("run", ["seen", "full", "selective", "chunked", "replayed"])
def test_wgrad_is_before_clipping(alone: tuple[Path, dict[str, dict[str, Any]]], run: str) -> None:
    folder, results = alone
    spoken = SaidSoFar(folder / run, 0)

    for step, reference in results[run]["references"].items():
        rows = spoken.of(int(step), "wgrad")
        assert len(rows) == len(reference) == 21
        for name, row in rows.items():
            assert norm(row) == pytest.approx(reference[_wrapped(name, reference)], rel=1e-5)
            assert not row["flags"] & 2, name
        total = float(np.sqrt(sum(norm(row) ** 2 for row in rows.values())))
        assert total == pytest.approx(float(results[run]["printed"][step][1]), rel=1e-2)
        assert total > 0.05  # Clipped ones would have this norm.


def _wrapped(name: str, known: dict[str, Any]) -> str:
    return next(one for one in known if one.replace("_checkpoint_wrapped_module.", "") == name)


def test_validation_is_not_measured(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    spoken = SaidSoFar(alone[0] / "seen", 0)

    # Steps 1, 2 and 4 were followed by a validation, 3 and 5 were not.
    sizes = [{name: int(row["count"]) for name, row in spoken.of(step, "activation").items()} for step in range(1, 6)]
    assert all(size == sizes[2] for size in sizes)
    assert sizes[0]["layers.0"] == 2 * 4 * 16 * 32


def test_recomputed_forwards_are_counted_once(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, _ = alone
    plain = closed_steps(folder / "seen")
    assert len(plain) > 1

    for run in ("full", "selective"):
        for ours, truth in zip(closed_steps(folder / run), plain, strict=True):
            for kind in EVERYTHING["kinds"]:
                assert len(statistics(truth, kind)) > 5
                assert not differences(statistics(ours, kind), statistics(truth, kind))


def test_a_head_inside_the_loss_is_measured(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, _ = alone

    plain = closed_steps(folder / "seen")
    assert len(plain) > 1
    for ours, truth in zip(closed_steps(folder / "chunked"), plain, strict=True):
        for kind in ("activation", "dgrad", "wgrad"):
            expected = statistics(truth, kind)
            assert any(key.startswith("lm_head") for key in expected)
            assert not differences(statistics(ours, kind), expected)
    assert SaidSoFar(folder / "chunked", 0).of(3, "activation")["lm_head"]["count"] == 2 * 4 * 16 * 64


def test_resume_goes_on_with_the_trainers_numbers(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone
    resumed = SaidSoFar(folder / "resumed", 0)

    assert sorted(SaidSoFar(folder / "first", 0).ends) == [1, 2, 3]
    assert sorted(resumed.ends) == [4, 5, 6] == sorted(map(int, results["resumed"]["printed"]))
    assert resumed.descriptor is not None
    assert resumed.descriptor.first_step == 4
    assert f"{resumed.ends[4].scalars['loss']:.5f}" == results["resumed"]["printed"]["4"][0]
    index = (folder / "kept" / "checkpoint" / "step-3" / ".metadata").read_bytes()
    assert b"sentinel.step" in index
    assert not resumed.health


def test_a_checkpoint_from_before_sentinel_loads(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone

    assert b"sentinel.step" not in (folder / "older" / "checkpoint" / "step-3" / ".metadata").read_bytes()
    assert results["after"]["error"] == ""
    assert sorted(SaidSoFar(folder / "after", 0).ends) == [4, 5]


def test_a_loss_that_is_not_finite_is_on_disk_when_torchtitan_raises(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone
    spoken = SaidSoFar(folder / "poisoned", 0)

    assert "Loss is not finite" in results["poisoned"]["error"]
    assert results["poisoned"]["flushed"]
    assert spoken.ends[3].is_partial
    assert np.isnan(spoken.ends[3].scalars["loss"])
    assert spoken.of(3, "activation")["lm_head"]["num_nan"] > 0
    assert spoken.of(3, "activation")["norm"]["num_nan"] == 0
    assert spoken.of(3, "wgrad")["tok_embeddings.weight"]["num_nan"] > 0


def test_a_step_that_raises_in_its_middle_is_on_disk(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone
    spoken = SaidSoFar(folder / "failed", 0)

    assert "planted" in results["failed"]["error"]
    assert sorted(spoken.ends) == [1, 2, 3]
    assert spoken.ends[3].is_partial
    assert spoken.ends[3].num_micro_steps == 1
    assert "loss" not in spoken.ends[3].scalars  # Half a loss is none.
    assert spoken.of(3, "activation")["layers.1"]["count"] == 4 * 16 * 32


def test_a_step_that_torchtitan_cancels_is_none(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone

    assert results["emptied"]["step"] == 3  # Announced, then out of data.
    assert sorted(SaidSoFar(folder / "emptied", 0).ends) == [1, 2]


def test_a_replayed_graph_shows_parameters_and_gradients_and_says_so(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone
    spoken, seen = SaidSoFar(folder / "replayed", 0), SaidSoFar(folder / "seen", 0)

    assert [one.code for one in spoken.health] == ["cuda_graphs"]
    assert results["replayed"]["weights"] == results["bare"]["weights"]
    for step in range(1, 6):
        assert not spoken.of(step, "activation")
        reported, expected = (
            {name: value for name, value in one.ends[step].scalars.items() if not name.startswith("memory_")}
            for one in (spoken, seen)
        )
        assert reported == expected  # Two processes need not fill the same memory.
        for kind in ("param", "wgrad"):
            ours, truth = spoken.of(step, kind), seen.of(step, kind)
            assert ours.keys() == truth.keys()
            assert all(ours[name]["mean"] == truth[name]["mean"] for name in truth)


def test_disabled_it_does_nothing(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = alone

    assert results["disabled"]["seen_by"] == "Unmeasured"
    assert results["seen"]["seen_by"] == "Monitor"
    assert results["disabled"]["weights"] == results["bare"]["weights"]
    assert not (folder / "disabled").exists()


def test_detach_restores_the_trainer(alone: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    _, results = alone

    assert results["seen"]["left"] == []
    assert results["seen"]["hooks"] == results["bare"]["hooks"]


SPLIT = ["--steps", "3", "--max-norm", "0.05", "--spmd", "partial_dtensor"]
LAYOUTS: dict[str, tuple[list[str], int]] = {
    "fsdp2": ([], 8),
    "replicated": (["--replicas", "2"], 8),
    "tensor": (["--tp", "2", "--no-sp"], 4),
    "sequence": (["--tp", "2"], 4),
}
"""Options, and the batch of one process that trains alike."""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """The same trainings on one process (whole batch, in micro-steps) and on two."""
    folder = tmp_path_factory.mktemp("together")
    train_all(
        folder,
        [
            {"name": f"one{batch}", "options": [*SPLIT, "--global-batch", str(batch)], "config": EVERYTHING}
            for batch in (4, 8)
        ],
    )
    runs: list[dict[str, Any]] = []
    for name, (options, _) in LAYOUTS.items():
        runs.append({"name": name, "options": [*SPLIT, *options], "config": EVERYTHING})
        runs.append({"name": f"{name}_bare", "options": [*SPLIT, *options]})
    return folder, train_all(folder, runs, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_statistics_mean_what_they_mean_on_one_process(name: str, together: tuple[Path, Results]) -> None:
    folder, results = together
    views, alone = closed_steps(folder / name), closed_steps(folder / f"one{LAYOUTS[name][1]}")
    assert len(views) > 1
    descriptor = SaidSoFar(folder / name, 0).descriptor
    assert descriptor is not None
    assert not [t.name for t in descriptor.tensors if "unknown" in t.placements.values()]
    partial = {f"{t.name}/{t.kind}" for t in descriptor.tensors if "partial" in t.placements.values()}
    assert bool(partial) == (name in ("tensor", "sequence"))

    for step, (ours, truth) in enumerate(zip(views, alone, strict=True), 1):
        for kind in EVERYTHING["kinds"]:
            expected, got = statistics(truth, kind), statistics(ours, kind)
            assert len(expected) > 5
            # FSDP hands a block its input as a new tensor; under tensor parallelism that is seen to be the same one.
            also = {key for key in expected if key.startswith(("layers.", "norm/")) and key.endswith("_in")}
            missing = {word.removeprefix("missing: ") for word in differences(got, expected) if word.startswith("missing: ")}
            assert missing <= (partial | also if partial else set())
            # Adam makes of the last bit of a sum, which the layout decides, another training: the first step tells.
            rel = 1e-5 if step == 1 else 2e-3
            assert not [word for word in differences(got, expected, rel) if not word.startswith("missing: ")]
        printed = results[0][name]["printed"][str(step)]
        assert ours.scalars["loss"].mean == pytest.approx(float(printed[0]), abs=1e-5)
        assert gradient_norm(ours) == pytest.approx(float(printed[1]), rel=1e-2)
        reference = results[0][name]["references"][str(step)]
        whole = float(np.sqrt(sum(value**2 for value in reference.values())))
        assert gradient_norm(ours) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_on_two_ranks_is_bit_identical_without_a_further_collective(
    name: str, together: tuple[Path, Results]
) -> None:
    _, results = together

    for rank in (0, 1):
        seen, bare = results[rank][name], results[rank][f"{name}_bare"]
        assert seen["weights"] == bare["weights"]
        assert seen["shares"] == bare["shares"]
        assert seen["collectives"] == bare["collectives"] > 10


def test_the_example_runs_beside_a_daemon(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "sentinel.cli", "run", "--dir", str(tmp_path), "--name", "run", "--drain-s", "60", "--",
            sys.executable, str(ROOT / "examples" / "torchtitan_train.py"), "--steps", "5", "--output", str(tmp_path),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
        env={key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")},
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ends = SaidSoFar(tmp_path / "run", 0).ends
    assert sorted(ends) == [1, 2, 3, 4, 5]
    assert ends[5].scalars["loss"] < ends[1].scalars["loss"]
