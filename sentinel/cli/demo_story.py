"""The end of the demo: what was planted, what was found when, and where the files lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sentinel.cli.demo_plan import DemoOutcome, DemoPlan, describe
from sentinel.cli.demo_receiver import Message


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the end of the demo shows."""

    plan: DemoPlan
    outcome: DemoOutcome
    topk: dict[int, list[dict[str, Any]]]
    """Step -> rows of `sentinel topk`, first causes first."""
    messages: list[Message]
    gauges: list[str]
    run_dir: Path
    url: str
    seconds: float
    postmortem: str = ""
    """File of the run's post-mortem; empty: it could not be written."""

    def report(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "ok": self.outcome.holds,
            "seconds": round(self.seconds, 1),
            "planted": msgspec.to_builtins(self.plan),
            **msgspec.to_builtins(self.outcome),
            "topk": {str(step): found for step, found in self.topk.items()},
            "alerts": msgspec.to_builtins(self.messages),
            "gauges": self.gauges,
            "directory": str(self.run_dir),
            "page": self.url,
            "postmortem": self.postmortem,
        }


def story(scene: Scene) -> Iterator[str]:
    """Yield the demo's end as lines: what was planted, what was known when, who was notified, where it all lies."""
    plan, outcome = scene.plan, scene.outcome
    yield ""
    yield "PLANTED (the daemon was not told)"
    yield f"  step {plan.batch_step}: a corrupted batch on every replica"
    yield (
        f"  steps {', '.join(map(str, plan.nan_steps))}: a NaN in the output of {plan.module} on rank {plan.rank}, "
        f"micro-batch {plan.micro_step}; the trainer skips such steps"
    )
    if outcome.black_box_step is not None:
        yield ""
        yield f"WHAT THE BLACK BOX KNEW, step {outcome.black_box_step}: {describe(outcome.black_box)}"
        yield from _table(scene.topk.get(outcome.black_box_step, []))
    if outcome.escalated_step is not None:
        yield ""
        yield f"WHAT ESCALATION ADDED, step {outcome.escalated_step}: {describe(outcome.escalated)}"
        yield from _table(scene.topk.get(outcome.escalated_step, []))
    yield ""
    yield "ALERTS SENT"
    for message in scene.messages:
        if message.to == "Slack":
            yield f"  {message.to}: {message.text}"
            for block in message.body.get("blocks", []):
                if block["type"] == "section":
                    yield from (f"      {line}" for line in str(block["text"]["text"]).splitlines())
    notified = {name: sum(one.to == name for one in scene.messages) for name in ("Alertmanager", "webhook")}
    yield "  and " + ", ".join(f"{count} requests to the {name}" for name, count in notified.items())
    yield ""
    yield "GAUGES (/metrics)"
    yield from (f"  {line}" for line in scene.gauges)
    yield ""
    yield "FILES"
    yield f"  {scene.run_dir}"
    yield "  anomalies/*.jsonl, incidents.jsonl, spool/, control/, .daemon/ (journal, log), demo/ (trainer's log)"
    if outcome.incident is not None:
        yield f"  sentinel explain {outcome.incident.id} -d {scene.run_dir}"
    if scene.postmortem:
        yield f"  report: {scene.postmortem} (sentinel report {scene.run_dir} writes it again)"
    yield f"  page: {scene.url} (while the daemon runs: sentinel demo --keep, or sentinel serve {scene.run_dir})"
    yield ""
    for claim in outcome.claims:
        yield f"{'FOUND ' if claim.holds else 'MISSED'}  {claim.text}: {claim.found}"
    words = "everything planted was found, and nothing false was told"
    yield f"{'' if outcome.holds else 'NOT '}{words}; {scene.seconds:.0f} s"


def _table(anomalies: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "      rank  micro  kind           tensor                        segment     value"
    for at, one in enumerate(anomalies, 1):
        rank = "all" if one["rank"] is None else one["rank"]
        micro = "-" if one["micro_step"] is None else one["micro_step"]
        value = one.get("value_text") or one.get("value")
        yield (
            f"  {at:>2}. {rank!s:>4}  {micro!s:>5}  {one['kind']:<13}  {one['tag_name']:<28}  {one.get('segment', ''):<10}"
            f"  {one['statistic']} {value}"
        )
