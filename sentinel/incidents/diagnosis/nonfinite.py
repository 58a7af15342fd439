"""What non-finite values make one suspect: rule 6 of `diagnosis/diagnose.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sentinel.incidents.diagnosis.claim import (
    CALM_STEPS,
    CHANCE,
    LASTING_STEPS,
    QUIET_STEPS,
    UNKNOWN,
    WELL_STEPS,
    Diagnosis,
    by_jump,
    figures,
    is_after_jump,
    is_narrow,
    is_of_experts,
    listed,
    plural,
)
from sentinel.incidents.diagnosis.element import by_weight
from sentinel.incidents.diagnosis.evidence import Birth, Evidence
from sentinel.order.phase import Phase

_LOSS = re.compile(r"loss|criterion", re.IGNORECASE)


def nonfinite(case: Evidence, acquitted: str) -> Diagnosis:
    bad_steps = sorted({sign.first_step for sign in case.signs.values() if sign.is_bad})
    first_bad = bad_steps[0]
    growth = [note for note in case.notes if note.step < first_bad and (note.num_flow >= 3 or note.has_result)]
    if growth:
        begun = [sign for sign in case.signs.values() if not sign.is_bad and sign.first_step == growth[0].step]
        first = f": {figures(begun[0])}" if begun else ""
        return Diagnosis(
            verdict="model",
            reasons=(
                f"it moved for {plural(len(growth), 'step')} before it went non-finite at step {first_bad}, from step "
                f"{growth[0].step} on{first}",
            ),
        )
    of_weight = by_weight(case)
    if of_weight is not None:
        return of_weight
    if case.jump is not None and is_after_jump(case, next((n.index for n in case.notes if n.num_bad), 0)):
        return by_jump(case)
    births = [one for one in case.births if one.step == case.births[0].step]
    if not births:
        return UNKNOWN
    steps = sorted({one.step for one in case.births})
    recurring = _recurring(case, steps) if len(steps) >= LASTING_STEPS else None
    if recurring is not None:
        return recurring
    from_data = [one for one in births if _is_input(one)]
    one = births[0]
    if from_data and not acquitted:
        one = from_data[0]
        return Diagnosis(
            verdict="batch",
            reasons=(f"at step {one.step} the input of the model was non-finite before anything was computed of it",),
            skip_steps=tuple(steps),
            skip_lanes=_lanes_of(from_data),
        )
    if one.phase is Phase.PARAM:
        return Diagnosis(reasons=(f"the weights of {one.name} were non-finite as step {one.step} began: why was not seen",))
    lanes = {birth.lane for birth in births if birth.lane is not None}
    is_gone = case.num_quiet >= QUIET_STEPS
    is_one = len(lanes) == 1 and all(birth.lane is not None for birth in births)
    if _is_at_the_end(one) and not is_one:
        return _of_labels(case, births, acquitted)
    if case.num_lanes > 1 and len(lanes) == case.num_lanes and one.ep_size <= 1:
        every = f"all {case.num_lanes} data-parallel replicas"
        if len(steps) >= LASTING_STEPS or _lasting_bad(case, first_bad):
            return Diagnosis(
                verdict="model",
                reasons=(f"{every} went non-finite from step {one.step} on, each by itself: they share the weights alone",),
            )
        if is_gone and not acquitted:
            return Diagnosis(
                verdict="batch",
                reasons=(
                    f"{every} went non-finite at step {one.step}, each by itself, and the {case.num_quiet} steps after it "
                    "were well: only the data is of that step",
                ),
                skip_steps=tuple(steps),
            )
        return Diagnosis(reasons=(f"{every} went non-finite at step {one.step}; whether it passes is to be seen",))
    of_rows = _of_rows(case, births, steps, acquitted)
    if of_rows is not None:
        return of_rows
    if case.num_lanes <= 1:
        alone = "there is one data-parallel replica: nothing to compare, a machine cannot be told from its data"
        return Diagnosis(reasons=(f"non-finite first in {one.kind} of {one.name} at step {one.step}", alone))
    if is_one:
        return _one_replica(case, births, acquitted)
    if lanes:
        return Diagnosis(
            reasons=(f"{len(lanes)} of {case.num_lanes} data-parallel replicas went non-finite at step {one.step}",)
        )
    return Diagnosis(
        reasons=(f"{one.kind} of {one.name} went non-finite at step {one.step} where replicas were merged already",)
    )


def _of_rows(case: Evidence, births: list[Birth], steps: list[int], acquitted: str) -> Diagnosis | None:
    """Return what whole rows say that went non-finite once: tokens, samples; None: it was no such thing."""
    one = births[0]
    lanes = _lanes_of(births)
    if acquitted or len(steps) > 1 or any(birth.phase is not Phase.FORWARD for birth in births) or is_narrow(one.dtype):
        return None
    if any(birth.num_bad < 2 for birth in births) or len({birth.name for birth in births}) > 1:
        return None
    if case.num_lanes > 1 and len(lanes) != 1:
        return None
    front = one.depth == 0 and (one.border in ("chunk_input", "block_input") or one.place.rpartition(".")[2] == "stem")
    if one.border and not front:
        return None  # Behind a whole block one lost number is a row as well.
    if case.num_quiet < (QUIET_STEPS if front else WELL_STEPS):
        return None
    who = f" on data-parallel replica {lanes[0]} of {case.num_lanes}" if case.num_lanes > 1 and lanes else ""
    where = "the first that is computed of the data" if front else "whole tokens or samples rather than one number"
    return Diagnosis(
        verdict="batch",
        reasons=(
            f"{one.num_bad} elements of {one.name} went non-finite at step {one.step}{who}: {where}",
            f"the {case.num_quiet} steps after it were well, with the same weights and other data",
        ),
        skip_steps=(one.step,), skip_lanes=lanes if case.num_lanes > 1 else (),
    )  # fmt: skip


def _lanes_of(births: Iterable[Birth]) -> tuple[int, ...]:
    lanes = [one.lane for one in births]
    return () if None in lanes else tuple(sorted({lane for lane in lanes if lane is not None}))


def _is_input(one: Birth) -> bool:
    """Tell whether the tensor is what the trainer fed in: the input of the whole model, at its first depth."""
    return one.kind == "activation_in" and one.border == "chunk_input" and one.depth == 0


def _lasting_bad(case: Evidence, first_bad: int) -> bool:
    return sum(note.num_bad > 0 for note in case.notes if note.step >= first_bad) >= LASTING_STEPS


def _is_at_the_end(one: Birth) -> bool:
    """Tell whether it was born in the loss, where labels and masks come in."""
    return one.phase is Phase.LOSS or bool(_LOSS.search(one.name))


def _of_labels(case: Evidence, births: list[Birth], acquitted: str) -> Diagnosis:
    one = births[0]
    lanes = _lanes_of(births)
    who = "" if case.num_lanes <= 1 else f" on {len(lanes) or case.num_lanes} of {case.num_lanes} data-parallel replicas"
    seen = f"at step {one.step} all before the loss was finite, and {one.name} was not{who}"
    if case.num_quiet < QUIET_STEPS or acquitted:
        return Diagnosis(reasons=(f"{seen}: labels or masks of the batch, or a machine",))
    return Diagnosis(
        verdict="batch",
        reasons=(f"{seen}; the {case.num_quiet} steps after it were well: labels or masks of that batch",),
        skip_steps=(one.step,), skip_lanes=lanes if len(lanes) < case.num_lanes else (),
    )  # fmt: skip


def _one_replica(case: Evidence, births: list[Birth], acquitted: str) -> Diagnosis:
    one = births[0]
    seen = f"data-parallel replica {one.lane} alone of {case.num_lanes} went non-finite at step {one.step}, in {one.name}"
    if _is_at_the_end(one):
        return _of_labels(case, births, acquitted)
    doubt = _doubt(case, births)
    if doubt:
        return Diagnosis(reasons=(seen, f"its part of the batch or its machine: {doubt}"))
    upstream = one.upstream
    assert upstream is not None
    # Where it got into the weights, no more evidence will come.
    if case.num_quiet < WELL_STEPS and (case.seen <= one.step or _was_skipped(case, one.step)):
        return Diagnosis(reasons=(seen, f"its machine is suspected; {WELL_STEPS} steps that are well are waited for"))
    ranks = sorted({birth.rank for birth in births if birth.rank is not None})
    return Diagnosis(
        verdict="hardware",
        reasons=(
            f"{seen}, rank {' or '.join(map(str, ranks))}: one element alone",
            f"its data had passed {plural(upstream.num_blocks, 'block')} and {plural(upstream.num_measured, 'tensor')} like "
            "the other replicas' before that",
            f"the {case.num_compared} weights compared are bit-identical on all replicas, and nothing was amiss before",
            "one replica, one rank, one moment; a kernel that reads what nobody wrote looks the same",
        ),
        ranks=tuple(ranks),
        since=one.step,
    )


def _doubt(case: Evidence, births: list[Birth]) -> str:
    """Return why one replica's non-finite value does not accuse its machine; empty: it does."""
    one = births[0]
    upstream = one.upstream
    if one.phase is not Phase.FORWARD:
        return "it was born in the backward, where roots and norms of zero do it to good data"
    if len({birth.name for birth in births}) > 1:
        return "it was born in several places at once"
    if is_narrow(one.dtype):
        return f"{one.dtype} overflows on good machines"
    if is_of_experts(one.name) or one.ep_size > 1:
        return "experts see few tokens, and some batches give them none"
    if upstream is None or not upstream.num_measured:
        return "what came before it in its replica was not measured"
    if one.num_bad != 1:
        what = f"{one.num_bad} elements" if one.num_bad else "a number of elements that is not known"
        return f"{what} went bad at once; data fails by rows, a machine in one place"
    if upstream.num_blocks < 1:
        return "the data had not passed a whole block before it, so that the data may be to blame"
    if upstream.unlike:
        return f"{upstream.unlike}, so that it came from before"
    if not case.num_compared:
        return "no second copy of the weights is compared"
    if case.is_differing:
        return "the weights are not the same on all replicas"
    if case.num_before < CALM_STEPS:
        return f"the attempt was {plural(case.num_before, 'step')} old"
    if case.trouble_step >= 0 and one.step - case.trouble_step <= CALM_STEPS:
        return f"there was trouble at step {case.trouble_step} already"
    if any(birth.lane not in (None, one.lane) for birth in case.births):
        return "another replica went non-finite by itself later"
    again = [birth.step for birth in case.births if birth.step != one.step and birth.name == one.name]
    if again:
        return f"it came again in the same place at step {again[0]}, which a machine has no reason to choose"
    if one.place.rpartition(".")[2] == "head" and one.border:
        return "what was seen of it was the output of a whole chunk, where labels may come in"
    return ""


def _was_skipped(case: Evidence, step: int) -> bool:
    return any(note.step == step and note.is_skipped for note in case.notes)


def _recurring(case: Evidence, steps: list[int]) -> Diagnosis | None:
    """Return what several births say; None: nothing beyond the first of them."""
    known = [one for one in case.births if one.lane is not None]
    lanes = sorted({one.lane for one in known if one.lane is not None})
    names = sorted({one.name for one in case.births})
    if case.num_lanes <= 1:
        if len(names) == 1:
            return Diagnosis(
                verdict="model",
                reasons=(f"non-finite in {names[0]} at {len(steps)} steps ({listed(steps)}), each with other data",),
            )
        return None
    if len(known) < len(case.births) or any(one.ep_size > 1 for one in known):
        return None
    if len(lanes) > 1:
        return Diagnosis(
            verdict="model",
            reasons=(
                f"non-finite values were born at {len(steps)} steps ({listed(steps)}) on {len(lanes)} of {case.num_lanes} "
                f"data-parallel replicas, in {listed(names, 3)}: not one batch, not one machine",
            ),
        )
    ranks = sorted({one.rank for one in known if one.rank is not None})
    chance = float(case.num_lanes) ** (1 - len(steps))
    is_wide = not any(is_narrow(one.dtype) for one in known)
    forward = all(one.phase is Phase.FORWARD for one in known)
    is_calm = case.trouble_step < 0 or case.births[0].step - case.trouble_step > CALM_STEPS
    unlike = any(one.upstream is None or one.upstream.unlike or one.num_bad != 1 for one in known)
    if (
        len(ranks) == 1 and chance < CHANCE and len(names) > 1 and is_wide and forward and is_calm and not unlike
        and case.num_compared and not case.is_differing
    ):  # fmt: skip
        return Diagnosis(
            verdict="hardware",
            reasons=(
                f"rank {ranks[0]} alone bore non-finite values at {len(steps)} steps ({listed(steps)}) in "
                f"{listed(names, 3)}: by chance 1 in {round(1 / chance)}",
                f"the {case.num_compared} weights compared are bit-identical on all replicas, and what came before each was "
                "like the others'",
            ),
            ranks=tuple(ranks),
            since=steps[0],
        )
    return Diagnosis(
        reasons=(
            f"non-finite values were born at {len(steps)} steps ({listed(steps)}) on data-parallel replica {lanes[0]} of "
            f"{case.num_lanes} alone: its part of the data, or its machine",
        )
    )
