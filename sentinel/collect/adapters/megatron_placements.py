"""How Megatron places what passes between modules: read off the classes and the settings of the model that was built.

Tensor parallelism leaves plain tensors in three states. *Cut*: heads, features, vocabulary (between a column and a row
parallel layer). *Residual*: whole on each rank, or cut along the sequence with `sequence_parallel`. *Expert*: the tokens
that the dispatcher brought here. Gradients are placed as the tensors are: Megatron reduces them inside its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from sentinel.place import Place, strip_wrappers

ATTENTIONS = frozenset({"self_attention", "cross_attention"})
HEAD_NORMS = frozenset({"q_layernorm", "k_layernorm"})
"""Children of an attention that see this rank's heads."""
RESIDUAL_CLASSES = (
    "TransformerBlock", "TransformerLayer", "MoETransformerLayer", "HyperConnectionTransformerLayer", "SelfAttention",
    "CrossAttention", "MLP", "SharedExpertMLP", "MoELayer", "TopKRouter", "IdentityOp", "IdentityFuncOp",
)  # fmt: skip
"""Modules that take and give the residual stream."""
NORMS = frozenset({"input_layernorm", "pre_mlp_layernorm", "pre_cross_attn_layernorm", "final_layernorm"})


def expert_tensor_size() -> tuple[int, int]:
    """Return (rank, size) of this rank's expert tensor-parallel group."""
    from megatron.core import parallel_state

    return (
        int(parallel_state.get_expert_tensor_parallel_rank() or 0),
        int(parallel_state.get_expert_tensor_parallel_world_size() or 1),
    )


class SitePlaces:
    """The table that `Sites.placements` asks: (local name of a module, whether its output is meant) -> axis to word."""

    def __init__(self, chunks: Sequence[nn.Module], place: Place) -> None:
        self.place = place
        self._words: dict[tuple[str, bool], str | None] = {}
        experts = 1 if place.tp_size == 1 else expert_tensor_size()[1]
        for chunk in chunks:
            for name, words in _words_of(chunk, experts):
                for is_output, word in zip((False, True), words, strict=True):
                    key = (name, is_output)
                    # Chunks of one rank share local names; where they differ, nothing is claimed.
                    if self._words.setdefault(key, word) != word:
                        self._words[key] = None

    def learn(self, *, has_labels: bool, is_parallel: bool) -> None:
        """Note what a last stage returns: with labels the loss, whole on each rank, else logits, which may be cut."""
        self._words["", True] = "shard" if is_parallel and not has_labels else "replicate"

    def __call__(self, name: str, is_output: bool) -> Mapping[str, str]:
        """Return the words of a site's plain tensors."""
        words: dict[str, str] = {}
        if self.place.ep_size > 1:
            words["ep"] = "replicate"  # Who holds which samples and tokens follows from dp, tp and cp already.
        word = self._words.get((name, is_output))
        if self.place.tp_size > 1 and word is not None:
            words["tp"] = word
        return words


def _words_of(chunk: nn.Module, expert_tp: int) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    """Yield (local name, (word of its inputs, word of its outputs)) over tp for each module that is known."""
    config = getattr(chunk, "config", None)
    residual = "shard" if getattr(config, "sequence_parallel", False) else "replicate"
    for full, module in chunk.named_modules():
        name = strip_wrappers(full) if full else ""
        words = name.split(".")
        kind = type(module).__name__
        if not name:
            # What a last stage returns is learnt when it is called; an earlier one hands its last layer's output on.
            yield name, (None, None)
        elif ATTENTIONS & set(words) and "core_attention" in words:
            yield name, ("shard", "shard")
        elif ATTENTIONS & set(words) and getattr(config, "multi_latent_attention", False):
            # Its projections are cut, whole or gathered by settings of their own: only its outer borders are sure.
            if words[-1] in ATTENTIONS or words[-1] == "linear_proj":
                yield name, (residual if words[-1] in ATTENTIONS else "shard", residual)
        elif ATTENTIONS & set(words) and words[-1] in HEAD_NORMS:
            yield name, ("shard", "shard")
        elif "shared_experts" in words and getattr(config, "moe_shared_expert_overlap", False):
            continue  # Run piece by piece between the dispatcher's exchanges.
        elif "experts" in words or "local_experts" in words:
            yield name, _expert(kind, words, expert_tp)
        elif "ColumnParallel" in kind:
            yield name, (residual, "replicate" if getattr(module, "gather_output", False) else "shard")
        elif "RowParallel" in kind:
            yield name, ("shard" if getattr(module, "input_is_parallel", True) else "replicate", residual)
        elif "embedding" in words:
            yield name, _embedding(module, words, residual)
        elif words[-1] == "rotary_pos_emb":
            yield name, ("replicate", "replicate")
        elif kind in RESIDUAL_CLASSES or words[-1] in NORMS:
            yield name, (residual, residual)


def _expert(kind: str, words: list[str], expert_tp: int) -> tuple[str | None, str | None]:
    """Without an expert tensor-parallel group ranks hold different tokens; else the dispatcher gathers and adds them up.

    Then an expert is given whole tokens and summands of their gradients, and gives the reverse: no word fits both.
    """
    tokens = None if expert_tp > 1 else "shard"
    if "ColumnParallel" in kind or words[-1] == "linear_fc1":
        return tokens, "shard"
    if "RowParallel" in kind or words[-1] == "linear_fc2":
        return "shard", tokens
    if words[-1] in ("experts", "local_experts") or words[-1].isdigit():
        return tokens, tokens
    return None, None


def _embedding(module: Any, words: list[str], residual: str) -> tuple[str | None, str | None]:
    if words[-1] == "embedding":
        return "replicate", residual if getattr(module, "scatter_to_sequence_parallel", True) else "replicate"
    if words[-1] == "embedding_dropout":
        return residual, residual
    if getattr(module, "reduce_scatter_embeddings", False):
        return "replicate", residual
    return "replicate", "replicate"
