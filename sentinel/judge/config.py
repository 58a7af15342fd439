"""When a step is judged, and how much of it is written down: the `judging` section of the daemon's configuration."""

from __future__ import annotations

import math

import msgspec

from sentinel.errors import ConfigError


class JudgingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a step is judged, and how much of it is written down."""

    late_after_steps: int = 2
    """A rank this many steps behind the newest is late: its step closes without it. 0: only the time limit counts."""

    late_after_s: float = 30.0
    """A rank that keeps the others waiting for so many seconds is late. 0: only the steps count."""

    max_anomalies_per_step: int = 1000
    """Most anomalies written for one step; one `truncated` record says how many more there were."""

    snapshot_interval_s: float = 10.0
    """Least seconds between two snapshots of the baselines; a restart judges again what came after the last one."""

    def __post_init__(self) -> None:
        if self.late_after_steps < 0:
            raise ConfigError(f"judging.late_after_steps must be at least 0, got {self.late_after_steps}")
        if not 0 <= self.late_after_s < math.inf:
            raise ConfigError(f"judging.late_after_s must be at least 0 and finite, got {self.late_after_s}")
        if not self.late_after_steps and not self.late_after_s:
            raise ConfigError(
                "judging.late_after_steps and judging.late_after_s must not both be 0: no step would ever close"
            )
        if self.max_anomalies_per_step < 1:
            raise ConfigError(f"judging.max_anomalies_per_step must be at least 1, got {self.max_anomalies_per_step}")
        if not 0 <= self.snapshot_interval_s < math.inf:
            raise ConfigError(f"judging.snapshot_interval_s must be at least 0 and finite, got {self.snapshot_interval_s}")
