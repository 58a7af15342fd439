"""The trainer side's configuration: one struct, unknown keys refused, every field documented."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sentinel.errors import ConfigError
from sentinel.record import Kind

MEASURED = (Kind.PARAM, Kind.WGRAD, Kind.ACTIVATION_IN, Kind.ACTIVATION, Kind.DGRAD, Kind.DGRAD_IN)
"""Kinds that the monitor can measure."""
MODULE_KINDS = (Kind.ACTIVATION_IN, Kind.ACTIVATION, Kind.DGRAD, Kind.DGRAD_IN)
"""Kinds that need hooks on modules."""
COMMANDS = ("EnableMonitoring", "DisableMonitoring")


class SpoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much disk a rank may use."""

    max_bytes: int = 4 * 2**30
    """Most bytes of spool a rank keeps. Past it the oldest committed file goes first, then the oldest, counted."""
    file_bytes: int = 64 * 2**20
    """A spool file is cut at this size."""

    def __post_init__(self) -> None:
        if self.file_bytes < 2**16:
            raise ConfigError(f"spool.file_bytes must be at least 65536, got {self.file_bytes}")
        if self.max_bytes < 2 * self.file_bytes:
            raise ConfigError(f"spool.max_bytes must be at least 2 x spool.file_bytes, got {self.max_bytes}")


class MonitorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What attach measures. Every field has a default: `attach(model, optimizer)` needs no config."""

    directory: str | None = None
    """Where runs lie; default $SENTINEL_DIR, else ./sentinel_runs."""
    run: str | None = None
    """The run's name; default $SENTINEL_RUN, else the launcher's id, else a name made by rank 0."""
    kinds: tuple[str, ...] = ("param", "wgrad")
    """What is measured each due step: param, wgrad, activation_in, activation, dgrad, dgrad_in."""
    targets: tuple[str, ...] = ()
    """Globs of module names for activation kinds; empty: every module. `layers.1` is not `layers.10`."""
    black_box: bool = True
    """Measure activation and gradient at every border of stem, blocks and head."""
    blocks: tuple[str, ...] = ()
    """Globs of the repeated layers, where the structure does not show them."""
    per_micro_step: bool = False
    """Keep one row per micro-step; false folds the micro-steps of a step into one row."""
    start_step: int = 0
    """First step that is measured."""
    step_interval: int = 1
    """Measure every this many steps, counted from start_step; the black box and scalars are taken every step."""
    zero_eps: float = 0.0
    """Elements with |x| <= zero_eps count as zeros; 0 counts exact zeros."""
    checksum: bool = True
    """Sum the bit patterns of params and reduced wgrads, so that replicas can be compared."""
    allow_commands: tuple[str, ...] = COMMANDS
    """Commands of the daemon that this trainer obeys; empty: none."""
    layer_offset: int | None = None
    """Number to add to this rank's local layer numbers; default: worked out by the daemon."""
    name_map: dict[str, str] = {}
    """Prefix of a local name to its canonical prefix."""
    max_rows: int = 65536
    """Most rows a step keeps before micro-steps are folded for want of room, counted."""
    spool: SpoolConfig = SpoolConfig()

    def __post_init__(self) -> None:
        known = [kind.label for kind in MEASURED]
        for at, kind in enumerate(self.kinds):
            if kind not in known:
                raise ConfigError(f"kinds[{at}]: unknown kind {kind!r}{near(kind, known)}; known: {', '.join(known)}")
        for at, command in enumerate(self.allow_commands):
            if command not in COMMANDS:
                raise ConfigError(f"allow_commands[{at}]: unknown command {command!r}{near(command, COMMANDS)}")
        if self.step_interval < 1:
            raise ConfigError(f"step_interval must be at least 1, got {self.step_interval}")
        if self.start_step < 0:
            raise ConfigError(f"start_step must be at least 0, got {self.start_step}")
        if not self.zero_eps >= 0:
            raise ConfigError(f"zero_eps must be at least 0, got {self.zero_eps}")
        if self.max_rows < 1024:
            raise ConfigError(f"max_rows must be at least 1024, got {self.max_rows}")
        if self.run is not None and (not self.run or "/" in self.run or self.run.startswith(".")):
            raise ConfigError(f"run must be a plain folder name without '/' or a leading '.', got {self.run!r}")


def near(word: str, known: tuple[str, ...] | list[str]) -> str:
    """Return `; did you mean "x"?` for the nearest known word, or nothing."""
    match = difflib.get_close_matches(word, known, 1, 0.5)
    return f'; did you mean "{match[0]}"?' if match else ""


def load_config(source: MonitorConfig | Mapping[str, Any] | str | Path | None) -> MonitorConfig:
    """Return the config that `source` describes: a struct, a mapping, the path of a YAML file, or None for defaults.

    Raises ConfigError with file, dotted path and the nearest known key.
    """
    if source is None:
        return MonitorConfig()
    if isinstance(source, MonitorConfig):
        return source
    where = ""
    if isinstance(source, (str, Path)):
        path, where = Path(source), f"{source}: "
        try:
            source = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from error
        source = {} if source is None else source
    if not isinstance(source, Mapping):
        raise ConfigError(f"{where}config must be a mapping of keys, got {type(source).__name__}")
    known = MonitorConfig.__struct_fields__
    for key in source:
        if key not in known:
            raise ConfigError(f"{where}unknown key {key!r}{near(str(key), known)}; known: {', '.join(known)}")
    plain = {key: [value] if isinstance(value, str) and key in ("kinds", "targets", "blocks") else value
             for key, value in source.items()}  # fmt: skip
    try:
        return msgspec.convert(plain, MonitorConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{error}") from error
