"""The daemon's configuration: one YAML file, every section documented beside its component."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from sentinel.control.policy import ControlConfig
from sentinel.errors import ConfigError
from sentinel.report.sinks.table import NotifyConfig


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
        if self.late_after_s < 0:
            raise ConfigError(f"judging.late_after_s must be at least 0, got {self.late_after_s}")
        if not self.late_after_steps and not self.late_after_s:
            raise ConfigError(
                "judging.late_after_steps and judging.late_after_s must not both be 0: no step would ever close"
            )
        if self.max_anomalies_per_step < 1:
            raise ConfigError(f"judging.max_anomalies_per_step must be at least 1, got {self.max_anomalies_per_step}")
        if self.snapshot_interval_s < 0:
            raise ConfigError(f"judging.snapshot_interval_s must be at least 0, got {self.snapshot_interval_s}")


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that `sentinel serve --config` takes."""

    judging: JudgingConfig = JudgingConfig()
    notify: NotifyConfig = NotifyConfig()
    control: ControlConfig = ControlConfig()


def load_config(path: Path | None) -> DaemonConfig:
    """Return the configuration of a YAML file; the defaults for None. ConfigError names file and dotted path."""
    if path is None:
        return DaemonConfig()
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: expected a configuration, got: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8, got {error}") from error
    try:
        content: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date of the 45th of May is a ValueError
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply; a configuration has four levels") from error
    try:
        return msgspec.convert({} if content is None else content, DaemonConfig)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise ConfigError(f"{path}: {cause if isinstance(cause, ConfigError) else error}") from error
