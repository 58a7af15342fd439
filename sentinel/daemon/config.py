"""The daemon's configuration: one YAML file, every section documented beside its component."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sentinel.control.policy import ControlConfig
from sentinel.file_keys import DAEMON
from sentinel.judge.config import JudgingConfig
from sentinel.report.sinks.table import NotifyConfig, outside_sinks
from sentinel.typed_document import named_document, read_struct


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that `sentinel serve --config` takes."""

    judging: JudgingConfig = JudgingConfig()
    notify: NotifyConfig = NotifyConfig()
    control: ControlConfig = ControlConfig()


def load_config(path: Path | None) -> DaemonConfig:
    """Return the configuration of a YAML file; the defaults for None. ConfigError says FILE:LINE, dotted path and what."""
    if path is None:
        return DaemonConfig()
    return read_struct(named_document(path), DaemonConfig, name=str(path), kind=DAEMON, outside=outside_sinks())
