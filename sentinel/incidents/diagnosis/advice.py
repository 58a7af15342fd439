"""What to do about a suspicion, in one sentence for who is on call at night."""

from __future__ import annotations

from sentinel.incidents.diagnosis.claim import Diagnosis, listed
from sentinel.incidents.diagnosis.evidence import Evidence
from sentinel.order.phase import Phase

TO_DO = "to do: "


def advice(case: Evidence, found: Diagnosis) -> str:
    """Return what to do; empty: wait for the steps that the reasons ask for."""
    if case.is_about_rows:
        return ""  # What to do depends on where they were lost: the anomaly says it.
    if case.is_liveness:
        return f"{TO_DO}look at the rank itself: its stack (py-spy dump), its loader, its device's log and clock"
    if found.verdict == "batch":
        return _of_batch(case, found)
    if found.verdict == "hardware":
        return _of_hardware(case, found)
    if found.verdict == "precision":
        scale = "let the loss scale find its level" if case.has_scaler else "set the scale of the narrow type lower"
        return f"{TO_DO}{scale}, or keep the tensors named here in a wider type; if it goes on, look for what grows"
    if found.verdict == "model":
        return _of_model(case)
    return ""


def _of_batch(case: Evidence, found: Diagnosis) -> str:
    whose = f" of rank {listed(case.ranks_of(found.skip_lanes))}" if found.skip_lanes else ""
    if not found.skip_steps:
        return f"{TO_DO}look at what the loader{whose} reads now; its steps are listed to be skipped when it is over"
    steps = _ranges(found.skip_steps)
    what = "batch" if len(found.skip_steps) == 1 else "batches"
    return (
        f"{TO_DO}nothing if the loss came back; else restart before step {min(found.skip_steps)} without the {what} of step "
        f"{steps}{whose} (sentinel.skip_list), and look at the samples"
    )


def _of_hardware(case: Evidence, found: Diagnosis) -> str:
    who = f"rank {listed(found.ranks)}" if len(found.ranks) == 1 else f"ranks {listed(found.ranks)} (either may be wrong)"
    since = found.since if found.since >= 0 else case.opened
    was_skipped = any(note.step == since and note.is_skipped for note in case.notes)
    kept = "a skipped step did not reach the weights" if was_skipped else f"go on from a checkpoint before step {since}"
    return f"{TO_DO}drain the node of {who} and test it; {kept}"


def _of_model(case: Evidence) -> str:
    before = f"a checkpoint before step {case.opened}"
    if case.jump is not None:
        return f"{TO_DO}put {case.jump.name} back, and if the loss does not come back go on from {before}"
    first = min(
        (one for one in case.signs.values() if one.kind != "scalar"), default=None,
        key=lambda one: (one.first_step, one.phase, one.name),
    )  # fmt: skip
    look = f"look at {first.name} first" if first is not None else "look at what changed in the program"
    if any(sign.phase in (Phase.LOSS, Phase.NORM) or sign.is_bad for sign in case.signs.values()):
        return f"{TO_DO}{look}; if it grows, go on from {before} with a lower learning rate or a tighter clip"
    return f"{TO_DO}{look}; the loss does not show it yet"


def _ranges(steps: tuple[int, ...]) -> str:
    """`30`, `30 to 33`, `30, 35 to 36`"""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return listed(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)
