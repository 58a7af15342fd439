"""What an incident suspects, and why: `batch`, `model`, `precision`, `hardware`, `program` or `unknown`.

Pure and deterministic: the same evidence gives the same diagnosis. When it is sent is decided in `held.py`. The rules, in
the order in which they are asked, with their reasons; the first that holds decides.

1. Liveness (a slow or silent rank) is `unknown`. A rank's time does not show why: device, host, input pipeline and
   deadlock look alike.
2. Copies of the same numbers (a weight, its optimizer state, a reduced gradient) that were bit-identical, and are not. Data
   cannot do that: reduced gradients are the same on all replicas, so that every copy takes the same update. A machine
   changes one or two weights of one rank, a link one step's gradients on one rank: `hardware`, where most copies are equal,
   so that the odd one is named, or where a single bit or a single absurd element parts them. A program changes many tensors
   at once, differs from the first comparison on, or leaves a gradient out in step after step: `program`. Else `unknown`.
3. `precision`: what a narrow type cannot hold. Shares of overflow or underflow that were reported first; infinities in
   float16 or float8 before any NaN; infinities in gradients alone while a loss scale is in force; a loss scale that falls
   again and again; gradients of several tensors that are exactly 0 together, with the forward as ever. In bfloat16 or
   float32 an infinity is no matter of precision: the value really grew.
4. `batch` by reference: another run on the same data moved at the same step. Two trainings share nothing but the data.
   One that did not move acquits the batch.
5. One element of a weight that no update makes (`element.py`): `hardware`, without a second copy.
6. Non-finite values (`nonfinite.py`). Growth before them: `model`. Born in the data (the input of the whole model):
   `batch`. Born where a function that is not defined everywhere was computed of finite numbers, or in weights after a step
   whose gradients all were finite (`program.py`): `program`. In every replica at one step, and the next steps are well:
   `batch`, for only the data is of that step; still there: `model`. Born again and again in several replicas: `model`.
   Whole rows, once: `batch`. In one replica alone: `unknown`. Replicas see other data, so that one of them proves nothing
   about its machine; the next experiment is named (`advice.py`). What comes again with other data is no batch.
7. Finite values (`finite.py`). A learning rate that jumped just before: `model`. Optimizer state that fell faster than a
   mean can: `model`. What came in with the data (`batch.py`): `batch`. An output out of its range with nothing before it
   amiss is not the batch's (`element.py`): `unknown`. A loss that jumped and is back where it was: `batch`, whatever
   gradients and optimizer state keep of it. Weights or optimizer state that moved first, series of states (dead, collapsed,
   drifting), or an excursion of 3 steps in a row: `model`, unless one replica alone keeps moving, which its data and its
   machine explain alike: `unknown`. An excursion of at most two steps after which two whole steps were well: `batch`: what
   is wrong with weights does not go away. A lone excursion of one tensor says nothing, nor do gradients of a young run while
   its loss stays: `unknown`.

What each layout can show. With one data-parallel replica, or with every weight sharded, there is no second copy, and only 5
says `hardware`; a tensor-parallel group holds copies of norms and biases. With two copies that differ, either may be wrong:
only an absurd value shows which.
"""

from __future__ import annotations

import msgspec

from sentinel.incidents.diagnosis.claim import (
    ALIKE_STEPS,
    CALM_STEPS,
    FEW_TENSORS,
    LASTING_STEPS,
    QUIET_STEPS,
    SCALE_FALL,
    SILENT,
    Diagnosis,
    figures,
    is_narrow,
    listed,
    plural,
)
from sentinel.incidents.diagnosis.evidence import Evidence
from sentinel.incidents.diagnosis.finite import finite
from sentinel.incidents.diagnosis.nonfinite import nonfinite
from sentinel.incidents.diagnosis.step_facts import Divergence
from sentinel.kinds import Phase


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of an incident by its evidence."""
    if evidence.is_liveness:
        return _liveness(evidence)
    found = by_comparison(evidence) or by_precision(evidence)
    if found is not None:
        return found
    acquitted, found = by_reference(evidence)
    if found is not None:
        return found
    bad = [sign for sign in evidence.signs.values() if sign.is_bad]
    found = nonfinite(evidence, acquitted) if bad else finite(evidence, acquitted)
    if acquitted and found.suspected != "batch":
        return msgspec.structs.replace(found, reasons=(acquitted, *found.reasons))
    return found


def _liveness(evidence: Evidence) -> Diagnosis:
    if evidence.is_about_rows:
        return Diagnosis(reasons=("rows were lost on their way to the judge: that tells nothing of the training itself",))
    if evidence.is_about_an_end:
        return Diagnosis(reasons=("the process is gone, and what it computed says nothing of why",))
    if evidence.is_about_a_stop:
        return Diagnosis(reasons=("the process is stopped: continued, it goes on where it stood",))
    ranks = sorted({sign.rank for sign in evidence.signs.values() if sign.rank is not None})
    who = f"rank {listed(ranks)}" if ranks else "a rank"
    return Diagnosis(
        reasons=(f"{who} is late or silent: its device, its host, its input pipeline and its program look alike in time",)
    )


def by_comparison(evidence: Evidence) -> Diagnosis | None:
    signs = [sign for sign in evidence.signs.values() if sign.statistic == "checksum"]
    if not signs:
        return None
    found = [one for one in evidence.divergences if one.kind != "wgrad"]
    left_out = None if _parts_gradients(evidence, found) else _left_out(evidence)
    if not found:
        if any(sign.kind != "wgrad" for sign in signs):
            return None
        return left_out or Diagnosis(
            reasons=("reduced gradients differ between ranks, their weights do not: a reduction left out, or a link",)
        )
    names = {one.name for one in found}
    first = found[0]
    what = f"{first.kind} of {first.name}"
    if evidence.num_alike < ALIKE_STEPS:
        never = f"copies of {what} differ, and never were the same since they are compared"
        if len(names) <= FEW_TENSORS:
            return Diagnosis(reasons=(never,))
        return Diagnosis(
            suspected="program",
            reasons=(
                f"{never}, as {evidence.num_differing} tensors in all",
                "what differs from the first comparison on was never made the same: a broadcast left out, a seed of each "
                "rank's own, or no copies at all",
            ),
        )
    since = f"bit-identical on all {first.num_copies} copies until step {evidence.last_alike}"
    of_exchange = _by_exchange(evidence, found)
    if of_exchange is not None or left_out is not None:
        return left_out or of_exchange
    # A weight, its gradient and its optimizer state may all differ.
    if evidence.num_differing > 4 * FEW_TENSORS or len(names) > FEW_TENSORS:
        is_most = 2 * evidence.num_differing >= max(evidence.num_compared, 1)
        return Diagnosis(
            suspected="program" if is_most else "unknown",
            reasons=(
                f"{evidence.num_differing} tensors differ from step {evidence.divergence_step} on, "
                f"{what} among them; {since}",
                "so many at once point to weights loaded or changed by the program on some ranks rather than to a machine",
            ),
        )
    if any(sign.is_bad and sign.first_step < evidence.divergence_step for sign in evidence.signs.values()):
        return Diagnosis(reasons=(f"copies of {what} differ after values had gone non-finite: no evidence of its own",))
    accused = {one.accused for one in found if one.is_sure}
    shown = [one for one in found if one.change]
    if len(accused) == 1 and all(one.is_sure for one in found):
        (ranks,) = accused
        if ranks == (0,) and not shown:
            return Diagnosis(
                reasons=(
                    f"{what} was {since}; at step {evidence.divergence_step} rank 0 alone differs, in more than one element",
                    "rank 0 is the one that programs treat apart",
                )
            )
        if len(ranks) == 1:
            odd = f"rank {ranks[0]} alone differs, the other {first.num_copies - 1} copies agree"
            why = f"{what} was {since}; at step {evidence.divergence_step} {odd}"
            return Diagnosis(
                suspected="hardware",
                reasons=(
                    why + (f": {shown[0].change_words}" if shown else ""),
                    "replicas take the same update from the same gradient: neither data nor model can part them",
                ),
                ranks=ranks,
                since=evidence.divergence_step,
            )
    if shown:
        one = shown[0]
        who = f"rank {one.culprit}" if one.culprit is not None else f"one of ranks {listed(one.accused)}"
        return Diagnosis(
            suspected="hardware",
            reasons=(
                f"{one.kind} of {one.name} was {since}; at step {evidence.divergence_step} "
                f"{who} changed: {one.change_words}",
                "replicas take the same update from the same gradient: neither data nor model can part them",
            ),
            ranks=(one.culprit,) if one.culprit is not None else one.accused,
            since=evidence.divergence_step,
        )
    return Diagnosis(
        reasons=(
            f"{what} was {since}; from step {evidence.divergence_step} on ranks {listed(first.accused)} differ",
            "no majority says which copy is wrong, and the change looks like no single fault",
        )
    )


def _parts_gradients(evidence: Evidence, found: list[Divergence]) -> bool:
    """Return whether gradients may differ because of one bit or element of a weight: of a tensor-parallel group all do then.

    A reduction that is left out shows the other way round: in gradients first, and a step later in the weights.
    """
    is_single = bool(found) and len({one.name for one in found}) <= FEW_TENSORS and any(one.change for one in found)
    return is_single and min((step for step, _ in evidence.odd_gradients), default=-1) >= evidence.divergence_step


def _left_out(evidence: Evidence) -> Diagnosis | None:
    """Return what reduced gradients say that differ between ranks step after step; None: they do not."""
    steps = [step for step, _ in evidence.odd_gradients]
    if len(steps) < LASTING_STEPS:
        return None
    names = sorted(
        {one.name for one in evidence.divergences if one.kind == "wgrad"} or {one.name for one in evidence.divergences}
    )
    what = f", {listed(names, 2)} among them" if names else ""
    return Diagnosis(
        suspected="program",
        reasons=(
            f"reduced gradients{what} differ between ranks in {len(steps)} steps, {listed(steps, 3)}",
            "a machine or a link is wrong at times, a reduction that is left out in every step: no_sync, a parameter "
            "outside the wrapper, or a gradient that is changed after it was reduced",
        ),
    )


def _by_exchange(evidence: Evidence, found: list[Divergence]) -> Diagnosis | None:
    """Return what reduced gradients say that arrived otherwise on one rank in one step, and the weights that took them."""
    at = [(step, ranks) for step, ranks in evidence.odd_gradients if step <= evidence.divergence_step]
    if not at or not 0 <= evidence.divergence_step - at[0][0] <= 1 or evidence.num_alike < CALM_STEPS:
        return None
    ranks = at[0][1]
    if len(ranks) != 1 or ranks == (0,) or not any(one.is_sure for one in found):
        return None
    # Of two copies alone, as experts may have, nobody can tell which is wrong.
    if any(one.accused != ranks if one.is_sure else ranks[0] not in one.accused for one in found):
        return None
    names = {one.name for one in found}
    if any(other != ranks for _, other in evidence.odd_gradients) or 2 * len(names) > evidence.num_weights:
        return None
    seen = (
        f"the reduced gradients of {plural(len(names), 'weight')}, {found[0].name} among them, arrived otherwise on rank "
        f"{ranks[0]} alone at step {at[0][0]}, and its weights took them"
    )
    since = f"bit-identical on all {found[0].num_copies} copies until step {evidence.last_alike}"
    if evidence.seen < at[-1][0] + QUIET_STEPS:
        return Diagnosis(reasons=(f"{seen}; {since}", "whether it comes again in the next steps is to be seen"))
    return Diagnosis(
        suspected="hardware",
        reasons=(
            f"{seen}; {since}",
            "a program that leaves a gradient out does so in every step: a link, a card, or a race in the exchange",
        ),
        ranks=ranks, since=at[0][0],
    )  # fmt: skip


def by_precision(evidence: Evidence) -> Diagnosis | None:
    bad = [sign for sign in evidence.signs.values() if sign.is_bad]
    first_bad = min((sign.first_step for sign in bad), default=1 << 62)
    shares = [
        sign
        for sign in evidence.signs.values()
        if (sign.kind == "precision" or sign.detector == "PrecisionLoss")
        and sign.first_step <= first_bad
        and (evidence.has_narrow or evidence.has_scaler)  # A format that nobody trains in may overflow.
    ]
    first = min((sign.first_step for sign in evidence.signs.values()), default=0)
    early = [sign for sign in shares if sign.first_step <= first + 1 or bad]
    if early:
        one = min(early, key=lambda sign: (sign.first_step, sign.phase, sign.name))
        then = f", before the first non-finite value at step {first_bad}" if bad else ""
        return Diagnosis(suspected="precision", reasons=(f"{figures(one)} from step {one.first_step} on{then}",))
    if bad:
        origins = [origin for origin in evidence.origins if origin.step == evidence.origins[0].step]
        narrow = [origin for origin in origins if is_narrow(origin.dtype)]
        infinite = next((origin for origin in narrow if origin.is_inf), None)
        if infinite is not None:
            what = f"{infinite.kind} of {infinite.name} ({infinite.dtype})"
            return Diagnosis(
                suspected="precision",
                reasons=(f"at step {infinite.step} {what} held infinities before anything held a NaN",),
            )
        are_gradients = bool(origins) and all(origin.phase in _GRADIENTS for origin in origins)
        if evidence.has_scaler and are_gradients and (narrow or any(origin.is_inf for origin in origins)):
            scale = "" if evidence.scale_before is None else f" of {evidence.scale_before:.6g}"
            return Diagnosis(
                suspected="precision",
                reasons=(
                    f"at step {origins[0].step} gradients overflowed under a loss scale{scale}, all of the forward finite",
                ),
            )
    silent = [
        sign for sign in evidence.signs.values() if sign.value == 0.0 and sign.phase in _GRADIENTS and is_narrow(sign.dtype)
    ]
    begun = min((sign.first_step for sign in evidence.signs.values()), default=0)
    names = sorted({sign.name for sign in silent if sign.first_step <= begun + 1})
    forward = [sign for sign in evidence.signs.values() if sign.phase is Phase.FORWARD and sign.first_step <= begun + 1]
    if len(names) >= SILENT and not forward and not bad:
        scale = "" if evidence.scale_now is None else f", under a loss scale of {evidence.scale_now:.6g}"
        return Diagnosis(
            suspected="precision",
            reasons=(
                f"the gradients of {len(names)} tensors are exactly 0 from step {begun} on{scale}: {listed(names, 3)}",
                f"{silent[0].dtype} holds nothing below 6e-8, and all of the forward is as ever",
            ),
        )
    before, now = evidence.scale_before, evidence.scale_now
    if before is not None and now is not None and now > 0 and before / now >= SCALE_FALL:
        return Diagnosis(suspected="precision", reasons=(f"the loss scale fell from {before:.6g} to {now:.6g}",))
    return None


_GRADIENTS = frozenset({Phase.BACKWARD, Phase.WGRAD_UNREDUCED, Phase.WGRAD, Phase.NORM})


def by_reference(evidence: Evidence) -> tuple[str, Diagnosis | None]:
    """Return words that acquit the batch, empty: none; or what is suspected because reference runs moved."""
    asked = [sign for sign in evidence.signs.values() if sign.reference_score is not None]
    moved = [sign for sign in asked if (sign.reference_score or 0.0) >= 1.0]
    if moved:
        one = min(moved, key=lambda sign: sign.first_step)
        steps = tuple(sorted({sign.first_step for sign in moved}))
        return "", Diagnosis(
            suspected="batch",
            reasons=(
                f"runs on the same data moved at step {one.first_step} too (score {one.reference_score:.2f}), "
                f"as {figures(one)} did here",
            ),
            skip_steps=steps,
        )
    if not asked:
        return "", None
    one = min(asked, key=lambda sign: sign.first_step)
    return (
        f"runs on the same data did not move at step {one.first_step} (score {one.reference_score:.2f}): not the batch",
        None,
    )
