"""When in a step something is made: the phases that dataflow, and the names of scalars, tell apart."""

from __future__ import annotations

import functools
import re

from sentinel.kinds import ROW_OF, Ordering, Phase, measured_kind

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
    row = ROW_OF.get(measured_kind(kind, name))
    if row is None:
        return Phase.FREE  # Of a newer version, or of a quantity that names no tensor: nothing is known to come after it.
    if row.ordering is Ordering.NAME:
        return scalar_phase(name)
    return Phase.FREE if row.phase is None else row.phase


def tensor_name(name: str) -> str:
    """Return the name of a tensor without the quantity of it that a probe formed: `fc1` of `fc1:dgrad.fp16_overflow`."""
    return name.partition(":")[0] or name
