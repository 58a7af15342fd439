"""What finite excursions make one suspect: rule 6 of `verdict.py`."""

from __future__ import annotations

from sentinel.order.case import Case, Note, Sign
from sentinel.order.phase import Phase
from sentinel.order.suspicion import (
    ABSURD,
    LASTING_STEPS,
    QUIET_STEPS,
    STATES,
    SURE_STATES,
    UNKNOWN,
    Suspicion,
    by_jump,
    figures,
    is_after_jump,
    listed,
    plural,
)


def finite(case: Case, acquitted: str) -> Suspicion:
    signs = [sign for sign in case.signs.values() if sign.statistic != "checksum"]
    if not signs:
        return UNKNOWN
    notes = [note for note in case.notes if note.num_flow]
    if case.jump is not None and notes and is_after_jump(case, notes[0].step):
        return by_jump(case)
    states = [
        sign
        for sign in signs
        if sign.detector in STATES and (sign.detector in SURE_STATES or sign.streak >= LASTING_STEPS)
    ]
    if states:
        one = min(states, key=lambda sign: (sign.first_step, sign.phase, sign.name))
        lasted = f", for {one.num_steps} steps" if one.num_steps > 1 else ""
        return Suspicion(
            verdict="model", reasons=(f"{one.detector}: {figures(one)} from step {one.first_step} on{lasted}",)
        )
    first = min(sign.first_step for sign in signs)
    moved_first = [sign for sign in signs if sign.first_step == first and sign.phase in (Phase.PARAM, Phase.OPTIMIZER)]
    run = _longest_run(notes)
    strong = [note for note in notes if note.has_result or note.num_flow >= 3]
    lasting = [sign for sign in signs if sign.streak >= LASTING_STEPS or sign.num_steps >= 2 * LASTING_STEPS]
    state_lasts = [sign for sign in lasting if sign.phase in (Phase.PARAM, Phase.OPTIMIZER)]
    if moved_first and (state_lasts or run >= LASTING_STEPS):
        one = min(moved_first, key=lambda sign: (sign.phase, sign.name))
        return Suspicion(
            verdict="model", reasons=(f"it began in the weights or their optimizer: {figures(one)} at step {first}",)
        )
    flow_lasts = [sign for sign in lasting if sign not in state_lasts]
    if run >= LASTING_STEPS and flow_lasts:
        return _lasting(case, notes, flow_lasts, run)
    if not strong:
        if lasting:
            return _lasting(case, notes, lasting, max(sign.num_steps for sign in lasting))
        one = min(signs, key=lambda sign: (sign.first_step, sign.phase, sign.name))
        return Suspicion(reasons=(f"{figures(one)} at step {one.first_step}, with too few others to say more",))
    if run > QUIET_STEPS or case.num_quiet < QUIET_STEPS:
        at = strong[0].step
        return Suspicion(reasons=(f"it moved at step {at}; whether the next {QUIET_STEPS} steps are well is to be seen",))
    if acquitted:
        return Suspicion(reasons=(f"it moved at step {strong[0].step} and passed",))
    return _passed(case, signs, strong)


def _passed(case: Case, signs: list[Sign], strong: list[Note]) -> Suspicion:
    steps = tuple(note.step for note in strong)
    at = [sign for sign in signs if sign.first_step in steps and sign.phase is not Phase.OPTIMIZER]
    one = max(at or signs, key=lambda sign: (sign.phase is Phase.LOSS, sign.phase is Phase.NORM, sign.score or 0.0))
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {listed(steps)}"
    reasons = [f"{figures(one)} at {when} alone; the {case.num_quiet} whole steps after it were well: weights do not heal"]
    lanes = sorted({lane for note in strong for lane in note.lanes})
    skip_lanes: tuple[int, ...] = ()
    if case.num_lanes > 1 and lanes:
        if len(lanes) == case.num_lanes:
            reasons.append(f"all {case.num_lanes} data-parallel replicas moved alike")
        else:
            absurd = [sign for sign in at if sign.phase is Phase.FORWARD and _times(sign) >= ABSURD]
            if absurd:
                return Suspicion(
                    reasons=(
                        f"data-parallel replica {listed(lanes)} alone moved: {figures(absurd[0])} at {when}",
                        "no data moves a layer so far, and nothing was done twice that would tell a machine",
                    )
                )
            skip_lanes = tuple(lanes)
            reasons.append(
                f"data-parallel replica {listed(lanes)} of {case.num_lanes} alone moved: its part of the batch"
                + (f"; the {case.num_compared} weights compared stay bit-identical" if case.num_compared else "")
            )
    return Suspicion(verdict="batch", reasons=tuple(reasons), skip_steps=steps, skip_lanes=skip_lanes)


def _times(sign: Sign) -> float:
    return abs(sign.value / sign.baseline) if sign.value is not None and sign.baseline else 0.0


def _longest_run(notes: list[Note]) -> int:
    longest, run, last = 0, 0, -2
    for note in notes:
        run = run + 1 if note.step == last + 1 else 1
        longest, last = max(longest, run), note.step
    return longest


def _lasting(case: Case, notes: list[Note], lasting: list[Sign], run: int) -> Suspicion:
    one = min(lasting, key=lambda sign: (sign.first_step, sign.phase, sign.name))
    lanes = sorted({lane for note in notes for lane in note.lanes})
    if case.num_lanes > 1 and len(lanes) == 1:
        return Suspicion(
            reasons=(
                f"data-parallel replica {lanes[0]} of {case.num_lanes} alone moves, for {run} steps: its part of the data "
                "or its machine",
            )
        )
    reasons = [f"{figures(one)} from step {one.first_step} on, for {run} steps: no batch lasts so long"]
    spread = [note.num_flow for note in notes]
    if len(spread) > 1 and max(spread) > spread[0]:
        reasons.append(f"it spread from {plural(spread[0], 'series', 'series')} to {max(spread)}")
    if case.num_lanes > 1 and len(lanes) == case.num_lanes:
        reasons.append(f"all {case.num_lanes} data-parallel replicas show it: they share the weights")
    return Suspicion(verdict="model", reasons=tuple(reasons))
