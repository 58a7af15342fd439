"""What the demo plants, and the judgement of whether it was found, from the run's files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Anomaly, Severity, is_nonfinite
from sentinel.cli.demo_falsehoods import falsehoods, is_of_time
from sentinel.incident import Incident
from sentinel.order.causes import leading_causes
from sentinel.order.origin import Origin, origin


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The faults that are planted, known to the trainer and to this file, never to the daemon."""

    num_steps: int = 290
    step_time_s: float = 0.0
    """Seconds that a step takes at least."""
    batch_step: int = 160
    """Step whose batch is corrupted, on every replica."""
    nan_steps: tuple[int, ...] = (230, 240, 250, 260, 270, 280)
    """Steps at which the planted module puts a NaN into its output."""
    module: str = "blocks.1.mlp.fc1"
    segment: str = "blocks.1"
    dp_rank: int = 1
    rank: int = 1
    """Global rank of that replica on the stage that holds the module: 2 stages x 2 replicas, replicas innermost."""
    micro_step: int = 2

    def faults(self) -> list[dict[str, Any]]:
        """Return what the trainer's --faults file says."""
        return [
            {"type": "batch", "steps": [self.batch_step]},
            {
                "type": "nan", "module": self.module, "phase": "forward", "steps": self.nan_steps,
                "dp_rank": self.dp_rank, "micro_step": self.micro_step,
            },
        ]  # fmt: skip


FLEET_PLAN = DemoPlan(
    num_steps=330, step_time_s=0.15, batch_step=80, nan_steps=tuple(range(170, 330, 10)), module="blocks.2.mlp.fc1",
    segment="blocks.2", rank=3,
)  # fmt: skip
"""Of two nodes with two ranks each: the NaN is on the second node. It comes again for 24 s at least, by the seconds that a
step takes: the join is away for 12 s, from when it has told of the batch, which on a busy machine is late; then it looks
closer."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the demo promises, and what was found."""

    text: str
    holds: bool
    found: str


class DemoOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of the faults of a plan, from the run's files."""

    claims: tuple[Claim, ...]
    incident: Incident | None
    """The incident of the NaN, newest revision."""
    black_box_step: int | None
    black_box: Origin | None
    """Origin as known at the first occurrence, from the black box alone."""
    escalated_step: int | None
    escalated: Origin | None
    """Origin as known at the first occurrence after modules were monitored."""

    @property
    def holds(self) -> bool:
        """Everything that was planted was found, and nothing false was reported."""
        return all(claim.holds for claim in self.claims)


def judge(
    plan: DemoPlan,
    anomalies: Sequence[Anomaly],
    incidents: Iterable[Incident],
    notified: Iterable[Incident],
    *,
    num_judged: int,
    num_dropped: int,
    texts: Sequence[str] = (),
) -> DemoOutcome:
    """Return what was found. incidents: all revisions, as written; notified: incidents that receivers were notified of.

    num_judged: steps; num_dropped: rows. Silence counts for something only where everything was looked at.
    texts: messages as people read them.
    """
    onsets = [one for one in anomalies if one.event == "onset"]
    incidents, notified = list(incidents), list(notified)
    newest = {one.id: one for one in incidents}
    false = falsehoods(plan, anomalies, [*incidents, *notified], texts)
    early = [one for one in notified if one.opened_step < plan.batch_step and not is_of_time(one)]
    spikes = [one for one in onsets if one.detector == "LossSpike"]
    first_step, escalated_step = _occurrences(plan, onsets)
    black_box = _root(onsets, first_step)
    escalated = _root(onsets, escalated_step)
    incident = _incident_of(newest.values(), onsets, first_step)
    claims = (
        Claim(
            text=f"all {plan.num_steps} steps were judged, no row lost",
            holds=num_judged == plan.num_steps and not num_dropped,
            found=f"{num_judged} steps, {num_dropped} rows lost",
        ),
        Claim(
            text=f"{plan.batch_step} healthy steps: nobody was told of anything but ranks that were waited for",
            holds=not early,
            found="silence" if not early else early[0].title,
        ),
        Claim(
            text=f"the corrupted batch of step {plan.batch_step} is a loss spike, and somebody was told",
            holds=any(one.step == plan.batch_step for one in spikes)
            and any("LossSpike" in one.detectors and one.opened_step == plan.batch_step for one in notified),
            found=", ".join(f"LossSpike at step {one.step}" for one in spikes) or "no loss spike",
        ),
        Claim(
            text=f"at step {plan.nan_steps[0]} the black box names segment, rank and micro-batch",
            holds=first_step == plan.nan_steps[0]
            and black_box is not None
            and (black_box.segment, black_box.rank, black_box.micro_step) == (plan.segment, plan.rank, plan.micro_step),
            found=describe(black_box),
        ),
        Claim(
            text="the alarm switches module monitoring on, and a later occurrence names module, rank and micro-batch",
            holds=escalated is not None
            and (escalated.module, escalated.rank, escalated.micro_step) == (plan.module, plan.rank, plan.micro_step),
            found=describe(escalated) + ("" if escalated_step is None else f", step {escalated_step}"),
        ),
        Claim(
            text="the incident's root is refined to the module",
            holds=incident is not None and incident.module == plan.module,
            found="no incident" if incident is None else incident.root_name or "no root",
        ),
        Claim(
            text="a critical incident was told to the receiver",
            holds=incident is not None
            and any(one.id == incident.id and one.severity is Severity.CRITICAL for one in notified),
            found=f"{len({one.id for one in notified})} incidents told",
        ),
        Claim(
            text="nothing else was told, and nothing that is not true",
            holds=not false,
            found="; ".join(false)
            or f"{len(notified)} messages about {len({one.id for one in notified})} incidents, all true",
        ),
    )
    return DemoOutcome(
        claims=claims,
        incident=incident,
        black_box_step=first_step,
        black_box=black_box,
        escalated_step=escalated_step,
        escalated=escalated,
    )


def describe(found: Origin | None) -> str:
    """Return an origin in a few words."""
    if found is None:
        return "nothing"
    where = f"module {found.module}" if found.module else f"segment {found.segment or found.name}"
    micro_step = "" if found.micro_step is None else f", micro-batch {found.micro_step}"
    return f"{where}, {found.phase}, rank {found.rank}{micro_step}"


def _occurrences(plan: DemoPlan, onsets: Sequence[Anomaly]) -> tuple[int | None, int | None]:
    bad = sorted({one.step for one in onsets if is_nonfinite(one)})
    inside = sorted(
        {one.step for one in onsets if is_nonfinite(one) and one.kind == "activation" and not one.border}
        | {one.step for one in onsets if is_nonfinite(one) and one.tag_name == plan.module and one.kind == "activation"}
    )
    return (bad[0] if bad else None), (inside[0] if inside else None)


def _root(onsets: Sequence[Anomaly], step: int | None) -> Origin | None:
    here = [one for one in onsets if one.step == step]
    roots = leading_causes(here)
    return origin(here[roots[0]], here) if roots else None


def _incident_of(incidents: Iterable[Incident], onsets: Sequence[Anomaly], step: int | None) -> Incident | None:
    bad = {one.id for one in onsets if one.step == step and is_nonfinite(one)}
    for one in incidents:
        if one.root in bad or not bad.isdisjoint(one.first_causes):
            return one
    return None
