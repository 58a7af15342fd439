"""The diagnosis of non-finite values: rule 6 of `diagnosis/diagnose.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sentinel.incidents.diagnosis.claim import (
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
from sentinel.incidents.diagnosis.evidence import Evidence, NonFiniteOrigin
from sentinel.incidents.diagnosis.program import by_function, by_update, functions_words
from sentinel.kinds import Phase

_LOSS = re.compile(r"loss|criterion", re.IGNORECASE)


def nonfinite(evidence: Evidence, acquitted: str) -> Diagnosis:
    bad_steps = sorted({sign.first_step for sign in evidence.signs.values() if sign.is_bad})
    first_bad = bad_steps[0]
    growth = [note for note in evidence.notes if note.step < first_bad and (note.num_flow >= 3 or note.has_result)]
    if growth:
        begun = [sign for sign in evidence.signs.values() if not sign.is_bad and sign.first_step == growth[0].step]
        first = f": {figures(begun[0])}" if begun else ""
        return Diagnosis(
            suspected="model",
            reasons=(
                f"it moved for {plural(len(growth), 'step')} before it went non-finite at step {first_bad}, from step "
                f"{growth[0].step} on{first}",
            ),
        )
    of_weight = by_weight(evidence)
    if of_weight is not None:
        return of_weight
    if evidence.jump is not None and is_after_jump(evidence, next((n.index for n in evidence.notes if n.num_bad), 0)):
        return by_jump(evidence)
    origins = [one for one in evidence.origins if one.step == evidence.origins[0].step]
    if not origins:
        return UNKNOWN
    silent = evidence.missing.get(origins[0].step, ())
    if silent and origins[0].rank not in silent:
        who = f"rank {listed(silent)} had not spoken of step {origins[0].step} when it was judged"
        return Diagnosis(
            reasons=(f"{who}: it may have been born there",),
            next_step="sentinel replay --recompute judges the step with the rows that came later",
        )
    steps = sorted({one.step for one in evidence.origins})
    from_data = [one for one in origins if _is_input(one)]
    one = origins[0]
    if from_data and not acquitted:
        one = from_data[0]
        return Diagnosis(
            suspected="batch",
            reasons=(f"at step {one.step} the input of the model was non-finite before anything was computed of it",),
            skip_steps=tuple(steps),
            skip_lanes=_lanes_of(from_data),
        )
    of_program = by_update(one) or by_function(evidence)
    if of_program is not None:
        return of_program
    if one.phase is Phase.PARAM:
        return Diagnosis(reasons=(f"the weights of {one.name} were non-finite as step {one.step} began: why was not seen",))
    recurring = _recurring(evidence, steps) if len(steps) > 1 else None
    if recurring is not None:
        return recurring
    lanes = {origin.lane for origin in origins if origin.lane is not None}
    is_gone = evidence.num_quiet >= QUIET_STEPS
    is_one = len(lanes) == 1 and all(origin.lane is not None for origin in origins)
    if _is_at_the_end(one) and not is_one:
        return _of_labels(evidence, origins, acquitted)
    if evidence.num_lanes > 1 and len(lanes) == evidence.num_lanes and one.ep_size <= 1:
        every = f"all {evidence.num_lanes} data-parallel replicas"
        if len(steps) >= LASTING_STEPS or _lasting_bad(evidence, first_bad):
            return Diagnosis(
                suspected="model",
                reasons=(f"{every} went non-finite from step {one.step} on, each by itself: they share the weights alone",),
            )
        if is_gone and not acquitted:
            return Diagnosis(
                suspected="batch",
                reasons=(
                    f"{every} went non-finite at step {one.step}, each by itself, and the {evidence.num_quiet} steps "
                    "after it were well: only the data is of that step",
                ),
                skip_steps=tuple(steps),
            )
        return Diagnosis(reasons=(f"{every} went non-finite at step {one.step}; whether it passes is to be seen",))
    of_rows = _of_rows(evidence, origins, steps, acquitted)
    if of_rows is not None:
        return of_rows
    if evidence.num_lanes <= 1:
        alone = "there is one data-parallel replica: nothing to compare, a machine cannot be told from its data"
        hint = functions_words(one)
        first = f"non-finite first in {one.kind} of {one.name} at step {one.step}"
        return Diagnosis(reasons=(first, alone, *([hint] if hint else ())))
    if is_one:
        return _one_replica(evidence, origins, acquitted)
    if lanes:
        return Diagnosis(
            reasons=(f"{len(lanes)} of {evidence.num_lanes} data-parallel replicas went non-finite at step {one.step}",)
        )
    return Diagnosis(
        reasons=(f"{one.kind} of {one.name} went non-finite at step {one.step} where replicas were merged already",)
    )


def _of_rows(evidence: Evidence, origins: list[NonFiniteOrigin], steps: list[int], acquitted: str) -> Diagnosis | None:
    """Return what whole rows say that went non-finite once: tokens, samples; None: it was no such thing."""
    one = origins[0]
    lanes = _lanes_of(origins)
    if acquitted or len(steps) > 1 or any(origin.phase is not Phase.FORWARD for origin in origins) or is_narrow(one.dtype):
        return None
    if any(origin.num_bad < 2 for origin in origins) or len({origin.name for origin in origins}) > 1:
        return None
    if evidence.num_lanes > 1 and len(lanes) != 1:
        return None
    front = one.depth == 0 and (one.border in ("chunk_input", "block_input") or one.place.rpartition(".")[2] == "stem")
    if one.border and not front:
        return None  # Behind a whole block one lost number is a row as well.
    if evidence.num_quiet < (QUIET_STEPS if front else WELL_STEPS):
        return None
    who = f" on data-parallel replica {lanes[0]} of {evidence.num_lanes}" if evidence.num_lanes > 1 and lanes else ""
    where = "the first that is computed of the data" if front else "whole tokens or samples rather than one number"
    return Diagnosis(
        suspected="batch",
        reasons=(
            f"{one.num_bad} elements of {one.name} went non-finite at step {one.step}{who}: {where}",
            f"the {evidence.num_quiet} steps after it were well, with the same weights and other data",
        ),
        skip_steps=(one.step,), skip_lanes=lanes if evidence.num_lanes > 1 else (),
    )  # fmt: skip


def _lanes_of(origins: Iterable[NonFiniteOrigin]) -> tuple[int, ...]:
    lanes = [one.lane for one in origins]
    return () if None in lanes else tuple(sorted({lane for lane in lanes if lane is not None}))


def _is_input(one: NonFiniteOrigin) -> bool:
    """Tell whether the tensor is what the trainer fed in: the input of the whole model, at its first depth."""
    return one.kind == "activation_in" and one.border == "chunk_input" and one.depth == 0


def _lasting_bad(evidence: Evidence, first_bad: int) -> bool:
    return sum(note.num_bad > 0 for note in evidence.notes if note.step >= first_bad) >= LASTING_STEPS


def _is_at_the_end(one: NonFiniteOrigin) -> bool:
    """Tell whether it was born in the loss, where labels and masks come in."""
    return one.phase is Phase.LOSS or bool(_LOSS.search(one.name))


def _of_labels(evidence: Evidence, origins: list[NonFiniteOrigin], acquitted: str) -> Diagnosis:
    one = origins[0]
    lanes = _lanes_of(origins)
    who = (
        ""
        if evidence.num_lanes <= 1
        else f" on {len(lanes) or evidence.num_lanes} of {evidence.num_lanes} data-parallel replicas"
    )
    seen = f"at step {one.step} all before the loss was finite, and {one.name} was not{who}"
    if evidence.num_quiet < QUIET_STEPS or acquitted:
        return Diagnosis(reasons=(f"{seen}: labels or masks of the batch, or a machine",))
    return Diagnosis(
        suspected="batch",
        reasons=(f"{seen}; the {evidence.num_quiet} steps after it were well: labels or masks of that batch",),
        skip_steps=(one.step,), skip_lanes=lanes if len(lanes) < evidence.num_lanes else (),
    )  # fmt: skip


def _one_replica(evidence: Evidence, origins: list[NonFiniteOrigin], acquitted: str) -> Diagnosis:
    """Return what one replica's non-finite value says: it sees other data than the others, so that it accuses no machine."""
    one = origins[0]
    seen = (
        f"data-parallel replica {one.lane} alone of {evidence.num_lanes} went non-finite at step {one.step}, in {one.name}"
    )
    if _is_at_the_end(one):
        return _of_labels(evidence, origins, acquitted)
    hint, doubt = functions_words(one), _doubt(evidence, origins)
    return Diagnosis(reasons=(seen, f"its data, its code or its machine: {doubt}", *([hint] if hint else ())))


def _doubt(evidence: Evidence, origins: list[NonFiniteOrigin]) -> str:
    """Return what is known of where one replica's value came from, and why that does not tell its cause."""
    one = origins[0]
    upstream = one.upstream
    if one.phase is not Phase.FORWARD:
        return "it was born in the backward, where roots and norms of zero do it to good data"
    if len({origin.name for origin in origins}) > 1:
        return "it was born in several places at once"
    if is_narrow(one.dtype):
        return f"{one.dtype} overflows on good machines"
    if is_of_experts(one.name) or one.ep_size > 1:
        return "experts see few tokens, and some batches give them none"
    if upstream is None or not upstream.num_measured:
        return "what came before it in its replica was not measured"
    if upstream.unlike:
        return f"{upstream.unlike}, so that it came from before"
    if evidence.is_differing:
        return "the weights are not the same on all replicas"
    passed = f"all {plural(upstream.num_measured, 'tensor')} before it were finite and like the other replicas'"
    return f"{passed}, but its data are its own, and nothing was computed twice"


def _recurring(evidence: Evidence, steps: list[int]) -> Diagnosis | None:
    """Return what origins at several steps say; None: nothing beyond the first of them."""
    known = [one for one in evidence.origins if one.lane is not None]
    lanes = sorted({one.lane for one in known if one.lane is not None})
    names = sorted({one.name for one in evidence.origins})
    # A border says its block, and module monitoring then which module of it.
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    at = f"at {len(steps)} steps ({listed(steps)})"
    is_often = len(steps) >= LASTING_STEPS
    hints = list(dict.fromkeys(functions_words(one) for one in evidence.origins if one.name in names))[:2]
    hints = [hint for hint in hints if hint]
    if all(_is_at_the_end(one) for one in evidence.origins):
        return Diagnosis(
            reasons=(
                f"{names[0]} was no number {at}, all before it finite, each time with other data",
                "a loss that divides by the labels that count does so whenever none does: no single batch, and no machine",
            )
        )
    if evidence.num_lanes <= 1:
        if len(names) == 1 and is_often:
            return Diagnosis(suspected="model", reasons=(f"non-finite in {names[0]} {at}, each with other data",))
        return None
    if len(known) < len(evidence.origins) or any(one.ep_size > 1 for one in known):
        return None
    if len(lanes) > 1:
        if len(lanes) == evidence.num_lanes and not is_often:
            return Diagnosis(
                reasons=(f"non-finite values were born {at} on all {evidence.num_lanes} replicas, each by itself",)
            )
        return Diagnosis(
            suspected="model" if is_often else "unknown",
            reasons=(
                f"non-finite values were born {at} on {len(lanes)} of {evidence.num_lanes} data-parallel replicas, in "
                f"{listed(names, 3)}: not one batch, not one machine",
                *hints,
            ),
        )
    return Diagnosis(
        reasons=(
            f"non-finite values were born {at} on data-parallel replica {lanes[0]} of {evidence.num_lanes} alone, in "
            f"{listed(names, 3)}: no single batch; its part of the data, what it computes, or its machine",
            *hints,
        )
    )
