"""What the daemon may ask of the trainer by itself: `control:` of its configuration."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from sentinel.anomaly import Severity
from sentinel.command import ALARM_KINDS, TrainerAction
from sentinel.errors import ConfigError
from sentinel.known_words import near
from sentinel.monitor_config import MEASURED_LABELS
from sentinel.record import KIND_LABELS

MAX_LATENCY_S = 30.0
MAX_POLICIES = 100
"""Most policies; a bound on the time that an alarm is considered."""

PolicyAction: TypeAlias = Literal["enable", "dump", "nothing"] | TrainerAction
PolicyReach: TypeAlias = Literal["blast_radius", "neighbours", "all"]


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What follows from some alarms. Of several policies that take an alarm the first counts, and its rule's own actions
    count no more."""

    name: str
    """Name in the audit; unique."""

    rules: tuple[str, ...] = ()
    """Names of rules, or globs, whose alarms it takes: loss-spike, "*nan*"; empty: of every rule."""

    detectors: tuple[str, ...] = ()
    """Detectors whose alarms it takes; empty: of every detector."""

    min_severity: Severity = Severity.WARNING
    """Alarms of this severity and above: warning, critical. What is only `info` never asks for anything."""

    action: PolicyAction = "enable"
    """enable (measure more), dump (raw tensors), nothing; or what the trainer takes up in `monitor.requests()`: checkpoint,
    skip_batches, pause."""

    reach: PolicyReach = "blast_radius"
    """Where enable and dump are obeyed: blast_radius (the suspected pipeline stages, on all their replicas), neighbours (the
    blocks of the first causes and those beside them), all."""

    kinds: tuple[str, ...] = ()
    """What is measured more, or dumped; empty: control.kinds or control.dump_kinds."""

    per_micro_step: bool | None = None
    """As control.per_micro_step, unless given."""

    for_steps: int | None = None
    """As control.for_steps or control.dump_for_steps, unless given."""

    num_batches: int = 1
    """skip_batches: steps whose batches are passed over."""

    for_s: float = 3600.0
    """pause: seconds after which it is over by itself."""

    cooldown_s: float | None = None
    """Least time between the end of one and the next; unless given as control.cooldown_s, for requests 600."""

    max_per_hour: int | None = None
    """Most orders in an hour; unless given as control.max_per_hour or control.max_dumps_per_hour, for requests 1."""

    dry_run: bool = False
    """Only write down what would be asked."""

    def __post_init__(self) -> None:
        where = f"control.policies[{self.name}]"
        if not self.name or len(self.name) > 64 or not all(char.isalnum() or char in "-_." for char in self.name):
            raise ConfigError(
                f"control.policies: expected a name of at most 64 letters, digits, '-', '_', '.', got {self.name[:80]!r}"
            )
        if self.name in (ESCALATE, DUMP):
            raise ConfigError(
                f"{where}: expected another name, {self.name} is what rules ask for themselves (control.{self.name})"
            )
        if self.min_severity is Severity.INFO:
            raise ConfigError(f"{where}.min_severity must be warning or critical, got info: it never asks for anything")
        known = MEASURED_LABELS if self.action == "dump" else KIND_LABELS
        unknown = [kind for kind in self.kinds if kind not in known]
        if unknown:
            raise ConfigError(f"{where}.kinds must be among {', '.join(known)}, got {quoted(unknown, known)}")
        refuse_outside(self, f"{where}.", (("for_steps", 1), ("num_batches", 1), ("cooldown_s", 0), ("max_per_hour", 0)))
        if not 0 < self.for_s < math.inf:
            raise ConfigError(f"{where}.for_s must be above 0 and finite, got {self.for_s}")


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the daemon may ask of the trainer by itself."""

    escalate: bool = True
    """Switch module monitoring on when a rule with the action `escalate` fires; false: never."""

    dry_run: bool = False
    """Only write down what would be asked."""

    policies: tuple[PolicyConfig, ...] = ()
    """What follows from which alarms, in this order; alarms that none takes have what their rules' actions say, by the keys
    below."""

    kinds: tuple[str, ...] = ALARM_KINDS
    """What is measured more."""

    per_micro_step: bool = True
    """One row per micro-step instead of one folded row a step."""

    for_steps: int = 20
    """Steps until the trainer switches it off by itself. Doubled, up to eight times this, while the same run escalates
    again within the hour: the fault comes back more rarely than was looked for."""

    latency_s: float = 0.1
    """Time from a judgement to every rank having read the command, until it was seen; from then on what the run's own
    commands took. Doubled when a command came too late."""

    cooldown_s: float = 10.0
    """Least time between the end of one escalation and the next."""

    max_per_hour: int = 20
    """Most escalations of a run in an hour."""

    max_overhead: float = 0.05
    """Most of an hour's time that measuring more may cost a run, by the durations of its own steps with and without; past it
    nothing more is switched on for a while. 1: no bound."""

    expires_s: float = 600.0
    """A command that not every rank answered for so long is withdrawn."""

    follow_config: bool = True
    """Make an edit of the trainer's config file a command that every rank obeys at one step; false: never."""

    max_edits_per_hour: int = 60
    """Most such edits of a run in an hour; further ones wait, the newest counts."""

    dump: bool = True
    """Ask for raw tensors when a rule with the action `dump` fires; false: never. The trainer obeys only where its own
    config names DumpTensors in `allow_commands`, within its quota."""

    dump_kinds: tuple[str, ...] = ("param", "wgrad")
    """What is dumped."""

    dump_for_steps: int = 1
    """Steps that are dumped."""

    dump_first_n: int | None = None
    """Only the first so many elements of each dimension of what a rank holds; None: all."""

    max_dumps_per_hour: int = 4
    """Most dumps of a run in an hour."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KIND_LABELS]
        if unknown or not self.kinds:
            raise ConfigError(f"control.kinds must be among {', '.join(KIND_LABELS)}, got {quoted(unknown, KIND_LABELS)}")
        unknown = [kind for kind in self.dump_kinds if kind not in MEASURED_LABELS]
        if unknown or not self.dump_kinds:
            known = ", ".join(MEASURED_LABELS)
            raise ConfigError(f"control.dump_kinds must be among {known}, got {quoted(unknown, MEASURED_LABELS)}")
        refuse_outside(
            self, "control.",
            (
                ("for_steps", 1), ("max_per_hour", 0), ("max_edits_per_hour", 0), ("cooldown_s", 0), ("dump_for_steps", 1),
                ("dump_first_n", 1), ("max_dumps_per_hour", 0),
            ),
        )  # fmt: skip
        if not 0 < self.latency_s <= MAX_LATENCY_S:
            raise ConfigError(f"control.latency_s must be in (0, {MAX_LATENCY_S:g}], got {self.latency_s}")
        if not 0 < self.max_overhead <= 1:
            raise ConfigError(f"control.max_overhead must be in (0, 1], got {self.max_overhead}")
        if not 0 < self.expires_s < math.inf:
            raise ConfigError(f"control.expires_s must be above 0 and finite, got {self.expires_s}")
        if len(self.policies) > MAX_POLICIES:
            raise ConfigError(f"control.policies must have at most {MAX_POLICIES} entries, got {len(self.policies)}")
        names = [policy.name for policy in self.policies]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"control.policies: expected every name once, got {name!r} {names.count(name)} times")


ESCALATE = "escalate"
"""The action of a rule that asks for more monitoring."""
DUMP = "dump"
"""The action of a rule that asks for raw tensors."""


def unknown_rules(policies: Sequence[PolicyConfig], known: Collection[str]) -> list[str]:
    """Return what to say of names and globs in policies that fit none of the known rules: they follow nothing."""
    return [
        f'control.policies[{at}].rules[{position}]: no rule is called "{name}"{near(name, known)}'
        for at, policy in enumerate(policies)
        for position, name in enumerate(policy.rules)
        if not any(fnmatch.fnmatchcase(rule, name) for rule in known)
    ]


def refuse_outside(config: Any, where: str, bounds: Sequence[tuple[str, float]]) -> None:
    """Raise ConfigError for a field below its least value, or not finite; None is neither. where: its path, dot included."""
    for name, least in bounds:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            bound = f"at least {least}" if math.isfinite(value) else "finite"
            raise ConfigError(f"{where}{name} must be {bound}, got {value}")


def quoted(unknown: Sequence[str], known: Collection[str]) -> str:
    """Return unknown words as a message quotes them, with the nearest known one of the first."""
    return f"{list(unknown)}{near(unknown[0], known)}" if unknown else "none"
