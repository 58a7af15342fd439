"""What to do about a diagnosis, in one sentence for who is on call at night; where nothing is known, the next experiment."""

from __future__ import annotations

import re

from sentinel.incident import TO_DO
from sentinel.incidents.diagnosis.claim import QUIET_STEPS, Diagnosis, listed
from sentinel.incidents.diagnosis.evidence import Evidence, NonFiniteOrigin, Sign
from sentinel.kinds import Phase

_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)")
"""Weights of a router. A gated feed-forward's are called gate_proj."""


def advice(evidence: Evidence, found: Diagnosis) -> str:
    """Return what to do; empty: wait for the steps that the reasons ask for."""
    if evidence.is_about_rows or evidence.is_about_an_end:
        return ""  # What to do depends on where rows were lost, or on how the run ended: the anomaly says it.
    if evidence.is_about_a_stop:
        return f"{TO_DO}see who stopped the process (Ctrl-Z, a scheduler, a debugger), then continue it: kill -CONT"
    if evidence.is_about_a_node:
        return f"{TO_DO}see whether the machine of that node lives, its `sentinel node` or `ship` there, and its network"
    if evidence.is_liveness:
        return f"{TO_DO}look at the rank itself: its stack (py-spy dump), its loader, its device's log and clock"
    if found.next_step:
        return f"{TO_DO}{found.next_step}"
    if found.suspected == "batch":
        return _of_batch(evidence, found)
    if found.suspected == "hardware":
        return _of_hardware(evidence, found)
    if found.suspected == "precision":
        scale = "let the loss scale find its level" if evidence.has_scaler else "set the scale of the narrow type lower"
        return f"{TO_DO}{scale}, or keep the tensors named here in a wider type; if it goes on, look for what grows"
    if found.suspected == "model":
        return _of_model(evidence)
    if found.suspected == "program":
        return f"{TO_DO}look at what the program does to the tensors named here on each rank; no machine need be drained"
    return _of_unknown(evidence)


def _of_unknown(evidence: Evidence) -> str:
    if evidence.origins:
        return f"{TO_DO}{_of_origin(evidence, min(evidence.origins, key=lambda one: bool(one.border)))}"
    copies = [sign for sign in evidence.signs.values() if sign.statistic == "checksum"]
    if copies:
        kind, name = copies[0].kind, copies[0].name
        return (
            f"{TO_DO}compare the copies before the next checkpoint is written: sentinel dump --kinds {kind} --targets "
            f"'{name}'; train on from the last checkpoint on which they agree"
        )
    tensors = [sign for sign in evidence.signs.values() if sign.kind != "scalar"]
    if evidence.num_quiet < QUIET_STEPS or not tensors:
        return ""
    name = min(tensors, key=lambda one: (one.first_step, one.phase, one.name)).name
    return f"{TO_DO}nothing now; to see more if it comes again: sentinel enable --targets '{name}*' --for-steps 500"


def _of_origin(evidence: Evidence, one: NonFiniteOrigin) -> str:
    """The experiments that tell data, code and machine apart: the same data elsewhere, and a look inside."""
    if one.phase is Phase.PARAM:
        see = "sentinel enable --kinds update,exp_avg,exp_avg_sq --for-steps 0"
        return f"go on from a checkpoint before step {one.step}, with the optimizer measured: {see}"
    whose = "its data on other nodes" if one.rank is None else f"the data of rank {one.rank} on another node"
    again = f"train step {one.step} again from a checkpoint before it, {whose}"
    notified = f"{again}: bad again means data or code, well means that node"
    steps = sorted({origin.step for origin in evidence.origins})
    inside = f"sentinel enable --targets '{one.name}*' --for-steps 500 shows the module inside if it comes again"
    if len(steps) > 1 and not one.border and one.phase is Phase.FORWARD:
        inside = f"sentinel dump --kinds activation_in,activation --targets '{one.name}' --for-steps 50 keeps what went in"
    return f"{notified}; {inside}" if one.phase is not Phase.LOSS else f"{notified}; log how many labels count in a step"


def _of_batch(evidence: Evidence, found: Diagnosis) -> str:
    whose = f" of rank {listed(evidence.ranks_of(found.skip_lanes))}" if found.skip_lanes else ""
    if not found.skip_steps:
        return f"{TO_DO}look at what the loader{whose} reads now; its steps are listed to be skipped when it is over"
    steps = _ranges(found.skip_steps)
    what = "batch" if len(found.skip_steps) == 1 else "batches"
    return (
        f"{TO_DO}nothing if the loss came back; else restart before step {min(found.skip_steps)} without the {what} of step "
        f"{steps}{whose} (sentinel.skip_list), and look at the samples"
    )


def _of_hardware(evidence: Evidence, found: Diagnosis) -> str:
    who = f"rank {listed(found.ranks)}" if len(found.ranks) == 1 else f"ranks {listed(found.ranks)} (either may be wrong)"
    since = found.since if found.since >= 0 else evidence.opened
    was_skipped = any(note.step == since and note.is_skipped for note in evidence.notes)
    kept = "a skipped step did not reach the weights" if was_skipped else f"go on from a checkpoint before step {since}"
    return f"{TO_DO}drain the node of {who} and test it; {kept}"


def _of_model(evidence: Evidence) -> str:
    before = f"a checkpoint before step {evidence.opened}"
    if evidence.jump is not None:
        return f"{TO_DO}put {evidence.jump.name} back, and if the loss does not come back go on from {before}"
    first = min(
        (one for one in evidence.signs.values() if one.kind != "scalar"), default=None,
        key=lambda one: (one.first_step, one.phase, one.name),
    )  # fmt: skip
    router = min(
        (one for one in evidence.signs.values() if _routes(one)), default=None, key=lambda one: (one.first_step, one.name)
    )
    if router is not None:
        name = router.name.partition(":")[0]
        return (
            f"{TO_DO}look at the loads of the router {name}, and at what keeps them even (auxiliary loss, z-loss, bias of "
            f"its experts); if it does not come back, go on from {before} with that made stronger"
        )
    look = f"look at {first.name} first" if first is not None else "look at what changed in the program"
    if any(sign.phase in (Phase.LOSS, Phase.NORM) or sign.is_bad for sign in evidence.signs.values()):
        return f"{TO_DO}{look}; if it grows, go on from {before} with a lower learning rate or a tighter clip"
    return f"{TO_DO}{look}; the loss does not show it yet"


def _routes(sign: Sign) -> bool:
    """Tell whether a sign is about how a mixture of experts chooses."""
    return sign.kind == "router" or (sign.kind == "param" and _ROUTER.search(sign.name) is not None)


def _ranges(steps: tuple[int, ...]) -> str:
    """`30`, `30 to 33`, `30, 35 to 36`"""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return listed(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)
