"""A border of the black box has one name, whatever else is measured: its series goes on when monitoring is switched."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sentinel

from ..support.nets import Block
from ..support.spools import Said

MODULE_KINDS = ["activation", "activation_in", "dgrad", "dgrad_in"]


class Gpt(nn.Module):
    """As Hugging Face builds BLOOM: embeddings, their norm, blocks in a list, a norm; a head around it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, 8),
                "wpe": nn.Embedding(5, 8),
                "ln_e": nn.LayerNorm(8),
                "h": nn.ModuleList([PostNorm() if how == "post-norm" else Block(8) for _ in range(2)]),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, 11)

    def forward(self, batch: torch.Tensor) -> Any:
        parts: Any = self.transformer
        x = parts["ln_e"](parts["wte"](batch) + parts["wpe"](torch.arange(batch.shape[1])))
        for block in parts["h"]:
            if self.how.startswith("checkpointed"):
                x = checkpoint(block, x, use_reentrant=self.how.endswith("reentrant"))
            else:
                x = block(x)
        logits = self.lm_head(parts["ln_e"](parts["ln_f"](x)) if self.how == "shared" else parts["ln_f"](x))
        return {"logits": logits} if self.how == "mapping" else logits


class PostNorm(nn.Module):
    """A block whose last module makes its output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.ln = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.ln(x + self.fc(x))
        return normed


class Residual(nn.Module):
    """As torchvision builds ResNet: one activation function, called twice; the second time it makes the block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.relu(self.conv2(self.relu(self.conv1(x))) + x)
        return made


class ConvNet(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 11)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.pool(self.layer1(self.stem(batch))).flatten(1))
        return found


MODELS: dict[str, Any] = {
    "gpt": Gpt, "post-norm": Gpt, "shared": Gpt, "mapping": Gpt, "checkpointed": Gpt, "checkpointed reentrant": Gpt,
    "resnet": ConvNet,
}  # fmt: skip
COMPILERS: dict[str, Any] = {
    "eager": lambda model: model,
    "whole": lambda model: torch.compile(model, backend="aot_eager"),
    "blocks": lambda model: [one.compile(backend="aot_eager") for one in blocks_of(model)] and model,
}


SHORT = {"eager": MODELS.keys(), "whole": (), "blocks": {"checkpointed reentrant", "resnet"}}
"""Models of the short form: compiled those that differ most, eagerly all. A graph of the whole takes longest to make."""
# A graph of the whole holds no reentrant checkpoint.
CASES = [
    pytest.param(how, compiler, marks=() if how in SHORT[compiler] else pytest.mark.long)
    for how in MODELS
    for compiler in COMPILERS
    if (how, compiler) != ("checkpointed reentrant", "whole")
]


def blocks_of(model: Any) -> Any:
    return model.layer1 if isinstance(model, ConvNet) else model.transformer["h"]


def batch_of(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, ConvNet):
        return torch.randn(4, 1, 6, 6, generator=generator)
    return torch.randint(0, 11, (4, 5), generator=generator)


def train_bordered(folder: Path, how: str, compiler: str, config: dict[str, Any], *, switch_at: int | None = None) -> Said:
    """Three steps of two micro-batches; one of them may measure modules too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[how](how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor: Any = sentinel.attach(model, optimizer, {"directory": str(folder), "run": "run", **config})
    call = COMPILERS[compiler](model)
    for step in range(3):
        if step == switch_at:
            monitor.enable(MODULE_KINDS, for_steps=1)
        optimizer.zero_grad()
        losses = []
        for micro_step in range(2):
            made = call(batch_of(model, 10 * step + micro_step))
            losses.append((made["logits"] if isinstance(made, dict) else made).square().mean())
        for loss in losses:  # Forwards first: a gradient belongs to its own micro-step.
            loss.backward()
        optimizer.step()
    monitor.detach()
    said = Said(folder / "run")
    assert not said.health, said.health
    return said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what trained with the black box alone."""

    @functools.cache
    def trained(how: str, compiler: str) -> Said:
        return train_bordered(tmp_path_factory.mktemp("alone"), how, compiler, {"per_micro_step": True})

    return trained


def borders(said: Said, step: int) -> dict[tuple[str, str, int], tuple[Any, ...]]:
    """(kind, name, micro_step) -> what a row of the black box says."""
    found: dict[tuple[str, str, int], tuple[Any, ...]] = {}
    for tensor, row in said.rows[step]:
        if tensor.border:
            key = tensor.kind, tensor.name, int(row["micro_step"])
            assert key not in found
            norm = math.sqrt(row["m2"] + row["count"] * row["mean"] ** 2)
            found[key] = tensor.border, tensor.border_index, int(row["count"]), float(row["mean"]), norm
    return found


LENT = {
    "transformer.ln_e": {("activation", "transformer.ln_e"), ("dgrad", "transformer.ln_e")},
    "transformer.h.0": {("activation_in", "transformer.h.0"), ("dgrad_in", "transformer.h.0")},
}


def border_names(said: Said, step: int) -> set[tuple[str, str]]:
    return {(tensor.kind, tensor.name) for tensor, _ in said.rows[step] if tensor.border}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("SENTINEL_DISABLE", "SENTINEL_RUN", "SENTINEL_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("how", "compiler"), CASES)
def test_series_go_on_while_modules_are_measured(tmp_path: Path, alone: Any, how: str, compiler: str) -> None:
    unswitched = alone(how, compiler)
    switched = train_bordered(tmp_path, how, compiler, {"per_micro_step": True}, switch_at=1)

    for step in range(3):
        expected, found = borders(unswitched, step), borders(switched, step)
        assert len(expected) >= 2 * (4 + 4)
        assert found.keys() == expected.keys(), step
        assert found == expected
    assert len(switched.rows[1]) > len(unswitched.rows[1]) + 20
    assert len(switched.rows[2]) == len(unswitched.rows[2])


@pytest.mark.parametrize("compiler", ["eager", pytest.param("whole", marks=pytest.mark.long), "blocks"])
def test_no_tensor_stands_twice_and_its_other_names_stay_with_it(tmp_path: Path, compiler: str) -> None:
    said = train_bordered(tmp_path, "gpt", compiler, {}, switch_at=1)

    stem = said.tensor("activation_in", "transformer.h.0")
    assert stem.also == ("transformer.ln_e",) and "transformer.h.0.ln" in stem.consumers
    assert said.tensor("dgrad_in", "transformer.h.0").also == ("transformer.ln_e",)
    assert said.tensor("activation", "").also == said.tensor("dgrad", "").also == ("lm_head",)
    assert not {"transformer.ln_e", "lm_head"} & {*said.names(1, "activation"), *said.names(1, "dgrad")}
    forward = [(int(row["call_id"]), t) for t, row in said.rows[1] if t.kind.startswith("activation")]
    order = [tensor.name for _, tensor in sorted(forward, key=lambda one: one[0])]
    assert order.index("transformer.wpe") < order.index("transformer.h.0") < order.index("transformer.h.0.ln")
    places = [tensor.site_pos for _, tensor in sorted(forward, key=lambda one: one[0])]
    assert places == sorted(places)


def test_what_calls_a_module_twice_keeps_the_other_call(tmp_path: Path) -> None:
    said = train_bordered(tmp_path, "resnet", "eager", {"per_micro_step": True}, switch_at=1)

    for kind in ("activation", "dgrad"):
        assert said.names(1, kind).count("layer1.0.relu") == said.names(1, kind).count("layer1.0") == 2  # Micro-steps.


@pytest.mark.parametrize(("how", "compiler"), CASES)
def test_modules_that_were_measured_first_change_no_name_later(tmp_path: Path, alone: Any, how: str, compiler: str) -> None:
    config = {"kinds": ["wgrad", *MODULE_KINDS], "collect_times": 1, "per_micro_step": True}

    said = train_bordered(tmp_path, how, compiler, config, switch_at=2)

    named = {step: border_names(said, step) for step in range(3)}
    if how == "shared":
        # Called once more behind the border: its name stands for two tensors, of which the border is one.
        named[0] ^= LENT["transformer.ln_e"] | LENT["transformer.h.0"]
        named[2] -= LENT["transformer.ln_e"]
    if how == "resnet":
        # Called once more before it makes the border's tensor: which has the border's name from the first step on.
        assert ("activation", "layer1.0") in named[0]
        named = {step: {one for one in names if not one[1].endswith(".relu")} for step, names in named.items()}
    for step in (1, 2):
        assert named[step] == named[0]
        found = [row for key, row in borders(said, step).items() if key[:2] in named[step]]
        assert sorted(found) == sorted(borders(alone(how, compiler), step).values())
    assert len(said.rows[2]) > len(said.rows[1]) + 20
