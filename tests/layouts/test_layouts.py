"""One meaning on every layout: the same names and statistics of the logical tensors as in one process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from sentinel.ingest.merge import ClosedStep
from sentinel.kinds import MODULE_KINDS, is_of_kind

from ..support.closed_steps import closed_steps, statistics
from .builds import LAYOUTS, REFERENCES, one, one_shallow
from .layout import EVERYTHING, Build, Training, differences, gradient_norm, steps_of, train_in_turn
from .net import NUM_STEPS

LOCAL_ACTIVATIONS = ("tp", "tp_x_dp", "tp_x_fsdp2", "tp_x_pp")
"""Inside a tensor-parallel group some activations are not known to be whole or cut: collect/test_tensor_parallel.py."""


COPIES = {
    "ddp", "ddp_tied", "zero_redundancy", "fsdp1_no_shard", "fsdp1_hybrid", "hsdp", "tp", "tp_x_dp", "tp_x_fsdp2", "cp",
    "cp_x_dp", "ep", "ep_x_dp", "ep_x_cp", "pp_x_dp", "tp_x_pp",
}  # fmt: skip
"""Layouts in which some weights are held by several ranks: their checksums agree; elsewhere nothing can be compared."""


def of_the_model(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Without what the later stages of a pipeline receive, which one process measures as the output of the block before."""
    return {key: one for key, one in found.items() if not key.startswith("stage")}


def residual(view: ClosedStep) -> dict[str, dict[str, float]]:
    """Key -> statistics of what counts as `residual`."""
    stream = {one.key for one in view.tensors if is_of_kind(one.kind, one.border, ("residual",))}
    found = {key: one for kind in MODULE_KINDS for key, one in statistics(view, kind.label).items()}
    return {key: one for key, one in found.items() if key in stream}


@functools.cache
def alone(build: Build) -> list[ClosedStep]:
    """The steps of one process, as heard."""
    return steps_of(build, config=EVERYTHING)


VARIANTS = (
    "ddp_tied", "fsdp1_grad_op", "fsdp1_no_shard", "fsdp1_hybrid", "fsdp2_4", "fsdp2_tied", "hsdp", "tp_x_dp", "tp_x_fsdp2",
    "tp_x_pp", "pp_x_dp", "cp_x_dp", "ep_x_dp", "ep_x_cp", "gpipe", "looped_bfs", "zero_bubble", "zbv",
)  # fmt: skip
"""Layouts of whose parts others consist too: each alone, or with another partner."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in VARIANTS else name for name in LAYOUTS]
)
def test_statistics_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    build, world = LAYOUTS[name]
    expected = alone(REFERENCES.get(name, one))

    trainings = [Training(tmp_path / "bare"), Training(tmp_path / "watched", EVERYTHING)]
    bare, watched = train_in_turn(trainings, build, world)
    views = closed_steps(tmp_path / "watched" / "run")

    assert repr([r.losses for r in watched]) == repr([r.losses for r in bare])  # NaN where another rank has the loss
    assert [r.weights for r in watched] == [r.weights for r in bare]
    assert [r.num_collectives for r in watched] == [r.num_collectives for r in bare]
    assert len(views) == NUM_STEPS
    assert bool(views[0].layout.replicated) is (name in COPIES)
    for view, whole in zip(views, expected, strict=True):
        for kind in ("param", "wgrad", "exp_avg", "exp_avg_sq"):
            wrong = differences(statistics(view, kind), statistics(whole, kind))
            assert not wrong, "\n".join([f"{kind} of step {view.step}:", *wrong[:20], f"{len(wrong)} in all"])
        if name not in LOCAL_ACTIVATIONS:
            for kind in ("activation", "activation_in", "dgrad", "dgrad_in"):
                wrong = differences(of_the_model(statistics(view, kind)), statistics(whole, kind))
                assert not wrong, "\n".join([f"{kind} of step {view.step}", *wrong[:20], f"{len(wrong)} in all"])
        wrong = differences(residual(view), residual(whole))
        assert not wrong, "\n".join([f"residual stream of step {view.step}", *wrong[:20]])
        num_blocks = 2 if expected is alone(one_shallow) else 4
        assert len(residual(view)) == 2 * (num_blocks + 1)  # Each block and the input of the first, forward and backward.
        assert view.differing == []
        assert gradient_norm(view) == pytest.approx(gradient_norm(whole), rel=1e-5)
        assert gradient_norm(view) == pytest.approx(watched[0].grad_norms[view.step], rel=1e-2)
        assert watched[0].grad_norms[view.step] > 0.5  # The positive control: clipping changed the gradients.
