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

_LOSS = re.compile(r"(^|[._/ -])loss(es)?$", re.IGNORECASE)
_NORM = re.compile(r"grad(ient)?s?[._ -]?norm|total_norm|found_inf|overflow|loss[._ -]?scale|num_zeros|clip", re.IGNORECASE)
_SCHEDULE = re.compile(r"(^|[._/-])(lr|learning_rate|weight_decay|momentum|beta[12]?)([._/-]|$)", re.IGNORECASE)
_FREE = re.compile(r"time|token|sample|second|throughput|memory|mfu|tflop|epoch|progress", re.IGNORECASE)

DATAFLOW = frozenset({Phase.PARAM, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.WGRAD_UNREDUCED, Phase.WGRAD})
"""Phases through which values flow to the weight gradients: all of them come before the gradient norm."""

AFTER_LOSS = frozenset({Phase.BACKWARD, Phase.WGRAD_UNREDUCED})
"""What comes after the loss of its own lane."""

AFTER_FORWARD = AFTER_LOSS | {Phase.LOSS, Phase.METRIC}
"""What comes after all of the forward of its own lane."""

AFTER_PARAM = AFTER_FORWARD
"""What comes after the weights of any stage; the forward only after those of its own stage and earlier ones."""


@functools.lru_cache(maxsize=4096)
def scalar_phase(name: str) -> Phase:
    """Return where in a step the logged scalar of this name belongs, by the names that trainers use."""
    if _NORM.search(name):
        return Phase.NORM
    if _LOSS.search(name):
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
    if kind == "precision":
        kind = name.rpartition(":")[2].partition(".")[0]  # `fc1:dgrad.fp16_overflow` is said of a gradient.
    return _PHASE_OF_KIND.get(kind, Phase.FREE)
