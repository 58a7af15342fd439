"""The words of a message: its headline, the facts of an incident, and the alert that `sentinel notify test` sends."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sentinel.anomaly import Severity
from sentinel.incident import Incident
from sentinel.report.alert import Alert


def headline(alert: Alert) -> str:
    """Return one line: what changed, how bad, where. `CRITICAL loss-spike in run a, step 12`."""
    incident = alert.incident
    level = incident.severity.value.upper()
    words = {"opened": level, "raised": f"now {level}", "worse": f"{level}, several times worse"}
    word = words.get(alert.change, alert.change)
    repeated = " (repeated)" if alert.repeated else ""
    step = f"step {incident.opened_step}"
    since = "" if re.search(rf"\b{step}\b", incident.title) else f", {step}"
    return f"{word}: {incident.title}, run {incident.run}{since}{repeated}"


def facts(incident: Incident) -> list[tuple[str, str]]:
    """Return (name, text) of what a person asks, the first question first, empty ones left out."""
    ranks = ", ".join(map(str, incident.ranks[:16]))
    ranks += f" and {len(incident.ranks) - 16} more" if len(incident.ranks) > 16 else ""
    suspected = incident.suspected if incident.suspected != "unknown" else "not known" if incident.reasons else ""
    pairs = [
        ("what to do", incident.to_do),
        ("cause", suspected),
        ("because", "; ".join(incident.reasons[:4])),
        ("batches to skip", _skipped(incident)),
        ("began with", incident.root_name),
        ("module", incident.module),
        ("segment", incident.segment),
        ("ranks", ranks),
        ("known", "; ".join(incident.facts[:4])),
        ("steps", incident.steps),
        ("anomalies", str(incident.num_members) if incident.num_members else ""),
        ("detectors", ", ".join(incident.detectors[:8])),
        ("people", "; ".join(act.in_words for act in incident.acts[-3:])),
        ("merged into", incident.merged_into or ""),
    ]
    return [(name, text) for name, text in pairs if text]


def _skipped(incident: Incident) -> str:
    if not incident.skip_steps:
        return ""
    words = f"step{'s' if len(incident.skip_steps) > 1 else ''} {', '.join(map(str, incident.skip_steps[:16]))}"
    if incident.skip_ranks:
        words += f", the part of rank {', '.join(map(str, incident.skip_ranks[:16]))}"
    return words + (f"; {len(incident.skip_samples)} samples" if incident.skip_samples else "")


def worst_first(alerts: Sequence[Alert]) -> list[Alert]:
    """Return alerts with pages first, then by severity, then oldest first."""
    return sorted(alerts, key=lambda one: (not one.is_page, -one.incident.severity.level, one.created, one.key))


def sample_alert(sink: str, now: float) -> Alert:
    """Return an alert that says it is a test, for `sentinel notify test`."""
    incident = Incident(
        id="i000000000000", revision=1, run="test", attempt=0, state="open", opened_step=0, last_step=0,
        severity=Severity.WARNING, title="this is a test of Sentinel's notifications", root=None, time=now,
    )  # fmt: skip
    return Alert(key=f"{sink}:test:{incident.id}:{now:.3f}", sink=sink, change="opened", incident=incident, created=now)
