"""Activations and their gradients under torch's tensor parallelism mean what they mean on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.collect.parallel.styles import declared_by_style

from ...layouts.layout import EVERYTHING, Result, Trainer, differences, train_ranks
from ...support.closed_steps import closed_steps, statistics
from ...support.spools import SaidSoFar
from .. import llama

LAYOUTS: dict[str, tuple[Callable[[], Trainer], int]] = {
    "one process": (llama.one, 1),
    "tensor": (llama.tp, 2),
    "sequence": (partial(llama.tp, True), 2),
    "loss-parallel": (partial(llama.tp_loss, False), 2),
    "loss-parallel sequence": (llama.tp_loss, 2),
    "recomputed": (partial(llama.tp, True, False), 2),
    "data x tensor": (partial(llama.tp_dp, False), 4),
    "data x sequence": (partial(llama.tp_dp, True), 4),
}
Trained = Callable[[str], tuple[Path, list[Result]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a layout, everything measured, when it is first asked for."""

    @functools.cache
    def once(name: str) -> tuple[Path, list[Result]]:
        folder = tmp_path_factory.mktemp("run")
        build, world = LAYOUTS[name]
        # These loops divide the loss themselves and add the gradients of their replicas up.
        return folder, train_ranks(folder, build, world, config={**EVERYTHING, "gradient_divisor": 1.0})

    return once


def placements(folder: Path, rank: int = 0) -> dict[tuple[str, str], str]:
    """(local name, kind) -> placement over tp, as the rank says it."""
    descriptor = SaidSoFar(folder / "run", rank).descriptor
    assert descriptor is not None
    return {(tensor.name, tensor.kind): tensor.placements.get("tp", "") for tensor in descriptor.tensors}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name.startswith("data x") else ())
        for name in LAYOUTS
        if name != "one process"
    ],
)
def test_activations_mean_what_they_mean_on_one_process(name: str, trained: Trained) -> None:
    (folder, _), (alone, _) = trained(name), trained("one process")

    assert [key for key, word in placements(folder).items() if word == "unknown"] == []
    for ours, truth in zip(closed_steps(folder / "run"), closed_steps(alone / "run"), strict=True):
        for kind in ("activation", "activation_in", "dgrad", "dgrad_in"):
            expected = statistics(truth, kind)
            assert len(expected) > 10
            assert not differences(statistics(ours, kind), expected)
    assert not SaidSoFar(folder / "run", 0).health


def test_each_word_is_said_where_it_is_true(trained: Trained) -> None:
    plain, sequence = placements(trained("tensor")[0]), placements(trained("sequence")[0])

    for at in (0, 1):
        # Cut by columns: heads and hidden units.
        for name in ("attention.wq", "attention.core", "ff.w1", "ff.act"):
            assert plain[f"layers.{at}.{name}", "activation"] == plain[f"layers.{at}.{name}", "dgrad"] == "shard"
        # The residual stream and what is computed of it alone: whole on each rank, or cut along the sequence.
        for name in ("", ".n1", ".n2", ".attention.wo", ".ff.w2"):
            for kind in ("activation", "dgrad"):
                assert plain[f"layers.{at}{name}", kind] == "replicate"
                assert sequence[f"layers.{at}{name}", kind] == "shard"
        # Gradients that a rank has only its summand of.
        for name in ("attention.wq", "attention.wk", "attention.wv", "ff.w1", "ff.w3"):
            assert plain[f"layers.{at}.{name}", "dgrad_in"] == "partial"
    assert plain["emb", "activation"] == "replicate"  # Summed over the ranks that hold a row of the table.
    assert sequence["emb", "activation"] == "shard"
    assert plain["out", "activation"] == "replicate"


def test_a_summand_of_a_gradient_stands_between_its_sum_and_what_follows_in_forward(trained: Trained) -> None:
    descriptor = SaidSoFar(trained("tensor")[0] / "run", 0).descriptor
    assert descriptor is not None
    at = {(tensor.name, tensor.kind): tensor.site_pos for tensor in descriptor.tensors}

    for norm, first, reading in (("n1", "attention.wq", ("wq", "wk", "wv")), ("n2", "ff.w1", ("w1", "w3"))):
        for module in reading:
            summand = at[f"layers.1.{first.rpartition('.')[0]}.{module}", "dgrad_in"]
            assert at[f"layers.1.{norm}", "dgrad"] < summand < at[f"layers.1.{first}", "dgrad"]


def test_gradients_of_sequence_parallel_norms_are_summands(trained: Trained) -> None:
    """torch adds them up only when the optimizer uses them: without a collective nobody knows their statistics."""
    (folder, _), (alone, _) = trained("sequence"), trained("one process")
    expected = {"norm.weight"} | {f"layers.{at}.n{n}.weight" for at in (0, 1) for n in (1, 2)}

    assert {name for (name, kind), word in placements(folder).items() if (kind, word) == ("wgrad", "partial")} == expected
    ours, truth = statistics(closed_steps(folder / "run")[1], "wgrad"), statistics(closed_steps(alone / "run")[1], "wgrad")
    assert set(differences(ours, truth)) == {f"missing: {name}/wgrad" for name in expected}


@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_training_is_bit_identical(name: str, trained: Trained, tmp_path: Path) -> None:
    build, world = LAYOUTS[name]
    bare, (_, seen) = train_ranks(tmp_path, build, world), trained(name)

    for ours, theirs in zip(seen, bare, strict=True):
        assert (ours.losses, ours.weights, ours.num_collectives) == (theirs.losses, theirs.weights, theirs.num_collectives)
    assert len(set(seen[0].losses)) > 1  # The positive control: it does train.


def test_what_is_not_certain_stays_apart_unless_the_user_says_it(tmp_path: Path) -> None:
    hints = {"layers.1.drop": {"tp": "replicate"}, "layers.1.mine": {"tp": "shard"}}
    train_ranks(tmp_path, llama.tp_uncertain, 2, config={**EVERYTHING, "site_placements": hints})

    words = placements(tmp_path)
    for kind in ("activation", "dgrad"):
        assert words["layers.0.drop", kind] == "unknown"  # Random: each rank may draw for itself.
        assert words["layers.0.piece", kind] == "unknown"  # Picked from a whole tensor, perhaps by rank.
        assert words["layers.0.mine", kind] == "unknown"  # Somebody's own function.
        assert words["layers.1.drop", kind] == "replicate"
        assert words["layers.1.mine", kind] == "shard"
        assert words["layers.0.ff.w2", kind] == "replicate"  # The positive control.
    keys = {tensor.key for tensor in closed_steps(tmp_path / "run")[0].tensors}
    assert {"layers.0.drop/activation@tp1", "layers.1.drop/activation"} <= keys


def test_frozen_layers_are_placed_by_their_styles(tmp_path: Path) -> None:
    """Without gradients there is no graph; the hooks of ColwiseParallel and its kin still say it."""
    train_ranks(tmp_path, llama.tp_frozen, 2, config=EVERYTHING)

    words = placements(tmp_path)
    assert words["layers.0.attention.wq", "activation"] == "shard"
    assert words["layers.0.attention.wo", "activation"] == "replicate"
    assert words["emb", "activation"] == "replicate"
    assert words["layers.0.n1", "activation"] == "unknown"


class Surprise:
    def __call__(self, *args: Any) -> None: ...

    @property
    def __closure__(self) -> Any:
        raise RuntimeError("not for you")


@pytest.mark.parametrize("hook", [Surprise(), lambda m, a, o: None, int])
def test_a_surprising_hook_is_no_answer(hook: Any) -> None:
    module = nn.Linear(2, 2)
    module.register_forward_hook(hook)

    assert declared_by_style(module, True) is None
    assert declared_by_style(module, False) is None


def test_without_tensor_parallelism_no_graph_is_kept() -> None:
    from sentinel.collect.parallel.tensor_parallel import LocalTensors

    local, tensor = LocalTensors(), torch.randn(2, requires_grad=True) * 2

    local.remember(tensor, object())  # type: ignore[arg-type]

    assert local.source(tensor) is None
    assert not local._seen
