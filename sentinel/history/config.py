"""HistoryConfig: what is kept of a run as Parquet, and how finely; the section `history`."""

from __future__ import annotations

import math

import msgspec

from sentinel.errors import ConfigError

FOLDER = "history"
"""Of a run: where its history lies."""


class HistoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the daemon writes into `<run>/history/`, for `sentinel sql` and for other tools that read Parquet."""

    enabled: bool = True
    """Whether it is written at all. What was judged before it was switched on is not in it."""

    full_steps: int = 10_000
    """Newest steps that are kept each by itself. Of older ones there are buckets of 16, 256 and 4,096 steps, with the least,
    greatest, mean and last value of each statistic and all that was not finite. 0: all steps, until `bytes` is reached."""

    around_steps: int = 64
    """Steps before and behind an anomaly's onset that stay by themselves when their time is over."""

    bytes: int = 2**36
    """Most bytes of a run's history. Past it the oldest single steps go first, then the oldest buckets of 16, and
    of 256; those of 4,096 stay. 0: no limit."""

    flush_s: float = 10.0
    """Seconds after which steps that were judged are written, where there are few of them."""

    def __post_init__(self) -> None:
        for name, least in (("full_steps", 0), ("around_steps", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"history.{name} must be at least {least}, got {getattr(self, name)}")
        if self.bytes and self.bytes < 2**20:
            raise ConfigError(f"history.bytes must be 0 (no limit) or at least {2**20}, got {self.bytes}")
        if not 0.05 <= self.flush_s < math.inf:
            raise ConfigError(f"history.flush_s must be at least 0.05 and finite, got {self.flush_s}")
