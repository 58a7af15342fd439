"""Trainer and Accelerate as two processes mean what one process means: names, statistics, losses, step numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ..layouts.layout import differences, gradient_norm
from ..support.closed_steps import closed_steps, statistics
from .hf_ranks import MAX_NORM, NUM_STEPS, launch

pytestmark = pytest.mark.trainer

EVERYTHING = {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Any]]:
    """One process of a kind, trained once: what it says, and its steps as a daemon closes them."""
    known: dict[str, tuple[Any, Any]] = {}

    def one(mode: str, **settings: Any) -> tuple[Any, Any]:
        if mode not in known:
            folder = tmp_path_factory.mktemp(mode)
            known[mode] = launch(folder, mode, 1, EVERYTHING, **settings), closed_steps(folder / "run")
        return known[mode]

    return one


def batched(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What grows with the batch: positions and the loss are as large on each process as on one."""
    return {key: one for key, one in found.items() if not key.startswith(("model.rotary_emb", "model:loss"))}


ZERO_2 = {
    "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}  # fmt: skip


@pytest.mark.parametrize("layout", ["trainer", "accelerate", "trainer_deepspeed", "accelerate_deepspeed"])
def test_two_processes_mean_what_one_means(tmp_path: Path, layout: str, alone: Callable[..., tuple[Any, Any]]) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2}
    mode, _, is_sharded = layout.partition("_")
    (single,), expected = alone(mode, **settings)
    if is_sharded:
        pytest.importorskip("deepspeed")
        settings["deepspeed"] = ZERO_2

    bare = launch(tmp_path / "bare", mode, 2, None, **settings)
    watched = launch(tmp_path / "watched", mode, 2, EVERYTHING, **settings)
    views = closed_steps(tmp_path / "watched" / "run")

    assert watched == bare  # losses, norms and weights to the bit, and as many collectives
    assert bare[0]["collectives"] > 0
    assert [view.step for view in views] == [view.step for view in expected] == list(range(1, NUM_STEPS + 1))
    for view, whole in zip(views, expected, strict=True):
        for kind in ("param", "wgrad", "activation"):
            ours, truth = batched(statistics(view, kind)), batched(statistics(whole, kind))
            wrong = differences(ours, truth)
            assert truth and not wrong, "\n".join([f"{kind} of step {view.step}:", *wrong[:20]])
        step = str(view.step)
        assert view.scalars["loss"].mean == pytest.approx(watched[0]["losses"][step], rel=1e-5)
        assert watched[0]["losses"][step] == pytest.approx(single["losses"][step], rel=1e-4)
        assert gradient_norm(view) == pytest.approx(gradient_norm(whole), rel=1e-5)
        assert gradient_norm(view) == pytest.approx(watched[0]["norms"][step], rel=1e-2)
        assert watched[0]["norms"][step] > MAX_NORM  # the positive control: the clipping changed the gradients
