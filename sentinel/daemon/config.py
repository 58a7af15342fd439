"""The daemon's configuration: one YAML file, every section documented beside its component."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from sentinel.control.policy import ControlConfig
from sentinel.errors import ConfigError
from sentinel.judge.config import JudgingConfig
from sentinel.report.sinks.table import NotifyConfig


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
