"""Goes on from incidents as they were written, where a run was judged anew: what people were told stays true.

An incident that both know has the number of its written revision; one that was closed stays closed; one that is open and
that judging anew does not find (what it began with is no longer recorded) stays open until a person ends it, or the
attempt is over.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sentinel.anomaly import Anomaly, is_nonfinite
from sentinel.incident import Incident
from sentinel.incidents.diagnosis.held import HeldDiagnosis
from sentinel.incidents.open_incident import OpenIncident
from sentinel.incidents.tracker_state import MAX_CLOSED, TrackerState
from sentinel.order.origin import origin

_OWN = frozenset({"revision", "members", "time", "acts"})
"""Fields that two ways of judging may differ in without saying anything else."""


def reconcile(
    state: TrackerState, written: Mapping[str, Incident], roots: Mapping[str, Anomaly], step: int
) -> list[Incident]:
    """Bring the tracker's incidents to what was written; return the revisions to write behind it.

    written: id -> newest revision of those that differ. roots: id of an anomaly -> that, of the first causes of the open
    ones. step: from which on judging began anew.
    """
    revisions = []
    known = {one.incident.id: one for one in (*state.open, *state.closed)}
    for former in written.values():
        one = known.get(former.id)
        if former.state != "open":
            if one is not None and one in state.open:
                state.open.remove(one)
                state.forget(one)
                one.incident = _laid_off(former)
                state.closed = [*state.closed, one][-MAX_CLOSED:]
            continue
        if one is not None:
            revisions += _renumbered(one, former)
            continue
        revisions.append(_adopted(state, former, roots, step))
    return revisions


def _renumbered(one: OpenIncident, former: Incident) -> list[Incident]:
    now = msgspec.structs.replace(one.incident, acts=former.acts)
    one.unpublished, one.num_withheld = [], 0
    is_same = all(getattr(now, name) == getattr(former, name) for name in Incident.__struct_fields__ if name not in _OWN)
    revision = former.revision + (not is_same)
    one.incident = msgspec.structs.replace(now, revision=revision, members=(), time=max(now.time, former.time))
    return [] if is_same else [one.incident]


def _adopted(state: TrackerState, former: Incident, roots: Mapping[str, Anomaly], step: int) -> Incident:
    root = roots.get(former.root or "")
    why = f"judged anew from step {step} on, after a repair: whether it goes on is not known; close it when it is over"
    is_over = root is None or former.attempt < state.attempt
    if is_over:
        why = f"attempt {state.attempt} had begun" if root is not None else "what it began with is no longer recorded"
    revision = msgspec.structs.replace(
        former, revision=former.revision + 1, members=(), evidence=(*former.evidence, why),
        state="ended" if is_over else "open",
    )  # fmt: skip
    if root is None or is_over:
        return revision
    causes = [roots[one] for one in former.first_causes if one in roots]
    adopted = OpenIncident(
        incident=revision, nature=former.nature or "finite", root=root, origin=origin(root, [root]), causes=causes or [root],
        last_bad_step=root.step if is_nonfinite(root) else -1, facts=revision.evidence, diagnosis=HeldDiagnosis.of(former),
        # An episode without an end: that nothing is heard of it is no sign that it is over.
        episodes={root.id: root.step},
    )  # fmt: skip
    state.owner[root.id] = former.id
    state.open.append(adopted)
    state.attempt = max(state.attempt, former.attempt)
    return revision


def _laid_off(incident: Incident) -> Incident:
    return msgspec.structs.replace(incident, members=())
