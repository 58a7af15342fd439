"""The configuration of `attach`: keys that may change while the run trains, and keys that are read once, at attach.

The only module that reads and checks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sentinel.document import Located
from sentinel.errors import ConfigError
from sentinel.file_keys import TRAINER
from sentinel.kinds import MEASURED_KINDS, PARAMETER_KINDS
from sentinel.known_words import near, nearest
from sentinel.place import AXES
from sentinel.rank_identity import MAX_LABELS, label_problem
from sentinel.record import Kind
from sentinel.target import Target
from sentinel.typed_document import locate, parse_named, read_struct

SITE_PLACEMENTS = ("shard", "replicate", "partial", "unknown")
"""Placements that the key `site_placements` may give to an activation that is no DTensor."""
MEASURED_LABELS = tuple(kind.label for kind in MEASURED_KINDS)
COMMANDS = (
    "EnableMonitoring", "DisableMonitoring", "ChangeConfig", "DescribeStructure", "RequestAction", "DumpTensors",
    "TraceTensors",
)  # fmt: skip
DEFAULT_COMMANDS = COMMANDS[:-2]
"""Commands allowed by default. DumpTensors and TraceTensors are not: what they write tells of the training data."""
PROBE_GROUP = "sentinel.probes"
"""Group of entry points: the name under `outside_probes` -> a class, or another callable, that is given a ProbeContext."""
MAX_CONFIG_BYTES = 2**20
"""Most bytes of a config file; a bound on memory: a larger file is no config."""


def _check_kind(where: str, kind: str) -> None:
    if kind not in MEASURED_LABELS:
        raise ConfigError(f"{where}: unknown kind {kind!r}{nearest(kind, MEASURED_LABELS)}")


def _check_schedule(where: str, schedule: Measurement | ProbeSchedule) -> None:
    for key, least in (("step_interval", 1), ("start_step", 0), ("stagger", 1)):
        value = getattr(schedule, key)
        if value is not None and value < least:
            raise ConfigError(f"{where}{key} must be at least {least}, got {value}")
    times = schedule.collect_times
    if times is not None and times < 1:
        raise ConfigError(f"{where}collect_times must be at least 1, got {times}; to measure nothing: enabled: false")
    for at, rank in enumerate(schedule.ranks or ()):
        if rank < 0:
            raise ConfigError(f"{where}ranks[{at}] must be at least 0, got {rank}")
    for at, target in enumerate(schedule.targets or ()):
        try:
            Target.parse(target)
        except ValueError as error:
            raise ConfigError(f"{where}targets[{at}]: {error}") from error


class ProbeSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and where one kind is measured; a key that is left out has the value that stands for all kinds."""

    targets: tuple[str, ...] | None = None
    """Modules, or parameters, as in `targets` above; of any kind."""
    start_step: int | None = None
    """First step that is measured."""
    step_interval: int | None = None
    """Measure every this many steps, counted from start_step."""
    collect_times: int | None = None
    """Number of measured steps after which this kind stops."""
    ranks: tuple[int, ...] | None = None
    """Ranks that measure it; an empty list: all."""
    stagger: int | None = None
    """Measure a different n-th of its tensors in each due step."""
    histogram: bool = False
    """Record a histogram of each tensor too; docs/probes.md lists its bins."""
    log_only: bool = False
    """comm: record each call and the line of code that made it, without measuring its tensors."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured, and when: the keys that may change while the run trains."""

    enabled: bool = True
    """Measure what `kinds` names; false: nothing but the black box, which has a switch of its own."""
    kinds: tuple[str, ...] = ("param", "wgrad")
    """What is measured each due step: names of kinds (docs/probes.md lists them)."""
    targets: tuple[str, ...] = ()
    """Modules whose activations and their gradients are measured; empty: every one. An exact name (`layers.1`: it and all
    inside it, never layers.10), a glob, or `re:` and a regular expression of the whole name; `:1` behind it: output 1."""
    black_box: bool = True
    """Measure activation and gradient at every border of stem, blocks and head."""
    per_micro_step: bool = False
    """Keep one row per micro-step; false folds the micro-steps of a step into one row."""
    start_step: int = 0
    """First step that is measured."""
    step_interval: int = 1
    """Measure every this many steps, counted from start_step; the black box and scalars are taken every step."""
    collect_times: int | None = None
    """Number of measured steps after which `kinds` stop; None: no end. Every edit of the file begins the count anew."""
    ranks: tuple[int, ...] = ()
    """Ranks that measure `kinds`; empty: all. Of a sharded tensor only the shards of these ranks are then measured."""
    stagger: int = 1
    """Measure a different n-th of the tensors in each due step, each tensor in every n-th; 1: all of them."""
    probes: dict[str, ProbeSchedule] = {}
    """Kinds with a schedule of their own, measured whether or not `kinds` names them."""
    max_overhead: float | None = 0.1
    """Largest share of a step that a kind may take of the training thread, once 200 steps and 30 s are over: one that takes
    more is measured every 2, 4, 8, ... steps, and a health record says so. While `kinds` is left at its default, all work of
    Sentinel may take half of it. A kind with a step_interval, a stagger or a collect_times keeps to these; the black box,
    scalars and what a command asks for are taken at every step. 0 or null: no bound."""

    def __post_init__(self) -> None:
        for at, kind in enumerate(self.kinds):
            _check_kind(f"kinds[{at}]", kind)
        _check_schedule("", self)
        if self.max_overhead is not None and not 0 <= self.max_overhead <= 1:
            raise ConfigError(f"max_overhead must be a share of a step from 0 to 1, or null, got {self.max_overhead}")
        for kind, schedule in self.probes.items():
            _check_kind("probes", kind)
            _check_schedule(f"probes.{kind}.", schedule)

    def all_targets(self) -> tuple[str, ...]:
        """Return the targets of everything that is measured."""
        own = (target for probe in self.probes.values() for target in probe.targets or ())
        return tuple(dict.fromkeys((*self.targets, *own)))

    def schedule_of(self, kind: str) -> ProbeSchedule:
        """Return the schedule of a kind, nothing left open but `collect_times`, whose None is: no end."""
        own = self.probes.get(kind, ProbeSchedule())
        common = ["start_step", "step_interval", "collect_times", "ranks", "stagger"]
        # Targets of the measurement name modules; those of comm name lines of code.
        if Kind.of(kind) not in (*PARAMETER_KINDS, Kind.COMM):
            common.append("targets")
        return msgspec.structs.replace(own, **{key: getattr(self, key) for key in common if getattr(own, key) is None})

    def is_interval_free(self, kind: str) -> bool:
        """Whether nobody said how often a kind is measured, so that it may be measured more rarely where it costs much."""
        own, schedule = self.probes.get(kind, ProbeSchedule()), self.schedule_of(kind)
        is_plain = schedule.step_interval == 1 and schedule.stagger == 1 and schedule.collect_times is None
        return is_plain and own.step_interval is None


class SpoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much disk a rank may use."""

    max_bytes: int = 4 * 2**30
    """Most bytes of spool a rank keeps. Past it files that were judged are deleted first, then finite rows of the oldest
    steps, then the borders of the black box, then steps without a NaN; a health record counts what was deleted."""
    file_bytes: int = 64 * 2**20
    """Bytes at which a spool file is closed and the next one begun."""
    queue_bytes: int = 128 * 2**20
    """Most bytes of rows that wait in memory while the writer is late; past it finite rows of the oldest steps are dropped
    and counted."""

    def __post_init__(self) -> None:
        if self.file_bytes < 2**16:
            raise ConfigError(f"spool.file_bytes must be at least 65536, got {self.file_bytes}")
        if self.max_bytes < 2 * self.file_bytes:
            raise ConfigError(f"spool.max_bytes must be at least 2 x spool.file_bytes, got {self.max_bytes}")
        if self.queue_bytes < 2**20:
            raise ConfigError(f"spool.queue_bytes must be at least 1048576, got {self.queue_bytes}")


class DumpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw tensors, written as safetensors into `<run>/dumps`: each rank what it holds."""

    kinds: tuple[str, ...] = ()
    """Kinds dumped without a command; empty: none, until a command orders a dump (`allow_commands`: DumpTensors)."""
    targets: tuple[str, ...] = ()
    """Modules or parameters, as in `targets`; empty: all."""
    start_step: int = 0
    """First step that is dumped."""
    end_step: int | None = None
    """Last step that may be dumped; None: no end but the quota's."""
    step_interval: int = 1
    """Dump every this many steps, counted from start_step."""
    first_n: int | None = None
    """Only the first so many elements of each dimension of what a rank holds; None: all."""
    quota_bytes: int = 16 * 2**30
    """Most bytes of dumps of one rank in a run, commands' included; 0: no dump at all. Past it a step is not dumped."""
    in_flight_bytes: int = 2**30
    """Most bytes held in memory on their way to the disk; tensors past it are left out, and the dump lists them."""

    def __post_init__(self) -> None:
        for at, kind in enumerate(self.kinds):
            _check_kind(f"dump.kinds[{at}]", kind)
        for at, target in enumerate(self.targets):
            try:
                Target.parse(target)
            except ValueError as error:
                raise ConfigError(f"dump.targets[{at}]: {error}") from error
        for key, least in (
            ("start_step", 0), ("step_interval", 1), ("first_n", 1), ("quota_bytes", 0), ("in_flight_bytes", 2**20),
        ):  # fmt: skip
            value = getattr(self, key)
            if value is not None and value < least:
                raise ConfigError(f"dump.{key} must be at least {least}, got {value}")
        if self.end_step is not None and self.end_step < self.start_step:
            raise ConfigError(f"dump.end_step must be at least dump.start_step ({self.start_step}), got {self.end_step}")


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces: small pictures of tensors, which a command asks for (`allow_commands`: TraceTensors)."""

    ring_bytes: int = 64 * 2**20
    """Most bytes of traces that a rank keeps on disk in an attempt; past it the oldest steps go."""
    in_flight_bytes: int = 64 * 2**20
    """Most bytes held in memory on their way to the disk. A step for which earlier ones leave no room is dropped
    and counted; of one that is larger by itself, what does not fit is left out and named."""
    vectors: dict[str, str] = {}
    """Name -> safetensors file with one tensor [1 to 64 vectors, hidden size]: what a command may have tokens projected
    onto, by this name. Each rank reads the files once, when it attaches; no command can name another file."""

    def __post_init__(self) -> None:
        for key in ("ring_bytes", "in_flight_bytes"):
            if getattr(self, key) < 2**20:
                raise ConfigError(f"trace.{key} must be at least {2**20}, got {getattr(self, key)}")


class MonitorConfig(Measurement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What attach measures. Every field has a default: `attach(model, optimizer)` needs no config."""

    at_step: int | None = None
    """Step from which on an edit of the file is in force, on every rank alike; None: the first that every rank can obey,
    which a daemon finds out. Without a daemon only an edit that names a future step is followed. Ignored at attach."""
    directory: str | None = None
    """Where runs lie; default $SENTINEL_DIR, else ./sentinel_runs."""
    run: str | None = None
    """The run's name; default $SENTINEL_RUN, else the launcher's id, else a name made by rank 0."""
    labels: dict[str, str] = {}
    """What the run is called by in messages, and what routes may ask for: `team: nlp`. At most 16, each value at most 256
    characters; they take precedence over those of $SENTINEL_LABELS (`team=nlp,cluster=a`)."""
    blocks: tuple[str, ...] = ()
    """Globs of the repeated layers, where the structure does not show them."""
    zero_eps: float = 0.0
    """Elements with |x| <= zero_eps count as zeros; 0 counts exact zeros."""
    checksum: bool = True
    """Sum the bit patterns of params and reduced wgrads, so that replicas can be compared."""
    allow_commands: tuple[str, ...] = DEFAULT_COMMANDS
    """Commands of the daemon that this trainer carries out; empty: none. ChangeConfig is an edit of this file;
    RequestAction reaches only code that calls `monitor.requests()`; DumpTensors and TraceTensors are obeyed only where
    they are named here."""
    dump: DumpConfig = DumpConfig()
    """Raw tensors."""
    trace: TraceConfig = TraceConfig()
    """Small pictures of tensors while it trains."""
    outside_probes: tuple[str, ...] = ()
    """Probes of other packages that run beside Sentinel's own, by the names of their entry points (`sentinel.probes`)."""
    struct: bool = False
    """Record the model's structure at the first step, for `sentinel struct`, which can also order it at any time."""
    layer_offset: int | None = None
    """Number to add to this rank's local layer numbers; default: worked out by the daemon."""
    name_map: dict[str, str] = {}
    """Prefix of a local name to its canonical prefix."""
    site_placements: dict[str, dict[str, str]] = {}
    """Glob of module names (`:in` behind it: their inputs) to mesh axis to shard, replicate, partial or unknown: how plain
    activations and their gradients are placed, where the trainer knows better; the last that matches counts."""
    gradient_divisor: float | None = None
    """Number by which the sum of all ranks' gradients is divided before the optimizer uses it; those of activations are
    divided by it too. None: the divisor set in FSDP2, else the number of ranks with samples or tokens of their own. 1 where
    the loss itself is divided by the whole batch."""
    max_rows: int = 65536
    """Most rows kept of a step; past it the rows of its micro-steps are folded into one, and the folded rows are counted."""
    spool: SpoolConfig = SpoolConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        for at, command in enumerate(self.allow_commands):
            if command not in COMMANDS:
                raise ConfigError(f"allow_commands[{at}]: unknown command {command!r}{near(command, COMMANDS)}")
        if len(self.labels) > MAX_LABELS:
            raise ConfigError(f"labels must be at most {MAX_LABELS}, got {len(self.labels)}")
        for name, value in self.labels.items():
            if why := label_problem(name, value):
                raise ConfigError(f"labels: {why}")
        if self.at_step is not None and self.at_step < 0:
            raise ConfigError(f"at_step must be at least 0, got {self.at_step}")
        if not 0 <= self.zero_eps < float("inf"):
            raise ConfigError(f"zero_eps must be at least 0 and finite, got {self.zero_eps}")
        if self.gradient_divisor is not None and not 0 < self.gradient_divisor < float("inf"):
            raise ConfigError(f"gradient_divisor must be above 0 and finite, got {self.gradient_divisor}")
        if self.max_rows < 1024:
            raise ConfigError(f"max_rows must be at least 1024, got {self.max_rows}")
        for glob, words in self.site_placements.items():
            for axis, word in words.items():
                if axis not in AXES:
                    raise ConfigError(f"site_placements.{glob}: unknown axis {axis!r}; known: {', '.join(AXES)}")
                if word not in SITE_PLACEMENTS:
                    expected = ", ".join(SITE_PLACEMENTS)
                    raise ConfigError(f"site_placements.{glob}.{axis} must be one of {expected}, got {word!r}")
        if self.run is not None and (not self.run or "/" in self.run or self.run.startswith(".")):
            raise ConfigError(f"run must be a plain folder name without '/' or a leading '.', got {self.run!r}")

    @property
    def measurement(self) -> Measurement:
        """The part that may change while training."""
        return Measurement(**{key: getattr(self, key) for key in Measurement.__struct_fields__})


MAY_CHANGE = (*Measurement.__struct_fields__, "at_step")
"""Keys that an edit may change while the run trains."""
FIXED = tuple(key for key in MonitorConfig.__struct_fields__ if key not in MAY_CHANGE)
"""Keys that are read once, at attach."""

_LISTS = ("kinds", "targets", "blocks", "allow_commands")
"""Keys for which one word may stand for a list of one."""


class ConfigSource(msgspec.Struct, frozen=True, kw_only=True):
    """A config and the file it was read from, both of which a rank records in its descriptor."""

    path: str = ""
    """Absolute path of the file; empty: the config came from code."""
    text_hash: str = ""
    """`hash_of` the file's text; empty: the config came from code."""
    config: MonitorConfig = MonitorConfig()
    given: MonitorConfig | None = None
    """The config as the file has it, where an adapter set `run` in `config`; None: `config` is as the file has it."""

    @property
    def as_read(self) -> MonitorConfig:
        """The config as the file has it, with which edits are compared."""
        return self.config if self.given is None else self.given

    def with_run(self, run: str) -> ConfigSource:
        """Return this config with the run's name from the trainer; edits of the file are followed as before."""
        return msgspec.structs.replace(self, config=msgspec.structs.replace(self.config, run=run), given=self.as_read)


def load_config(source: MonitorConfig | Mapping[str, Any] | str | Path | None) -> MonitorConfig:
    """Return the config that `source` describes: a struct, a mapping, the path of a YAML file, or None for defaults.

    Raises ConfigError with file, line, dotted path and the nearest known key.
    """
    return read_source(source).config


def read_source(source: ConfigSource | MonitorConfig | Mapping[str, Any] | str | Path | None) -> ConfigSource:
    """Return the config and where it came from; ConfigError as of `load_config`."""
    if isinstance(source, ConfigSource):
        return source
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        return ConfigSource(path=str(path.absolute()), text_hash=hash_of(data), config=parse_config(data, str(source)))
    if source is None:
        return ConfigSource()
    if isinstance(source, MonitorConfig):
        return ConfigSource(config=source)
    if not isinstance(source, Mapping):
        raise ConfigError(f"config must be a mapping of keys, got {type(source).__name__}")
    return ConfigSource(config=read_struct(_listed(Located.of(source)), MonitorConfig, name="", kind=TRAINER))


def hash_of(text: bytes) -> str:
    """Return the 16 hex digits that identify a config file's text; a changed comment changes them too."""
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def parse_config(text: bytes, name: str) -> MonitorConfig:
    """Return the config that a file's text describes; ConfigError with `name` of the file and the line."""
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name}: expected at most {MAX_CONFIG_BYTES} bytes, got {len(text)}")
    tree = parse_named(text, name)
    return read_struct(tree and _listed(tree), MonitorConfig, name=name, kind=TRAINER)


def is_blank(text: bytes) -> bool:
    """Whether a file's text has no key at all, which while training is taken for a write that is still under way."""
    tree = parse_named(text, "")
    return tree is None or tree.value is None


def refuse_fixed(text: bytes, name: str, in_force: Mapping[str, Any]) -> None:
    """Raise ConfigError when the text changes a key that is read once.

    in_force: plain values of the config in force (`as_reported`).
    """
    wanted, tree = as_reported(parse_config(text, name)), parse_named(text, name)
    changed = [key for key in FIXED if key in in_force and wanted[key] != in_force[key]]
    if changed:
        words = "; ".join(
            f"{name}:{locate(tree, key)[0].where if tree else 1}: {key} cannot change while the run trains: it is "
            f"{_shown(in_force[key])}, the file says {_shown(wanted[key])}"
            for key in changed
        )
        raise ConfigError(f"{words}; put it back, or restart the trainer; may change: {', '.join(MAY_CHANGE)}")


def as_reported(config: Measurement) -> dict[str, Any]:
    """Return every key as a plain value of JSON, as descriptors and commands hold them; edits are compared in this form."""
    reported: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return reported


def measurement_of(settings: Mapping[str, Any]) -> Measurement:
    """Return the measurement that plain values describe; ConfigError for what this version does not know."""
    return read_struct(_listed(Located.of(settings)), Measurement, name="", kind=TRAINER)


def _listed(tree: Located) -> Located:
    """Let one word stand for a list of one, and a probe without keys for one with the common schedule."""
    if not isinstance(tree.value, dict):
        return tree
    keys = {
        key: replace(item, value=[item]) if key in _LISTS and isinstance(item.value, str) else item
        for key, item in tree.value.items()
    }
    if "dump" in keys:
        keys["dump"] = _listed(keys["dump"])
    probes = keys.get("probes")
    if probes is not None:
        by_kind = probes.value
        if isinstance(by_kind, list) and all(isinstance(one.value, str) for one in by_kind):
            by_kind = {one.value: replace(one, value=None) for one in by_kind}
        if isinstance(by_kind, dict):
            by_kind = {kind: replace(one, value={}) if one.value is None else _listed(one) for kind, one in by_kind.items()}
        keys["probes"] = replace(probes, value=by_kind)
    return replace(tree, value=keys)


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:200]
