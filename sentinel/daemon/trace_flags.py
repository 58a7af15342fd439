"""MegaScope's words for what is traced: its flags as kinds and targets of any model, and back.

Its client asks by `visualization_flags` and `compressor_config`, and is told of a tensor by a number, `update_type`, and a
layer. Source: MegaScope's tensor tracer, as FEATURES describes it: FlagType and its messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from sentinel.daemon.trace_api import MOST_SHOWN
from sentinel.errors import ConfigError
from sentinel.known_words import nearest
from sentinel.rank_list import ranks_in
from sentinel.trace import Compressor, check_compressor

_QKV = r"qkv|qkv_proj|query_key_value|linear_qkv|c_attn|in_proj|q_proj|k_proj|v_proj|wq|wk|wv|query|key|value"
_CONTEXT = r"(?:.*att.*\.)(?:o_proj|out_proj|c_proj|linear_proj|dense|proj|wo)"
_FIRST = r"fc1|linear_fc1|c_fc|up_proj|gate_proj|gate_up_proj|dense_h_to_4h|w1|w3|fc_in|lin1"
_SECOND = r"fc2|linear_fc2|down_proj|dense_4h_to_h|w2|fc_out|lin2"
_BLOCK = r"(?:layers?|blocks?|h)\.\d+"
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class FlagMeaning(NamedTuple):
    """What one flag stands for."""

    update_type: int
    kind: str
    """Kind of Sentinel's; `tokens` for what the model is given."""
    pattern: str
    """Of the modules' names, matched as a whole; empty: of no module."""

    @property
    def target(self) -> str:
        """The pattern as a target."""
        return f"re:(?:.*\\.)?(?:{self.pattern})"


FLAGS: Mapping[str, FlagMeaning] = {
    "QKV_mat_mul": FlagMeaning(1, "activation", _QKV),
    "RawAttentionScore_mat_mul": FlagMeaning(2, "attention", r".*att.*"),
    "ContextLayer_mat_mul": FlagMeaning(3, "activation_in", _CONTEXT),
    "MLP1_mat_mul": FlagMeaning(4, "activation", _FIRST),
    "MLP2_mat_mul": FlagMeaning(5, "activation", rf"{_SECOND}|(?:.*mlp\.)c_proj"),
    "AttentionOutput_mat_mul": FlagMeaning(6, "activation", _CONTEXT),
    "HiddenStates": FlagMeaning(7, "activation", _BLOCK),
    "InputTokens": FlagMeaning(8, "tokens", ""),
}  # fmt: skip
"""Flag -> what it stands for. Names are those of Megatron, Hugging Face, torchtitan and GPT-2 alike."""
COMPRESSORS: Mapping[str, str] = {
    "TileCompressor": "tile", "Tile": "tile", "NoOpCompressor": "none", "NoOp": "none", "ProjectionCompressor": "projection",
    "Projection": "projection", "PCACompressor": "pca", "PCA": "pca",
}  # fmt: skip
"""MegaScope's names of compressors -> ours, which are taken as well."""
_MEANT = {name: re.compile(rf"(?:.*\.)?(?:{one.pattern})") for name, one in FLAGS.items() if one.pattern}


class Asked(NamedTuple):
    """What a client wants to see."""

    flags: tuple[str, ...]
    kinds: tuple[str, ...]
    targets: tuple[str, ...]
    tokens: bool
    compressor: Compressor
    ranks: tuple[int, ...] | None
    """Whose traces; None: the first `MOST_SHOWN` that trace."""


def asked_of(message: Mapping[str, Any]) -> Asked:
    """Return what a message `run_training_step` asks for; ConfigError names what is wrong in it."""
    given = message.get("visualization_flags", {})
    if isinstance(given, Mapping):
        chosen = [str(name) for name, value in given.items() if _is_on(value)]
    elif isinstance(given, list):
        chosen = [str(name) for name in given]
    else:
        raise ConfigError(f"visualization_flags: expected an object or a list of names, got {type(given).__name__}")
    for name in chosen:
        if name not in FLAGS:
            raise ConfigError(f'visualization_flags: unknown flag "{name[:60]}"{nearest(name[:60], tuple(FLAGS))}')
    if not chosen:
        raise ConfigError(f"visualization_flags: expected some of {', '.join(FLAGS)} to be true, got none")
    meanings = [FLAGS[name] for name in dict.fromkeys(chosen)]
    kinds = dict.fromkeys(one.kind for one in meanings if one.pattern)
    targets = tuple(one.target for one in meanings if one.pattern)
    compressor = _compressor_of(message.get("compressor_config", {}))
    # Tokens alone: a kind is asked for at no module.
    return Asked(
        tuple(dict.fromkeys(chosen)), tuple(kinds) or ("activation",), targets or ("re:-",),
        any(one.kind == "tokens" for one in meanings), compressor, _ranks_of(message.get("ranks")),
    )  # fmt: skip


def _ranks_of(given: Any) -> tuple[int, ...] | None:
    if given is None or given == "":
        return None
    text = ",".join(map(str, given)) if isinstance(given, list) else str(given)
    return ranks_in(text[:10_000], "ranks", MOST_SHOWN)


def _is_on(value: Any) -> bool:
    return value is True or (isinstance(value, (str, int)) and str(value).lower() in ("true", "1"))


def _compressor_of(config: Any) -> Compressor:
    if not isinstance(config, Mapping):
        raise ConfigError(f"compressor_config: expected an object, got {type(config).__name__}")
    plain: dict[str, Any] = dict(config)
    named = plain.pop("type", plain.pop("name", "tile"))
    plain["name"] = COMPRESSORS.get(str(named), str(named))
    if "tiles" in plain:
        plain["size"] = plain.pop("tiles")
    if "method" in plain:
        plain["reduce"] = plain.pop("method")
    try:
        found = msgspec.convert(plain, Compressor)
    except msgspec.ValidationError as error:
        raise ConfigError(f"compressor_config: {error}") from error
    check_compressor("compressor_config", found)
    return found


def update_type_of(kind: str, name: str, flags: Iterable[str]) -> int:
    """Return the number under which a traced tensor is told; 0: no flag that was asked for means it."""
    for flag in flags:
        meaning = FLAGS[flag]
        if meaning.kind == kind and (not meaning.pattern or _MEANT[flag].fullmatch(name.partition(":")[0])):
            return meaning.update_type
    return 0


def layer_of(name: str) -> int:
    """Return the number of the layer in a module's name; -1: it is in none."""
    found = _LAYER.search(name)
    return int(found[1]) if found and len(found[1]) < 10 else -1
