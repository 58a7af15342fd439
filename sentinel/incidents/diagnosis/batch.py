"""What comes in with the data: at the front of the model, in the labels behind it, or for a stretch of steps.

What is made of the data before the first block depends on them and on few weights, which are the same a step later: where
it moves and comes back, the data moved. One replica whose front moves for many steps, its weights bit-identical to the
others', reads other data. A loss that jumps at once, stays, and falls back at once was a stretch of data: damage to weights
is undone over many steps.
"""

from __future__ import annotations

from sentinel.incidents.diagnosis.claim import (
    FRONT,
    GONE,
    HALF,
    LASTING_STEPS,
    PULSE_STEPS,
    QUIET_STEPS,
    SURE_STATES,
    Diagnosis,
    figures,
    listed,
    plural,
    times,
)
from sentinel.incidents.diagnosis.evidence import Evidence, Sign, StepEvidence
from sentinel.kinds import Phase


def by_data(evidence: Evidence, signs: list[Sign], notes: list[StepEvidence]) -> Diagnosis | None:
    """Return the diagnosis `batch` where data of several steps, or one tensor at the front, account for it; else None."""
    if not notes or any(sign.phase is Phase.PARAM or sign.detector in SURE_STATES for sign in signs):
        return None
    return _of_one_replica(evidence, signs, notes) or _stretch(evidence, notes) or _front(evidence, signs, notes)


def _of_one_replica(evidence: Evidence, signs: list[Sign], notes: list[StepEvidence]) -> Diagnosis | None:
    """One replica alone keeps moving, from its front on, or in its loss with nothing before it."""
    lanes = sorted({lane for note in notes for lane in note.lanes})
    if evidence.num_lanes <= 1 or len(lanes) != 1 or not evidence.num_compared or evidence.is_differing:
        return None
    first = min(sign.first_step for sign in signs)
    moved = [sign for sign in signs if sign.phase is Phase.FORWARD and sign.lanes == tuple(lanes)]
    fronts = [sign for sign in moved if sign.is_entry and sign.first_step <= first + 1]
    apart = evidence.apart.get(lanes[0])
    steps = tuple(note.step for note in notes if note.lanes)
    if len(steps) < LASTING_STEPS:
        return None
    of_loss = [sign for sign in signs if sign.phase is Phase.LOSS and sign.lanes == tuple(lanes)]
    if fronts:
        one, why = fronts[0], "what is made of its data before the first block is not like the others'"
    elif of_loss and apart is not None and apart.is_entry:
        one, why = of_loss[0], f"{apart.name}, before the first block, is {apart.times:.2g} times that of the others"
    elif of_loss and evidence.num_outputs and apart is None and not moved:
        what = plural(evidence.num_outputs, "output")
        one, why = of_loss[0], f"its {what} in the forward are like the others', so that its labels or tokens are not"
    else:
        return None
    is_over = evidence.num_quiet >= QUIET_STEPS and len(steps) <= PULSE_STEPS
    return Diagnosis(
        suspected="batch",
        reasons=(
            f"data-parallel replica {lanes[0]} of {evidence.num_lanes} alone moves, from step {steps[0]} on: {figures(one)}",
            f"{why}; the {evidence.num_compared} weights compared are bit-identical",
        ),
        skip_steps=steps if is_over else (), skip_lanes=tuple(lanes),
    )  # fmt: skip


def _stretch(evidence: Evidence, notes: list[StepEvidence]) -> Diagnosis | None:
    """The loss rose at once, stayed for some steps, and came back at once."""
    if evidence.num_quiet < QUIET_STEPS or evidence.jump is not None:
        return None
    for sign in evidence.signs.values():
        notified = [(step, value) for step, value in evidence.results.get(sign.name, []) if step >= sign.first_step]
        if sign.phase is not Phase.LOSS or sign.is_bad or sign.baseline is None or not notified:
            continue
        excess = [value - sign.baseline for _, value in notified]
        top = max(excess)
        high = [at for at, one in enumerate(excess) if one > HALF * top]
        length = len(high)
        is_one = top > 0.0 and high == list(range(length)) and LASTING_STEPS <= length <= PULSE_STEPS
        if not is_one or len(excess) < length + QUIET_STEPS or max(excess[length:]) > GONE * top:
            continue
        steps = tuple(step for step, _ in notified[:length])
        shown = f"{steps[0]} to {steps[-1]}" if steps[-1] - steps[0] == length - 1 else listed(steps)
        return Diagnosis(
            suspected="batch",
            reasons=(
                f"{figures(sign)} at step {steps[0]}; it stayed for {plural(length, 'step')} ({shown}) and came back at "
                f"once, to {max(max(excess[length:]) / top, 0.0):.0%} of the jump at most: weights do not heal so fast",
            ),
            skip_steps=steps,
        )
    return None


def _front(evidence: Evidence, signs: list[Sign], notes: list[StepEvidence]) -> Diagnosis | None:
    """What is made of the data before the first block moved for a step or two, and came back, with or without the rest."""
    first = min(sign.first_step for sign in signs)
    fronts = [
        sign for sign in signs if sign.is_entry and sign.first_step == first and sign.kind in ("activation", "activation_in")
    ]
    steps = tuple(note.step for note in notes)
    if not any(note.has_result or note.num_flow >= LASTING_STEPS for note in notes):
        fronts = [sign for sign in fronts if not 1.0 / FRONT < times(sign) < FRONT]
    if not fronts or evidence.num_quiet < QUIET_STEPS or len(steps) > QUIET_STEPS or evidence.jump is not None:
        return None
    lanes = sorted({lane for note in notes for lane in note.lanes})
    is_part = evidence.num_lanes > 1 and 0 < len(lanes) < evidence.num_lanes
    of = f" on data-parallel replica {listed(lanes)} of {evidence.num_lanes} alone" if is_part else ""
    return Diagnosis(
        suspected="batch",
        reasons=(
            f"{figures(fronts[0])} at step {first}{of}: what is made of the data before the first block",
            f"the {evidence.num_quiet} whole steps after it were well, with the same weights and other data",
        ),
        skip_steps=steps, skip_lanes=tuple(lanes) if is_part else (),
    )  # fmt: skip
