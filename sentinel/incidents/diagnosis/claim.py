"""Diagnosis: what is suspected and the reasons, the bounds that diagnoses are given by, and the words that they share."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from sentinel.anomaly_words import against_words
from sentinel.incidents.diagnosis.evidence import Evidence, Sign
from sentinel.kinds import STATE_KINDS, labels

LASTING_STEPS = 3
"""Steps in a row that are no batch any more: the next two batches would have to be bad too."""
QUIET_STEPS = 2
"""Whole steps without an anomaly after which an excursion counts as gone. Fewer: a pause passes for its end; more: the
diagnosis comes later."""
WELL_STEPS = 5
"""Whole steps without an anomaly after which a lone non-finite value may be a machine's. Fewer: broken code that strikes
again is taken for a machine; more: the diagnosis comes later."""
LOSS_SPREADS = 5.0
"""Spreads of its newest values from which a loss moved with the rest, alarm or not. Smaller: its noise counts as a move;
larger: a bad batch that moved it a little is not called one."""
WIDE = 5
"""Series of one step, the gradient norm among them, that a batch moves without the loss. Fewer: excursions of single layers
pass for a batch; more: a batch that moves few layers is not called one."""
ABSURD = 100.0
"""Times by which no part of a batch moves a layer. Smaller: extreme data are taken for a broken layer; larger: a broken
layer passes for data that should be skipped."""
STEEP = 200
"""Elements of a weight of which one may be called nearly all. Fewer: weights in which one element is the largest by design
are named; more: a flip in a small weight is not."""
FRONT = 2.0
"""Times by which the tensors made of the data first must move to point at the data, with nothing beside them. Smaller: the
noise of batches does; larger: data that are bad by less are not named."""
PULSE_STEPS = 32
"""Most steps that a stretch of bad data may last which comes and goes at once. Fewer: a longer stretch of bad data stays
unexplained; more: a state of the training that ends by itself passes for data."""
GONE = 0.25
"""Share of its height below which a jump is gone at once, rather than fading. Smaller: the noise of the loss keeps it there;
larger: a recovery of damaged weights passes for the end of bad data."""
AVERAGES = labels(STATE_KINDS)
LOST = 0.3
"""Share of what it was below which a running mean was lost rather than fell: with b1 = 0.9 it keeps nine tenths a step.
Larger: means that large gradients cancel are called lost; smaller: one that was reset and took in a gradient is not."""
SILENT = 3
"""Gradients that become exactly zero together when a narrow type cannot hold them: one alone is a layer's own. More: an
underflow in a small model is not named."""
HALF = 0.5
"""Share of its height below which a jump of the loss or gradient norm is over; what is left is its aftermath. Smaller: the
aftermath counts as the jump; larger: a jump that lasts counts as over."""
PEAK = 0.75
"""Share of its height from which a step is one of the jump's own, rather than its aftermath. Smaller: steps after the bad
batch are to be skipped too; larger: of two bad batches only the worse is."""
AFTERMATH_STEPS = 6
"""Steps in a row that a tensor may stay out of its range behind a bad batch, which leaves its mark on weights. Fewer: a bad
batch is called a lasting fault; more: a lasting fault is called a batch for longer."""
FEW_TENSORS = 2
"""Most weights that one fault of a machine changes in one step; a program changes more. Fewer: a machine that hit two is not
blamed; more: a program's own change of a few is put down to a machine."""
ALIKE_STEPS = 1
"""Earlier comparisons without a difference that are asked for."""
CALM_STEPS = 10
"""Steps of the attempt before it, and steps without trouble, after which a machine may be blamed. Fewer: what a start brings
is put down to a machine; more: a fault in the first steps is not named."""
BACK = 0.05
"""Share of its height to which a loss is back where it was: what lasts in gradients then is a batch's mark. Smaller: noise
keeps the loss from being back; larger: a loss that stayed raised is called back."""
LARGE = 3.0
"""Times by which a batch moves the gradients of a young run for it to count as odd while the loss stays. Smaller: ordinary
batches, which move them twofold, count; larger: bad ones do not."""
YOUNG_STEPS = 100
"""Steps of an attempt in which gradients are no calm series yet: ordinary batches move them twofold. Fewer: these are called
bad; more: a bad one needs to be larger for longer."""
LR_JUMP = 3.0
"""Times that a learning rate rises in a step when no warm-up raises it. Smaller: a warm-up's first steps are a jump; larger:
a rate that was raised by less is none."""
JUMP_STEPS = 3
"""Steps from a jump of the learning rate to what it brought. Fewer: slower consequences have no cause; more: what came by
chance is put down to the jump."""
SCALE_FALL = 8.0
"""Times that a loss scale falls within an incident when it does not find its level: three halvings. Fewer: an ordinary
search is named; more: the diagnosis comes later."""

STATES = frozenset(
    {
        "Drift", "Plateau", "VanishingGradient", "DeadTensor", "DeadExpert", "DominantExpert", "ExpertImbalance",
        "AttentionCollapse", "Saturation", "UpdateRatio", "ExplodingTensor",
    }
)  # fmt: skip
"""Detectors of what a model is in, rather than of what befell it."""
SURE_STATES = frozenset({"Drift", "Plateau", "DeadTensor", "DeadExpert", "DominantExpert"})
"""Of these, those that themselves wait until it has lasted."""
_EXPERTS = re.compile(r"expert|moe|router|(^|[._])gate($|[._])", re.IGNORECASE)
_NARROW = re.compile(r"float16|half|float8|fp8|e4m3|e5m2", re.IGNORECASE)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What is suspected, and why."""

    suspected: str = "unknown"
    reasons: tuple[str, ...] = ()
    """Sentences that name the figures."""
    skip_steps: tuple[int, ...] = ()
    """Of `batch`: the steps."""
    skip_lanes: tuple[int, ...] = ()
    """Of those, the data-parallel replicas whose part it was; empty: all."""
    ranks: tuple[int, ...] = ()
    """Of `hardware`: the ranks accused."""
    since: int = -1
    """Step from which on what was trained is to be doubted; -1: not known."""
    next_step: str = ""
    """What to do about it, where the claim itself says so; empty: `advice.py` says it of all claims like it."""


UNKNOWN = Diagnosis()


def usual(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and a robust spread, at least a thousandth of the median; 1 of values that were 0 throughout."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, max(spread, 1e-3 * abs(middle)) or 1.0


def rose(before: float, after: float, highest: float) -> bool:
    """Tell whether a learning rate jumped from one step to the next, which no warm-up does."""
    return after >= LR_JUMP * before and after > 0.0 and before > 0.01 * highest and before > 0.0


def plural(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def listed(numbers: Iterable[object], most: int = 8) -> str:
    words = [str(one) for one in numbers]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def figures(sign: Sign) -> str:
    """`loss 5.2 against 2.1`, `norm of fc.weight (wgrad) 9 against 1`"""
    what = sign.name if sign.kind == "scalar" else f"{sign.statistic} of {sign.name} ({sign.kind})"
    return what + against_words(sign.value, sign.baseline)


def times(sign: Sign) -> float:
    """Return how many times its baseline a value is; 0 where either is not known."""
    return abs(sign.value / sign.baseline) if sign.value is not None and sign.baseline else 0.0


def is_of_experts(name: str) -> bool:
    """Tell whether a module is one of few tokens, or chooses among those."""
    return bool(_EXPERTS.search(name))


def is_narrow(dtype: str) -> bool:
    """Tell whether a type overflows at values that healthy training meets: float16 and the eight-bit ones."""
    return bool(_NARROW.search(dtype)) and "bfloat16" not in dtype


def is_after_jump(evidence: Evidence, index: int) -> bool:
    """Tell whether a closed step of the case, by its number, comes so soon behind a jump of the learning rate."""
    return evidence.jump is not None and 0 <= evidence.num_before + index - evidence.jump.index <= JUMP_STEPS


def by_jump(evidence: Evidence) -> Diagnosis:
    jump = evidence.jump
    assert jump is not None
    times = f"{jump.after / jump.before:.3g} times" if jump.before > 0 else "from nothing"
    return Diagnosis(
        suspected="model",
        reasons=(
            f"{jump.name} rose from {jump.before:.3g} to {jump.after:.3g} ({times}) at step {jump.step}; it began at step "
            f"{evidence.opened}",
        ),
    )
