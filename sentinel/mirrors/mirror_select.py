"""MirrorSelect: which series, anomalies and incidents a mirror is given; the section `select` of each."""

from __future__ import annotations

import math

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.exports.series import SCALAR, TENSOR_KINDS, VALUE, SeriesQuery
from sentinel.record import STATISTICS


class TensorSeries(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of tensors that are mirrored, a series each."""

    kinds: tuple[str, ...]
    """Kinds of tensors: `param`, `wgrad`, `activation`, ..."""

    statistics: tuple[str, ...]
    """Of each: `norm`, `mean`, `kurtosis`, ..."""

    names: tuple[str, ...] = ("*",)
    """Globs of their names."""

    def __post_init__(self) -> None:
        for what, words, known in (("kinds", self.kinds, TENSOR_KINDS), ("statistics", self.statistics, STATISTICS)):
            if unknown := [word for word in words if word not in known]:
                why = "logged values are mirrored by `scalars`" if unknown[0] in (SCALAR, VALUE) else "unknown word"
                raise ConfigError(f'mirrors: select.tensors.{what}: {why}: "{unknown[0]}"; known: {", ".join(known)}')
        _ = self.query  # an empty list is said there

    @property
    def query(self) -> SeriesQuery:
        """The same, as exports ask for it."""
        return SeriesQuery(names=self.names, kinds=self.kinds, statistics=self.statistics)


class MirrorSelect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is mirrored."""

    scalars: tuple[str, ...] = ("*",)
    """Globs of logged values: loss, grad_norm, lr, and what else the trainer logs. `step_time_s` is how long a step took."""

    tensors: tuple[TensorSeries, ...] = ()
    """Statistics of tensors; none: logged values alone."""

    max_series: int = 500
    """Most series of a run, logged values first, then tensors in the order of the model. What is beyond is left out, and
    counted in `sentinel_mirror_series_left_out`. Too small: a layer goes unseen; too large: pages of other tools, which draw
    a chart a series, do not open any more."""

    step_interval: int = 1
    """Every this many steps; 1: each one. Anomalies and incidents are mirrored whatever their step."""

    severity: Severity = Severity.WARNING
    """Least severity of anomalies and incidents that are mirrored."""

    flush_s: float = 2.0
    """Seconds between two batches."""

    def __post_init__(self) -> None:
        for name in ("max_series", "step_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"mirrors: select.{name} must be at least 1, got {getattr(self, name)}")
        if not 0.05 <= self.flush_s < math.inf:
            raise ConfigError(f"mirrors: select.flush_s must be at least 0.05 and finite, got {self.flush_s}")
