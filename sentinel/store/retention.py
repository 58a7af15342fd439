"""RetentionConfig: how much of a run the daemon keeps on disk, and for how long; the section `retention`."""

from __future__ import annotations

import math

import msgspec

from sentinel.errors import ConfigError

DAY_S = 86400.0


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much the daemon keeps of a run. Open incidents are kept with their evidence, whatever these say."""

    age_days: float = 90.0
    """Days for which decisions, anomalies and incidents that are over are kept. 0: age does not count."""

    journal_bytes: int = 2**30
    """Most bytes of the journal: when it is full, the older half of its decisions goes. About 200 bytes a step, and 600 an
    anomaly. A replay begins where the journal does. 0: no limit."""

    anomalies_bytes: int = 4 * 2**30
    """Most bytes of `anomalies/`: the oldest files go, whole. 0: no limit."""

    incidents_bytes: int = 2**28
    """Most bytes of `incidents.jsonl`: those that were over first go, with all their revisions. 0: no limit."""

    spool_bytes: int = 2**38
    """Most bytes of spool that processes which are gone leave in a run: of what was judged the oldest files go, all but the
    newest of each process. What a process that writes keeps is its own `spool.max_bytes`. 0: no limit."""

    def __post_init__(self) -> None:
        if not 0 <= self.age_days < math.inf:
            raise ConfigError(f"retention.age_days must be at least 0 and finite, got {self.age_days}")
        for name, least in (
            ("journal_bytes", 2**20), ("anomalies_bytes", 2**20), ("incidents_bytes", 2**16),
            ("spool_bytes", 2**20),
        ):  # fmt: skip
            value = getattr(self, name)
            if value and value < least:
                raise ConfigError(f"retention.{name} must be 0 (no limit) or at least {least}, got {value}")

    @property
    def age_s(self) -> float:
        """`age_days` in seconds; infinite where age does not count."""
        return self.age_days * DAY_S or math.inf
