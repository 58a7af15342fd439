"""Anomaly and its severity: their JSON is public."""

from __future__ import annotations

import enum
import hashlib

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
    """How far reference runs on the same data moved at this step, in units of score: at least 1: they moved too.
    Null: there is no reference."""
    dtype: str = ""
    """Type of the tensor's numbers: `float16`, `bfloat16`, `float32`; empty: not known, or none."""
    moved_ranks: tuple[int, ...] = ()
    """Of `group_mates`, those whose own part moved past the bound too; empty: not known, or nobody's alone."""

    @property
    def excess(self) -> float:
        """Distance of the value from its baseline, in the statistic's unit; 0.0 where either is not known."""
        return abs(self.value - self.baseline) if self.value is not None and self.baseline is not None else 0.0


_LIVENESS = frozenset({"StaleRank", "SlowRank"})
"""Detectors of what comes late."""


def is_liveness(anomaly: Anomaly) -> bool:
    """Tell whether the anomaly is about ranks and rows that do not come, rather than about numbers that do."""
    return anomaly.kind == "health" or anomaly.detector in _LIVENESS


def is_nonfinite(anomaly: Anomaly) -> bool:
    """Tell whether the anomaly is about NaN or infinite values."""
    return bool(anomaly.value_text) or anomaly.statistic in ("nans", "infs")


def anomaly_id(
    run: str, attempt: int, step: int, micro_step: int | None, rank: int | None, series: str, rule: str, event: str = "onset"
) -> str:
    """Return the 16 hex digits that name an anomaly: the same fact has the same id on every replay."""
    text = "\x1f".join(map(str, (run, attempt, step, micro_step, rank, series, rule, event)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
