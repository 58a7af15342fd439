"""Raw moments as Megatron's training stats write them: `training_stats/{stat}/rank{R}.jsonl`, one line a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from sentinel.moments import Moments

STAT_OF_PARAMETER = {"param": "param_raw_moments_by_param", "wgrad": "grad_raw_moments_by_param"}
STAT_OF_SITE = {
    "activation": "activation_raw_moments_by_layer",
    "activation_in": "activation_raw_moments_by_layer",
    "dgrad": "dgrad_raw_moments_by_layer",
    "dgrad_in": "dgrad_raw_moments_by_layer",
}
STAT_OF_STREAM = {"activation": "residual_raw_moments_by_layer", "dgrad": "residual_dgrad_raw_moments_by_layer"}
"""Kind -> stat of the residual stream, in which what passes from block to block is written a second time."""
STREAM_STATS = frozenset(STAT_OF_STREAM.values())
STREAM = "residual"
KINDS = (*STAT_OF_PARAMETER, *STAT_OF_SITE, STREAM)
"""Kinds that have a place in the format."""
FIRST_INPUT, OUTPUT = "block_input", "block_output"
"""Borders of the black box that are in the residual stream."""
_BLOCK = re.compile(r"(?:(?P<stack>.*)\.)?[^.]+\.(?P<number>\d+)")
"""`decoder.layers.7`: a block, and the stack that it is in."""
SAMPLES = ("consumed_train_samples", "consumed_samples")
"""Logged values that say how many samples were trained on."""


class RawMoments(msgspec.Struct, frozen=True):
    """The values of one tensor or group: sums over finite elements, the other elements counted."""

    count: int
    sum_1: float
    sum_2: float
    sum_3: float
    sum_4: float
    nan: int
    inf: int
    zero: int | None
    min: float | None
    max: float | None


class _Line(msgspec.Struct, frozen=True):
    iter: int
    consumed_train_samples: float | None
    stat: str
    values: dict[str, RawMoments]


def raw_moments(moments: Moments) -> list[RawMoments]:
    """Return the raw moments, sums of x**k over finite elements, of each row. One too large for float64 is null in JSON.

    Source: S2 = M2 + n mu^2 and so on (`Moments.raw_moments`).
    """
    sums = moments.raw_moments()
    stats = moments.stats
    lows, highs = moments.min(), moments.max()
    return [
        RawMoments(
            int(stats["count"][at]),
            float(sums["s1"][at]),
            float(sums["s2"][at]),
            float(sums["s3"][at]),
            float(sums["s4"][at]),
            int(stats["num_nan"][at]),
            int(stats["num_pos_inf"][at] + stats["num_neg_inf"][at]),
            int(stats["num_zero"][at]) if stats["num_zero"][at] >= 0 else None,
            None if np.isnan(lows[at]) else float(lows[at]),
            None if np.isnan(highs[at]) else float(highs[at]),
        )
        for at in range(len(stats))
    ]


def places_of(
    name: str, kind: str, border: str = "", also: Sequence[str] = (), consumers: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Return (stat, name) of each line that a tensor is written in: one for every module that returns or takes it.

    border, also, consumers: as of a logical tensor. Source: `decoder.layers.0.mlp.linear_fc1/input0`, and for the residual
    stream `decoder/input0`, `decoder.layers.0/output0`, as RawMomentLogger names its sites. A module's gradient there is its
    own share, here it is the tensor's: the sum over all that read it.
    """
    if kind in STAT_OF_PARAMETER:
        return [(STAT_OF_PARAMETER[kind], name)]
    if kind not in STAT_OF_SITE:
        return []
    is_input = kind.endswith("_in")
    takers = (name, *consumers) if is_input else consumers
    givers = also if is_input else (name, *also)
    sites = [*(_site(one, "output") for one in givers), *(_site(one, "input") for one in takers)]
    found = [(STAT_OF_SITE[kind], site) for site in dict.fromkeys(sites)]
    stream = _stream_site(givers, takers, border)
    if stream:
        found.append((STAT_OF_STREAM[kind.removesuffix("_in")], stream))
    return found


def _site(name: str, slot: str) -> str:
    module, _, element = name.partition(":")
    return f"{module}/{slot}{element or 0}" if not element or element.isdigit() else f"{module}/{slot}.{element}"


def _stream_site(givers: Sequence[str], takers: Sequence[str], border: str) -> str:
    """Return the name in the residual stream; empty: it is not in it, or is there as another block's output already."""
    blocks = [one for name in (givers if border == OUTPUT else takers) if (one := _BLOCK.fullmatch(name.partition(":")[0]))]
    block = min(blocks, key=lambda one: len(one[0]), default=None)
    if border == OUTPUT:
        return _site(block[0] if block is not None else givers[0], "output") if givers else ""
    if border == FIRST_INPUT and block is not None and int(block["number"]) == 0:
        return f"{block['stack']}/input0" if block["stack"] else "input0"
    return ""


def file_name(stat: str, rank: int) -> str:
    """Return the path of a rank's lines of a stat, relative to the directory of the stats."""
    return f"{stat}/rank{rank}.jsonl"


def lines_of(
    iteration: int, samples: float | None, rows: Iterable[tuple[str, str, int, RawMoments]]
) -> tuple[list[tuple[str, bytes]], int]:
    """Return ((file, line) for each file that an iteration has values in, number of the values).

    A tensor is in the file of the lowest rank that holds it alone. samples: trained on so far; None: not known. rows:
    (stat, name, that rank, values).
    """
    lines: dict[tuple[str, int], dict[str, RawMoments]] = {}
    for stat, name, rank, values in rows:
        lines.setdefault((stat, rank), {})[name] = values
    chunks = [
        (file_name(stat, rank), msgspec.json.encode(_Line(iteration, samples, stat, found)) + b"\n")
        for (stat, rank), found in lines.items()
    ]
    return chunks, sum(len(found) for found in lines.values())
