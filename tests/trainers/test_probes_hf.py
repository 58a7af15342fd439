"""Attention and routers of real Hugging Face models, against what the models themselves return."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers as t

import sentinel
from sentinel.collect.probes.router_finding import find_routers

from ..collect.probes.test_attention_scores import truth
from ..support.spools import Said
from ..support.training import train_steps
from ..support.truth import assert_row_of
from . import hf_models

pytestmark = pytest.mark.trainer


def token_ids(seed: int) -> torch.Tensor:
    return torch.randint(1, hf_models.VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(seed))


def padding() -> torch.Tensor:
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def train_causal(model: Any) -> list[float]:
    def loss(model: Any, seed: int) -> torch.Tensor:
        ids = token_ids(seed)
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    return train_steps(model.train(), 2, seed=3, loss=loss)


def grouped() -> nn.Module:
    return hf_models.llama(num_attention_heads=4, num_key_value_heads=2)


MODELS = {"llama": grouped, "gpt2": hf_models.gpt2, "mixtral": hf_models.mixtral, "qwen_moe": hf_models.qwen_moe}
MIXED = ("mixtral", "qwen_moe")
ATTENTION_OF = {"gpt2": "transformer.h.{}.attn"}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_attention_is_that_of_the_model(kind: str, way: str, padded: bool, run: Path) -> None:
    model: Any = MODELS[kind]()
    for one in model.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0  # The twin draws other numbers.
    twin = copy.deepcopy(model)
    model.set_attn_implementation(way)
    twin.set_attn_implementation("eager")
    more = {"attention_mask": padding()} if padded else {}
    monitor = sentinel.attach(model, config={"kinds": ["attention"], "black_box": False})
    model.train()(input_ids=token_ids(0), labels=token_ids(0), **more).loss.backward()
    monitor.detach()
    reported = Said(run)

    weights = twin(input_ids=token_ids(0), output_attentions=True, **more).attentions
    seen = (padding() == 1)[:, None].expand(3, weights[0].shape[1], 8) if padded else torch.ones_like(weights[0][..., 0]) > 0
    for layer, p in enumerate(weights):
        entropy = -(p.detach().double() * p.detach().double().log().nan_to_num(0.0, 0.0, 0.0)).sum(-1)
        entropy = torch.where(entropy < 1e-6, 0.0, entropy)  # A query that sees one key; p was rounded.
        name = ATTENTION_OF.get(kind, "model.layers.{}.self_attn").format(layer)
        row = reported.row(0, "attention", f"{name}:entropy")
        assert_row_of(row, entropy[seen], rel=1e-3)
        (per_head,) = reported.vectors[0][f"{name}:entropy", "entropy"]
        total, number = (entropy * seen).sum((0, 2)), seen.sum((0, 2))
        assert np.allclose(per_head, total / number, atol=1e-4)
        assert reported.row(0, "attention", f"{name}:max_logit")["count"] == 3 * p.shape[1]
    assert len(reported.of(0, "attention")) == 2 * len(weights)
    assert not reported.health, reported.health


@pytest.mark.parametrize("way", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_bit_identical_with_every_probe_on(kind: str, way: str, run: Path) -> None:
    bare: Any = MODELS[kind]()
    bare.set_attn_implementation(way)
    model = copy.deepcopy(bare)
    expected, after = train_causal(bare), torch.get_rng_state()
    kinds = ["attention", "saturation", "precision", "channel", "residual", *(["router"] if kind in MIXED else [])]
    monitor = sentinel.attach(model, config={"kinds": kinds})
    losses, state = train_causal(model), torch.get_rng_state()
    monitor.detach()

    assert losses == expected and torch.equal(state, after)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), bare.parameters(), strict=True))
    reported = Said(run)
    assert not reported.health, reported.health
    assert set(reported.ends[1].due) >= set(kinds) - {"residual"}


@pytest.mark.parametrize("kind", ["mixtral", "qwen_moe"])
def test_routers_are_those_of_the_model(kind: str, run: Path) -> None:
    model: Any = MODELS[kind]()
    twin = copy.deepcopy(model)
    monitor = sentinel.attach(model, config={"kinds": ["router"], "black_box": False})
    loss = model.train()(input_ids=token_ids(0), labels=token_ids(0), output_router_logits=True)
    loss.loss.backward()
    monitor.detach()
    reported = Said(run)

    kept: dict[str, torch.Tensor] = {}
    for name, module in twin.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda m, args, name=name: kept.setdefault(name, args[0].detach()))
    twin(input_ids=token_ids(0))
    assert len(kept) == 2
    for name, hidden in kept.items():
        weight = twin.get_submodule(name).weight.detach().double()
        logits = hidden.reshape(-1, weight.shape[1]).double() @ weight.T
        chosen = np.bincount(logits.topk(2).indices.flatten(), minlength=4)
        assert_row_of(reported.row(0, "router", f"{name}:logits"), logits, rel=1e-3)
        assert_row_of(reported.row(0, "router", f"{name}:entropy"), truth(logits[:, None, None])[0], rel=1e-3)
        assert_row_of(reported.row(0, "router", f"{name}:load"), chosen / len(logits))
        assert reported.vectors[0][f"{name}:load", "load"][0].tolist() == chosen.tolist()
    assert reported.row(0, "router", ":aux_loss")["mean"] == pytest.approx(float(loss.aux_loss), rel=1e-6)
    assert not reported.health, reported.health


MIXTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Mixtral": ("num_local_experts", {}, "softmax"),
    "Qwen2Moe": ("num_experts", {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}, "softmax"),
    "Qwen3Moe": ("num_experts", {"moe_intermediate_size": 8}, "softmax"),
    "Olmoe": ("num_experts", {}, "softmax"),
    "DeepseekV3": (
        "n_routed_experts",
        {
            "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1,
        },
        "sigmoid",
    ),
    "GptOss": ("num_local_experts", {"head_dim": 8}, "softmax"),
    "PhiMoE": ("num_local_experts", {}, "softmax"),
    "GraniteMoe": ("num_local_experts", {}, "softmax"),
}  # fmt: skip
"""Family -> the name of its number of experts, what its config needs besides, how it scores."""


@pytest.mark.parametrize("family", MIXTURES)
def test_routers_of_many_families_are_found_and_read(family: str, run: Path) -> None:
    config_class, model_class = (getattr(t, f"{family}{what}", None) for what in ("Config", "ForCausalLM"))
    if family == "PhiMoE":
        config_class, model_class = getattr(t, "PhimoeConfig", None), getattr(t, "PhimoeForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip(f"this transformers has no {family}")
    count, more, scoring = MIXTURES[family]
    config = config_class(**{**hf_models.SIZES, "num_experts_per_tok": 2, count: 6, **more})
    model: Any = hf_models.made(lambda: model_class(config))

    routers = find_routers(dict(model.named_modules()))
    monitor = sentinel.attach(model, config={"kinds": ["router", "attention"], "black_box": False})
    model.train()(input_ids=token_ids(0), labels=token_ids(0)).loss.backward()
    monitor.detach()
    reported = Said(run)

    assert [(one.num_experts, one.top_k) for one in routers] == [(6, 2)] * 2, routers
    assert [one.scoring for one in routers] == [scoring] * 2
    for one in routers:
        assert reported.row(0, "router", f"{one.name}:logits")["count"] == 24 * 6
        assert reported.vectors[0][f"{one.name}:load", "load"][0].sum() == 24 * 2
    assert reported.of(0, "attention") and not reported.health, reported.health
