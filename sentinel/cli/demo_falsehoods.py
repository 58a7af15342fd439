"""What was reported in a demo and is not true: every incident and every message, compared with what was planted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sentinel.anomaly import Anomaly, Severity
from sentinel.incident import Incident

if TYPE_CHECKING:
    from sentinel.cli.demo_plan import DemoPlan

OF_TIME = frozenset({"SlowRank"})
"""Detectors of ranks that others waited for: on a busy machine they truly did."""


def falsehoods(
    plan: DemoPlan, anomalies: Sequence[Anomaly], revisions: Iterable[Incident], texts: Iterable[str] = ()
) -> list[str]:
    """Return what is not true, each thing once, in words; empty: nothing.

    revisions: of all incidents, as written and as sent. texts: messages as people read them; each is to be about one of the
    incidents.
    """
    roots = {one.id: one for one in anomalies}
    found: dict[str, None] = {}
    titles = set()
    for one in revisions:
        titles.add(one.title)
        why = _why_false(plan, roots, one) if one.severity is not Severity.INFO else ""
        if why:
            found[f'"{one.title}": {why}'] = None
    for text in texts:
        if not any(title in text for title in titles):
            found[f'a message about no incident: "{text[:80]}"'] = None
    return list(found)


def is_of_time(one: Incident) -> bool:
    """Return whether an incident is about ranks that others waited for."""
    return bool(one.detectors) and OF_TIME.issuperset(one.detectors)


def _why_false(plan: DemoPlan, roots: Mapping[str, Anomaly], one: Incident) -> str:
    """Return what is not true of a revision that people are notified of; empty: all of it is true."""
    if is_of_time(one):
        return ""
    if one.opened_step == plan.batch_step:
        if one.suspected not in ("unknown", "batch"):
            return f"suspects {one.suspected}, and a batch was planted"
        if not set(one.skip_steps) <= {plan.batch_step} or one.skip_ranks:
            return f"would skip steps {one.skip_steps} of ranks {one.skip_ranks or 'all'}, and one batch of all was planted"
        return ""
    if one.opened_step != plan.nan_steps[0]:
        return f"nothing was planted at step {one.opened_step}; it follows from what was"
    root = roots.get(one.root or "")
    if root is not None and (root.rank, root.micro_step) != (plan.rank, plan.micro_step):
        return f"names rank {root.rank}, micro-batch {root.micro_step}"
    if one.segment != plan.segment or one.module not in ("", plan.module):
        return f"names {one.module or one.segment}"
    if one.suspected not in ("unknown", "program") or one.skip_steps:
        return f"suspects {one.suspected}, and a module's output was overwritten: no batch, no model, no machine"
    return ""
