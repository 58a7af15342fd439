"""MegaScope's flags mean the modules that people have, whatever their model calls them."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel.daemon.trace_flags import FLAGS, asked_of, layer_of, update_type_of
from sentinel.errors import ConfigError
from sentinel.target import Target

MODELS = {
    "llama": {
        1: ["model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.k_proj", "model.layers.3.self_attn.v_proj"],
        6: ["model.layers.3.self_attn.o_proj"], 4: ["model.layers.3.mlp.gate_proj", "model.layers.3.mlp.up_proj"],
        5: ["model.layers.3.mlp.down_proj"], 7: ["model.layers.3"],
        0: ["model.embed_tokens", "lm_head", "model.norm", "model.layers.3.mlp", "model.layers.3.input_layernorm"],
    },
    "megatron": {
        1: ["decoder.layers.11.self_attention.linear_qkv"], 6: ["decoder.layers.11.self_attention.linear_proj"],
        4: ["decoder.layers.11.mlp.linear_fc1"], 5: ["decoder.layers.11.mlp.linear_fc2"], 7: ["decoder.layers.11"],
        0: ["decoder.final_layernorm", "output_layer"],
    },
    "gpt2": {
        1: ["transformer.h.0.attn.c_attn"], 6: ["transformer.h.0.attn.c_proj"], 4: ["transformer.h.0.mlp.c_fc"],
        5: ["transformer.h.0.mlp.c_proj"], 7: ["transformer.h.0"], 0: ["transformer.wte", "transformer.h.0.ln_1"],
    },
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_names_of_models_people_have(model: str) -> None:
    for update_type, names in MODELS[model].items():
        for name in names:
            assert update_type_of("activation", name, FLAGS) == update_type, name
            mine = [one for one in FLAGS.values() if one.pattern and one.kind == "activation"]
            meant = [one.update_type for one in mine if Target.parse(one.target).means((name,))]
            assert meant == ([update_type] if update_type else []), name


def test_context_attention_and_tokens() -> None:
    assert update_type_of("activation_in", "layers.0.attn.o_proj", FLAGS) == 3
    assert update_type_of("attention", "layers.0.attn:scores", FLAGS) == 2
    assert update_type_of("tokens", "", FLAGS) == 8
    assert update_type_of("activation", "layers.0", ["QKV_mat_mul"]) == 0
    assert [layer_of(name) for name in ("layers.12.attn", "h.0", "head", "9" * 30)] == [12, 0, -1, -1]


def test_what_a_client_asks_for() -> None:
    asked = asked_of({
        "visualization_flags": {"QKV_mat_mul": "True", "HiddenStates": False, "InputTokens": 1},
        "compressor_config": {"type": "TileCompressor", "tiles": 48, "method": "absmax"},
    })  # fmt: skip

    assert asked.flags == ("QKV_mat_mul", "InputTokens") and asked.tokens and asked.kinds == ("activation",)
    assert (asked.compressor.name, asked.compressor.size, asked.compressor.reduce) == ("tile", 48, "absmax")
    alone = asked_of({"visualization_flags": ["InputTokens"]})
    assert alone.tokens and not Target.parse(alone.targets[0]).means(("layers.0", "lm_head"))


@pytest.mark.parametrize(("message", "says"), [
    ({}, "got none"), ({"visualization_flags": {"QKV": True}}, "unknown flag"),
    ({"visualization_flags": 3}, "list of names"),
    ({"visualization_flags": ["HiddenStates"], "compressor_config": {"type": "eval"}}, "name"),
    ({"visualization_flags": ["HiddenStates"], "compressor_config": {"tiles": 10**9}}, "1 to"),
    ({"visualization_flags": ["HiddenStates"], "compressor_config": {"code": "x"}}, "code"),
    ({"visualization_flags": ["HiddenStates"], "compressor_config": 1}, "expected an object"),
])  # fmt: skip
def test_nonsense_is_told(message: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        asked_of(message)
