"""Tiny random models of transformers, and data for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from torch import nn

VOCABULARY = 61
LENGTH = 8

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def llama(**more: Any) -> nn.Module:
    return made(lambda: t.LlamaForCausalLM(t.LlamaConfig(**{**SIZES, **more})))


def gpt2() -> nn.Module:
    config = t.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return made(lambda: t.GPT2LMHeadModel(config))


def mixtral() -> nn.Module:
    config = t.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return made(lambda: t.MixtralForCausalLM(config))


def qwen_moe() -> nn.Module:
    config = t.Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=12
    )
    return made(lambda: t.Qwen2MoeForCausalLM(config))


def tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "tied_llama": tied, "gpt2": gpt2, "mixtral": mixtral, "qwen_moe": qwen_moe,
}  # fmt: skip


def t5() -> nn.Module:
    config = t.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return made(lambda: t.T5ForConditionalGeneration(config))


def bert() -> nn.Module:
    config = t.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=3
    )
    return made(lambda: t.BertForSequenceClassification(config))


def sequence() -> list[int]:
    return torch.randint(1, VOCABULARY, (LENGTH,)).tolist()


def causal_data(num: int, seed: int = 1) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    return [{"input_ids": tokens, "labels": list(tokens)} for tokens in (sequence() for _ in range(num))]


def seq2seq_data() -> list[dict[str, Any]]:
    torch.manual_seed(2)
    return [{"input_ids": sequence(), "labels": sequence()} for _ in range(12)]


def labelled_data() -> list[dict[str, Any]]:
    torch.manual_seed(3)
    return [{"input_ids": sequence(), "labels": at % 3} for at in range(12)]


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[dict[str, Any]]]]] = {
    "t5": (t5, seq2seq_data), "bert": (bert, labelled_data),
}  # fmt: skip


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank difference, as PEFT has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def with_adapters(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    return model
