"""Incident, its revisions and what people did about it: their JSON is public."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import msgspec

from sentinel.anomaly import Severity

SUSPECTED = "suspected "
"""Prefix of the lines of evidence that are reasons of the diagnosis in the notice; all other lines are facts."""
TO_DO = "to do: "
"""What the reason begins with that says what to do."""


class IncidentAct(msgspec.Struct, frozen=True, kw_only=True):
    """What a person did about an incident."""

    incident: str
    act: str
    """`ack` (somebody works on it), `resolve` (it is over) or `reopen` (it is not)."""
    who: str
    why: str = ""
    until: float = 0.0
    """Of `ack`: seconds since the epoch until which it holds; 0: until the incident ends."""
    time: float = 0.0
    """Seconds since the epoch."""
    id: str = ""
    """Names the act, so that it is taken once."""

    @property
    def in_words(self) -> str:
        """`acknowledged by ana until 2026-11-22 14:30 UTC: the node is drained`"""
        did = {"ack": "acknowledged", "resolve": "closed", "reopen": "reopened"}.get(self.act, self.act)
        until = f" until {datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M} UTC" if self.until else ""
        return f"{did} by {self.who}{until}" + (f": {self.why}" if self.why else "")


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of an incident: anomalies that follow from the same first causes; one line of `incidents.jsonl`."""

    id: str
    revision: int
    run: str
    attempt: int
    state: str
    """`open`, `resolved` (quiet), `settled` (a level shift became the new normal), `ended` (the run ended, or began anew),
    `closed` (by a person) or `merged` (into `merged_into`)."""
    opened_step: int
    last_step: int
    severity: Severity
    title: str
    root: str | None
    """Id of the anomaly that came first (the first of the first causes in the total order)."""
    root_name: str = ""
    """Where it came from, in words: module or segment, kind, rank, micro_step."""
    first_causes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    """Ids of the anomalies that joined with this revision (not all of them: revisions add up)."""
    num_members: int = 0
    detectors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    suspected: str = msgspec.field(default="unknown", name="verdict")
    evidence: tuple[str, ...] = ()
    """Facts as they became known, the reasons of the diagnosis among them: those of an older one stay, and say so."""
    skip_steps: tuple[int, ...] = ()
    """Of a `batch` diagnosis: the steps whose batches are suspected, oldest first."""
    skip_ranks: tuple[int, ...] = ()
    """The ranks whose part of those batches it was; empty: all."""
    skip_samples: tuple[int | str, ...] = ()
    """The ids of the samples of those steps, where the trainer logged them."""
    segment: str = ""
    module: str = ""
    """Refined root, when module monitoring caught the fault in the act."""
    paged: bool = False
    """A page was due: something in it is corroborated, non-finite, or in the loss, and critical."""
    merged_into: str | None = None
    time: float = 0.0
    num_worse: int = 0
    """Times that it became several times worse than its title said; a notice is sent of each."""
    acts: tuple[IncidentAct, ...] = ()
    """What people did about it, oldest first."""
    nature: str = ""
    """The kind of harm: `nonfinite`, `finite`, or `liveness` (ranks and rows that do not come); empty: an older record."""
    active_step: int = -1
    """Newest step, when this was written, in which something of it was anomalous: what goes on makes no anomaly of its own
    in each step, so that `last_step`, the newest of its anomalies, may be older. -1: not known."""

    @property
    def steps(self) -> str:
        """The steps that it spans, in words: `230 to 280`."""
        return f"{self.opened_step} to {max(self.last_step, self.active_step)}"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why what is suspected is suspected, in plain words; without what to do."""
        return tuple(reason for reason in self._reasons if not reason.startswith(TO_DO))

    @property
    def to_do(self) -> str:
        """What to do now, in a sentence; empty: nothing is known to do."""
        return next((reason.removeprefix(TO_DO) for reason in self._reasons if reason.startswith(TO_DO)), "")

    @property
    def facts(self) -> tuple[str, ...]:
        """Evidence that holds whatever is suspected, and what was suspected before."""
        return tuple(line for line in self.evidence if not line.startswith(SUSPECTED))

    @property
    def _reasons(self) -> list[str]:
        return [line.partition(": ")[2] for line in self.evidence if line.startswith(SUSPECTED)]

    def acknowledged(self, now: float) -> IncidentAct | None:
        """Return the acknowledgement that holds at `now`, seconds since the epoch; None: nobody says that he works on it."""
        last = self.acts[-1] if self.acts else None
        if last is None or last.act != "ack" or 0.0 < last.until <= now:
            return None
        return last


CLOSED_STATES = frozenset({"resolved", "settled", "ended", "closed", "merged"})
"""States of an incident that is over."""


def incident_id(run: str, attempt: int, step: int, detector: str, root: str) -> str:
    """Return `i` and 12 hex digits that name an incident, from what was known at its first anomaly."""
    text = "\x1f".join(map(str, (run, attempt, step, detector, root)))
    return "i" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
