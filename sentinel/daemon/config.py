"""The daemon's configuration: one YAML file, every section documented beside its component."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from sentinel.control.config import ControlConfig
from sentinel.document import Located
from sentinel.errors import ConfigError
from sentinel.file_keys import DAEMON
from sentinel.history.config import HistoryConfig
from sentinel.judge.config import JudgingConfig
from sentinel.mirrors.mirror_table import MirrorConfig, check_names, outside_mirrors
from sentinel.rank_identity import label_problem
from sentinel.report.heartbeat import HeartbeatConfig
from sentinel.report.sinks.sink_table import NotifyConfig, outside_sinks
from sentinel.store.retention import RetentionConfig
from sentinel.typed_document import locate, named_document, read_struct


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that `sentinel serve --config` takes."""

    judging: JudgingConfig = JudgingConfig()
    notify: NotifyConfig = NotifyConfig()
    control: ControlConfig = ControlConfig()
    heartbeat: HeartbeatConfig = HeartbeatConfig()
    retention: RetentionConfig = RetentionConfig()
    history: HistoryConfig = HistoryConfig()
    mirrors: tuple[MirrorConfig, ...] = ()
    """Where else what is measured and found is shown, while it is judged: TensorBoard and others."""
    labels: dict[str, str] = {}
    """Labels of every run that the daemon serves: `cluster: a`. Those of a run itself take precedence."""

    def __post_init__(self) -> None:
        check_names(self.mirrors)
        for name, value in self.labels.items():
            if why := label_problem(name, value):
                raise ConfigError(f"labels: {why}")


def load_config(path: Path | None) -> DaemonConfig:
    """Return the configuration of a YAML file; the defaults for None. ConfigError says FILE:LINE, dotted path and what."""
    if path is None:
        return DaemonConfig()
    return checked_document(named_document(path), path)


def checked_document(document: Located | None, path: Path) -> DaemonConfig:
    """Return the configuration of a document that was read from `path`; ConfigError as of `load_config`."""
    outside = {"notify.sinks": outside_sinks(), "mirrors": outside_mirrors()}
    return read_struct(document, DaemonConfig, name=str(path), kind=DAEMON, outside=outside)


def read_config(path: Path | None, late_after_steps: int | None = None, late_after_s: float | None = None) -> DaemonConfig:
    """Return `load_config` with what the command line says on top, where that is not None."""
    config = load_config(path)
    given = {"late_after_steps": late_after_steps, "late_after_s": late_after_s}
    asked = {name: value for name, value in given.items() if value is not None}
    # `replace` does not validate; building it anew does.
    judging = JudgingConfig(**{**msgspec.structs.asdict(config.judging), **asked})
    return msgspec.structs.replace(config, judging=judging)


def hash_of(config: DaemonConfig) -> str:
    """Return 16 hexadecimal digits that are equal for configurations that say the same."""
    return hashlib.blake2b(msgspec.json.encode(config, order="sorted"), digest_size=8).hexdigest()


def placed(error: ConfigError, path: Path) -> ConfigError:
    """Return an error about a configuration with FILE:LINE before it, where its dotted path is one of the file's."""
    dotted = str(error).split(maxsplit=1)[0].rstrip(":")
    document = named_document(path)
    if document is None or dotted.partition(".")[0] not in DaemonConfig.__struct_fields__:
        return error
    return ConfigError(f"{path}:{locate(document, dotted)[0].where}: {error}")
