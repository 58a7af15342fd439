"""What numbers look like that no data and no update make: one element of a weight, or of one replica's forward.

A weight moves by what its optimizer adds, which is bounded: the learning rate times the gradient (SGD), or times a first
moment over the root of a second one, held from zero by 1e-8 or so. One element of a matrix that is beyond even the largest
of these by far was not put there by training, but by a bit of its exponent; and of a whole matrix, programs change more than
one element. That needs no second copy.

An output that is a hundred times beyond its past, while all that was measured before it in its replica, and the weights of
its module, are as ever, is not the batch's as a whole: data come in at the front. It may be a token's, though: the inverse
of a small number, a massive activation (Sun et al. 2024: a few elements, thousands of times beyond the others, in good
models). Replicas see other data, so that it accuses no machine.
"""

from __future__ import annotations

from sentinel.incidents.diagnosis.claim import (
    ABSURD,
    CALM_STEPS,
    LASTING_STEPS,
    STEEP,
    Diagnosis,
    figures,
    is_after_jump,
    is_narrow,
    is_of_experts,
    listed,
    plural,
    times,
)
from sentinel.incidents.diagnosis.evidence import FLOW, Evidence, Sign
from sentinel.incidents.diagnosis.step_facts import OddWeight, Outlier
from sentinel.kinds import Phase

FAR = 10.0
"""Size of one element that is nearly all of a weight from which a diagnosis names it: weights of healthy models are below 1.
Smaller: a weight that is learned large is named; larger: a flip that makes a smaller value is not."""
UNMADE = 1e12
"""Size from which one element of a weight is no update's, times the rate and the gradient where these are above 1: a moment
of 1 over 1e-8 comes to 1e8 times the rate, and a flipped bit of the upper two of an exponent to 1e17 and more."""


def by_weight(evidence: Evidence) -> Diagnosis | None:
    """Return the diagnosis of one element of a weight that stands beyond all others; None: there is none."""
    found = None
    for odd in evidence.odd_weights:
        before = [one for one in evidence.signs.values() if one.first_step < odd.step and one.phase in FLOW]
        if (
            abs(odd.value) <= FAR * max(1.0, odd.rate)
            or before
            or odd.num_elements < STEEP
            or evidence.num_before < CALM_STEPS
        ):
            continue
        everywhere = any(one.name == odd.name and one.rank != odd.rank for one in evidence.odd_weights)
        if everywhere or evidence.has_narrow or evidence.jump is not None:
            continue  # What all copies hold was handed to them.
        what = (
            f"one element of {odd.name} is {odd.value:.3g} on rank {odd.rank} from step {odd.step} on, and nearly all that "
            f"its {odd.num_elements} elements come to; it was not so before"
        )
        if abs(odd.value) > _most(odd):
            return Diagnosis(
                suspected="hardware",
                reasons=(
                    what,
                    f"no update reaches that, at a rate of {odd.rate:.3g}: a bit of its exponent; a program that writes "
                    "weights changes more than one",
                ),
                ranks=(odd.rank,), since=odd.step,
            )  # fmt: skip
        found = found or Diagnosis(
            reasons=(what, "a bit of its exponent, or an update divided by almost nothing: no second copy tells"),
            next_step=(
                f"set that element to what a checkpoint before step {odd.step} holds, or go on from there; sentinel enable "
                f"--kinds param,update --targets '{odd.name}' --for-steps 0 shows whether updates do it again"
            ),
        )
    return found


def _most(odd: OddWeight) -> float:
    """Return the most that an update may come to, with room to spare."""
    gradient = odd.gradient if odd.gradient != float("inf") else 0.0
    return UNMADE * max(odd.rate, 1.0) * max(1.0, gradient)


def by_output(evidence: Evidence, acquitted: str) -> Diagnosis | None:
    """Return the diagnosis of an output that left its range with nothing before it amiss; None: there is none, or it
    lasts."""
    found = _first_output(evidence)
    if found is None:
        return None
    sign, outlier = found
    if sign.value == 0.0 and sign.statistic in ("norm", "rms") and len(sign.lanes) != 1 and outlier.num_before:
        return _of_nothing(sign, outlier)
    is_far = sign.statistic != "kurtosis" and times(sign) >= ABSURD
    if not (is_far or outlier.is_alone) or outlier.num_before < 1 or sign.streak >= LASTING_STEPS:
        return None
    own = [one for one in evidence.signs.values() if one.phase is Phase.PARAM and one.name.startswith(f"{sign.name}.")]
    if own or (evidence.jump is not None and is_after_jump(evidence, 0)):
        return None
    what = f"{figures(sign)} at step {sign.first_step}"
    if outlier.is_alone:
        what += f": one element alone, {outlier.value:.3g}"
    passed = f"the {plural(outlier.num_before, 'output')} measured before it were as ever: it did not come in with the data"
    return Diagnosis(reasons=(what, passed, f"what its module computes, or its machine: {_doubt(evidence, sign, outlier)}"))


def _of_nothing(sign: Sign, outlier: Outlier) -> Diagnosis:
    """Return what an output of exactly 0 says, where what came before it was none."""
    what = f"{figures(sign)} from step {sign.first_step} on: exactly 0"
    passed = f"the {plural(outlier.num_before, 'output')} measured before it were as ever: it did not come in with the data"
    if sign.streak < LASTING_STEPS:
        return Diagnosis(reasons=(what, passed, "whether it stays is to be seen"))
    return Diagnosis(suspected="model", reasons=(what, passed, "its weights are zero, or what switches it off is wrong"))


def _first_output(evidence: Evidence) -> tuple[Sign, Outlier] | None:
    """Return the first output in forward order that left its range in the first step; None: data came in so, or none did."""
    signs = [one for one in evidence.signs.values() if one.statistic != "checksum" and not one.is_bad]
    first = min((one.first_step for one in signs), default=-1)
    of_step = [one for one in signs if one.first_step == first and one.phase is Phase.FORWARD]
    if not of_step or any(one.phase is Phase.PARAM and one.first_step < first for one in signs):
        return None
    # A probe of a module looks at what its output shows as well.
    front = min(of_step, key=lambda one: (one.depth, one.site_pos))
    outputs = [one for one in of_step if one.kind == "activation" and one.name in evidence.outliers]
    if front.is_entry or not outputs:
        return None
    # Of one output the statistic that says most.
    sign = min(outputs, key=lambda one: (one.depth, one.site_pos, one.statistic == "kurtosis", one.name))
    return sign, evidence.outliers[sign.name]


def _doubt(evidence: Evidence, sign: Sign, outlier: Outlier) -> str:
    """Return why an output does not tell which."""
    functions = [name.partition(":")[0].rstrip("'") for name in outlier.functions or ()]
    if functions:
        return f"it computes {listed(dict.fromkeys(functions), 4)}, whose results have no bound"
    if evidence.num_lanes <= 1:
        return "there is one data-parallel replica, and nothing was done twice that would tell"
    if is_narrow(sign.dtype):
        return f"{sign.dtype} is scaled, and a scale may be wrong"
    if is_of_experts(sign.name) or sign.ep_size > 1:
        return "experts see few tokens"
    if outlier.upstream.unlike:
        return f"{outlier.upstream.unlike}, so that it came from before"
    return "replicas see other data, and nothing was computed twice that would tell"
