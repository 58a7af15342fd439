"""The names of msProbe's format: folders, CSV files and their columns, the names and tags in them.

Source: msProbe 26.2 and its output. What it measures, and when, is in docs/exports.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

FOLDER = re.compile(r"([\w-]{0,20})-rank(\d{1,5})-(\w*)")
"""`Nov21_13-56-02-rank0-d3a1c196`: time, rank, id of the process."""
FILE = re.compile(r"([a-z_]+?)_(\d+)-(\d+)\.csv")
"""`grad_reduced_0-9.csv`: the steps from 0 to 9."""
TIME = "%b%d_%H-%M-%S"
"""Time in a folder's name: without a year, at UTC+8 wherever it was written."""
TIME_OFFSET_S = 8 * 3600

HEAD = ("vpp_stage", "name", "step")
MICRO_STEP = "micro_step"
OPS = ("min", "max", "mean", "norm", "nans", "zeros")
"""Statistics that it knows; its user chooses which of them are written, and in which order."""
TAIL = ("shape", "dtype")

TENSOR_FILES: dict[str, tuple[str, int]] = {
    "param_origin": ("param", 0),
    "param_updated": ("param", 1),
    "actv": ("activation", 0),
    "actv_grad": ("dgrad", 0),
    "grad_unreduced": ("wgrad_unreduced", 0),
    "grad_reduced": ("wgrad", 0),
    "exp_avg": ("exp_avg", -1),
    "exp_avg_sq": ("exp_avg_sq", -1),
}
"""File -> (Sentinel's kind, Sentinel's step minus its step). It reads the optimizer's state before the update, Sentinel
after it."""
OTHER_FILE = "other"
"""Agreement of gradient and momentum, by parameter; communication, in lines that do not fit their header."""


class Feature(msgspec.Struct, frozen=True):
    """A column of one of its files of features: one number for each observation."""

    quantity: str
    """The quantity behind the colon of Sentinel's name."""
    power: int = 1
    """Sentinel's value is msProbe's to this power: its `sr` is ||W||_F / ||W||_2, the stable rank is the square of that."""


class FeatureFile(msgspec.Struct, frozen=True):
    """A file of features."""

    kind: str
    suffix: str
    """What follows the module's name in msProbe."""
    ending: str
    """What follows the module's name in Sentinel: the weight that was measured."""
    columns: dict[str, Feature]
    has_micro_steps: bool


FEATURE_FILES: dict[str, FeatureFile] = {
    "linear_hook": FeatureFile(
        "weight_spectrum", ".linear", ".weight",
        {"sr": Feature("stable_rank", 2), "kernel_norm": Feature("spectral_norm")}, False,
    ),
    "attention_hook": FeatureFile(
        "attention", ".attention", "", {"entropy": Feature("entropy"), "softmax_max": Feature("softmax_max")}, True
    ),
    "moe_router_weight_hook": FeatureFile(
        "router", ".moe_router", "", {"router_weight_similarity": Feature("weight_similarity")}, False
    ),
    "moe_router_logit_hook": FeatureFile(
        "router", ".moe_router", "", {"per_token_expert_entropy": Feature("entropy")}, True
    ),
}  # fmt: skip
FILES = (*TENSOR_FILES, OTHER_FILE, *FEATURE_FILES)

TAG_OF_KIND = {
    "param": "param_origin",
    "activation": "actv",
    "activation_in": "actv",
    "dgrad": "actv_grad",
    "dgrad_in": "actv_grad",
    "residual": "actv",
    "attention": "actv",
    "router": "actv",
    "wgrad_unreduced": "acc_grad",
    "wgrad": "post_grad",
}
"""Sentinel's kind -> the last word of a tag; other kinds have their own name there."""

_SLOT = re.compile(r"(?P<module>.*?)\.?(?P<slot>input|output)(?:_(?P<element>[^.]+))?")
_INPUT_OF = {"activation": "activation_in", "dgrad": "dgrad_in"}
_OUTPUT_OF = {kind: output for output, kind in _INPUT_OF.items()}


class Slot(msgspec.Struct, frozen=True):
    """The parts of a name in `actv` or `actv_grad`."""

    kind: str
    name: str
    """As Sentinel names a tensor: the module, and `:1` behind it for another element than the first."""


def slot_of(kind: str, name: str) -> Slot | None:
    """Return the parts of `encoder.layers.0.self_attn.output_1`; None: the name is of no input or output.

    kind: activation or dgrad, by the file.
    """
    # The slot is the last word: a module may itself be called `output`.
    module, dot, last = name.rpartition(".")
    match = _SLOT.fullmatch("." + last) if dot else None
    if match is None or match["module"]:
        return None
    element = "" if match["element"] in (None, "0") else f":{match['element']}"
    return Slot(_INPUT_OF[kind] if match["slot"] == "input" else kind, module + element)


def slot_name(kind: str, name: str) -> str:
    """Return the name in `actv` and `actv_grad` of an activation or its gradient."""
    module, colon, element = name.partition(":")
    return f"{module}.{'input' if kind in _OUTPUT_OF else 'output'}{f'_{element}' if colon else ''}"


def file_of_kind(kind: str) -> str | None:
    """Return the file that has the tensors of a kind; None: msProbe does not measure it."""
    kind = _OUTPUT_OF.get(kind, kind)
    return next((file for file, (one, shift) in TENSOR_FILES.items() if one == kind and file != "param_updated"), None)


def tag_of(vpp_stage: int, name: str, kind: str, rank: int, micro_step: int | None) -> str:
    """Return the tag of a tensor: `0:encoder.layers.0.linear1.output:0/rank0/actv`, `0:emb.weight/rank0/post_grad`.

    name: as Sentinel names it; micro_step: of an activation or its gradient, None: 0.
    """
    own = slot_name(kind, name) if TAG_OF_KIND.get(kind, kind) in ("actv", "actv_grad") else name
    return tag_named(vpp_stage, own, kind, rank, micro_step)


def tag_named(vpp_stage: int, name: str, kind: str, rank: int, micro_step: int | None) -> str:
    """Return the tag of a tensor whose name is that of a CSV file: `encoder.layers.0.linear1.output`."""
    word = TAG_OF_KIND.get(kind, kind)
    micro = f":{micro_step or 0}" if word in ("actv", "actv_grad") else ""
    return f"{vpp_stage}:{name}{micro}/rank{rank}/{word}"


def squashed(names: Mapping[str, None] | list[str]) -> dict[str, str]:
    """Return name -> its short form: what stands before its last part `layer(s)` is left out.

    Without one: before the last part that begins with embedding, final, output or norm. A short form that two names would
    share is given to neither.
    """
    short = {name: _squashed(name) for name in names}
    owners: dict[str, int] = {}
    for one in short.values():
        owners[one] = owners.get(one, 0) + 1
    return {name: one if owners[one] == 1 else name for name, one in short.items()}


def _squashed(name: str) -> str:
    for pattern in (r"layers?\.", r"embeddings?\.", r"final", r"output", r"norm"):
        found = [match.start() for match in re.finditer(rf"(?:^|(?<=\.)){pattern}", name)]
        if found:
            return name[found[-1] :]
    return name
