"""DeepSpeed, ZeRO stages 0 to 3, two gloo processes each: numbers, gradients, checkpoints, and nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ..end_to_end.ranks import Spoken
from ..layouts.layout import STATISTICS, differences, gradient_norm, heard, statistics
from ..layouts.net import Net, loss_of, tokens

pytest.importorskip("deepspeed")

from .deepspeed_ranks import EVERYTHING, Job, phases, run

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


def said_by(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{phase}-{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The same model on the same data in one plain torch process: its steps as heard."""
    import sentinel

    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SENTINEL_DIR", str(folder))
        patch.setenv("SENTINEL_RUN", "run")
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
        monitor = sentinel.attach(model, optimizer, EVERYTHING)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(tokens(step)), tokens(step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        monitor.detach()
    return heard(folder)


def trained(folder: Path, job: Job, names: tuple[str, ...] = ("bare", "watched", "truth")) -> list[Any]:
    """Train in every phase, check that Sentinel changed nothing, and return the steps as heard."""
    run(folder, WORLD, phases, job, names)
    bare, watched = said_by(folder, "bare"), said_by(folder, "watched")
    for rank in range(WORLD):
        assert watched[rank]["losses"] == bare[rank]["losses"]
        assert torch.equal(watched[rank]["weights"], bare[rank]["weights"])
        assert watched[rank]["collectives"] == bare[rank]["collectives"] >= job.num_steps > 0
        assert watched[rank]["health"] == []
    return heard(folder)


def is_true(folder: Path, views: list[Any], rel: float = 1e-5) -> None:
    """Whether params and gradients are, step by step, those that DeepSpeed itself gathered in the run for the truth."""
    truth = said_by(folder, "truth")[0]
    assert len(views) == len(truth["grads"]) > 0
    for view, grads, params in zip(views, truth["grads"], truth["params"], strict=True):
        for kind, expected in (("wgrad", grads), ("param", params)):
            wrong = differences(statistics(view, kind), truth_of(expected, kind), rel)
            assert not wrong, "\n".join([f"{kind} of step {view.step}:", *wrong[:20], f"{len(wrong)} in all"])
        norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
        assert gradient_norm(view) == pytest.approx(float(norm), rel=1e-5)


def are_like(views: list[Any], alone: list[Any]) -> None:
    """Whether names and statistics are those of one plain process."""
    for view, whole in zip(views, alone, strict=True):
        for kind in ("wgrad", "param"):
            wrong = differences(statistics(view, kind), statistics(whole, kind))
            assert not wrong, "\n".join([f"{kind} of step {view.step}:", *wrong[:20], f"{len(wrong)} in all"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_whole_reduced_and_unclipped(stage: int, precision: str, tmp_path: Path, alone: list[Any]) -> None:
    views = trained(tmp_path, Job(stage, precision))

    assert [view.step for view in views] == [1, 2, 3]  # As DeepSpeed prints them: see the golden test.
    is_true(tmp_path, views)
    watched = said_by(tmp_path, "watched")[0]
    for view, norm in zip(views, watched["norms"], strict=True):
        if norm is not None:  # Without ZeRO and low precision DeepSpeed forgets it.
            assert gradient_norm(view) == pytest.approx(norm, rel=1e-2)
        assert gradient_norm(view) > 0.5  # The positive control: clipping changed the gradients.
    if precision == "fp32":
        are_like(views, alone)
    else:
        for kind in ("wgrad", "param"):
            assert statistics(views[0], kind).keys() == statistics(alone[0], kind).keys()
        assert gradient_norm(views[0]) == pytest.approx(gradient_norm(alone[0]), rel=0.05)
    for rank in range(WORLD):
        parts = {tensor.part for tensor in Spoken(tmp_path / "run", rank).descriptor.tensors if tensor.kind == "wgrad"}
        assert (len(parts - {""}) > 1) == (stage > 0)
