"""The diagnosis of finite excursions: rule 7 of `diagnosis/diagnose.py`."""

from __future__ import annotations

import msgspec

from sentinel.incidents.diagnosis.batch import by_data
from sentinel.incidents.diagnosis.claim import (
    ABSURD,
    AFTERMATH_STEPS,
    AVERAGES,
    BACK,
    HALF,
    LARGE,
    LASTING_STEPS,
    LOSS_SPREADS,
    LOST,
    PEAK,
    QUIET_STEPS,
    SILENT,
    STATES,
    SURE_STATES,
    UNKNOWN,
    WIDE,
    YOUNG_STEPS,
    Diagnosis,
    by_jump,
    figures,
    is_after_jump,
    listed,
    plural,
    times,
)
from sentinel.incidents.diagnosis.element import by_output, by_weight
from sentinel.incidents.diagnosis.evidence import Evidence, Sign, StepEvidence
from sentinel.kinds import Phase


def finite(evidence: Evidence, acquitted: str) -> Diagnosis:
    signs = [sign for sign in evidence.signs.values() if sign.statistic != "checksum"]
    if not signs:
        return UNKNOWN
    notes = [note for note in evidence.notes if note.num_flow]
    begun = notes or evidence.notes
    if evidence.jump is not None and begun and is_after_jump(evidence, begun[0].index):
        return by_jump(evidence)
    of_element = by_weight(evidence) or by_output(evidence, acquitted)
    if of_element is not None:
        return of_element
    lost = _lost_state(signs)
    if lost is not None:
        return lost
    of_data = None if acquitted else by_data(evidence, signs, notes)
    if of_data is not None:
        return of_data
    first = min(sign.first_step for sign in signs)
    run = _longest_run(notes)
    strong = [note for note in notes if note.has_result or note.num_flow >= 3]
    # A running mean of gradients says no more than they do, and says it for longer.
    own = [sign for sign in signs if sign.kind not in AVERAGES]
    lasting = [sign for sign in own if sign.streak >= LASTING_STEPS or sign.num_steps >= 2 * LASTING_STEPS]
    jump = _jump(evidence)
    is_batch_like = jump is not None and jump.since <= first and not acquitted and not any(map(_outlives, signs))
    if jump is not None and is_batch_like and (jump.is_over or evidence.num_quiet >= QUIET_STEPS):
        peak = [note for note in strong if note.step in jump.peak]
        if peak and run <= AFTERMATH_STEPS:
            return _passed(evidence, signs, peak, f"{jump.left:.0%} of the jump was left {jump.num_after} steps after it")
    excursion = _loss_excursion(evidence, first)
    if excursion and not acquitted:
        # The loss is where it was: what else lasts is what the batch left in gradients and in the optimizer's memory.
        peak = [note for note in strong if note.step in excursion]
        if peak and not any(sign.phase is Phase.PARAM and sign.first_step <= first for sign in signs):
            after = "the loss was back at once; gradients and optimizer state keep its mark longer"
            return _passed(evidence, signs, peak, after)
    states = [
        sign for sign in signs if sign.detector in STATES and (sign.detector in SURE_STATES or sign.streak >= LASTING_STEPS)
    ]
    began_so = any(sign.first_step <= first for sign in states)
    if is_batch_like and not began_so and run <= AFTERMATH_STEPS and evidence.num_quiet < QUIET_STEPS:
        return Diagnosis(
            reasons=(f"it was at its highest at step {first}; whether it goes as the mark of a batch does is to be seen",)
        )
    lanes = {lane for note in notes for lane in note.lanes}
    if (
        evidence.num_lanes > 1
        and len(lanes) == 1
        and sum(bool(note.lanes) for note in notes) >= QUIET_STEPS
        and not began_so
    ):
        states = []  # What one replica brought on all of them.
    if states:
        one = min(states, key=lambda sign: (sign.first_step, sign.phase, sign.name))
        lasted = f", for {one.num_steps} steps" if one.num_steps > 1 else ""
        return Diagnosis(
            suspected="model", reasons=(f"{one.detector}: {figures(one)} from step {one.first_step} on{lasted}",)
        )
    of_states = [sign for sign in own if sign.phase in (Phase.PARAM, Phase.OPTIMIZER)]
    moved_first = [sign for sign in of_states if sign.first_step == first]
    state_lasts = [sign for sign in lasting if sign in of_states]
    if moved_first and (state_lasts or run >= LASTING_STEPS):
        one = min(moved_first, key=lambda sign: (sign.phase, sign.name))
        return Diagnosis(
            suspected="model", reasons=(f"it began in the weights or their optimizer: {figures(one)} at step {first}",)
        )
    flow_lasts = [sign for sign in lasting if sign not in state_lasts]
    if run >= LASTING_STEPS and flow_lasts:
        return _lasting(evidence, notes, flow_lasts, run)
    if not strong:
        if lasting:
            return _lasting(evidence, notes, lasting, max(sign.num_steps for sign in lasting))
        one = min(signs, key=lambda sign: (sign.first_step, sign.phase, sign.name))
        return Diagnosis(reasons=(f"{figures(one)} at step {one.first_step}, with too few others to say more",))
    if run > QUIET_STEPS or evidence.num_quiet < QUIET_STEPS:
        at = strong[0].step
        return Diagnosis(reasons=(f"it moved at step {at}; whether the next {QUIET_STEPS} steps are well is to be seen",))
    if acquitted:
        return Diagnosis(reasons=(f"it moved at step {strong[0].step} and passed",))
    return _passed(evidence, signs, strong, f"the {evidence.num_quiet} whole steps after it were well: weights do not heal")


def _lost_state(signs: list[Sign]) -> Diagnosis | None:
    """Return what running means of the optimizer say that fell faster than a mean can; None: none did."""
    for sign in signs:
        if sign.kind in AVERAGES:
            of_step = [one for one in signs if one.kind == sign.kind and one.first_step == sign.first_step]
            fallen = [one for one in of_step if one.baseline and times(one) < LOST and not one.is_bad]
            names = {one.name for one in fallen}
            if len(names) >= SILENT and len(fallen) == len(of_step):
                one = min(fallen, key=lambda one: one.name)
                return Diagnosis(
                    suspected="model",
                    reasons=(
                        f"{figures(one)} at step {one.first_step}, and so of {len(names)} weights: optimizer state was lost",
                        "a running mean cannot fall so far in one step, whatever the gradients are",
                    ),
                )
    return None


def _loss_excursion(evidence: Evidence, first: int) -> frozenset[int]:
    """Return the steps of a jump of the loss that began with the incident and is over, the loss back where it was."""
    for sign in evidence.signs.values():
        notified = [(step, value) for step, value in evidence.results.get(sign.name, []) if step >= sign.first_step]
        if sign.phase is not Phase.LOSS or sign.is_bad or sign.baseline is None or sign.first_step > first or not notified:
            continue
        excess = [value - sign.baseline for _, value in notified]
        top = max(excess)
        high = [at for at, one in enumerate(excess) if one > BACK * top]
        if top > 0.0 and high == list(range(len(high))) and len(high) <= QUIET_STEPS <= len(excess) - len(high):
            return frozenset(notified[at][0] for at in high)
    return frozenset()


class _SuddenJump(msgspec.Struct, frozen=True):
    """A jump of the loss or the gradient norm that was at its highest at once."""

    peak: frozenset[int]
    """Its first steps that were about as high as its highest."""
    is_over: bool
    """It fell below half of its height within two steps, and has stayed there for two."""
    left: float
    """The share of its height that is left."""
    num_after: int
    """Closed steps since it was above half of its height."""
    since: int
    """Step at which it began."""


def _outlives(sign: Sign) -> bool:
    """Tell whether a tensor stays out of its range for longer than what a bad batch leaves behind; its optimizer may."""
    return sign.phase is not Phase.OPTIMIZER and sign.kind != "scalar" and sign.streak >= AFTERMATH_STEPS


def _jump(evidence: Evidence) -> _SuddenJump | None:
    """Return how the results of steps jumped and came down; None: none did, or one went on to grow."""
    high: set[int] = set()
    peak: set[int] = set()
    left, since, num_after = 0.0, 1 << 62, 1 << 62
    for sign in evidence.signs.values():
        notified = evidence.results.get(sign.name, [])
        if sign.kind != "scalar" or sign.is_bad or sign.baseline is None:
            continue
        side = 1.0 if (sign.value or 0.0) >= sign.baseline else -1.0
        steps = [step for step, _ in notified if step >= sign.first_step]
        excess = [side * (value - sign.baseline) for step, value in notified if step >= sign.first_step]
        if not excess:
            continue
        top = max(excess)
        if top <= 0.0 or excess.index(top) > 1:
            return None
        above = [at for at, one in enumerate(excess) if one > HALF * top]
        high.update(steps[at] for at in above)
        peak.update(steps[at] for at in above if at <= 1 and excess[at] > PEAK * top)
        num_after, since = min(num_after, len(excess) - 1 - above[-1]), min(since, sign.first_step)
        left = max(left, excess[-1] / top)
    if not peak:
        return None
    is_over = len(high) <= QUIET_STEPS and num_after >= QUIET_STEPS and left <= HALF
    return _SuddenJump(frozenset(peak), is_over, max(left, 0.0), num_after, since)


def _passed(evidence: Evidence, signs: list[Sign], strong: list[StepEvidence], after: str) -> Diagnosis:
    steps = tuple(note.step for note in strong)
    at = [sign for sign in signs if sign.first_step in steps and sign.phase is not Phase.OPTIMIZER]
    one = max(at or signs, key=lambda sign: (sign.phase is Phase.LOSS, sign.phase is Phase.NORM, sign.score or 0.0))
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {listed(steps)}"
    if evidence.losses and not any(sign.phase is Phase.LOSS for sign in at):
        rise = max((evidence.risen.get(step, 0.0) for step in steps), default=0.0)
        if rise < LOSS_SPREADS and max(note.num_flow for note in strong) < WIDE:
            return Diagnosis(reasons=(f"{figures(one)} at {when} alone, while the loss stayed: hardly its batch",))
        if rise < LOSS_SPREADS and evidence.num_before < YOUNG_STEPS and times(one) < LARGE:
            age = plural(evidence.num_before, "step")
            return Diagnosis(
                reasons=(f"{figures(one)} at {when} alone, while the loss stayed: ordinary of a run that is {age} old",)
            )
    reasons = [f"{figures(one)} at {when} alone; {after}"]
    lanes = sorted({lane for note in strong for lane in note.lanes})
    skip_lanes: tuple[int, ...] = ()
    if evidence.num_lanes > 1 and lanes:
        if len(lanes) == evidence.num_lanes:
            reasons.append(f"all {evidence.num_lanes} data-parallel replicas moved alike")
        else:
            absurd = [sign for sign in at if sign.phase is Phase.FORWARD and times(sign) >= ABSURD]
            if absurd:
                return Diagnosis(
                    reasons=(
                        f"data-parallel replica {listed(lanes)} alone moved: {figures(absurd[0])} at {when}",
                        "no data moves a layer so far, and nothing was done twice that would tell a machine",
                    )
                )
            skip_lanes = tuple(lanes)
            reasons.append(
                f"data-parallel replica {listed(lanes)} of {evidence.num_lanes} alone moved: its part of the batch"
                + (f"; the {evidence.num_compared} weights compared stay bit-identical" if evidence.num_compared else "")
            )
    return Diagnosis(suspected="batch", reasons=tuple(reasons), skip_steps=steps, skip_lanes=skip_lanes)


def _longest_run(notes: list[StepEvidence]) -> int:
    longest, run, last = 0, 0, -2
    for note in notes:
        run = run + 1 if note.index == last + 1 else 1
        longest, last = max(longest, run), note.index
    return longest


def _lasting(evidence: Evidence, notes: list[StepEvidence], lasting: list[Sign], run: int) -> Diagnosis:
    one = min(lasting, key=lambda sign: (sign.first_step, sign.phase, sign.name))
    lanes = sorted({lane for note in notes for lane in note.lanes})
    if evidence.num_lanes > 1 and len(lanes) == 1:
        return Diagnosis(
            reasons=(
                f"data-parallel replica {lanes[0]} of {evidence.num_lanes} alone moves, for {run} steps: its part of "
                "the data or its machine",
            )
        )
    reasons = [f"{figures(one)} from step {one.first_step} on, for {run} steps: no batch lasts so long"]
    spread = [note.num_flow for note in notes]
    if len(spread) > 1 and max(spread) > spread[0]:
        reasons.append(f"it spread from {plural(spread[0], 'series', 'series')} to {max(spread)}")
    if evidence.num_lanes > 1 and len(lanes) == evidence.num_lanes:
        reasons.append(f"all {evidence.num_lanes} data-parallel replicas show it: they share the weights")
    return Diagnosis(suspected="model", reasons=tuple(reasons))
