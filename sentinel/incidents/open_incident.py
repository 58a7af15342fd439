"""An open incident: its newest revision, and what is needed to know what it explains and what it makes one suspect."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from sentinel.anomaly import Anomaly, Incident
from sentinel.incidents.diagnosis.advice import advice
from sentinel.incidents.diagnosis.diagnose import suspect
from sentinel.incidents.diagnosis.evidence import Evidence
from sentinel.order.causal import is_nonfinite
from sentinel.order.origin import Origin
from sentinel.order.phase import Phase, phase_of
from sentinel.order.wording import born_words, root_words, title_words

SUSPECTED = "suspected "
"""What the lines of evidence begin with that give the reasons of the verdict; all others are facts."""


class OpenIncident(msgspec.Struct, kw_only=True):
    """An open incident: its newest revision, and what is needed to know what it explains."""

    incident: Incident
    nature: str
    """`nonfinite`, `finite`, or `liveness`."""
    root: Anomaly
    origin: Origin
    causes: list[Anomaly]
    last_bad_step: int
    """Newest step with a non-finite member; -1: none."""
    was_skipped: bool = False
    """The optimizer skipped `last_bad_step`: its NaN did not reach the weights."""
    episodes: dict[str, int] = {}
    """Ids of onsets without an end, to the step of each."""
    series: dict[str, int] = {}
    """Keys of the series that belong here, to the step they last joined."""
    has_settled: bool = False
    num_unnamed: int = 0
    """First causes that the cap left out."""
    case: Evidence = msgspec.field(default_factory=lambda: Evidence(opened=-1))
    """What it has shown, for the verdict."""
    facts: tuple[str, ...] = ()
    """Evidence that stays whatever is suspected."""

    def revise(self, *, state: str | None = None, evidence: str | None = None) -> None:
        """Give it another state, or one more fact."""
        if state is not None:
            self.incident = msgspec.structs.replace(self.incident, state=state)
        if evidence is not None:
            self.facts = (*self.facts, evidence)
            reasons = [line for line in self.incident.evidence if line.startswith(SUSPECTED)]
            self.incident = msgspec.structs.replace(self.incident, evidence=(*reasons, *self.facts))

    def suspect(self) -> None:
        """Say what it makes one suspect now, and why."""
        now, found = self.incident, suspect(self.case)
        todo = advice(self.case, found)
        lines = (*found.reasons, todo) if todo else found.reasons
        reasons = tuple(f"{SUSPECTED}{found.verdict}: {reason}" for reason in lines)
        told = tuple(line for line in now.evidence if line.startswith(SUSPECTED))
        is_same = (found.verdict, found.skip_steps) == (now.verdict, now.skip_steps)
        if is_same and (found.verdict != "unknown" or _without_figures(told) == _without_figures(reasons)):
            reasons = told  # Figures that grow from step to step are no news.
        if found.verdict != now.verdict and now.verdict != "unknown":
            self.facts = (*self.facts, f"{now.verdict} was suspected until step {max(self.case.seen, now.last_step)}")
        samples: tuple[int | str, ...] = ()
        if found.skip_steps:
            samples = self.case.samples_of(found.skip_steps, found.skip_lanes)
        self.incident = msgspec.structs.replace(
            now, verdict=found.verdict, evidence=(*reasons, *self.facts), skip_steps=found.skip_steps,
            skip_ranks=self.case.ranks_of(found.skip_lanes), skip_samples=samples,
        )  # fmt: skip


_FIGURES = re.compile(r"\d+")


def _without_figures(lines: Iterable[str]) -> list[str]:
    return [_FIGURES.sub("", line) for line in lines]


def age(one: OpenIncident) -> tuple[int, int, str]:
    return one.incident.attempt, one.incident.opened_step, one.incident.id


def series_of(anomaly: Anomaly) -> str:
    return f"{anomaly.kind}/{anomaly.tag_name}"


def says_settled(end: Anomaly) -> bool:
    return "settled" in end.message or "level shift" in end.message


def has_bad_episode(one: OpenIncident) -> bool:
    """Tell whether the root's own non-finite episode still goes on."""
    return is_nonfinite(one.root) and one.root.id in one.episodes


def is_same_place(one: OpenIncident, causes: list[Anomaly], born: Origin) -> bool:
    if one.origin.phase != born.phase:
        return False
    first = one.causes[0] if one.causes else one.root
    if one.origin.segment and one.origin.segment == born.segment:
        return True
    if born.module and born.module == one.origin.module:
        return True
    return any(series_of(cause) == series_of(first) for cause in causes)


def refine(one: OpenIncident, cause: Anomaly, born: Origin) -> None:
    """Name the module where the root was only a segment, now that a recurrence was seen from inside."""
    if one.incident.module or not born.module or one.origin.segment != born.segment:
        return
    one.origin = msgspec.structs.replace(one.origin, name=born.name, module=born.module)
    if born.rank in one.origin.ranks and not born.ranks:
        one.origin = msgspec.structs.replace(one.origin, rank=born.rank, ranks=())
    one.incident = msgspec.structs.replace(
        one.incident,
        module=born.module,
        root_name=f"{root_words(one.root, one.origin)}, refined at step {cause.step}",
        title=title_words(one.root, one.origin),
    )
    one.revise(evidence=f"refined at step {cause.step} by module monitoring: {born_words(cause, born)}")


def opening_facts(nature: str, root: Anomaly, causes: list[Anomaly], group: list[Anomaly]) -> tuple[str, ...]:
    """What is known when an incident opens: facts alone."""
    if nature != "nonfinite":
        return ()
    border = f" (border {root.border})" if root.border else ""
    facts = [f"first bad: {root.kind} of {root.tag_name}{border}"]
    phase = phase_of(root.kind, root.tag_name)
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        said = "before it in forward" if phase is Phase.FORWARD else "in forward, nor before it in backward"
        span = "step" if root.micro_step is None else "micro_step"
        facts.append(f"nothing non-finite was measured {said}, in that {span} of its replica")
    others = sorted({a.rank for a in causes if a.rank is not None and a.rank != root.rank})
    if others:
        shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        facts.append(f"first bad independently on {len(others) + 1} ranks: {root.rank}, {shown}")
    elif root.rank is not None and root.dp_size > 1:
        lanes = {a.place.get("dp") for a in group if a.rank is not None}
        if len(lanes) == 1:
            facts.append(f"one of {root.dp_size} data-parallel replicas")
    return tuple(facts)
