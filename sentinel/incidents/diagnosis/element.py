"""What numbers look like that no data and no update make: one element of a weight, or of one replica's forward.

A weight moves by what its optimizer adds, which is bounded: the learning rate times the gradient (SGD), or times a small
number (Adam and its like divide by the gradient's own size). So one element of a matrix that is thousands of times beyond
that bound from one step to the next was not put there by training; and of a whole matrix, programs change more than one.
That needs no second copy.

An output that is a hundred times beyond its past, while all that was measured before it in its replica, and the weights of
its module, are as ever, is not the batch's: data come in at the front. Whether a machine made it takes a second replica that
did the same work: massive activations (Sun et al. 2024) are a few elements, thousands of times beyond the others, and belong
to good models, so that on one replica a single huge element accuses nobody.
"""

from __future__ import annotations

from sentinel.incidents.diagnosis.claim import (
    ABSURD,
    CALM_STEPS,
    LASTING_STEPS,
    STEEP,
    UPDATES,
    WELL_STEPS,
    Diagnosis,
    figures,
    is_after_jump,
    is_narrow,
    is_of_experts,
    plural,
    times,
)
from sentinel.incidents.diagnosis.evidence import FLOW, Evidence, Sign
from sentinel.incidents.diagnosis.step_facts import OddWeight, Stray
from sentinel.order.phase import Phase

UNMADE = 1e6
"""Times beyond the largest value of the other replicas that no data move an output by (chosen): massive activations stay
below 1e5 times the median."""


def by_weight(case: Evidence) -> Diagnosis | None:
    """Return what one element of a weight says that no update can have made; None: there is none."""
    for odd in case.odd_weights:
        before = [one for one in case.signs.values() if one.first_step < odd.step and one.phase in FLOW]
        if abs(odd.value) <= _most(odd) or before or odd.num_elements < STEEP or case.num_before < CALM_STEPS:
            continue
        everywhere = any(one.name == odd.name and one.rank != odd.rank for one in case.odd_weights)
        if everywhere or case.has_narrow or case.jump is not None:
            continue  # What all copies hold was handed to them.
        made = f", and its gradient holds nothing beyond {odd.gradient:.3g}" if odd.gradient > 0.0 else ""
        if odd.gradient == float("inf"):
            made = ", and its gradient is not finite, so that no update made a number of it"
        return Diagnosis(
            verdict="hardware",
            reasons=(
                f"one element of {odd.name} is {odd.value:.3g} on rank {odd.rank} from step {odd.step} on, and nearly all "
                f"that its {odd.num_elements} elements come to; it was not so before",
                f"no update reaches that: the rate is {odd.rate:.3g}{made}; a program that writes weights changes "
                "more than one",
            ),
            ranks=(odd.rank,), since=odd.step,
        )  # fmt: skip
    return None


def _most(odd: OddWeight) -> float:
    """Return the most that an update may come to, with room to spare: at least 1, for rates are logged in many units."""
    gradient = odd.gradient if odd.gradient != float("inf") else 0.0
    return UPDATES * max(odd.rate, 1e-3) * max(1.0, gradient)


def by_output(case: Evidence, acquitted: str) -> Diagnosis | None:
    """Return what an output says that left its range with nothing before it amiss; None: there is none, or it lasts."""
    found = _first_output(case)
    if found is None:
        return None
    sign, stray = found
    if sign.value == 0.0 and sign.statistic in ("norm", "rms") and len(sign.lanes) != 1 and stray.num_before:
        return _of_nothing(sign, stray)
    is_far = sign.statistic != "kurtosis" and times(sign) >= ABSURD
    if not (is_far or stray.is_alone) or stray.num_before < 1 or sign.streak >= LASTING_STEPS:
        return None
    own = [one for one in case.signs.values() if one.phase is Phase.PARAM and one.name.startswith(f"{sign.name}.")]
    if own or (case.jump is not None and is_after_jump(case, 0)):
        return None
    what = f"{figures(sign)} at step {sign.first_step}"
    if stray.is_alone:
        what += f": one element alone, {stray.value:.3g}"
    passed = f"the {plural(stray.num_before, 'output')} measured before it were as ever: it did not come in with the data"
    doubt = _doubt(case, sign, stray)
    if doubt:
        return Diagnosis(reasons=(what, passed, f"its machine, or what its module computes: {doubt}"))
    if case.num_quiet < WELL_STEPS:
        return Diagnosis(
            reasons=(what, passed, f"its machine is suspected; {WELL_STEPS} steps that are well are waited for")
        )
    return Diagnosis(
        verdict="hardware",
        reasons=(
            f"{what}, on data-parallel replica {stray.lane} of {case.num_lanes}, rank {stray.rank}; the others stayed "
            f"within {stray.usual:.3g}",
            f"its data had passed {plural(stray.upstream.num_blocks, 'block')} and "
            f"{plural(stray.upstream.num_measured, 'tensor')} like the other replicas' before that",
            f"the {case.num_compared} weights compared are bit-identical on all replicas, and nothing was amiss before",
        ),
        ranks=(stray.rank,), since=sign.first_step,
    )  # fmt: skip


def _of_nothing(sign: Sign, stray: Stray) -> Diagnosis:
    """Return what an output of exactly 0 says, where what came before it was none."""
    what = f"{figures(sign)} from step {sign.first_step} on: exactly 0"
    passed = f"the {plural(stray.num_before, 'output')} measured before it were as ever: it did not come in with the data"
    if sign.streak < LASTING_STEPS:
        return Diagnosis(reasons=(what, passed, "whether it stays is to be seen"))
    return Diagnosis(verdict="model", reasons=(what, passed, "its weights are zero, or what switches it off is wrong"))


def _first_output(case: Evidence) -> tuple[Sign, Stray] | None:
    """Return the first output in forward order that left its range in the first step; None: data came in so, or none did."""
    signs = [one for one in case.signs.values() if one.statistic != "checksum" and not one.is_bad]
    first = min((one.first_step for one in signs), default=-1)
    of_step = [one for one in signs if one.first_step == first and one.phase is Phase.FORWARD]
    if not of_step or any(one.phase is Phase.PARAM and one.first_step < first for one in signs):
        return None
    # A probe of a module looks at what its output shows as well.
    front = min(of_step, key=lambda one: (one.depth, one.site_pos))
    outputs = [one for one in of_step if one.kind == "activation" and one.name in case.strays]
    if front.is_entry or not outputs:
        return None
    # Of one output the statistic that says most.
    sign = min(outputs, key=lambda one: (one.depth, one.site_pos, one.statistic == "kurtosis", one.name))
    return sign, case.strays[sign.name]


def _doubt(case: Evidence, sign: Sign, stray: Stray) -> str:
    """Return why an output accuses no machine; empty: it does."""
    if case.num_lanes <= 1:
        return "there is one data-parallel replica, and nothing was done twice that would tell"
    if is_narrow(sign.dtype):
        return f"{sign.dtype} is scaled, and a scale may be wrong"
    if is_of_experts(sign.name) or sign.ep_size > 1:
        return "experts see few tokens"
    if stray.usual <= 0.0 or stray.value < UNMADE * stray.usual:
        return "a few tokens drive a good model so far"
    if not (stray.is_alone or stray.is_whole):
        return "neither one element nor all of them moved; data fails by tokens"
    if stray.upstream.num_blocks < 1:
        return "its data had not passed a whole block before it"
    if stray.upstream.unlike:
        return f"{stray.upstream.unlike}, so that it came from before"
    if not case.num_compared or case.is_differing:
        return "no second copy of the weights says that they are the same" if not case.num_compared else "the weights differ"
    if case.num_before < CALM_STEPS:
        return f"the attempt was {plural(case.num_before, 'step')} old"
    if case.trouble_step >= 0 and sign.first_step - case.trouble_step <= CALM_STEPS:
        return f"there was trouble at step {case.trouble_step} already"
    return ""
