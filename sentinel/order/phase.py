"""When in a step something is made: the phases that dataflow, and the names of scalars, tell apart."""

from __future__ import annotations

import enum
import functools
import re


class Phase(enum.IntEnum):
    """When in a step an anomaly was made; the number is its place in the total order."""

    PARAM = 0
    """Weights as the step reads them."""
    FORWARD = 1
    LOSS = 2
    METRIC = 3
    """A scalar of unknown making: after the forward, before nothing."""
    BACKWARD = 4
    WGRAD_UNREDUCED = 5
    WGRAD = 6
    SCHEDULE = 7
    """Learning rate and its like: only the optimizer reads them."""
    NORM = 8
    """Gradient norm, found_inf: after every rank's weight gradients."""
    OPTIMIZER = 9
    COMM = 10
    """A collective: program order on its own rank only."""
    FREE = 11
    """Health and wall-clock figures: related to nothing inside the step."""


_PHASE_OF_KIND = {
    "param": Phase.PARAM,
    "weight_spectrum": Phase.PARAM,
    "activation_in": Phase.FORWARD,
    "activation": Phase.FORWARD,
    "residual": Phase.FORWARD,
    "attention": Phase.FORWARD,
    "router": Phase.FORWARD,
    "saturation": Phase.FORWARD,
    "channel": Phase.FORWARD,
    "dgrad": Phase.BACKWARD,
    "dgrad_in": Phase.BACKWARD,
    "wgrad_unreduced": Phase.WGRAD_UNREDUCED,
    "wgrad": Phase.WGRAD,
    "exp_avg": Phase.OPTIMIZER,
    "exp_avg_sq": Phase.OPTIMIZER,
    "update": Phase.OPTIMIZER,
    "update_ratio": Phase.OPTIMIZER,
    "grad_momentum_alignment": Phase.OPTIMIZER,
    "comm": Phase.COMM,
    "health": Phase.FREE,
}

_EDGE, _END = r"(?:^|[._/: -])", r"(?:[._/: (-]|$)"
_EVALUATION = re.compile(rf"{_EDGE}(eval|evaluation|val|valid|validation|test){_END}", re.IGNORECASE)
_LOSS = re.compile(rf"{_EDGE}(loss|losses|nll|perplexity|ppl|cross[._ -]?entropy){_END}", re.IGNORECASE)
_NORM = re.compile(
    r"grad(ient)?s?[._ -]?norm|total_norm|found[._ -]?inf|overflow|(loss|grad|amp)[._ -]?scale|num[._ -]?zeros"
    r"|(?:grad(ient)?s?|norm)[._ -]?clip|clip(ped|ping|[._ -]?(coef|grad|norm|ratio|scale))",
    re.IGNORECASE,
)
_UPDATED = re.compile(r"(param(eter)?s?|weights?|update)[._ -]?norm", re.IGNORECASE)
_SCHEDULE = re.compile(
    rf"{_EDGE}(lr|lrs|learning[._ -]?rates?|weight[._ -]?decay|momentum|beta[12]?|betas){_END}", re.IGNORECASE
)
_FREE = re.compile(
    r"time|token|sample|second|throughput|memory|mfu|tflop|epoch|progress|batch[._ -]?size|world[._ -]?size", re.IGNORECASE
)

_WALL_CLOCK = re.compile(r"time|second", re.IGNORECASE)

DATAFLOW = frozenset({Phase.PARAM, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.WGRAD_UNREDUCED, Phase.WGRAD})
"""Phases through which values flow to the weight gradients: all of them come before the gradient norm."""

CONCURRENT = frozenset(
    {
        Phase.PARAM, Phase.LOSS, Phase.METRIC, Phase.WGRAD_UNREDUCED, Phase.WGRAD, Phase.SCHEDULE, Phase.NORM, Phase.FREE,
    }
)  # fmt: skip
"""Phases of which nothing precedes anything else of the same phase and step."""

AFTER_LOSS = frozenset({Phase.BACKWARD, Phase.WGRAD_UNREDUCED})
"""What comes after the loss of its own lane."""

AFTER_FORWARD = AFTER_LOSS | {Phase.LOSS, Phase.METRIC}
"""What comes after all of the forward of its own lane."""

AFTER_PARAM = AFTER_FORWARD
"""What comes after the weights of any stage; the forward only after those of its own stage and earlier ones."""


@functools.lru_cache(maxsize=4096)
def scalar_phase(name: str) -> Phase:
    """Return where in a step the logged scalar of this name belongs, by the names that trainers use."""
    if _EVALUATION.search(name):
        return Phase.FREE  # Of another pass over other data, before or after the step: it made nothing in it.
    if _NORM.search(name):
        return Phase.NORM
    if _UPDATED.search(name):
        return Phase.OPTIMIZER
    if _LOSS.search(name) and not _WALL_CLOCK.search(name):
        return Phase.LOSS
    if _SCHEDULE.search(name):
        return Phase.SCHEDULE
    if _FREE.search(name):
        return Phase.FREE
    return Phase.METRIC


def phase_of(kind: str, name: str) -> Phase:
    """Return the phase of a step in which a tensor of this kind, or a scalar of this name, was made."""
    if kind == "scalar":
        return scalar_phase(name)
    return _PHASE_OF_KIND.get(measured_kind(kind, name), Phase.FREE)


def measured_kind(kind: str, name: str) -> str:
    """Return the kind of the tensor that a row is about: `dgrad` for the precision row `fc1:dgrad.fp16_overflow`."""
    return name.rpartition(":")[2].partition(".")[0] if kind == "precision" else kind


def tensor_name(name: str) -> str:
    """Return the name of a tensor without the quantity of it that a probe formed: `fc1` of `fc1:dgrad.fp16_overflow`."""
    return name.partition(":")[0] or name
