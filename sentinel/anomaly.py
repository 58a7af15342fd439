"""Anomaly, Incident, IncidentAct and Severity: their JSON is public."""

from __future__ import annotations

import enum
import hashlib
from datetime import UTC, datetime

import msgspec


class Severity(enum.Enum):
    """How much an anomaly matters: `info` is written down, `warning` is shown, `critical` pages."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def level(self) -> int:
        """0, 1, 2: larger is worse."""
        return _LEVELS[self]


_LEVELS = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


class Anomaly(msgspec.Struct, frozen=True, kw_only=True):
    """A fact: this series broke this rule at this step and place. Immutable; one line of `anomalies/*.jsonl`.

    Non-finite values are written as null beside `value_text` (`nan`, `inf`, `-inf`), so that the JSON stays strict.
    """

    id: str
    """`anomaly_id` of the identity: run, attempt, step, micro_step, rank or null, series, rule."""
    run: str
    attempt: int
    rank: int | None
    """The rank whose own row shows it; null when ranks were merged, then see `ranks`."""
    ranks: tuple[int, ...] = ()
    step: int
    micro_step: int | None
    """Null for what belongs to no micro-batch, and for a finite value of a row folded over several."""
    pp_stage: int
    vpp_stage: int
    call_id: int | None
    tag_name: str
    """Canonical name of the tensor: a parameter, a module (its output), or a scalar's name."""
    kind: str
    statistic: str
    rule: str
    detector: str
    severity: Severity
    value: float | None
    value_text: str = ""
    """`nan`, `inf`, `-inf` when value is null for that reason; empty otherwise."""
    baseline: float | None = None
    score: float | None = None
    """At least 1 is anomalous; null for absolute rules whose score is infinite."""
    message: str = ""
    group_mates: tuple[int, ...] = ()
    """Ranks that hold the same tensor (its replicas and shards)."""
    time: float = 0.0
    """Seconds since the epoch by the record's own clock."""
    event: str = "onset"
    """`onset`, `end` (count says how many steps it lasted) or `truncated` (count says how many were not written)."""
    count: int = 1
    onset_id: str | None = None
    """For `end`: the id of the onset."""
    depth: int = 0
    """Place of the chunk in the forward order of the whole model."""
    site_pos: int = 0
    place: dict[str, int] = {}
    """Split axes to the coordinate of `rank` (`Place.coordinates`); empty when merged."""
    consumers: tuple[str, ...] = ()
    """Canonical names of the modules that read this same tensor."""
    also: tuple[str, ...] = ()
    segment: str = ""
    """Segment of the black box in which this was made: known for borders, and for modules inside one."""
    border: str = ""
    """Which border of the black box the tensor is; empty: none."""
    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    """Ranks of the data-parallel axis that share one set of experts."""
    communicates: bool = False
    """The module exchanges data inside its tensor- or context-parallel group."""
    num_members: int = 0
    """Of a group of tensors that a rule merges: how many were merged; 0: this is no group."""
    members: tuple[str, ...] = ()
    """Their names, sorted; empty where they are too many to list."""
    members_id: str = ""
    """Where they are: a hash of their names, equal for equal members."""
    reference_score: float | None = None
    """How far sister runs on the same data moved at this step, in units of score: at least 1: they moved too.
    Null: there is no reference."""
    dtype: str = ""
    """Type of the tensor's numbers: `float16`, `bfloat16`, `float32`; empty: not known, or none."""
    moved_ranks: tuple[int, ...] = ()
    """Of `group_mates`, those whose own part moved past the bound too; empty: not known, or nobody's alone."""

    @property
    def excess(self) -> float:
        """Distance of the value from its baseline, in the statistic's unit; 0.0 where either is not known."""
        return abs(self.value - self.baseline) if self.value is not None and self.baseline is not None else 0.0


SUSPECTED = "suspected "
"""What the lines of evidence begin with that give the reasons of the diagnosis told; all others are facts."""
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
    verdict: str = "unknown"
    evidence: tuple[str, ...] = ()
    """Facts as they became known, the reasons of the verdict among them: those of an older verdict stay, and say so."""
    skip_steps: tuple[int, ...] = ()
    """Of a `batch` verdict: the steps whose batches are suspected, oldest first."""
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
    """Times that it became several times worse than what its title had told; each is told."""
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
        return tuple(reason for reason in self._suspicions if not reason.startswith(TO_DO))

    @property
    def to_do(self) -> str:
        """What to do now, in a sentence; empty: nothing is known to do."""
        return next((reason.removeprefix(TO_DO) for reason in self._suspicions if reason.startswith(TO_DO)), "")

    @property
    def facts(self) -> tuple[str, ...]:
        """Evidence that holds whatever is suspected, and what was suspected before."""
        return tuple(line for line in self.evidence if not line.startswith(SUSPECTED))

    @property
    def _suspicions(self) -> list[str]:
        return [line.partition(": ")[2] for line in self.evidence if line.startswith(SUSPECTED)]

    def acknowledged(self, now: float) -> IncidentAct | None:
        """Return the acknowledgement that holds at `now`, seconds since the epoch; None: nobody says that he works on it."""
        last = self.acts[-1] if self.acts else None
        if last is None or last.act != "ack" or 0.0 < last.until <= now:
            return None
        return last


CLOSED_STATES = frozenset({"resolved", "settled", "ended", "closed", "merged"})
"""States of an incident that is over."""


def anomaly_id(
    run: str, attempt: int, step: int, micro_step: int | None, rank: int | None, series: str, rule: str, event: str = "onset"
) -> str:
    """Return the 16 hex digits that name an anomaly: the same fact has the same id on every replay."""
    text = "\x1f".join(map(str, (run, attempt, step, micro_step, rank, series, rule, event)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def incident_id(run: str, attempt: int, step: int, detector: str, root: str) -> str:
    """Return `i` and 12 hex digits that name an incident, from what was known at its first anomaly."""
    text = "\x1f".join(map(str, (run, attempt, step, detector, root)))
    return "i" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
