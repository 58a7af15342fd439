"""Commands of the daemon to the trainers of a run: each names the step from which it holds, and the attempt it is for."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from sentinel.bounds import MAX_RANKS, MAX_STEP
from sentinel.errors import ConfigError
from sentinel.kinds import MODULE_KINDS, labels
from sentinel.trace import Trace

ANY_ATTEMPT = -1
ALARM_KINDS: tuple[str, ...] = tuple(sorted(labels(MODULE_KINDS)))
"""Kinds that a command for more measurement enables where it names none."""
TrainerAction: TypeAlias = Literal["checkpoint", "skip_batches", "pause"]
"""What a trainer may be asked for."""


class EnableMonitoring(msgspec.Struct, frozen=True, kw_only=True, tag="EnableMonitoring"):
    """Measure more, from one step on, on every rank alike."""

    id: str
    seq: int
    """Number of the file `<run>/control/<seq>.json`; grows by one a command."""
    at_step: int
    kinds: tuple[str, ...] = ALARM_KINDS
    targets: tuple[str, ...] = ()
    """Globs of canonical or local module names; empty: all."""
    statistics: tuple[str, ...] | None = None
    per_micro_step: bool = True
    for_steps: int | None = None
    """Steps after which the trainer stops by itself; None: until a command stops it."""
    ranks: tuple[int, ...] = ()
    """Ranks that are meant; empty: all."""
    reason: str = ""
    attempt: int = ANY_ATTEMPT
    """The attempt for which the command is meant, whose steps `at_step` counts; ANY_ATTEMPT: every one."""


class DisableMonitoring(msgspec.Struct, frozen=True, kw_only=True, tag="DisableMonitoring"):
    """Stop measuring what was enabled, from one step on."""

    id: str
    seq: int
    at_step: int
    kinds: tuple[str, ...] = ()
    """Empty: all that commands enabled."""
    targets: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    reason: str = ""
    attempt: int = ANY_ATTEMPT


class ChangeConfig(msgspec.Struct, frozen=True, kw_only=True, tag="ChangeConfig"):
    """Measure as the edited config file says, from one step on, on every rank alike."""

    id: str
    seq: int
    at_step: int
    settings: dict[str, Any] = {}
    """Every key of `monitor_config.Measurement` as it is from then on; what was in force before does not matter."""
    changed: tuple[str, ...] = ()
    """Keys that the edit changed, for people; empty when only the text did."""
    path: str = ""
    text_hash: str = ""
    """`monitor_config.hash_of` the edited text."""
    ranks: tuple[int, ...] = ()
    """Ranks that are meant; empty: all."""
    reason: str = ""
    attempt: int = ANY_ATTEMPT


class DumpTensors(msgspec.Struct, frozen=True, kw_only=True, tag="DumpTensors"):
    """Write raw tensors into `<run>/dumps`, each rank what it holds. Obeyed only where the trainer's config allows it."""

    id: str
    seq: int
    at_step: int
    kinds: tuple[str, ...] = ("wgrad",)
    targets: tuple[str, ...] = ()
    """Names or globs of modules and parameters; empty: all."""
    for_steps: int = 1
    step_interval: int = 1
    """Dump every this many steps, counted from at_step."""
    first_n: int | None = None
    """Only the first so many elements of each dimension of what a rank holds; None: all."""
    ranks: tuple[int, ...] = ()
    """Ranks that are meant; empty: all."""
    reason: str = ""
    attempt: int = ANY_ATTEMPT


class TraceTensors(msgspec.Struct, frozen=True, kw_only=True, tag="TraceTensors"):
    """Make small pictures of tensors as they pass, into `<run>/trace`. Obeyed only where the trainer's config allows it."""

    id: str
    seq: int
    at_step: int
    kinds: tuple[str, ...] = ("activation",)
    targets: tuple[str, ...] = ()
    """Names or globs of modules and parameters; empty: all."""
    trace: Trace = Trace()
    """How a tensor becomes small, and what besides."""
    for_steps: int = 100
    step_interval: int = 1
    """Trace every this many steps, counted from at_step."""
    ranks: tuple[int, ...] = ()
    """Ranks that are meant; empty: all."""
    reason: str = ""
    attempt: int = ANY_ATTEMPT


class DescribeStructure(msgspec.Struct, frozen=True, kw_only=True, tag="DescribeStructure"):
    """Write down the model's structure as one step's first forward shows it, into `<run>/structure`."""

    id: str
    seq: int
    at_step: int
    ranks: tuple[int, ...] = ()
    """Ranks that are meant; empty: all."""
    reason: str = ""
    attempt: int = ANY_ATTEMPT


class RequestAction(msgspec.Struct, frozen=True, kw_only=True, tag="RequestAction"):
    """Ask the trainer for what only it can do on all ranks alike. It reaches code that calls `monitor.requests()`."""

    id: str
    seq: int
    at_step: int
    """Step from whose beginning on it is handed out."""
    action: TrainerAction
    """`checkpoint`: save one now. `skip_batches`: pass over the next ones without training on them. `pause`: do not begin
    the next step until it is over."""
    num_batches: int = 0
    """Of `skip_batches`: steps whose batches are passed over, on every rank its own."""
    for_s: float = 0.0
    """Of `pause`: seconds after which it is over by itself."""
    for_steps: int = 100
    """Steps from at_step on within which the trainer has to ask; later it counts as missed."""
    ranks: tuple[int, ...] = ()
    """Always empty: all."""
    reason: str = ""
    attempt: int = ANY_ATTEMPT


class WithdrawCommand(msgspec.Struct, frozen=True, kw_only=True, tag="WithdrawCommand"):
    """Forget a command that not every rank could obey in time."""

    id: str
    seq: int
    withdraws: str
    """The id of the command to forget; what it enabled ends at once, what it changed is changed back."""
    reason: str = ""


Obeyed: TypeAlias = (
    EnableMonitoring | DisableMonitoring | ChangeConfig | DumpTensors | TraceTensors | DescribeStructure | RequestAction
)
"""Commands that ranks obey at their step."""
Command: TypeAlias = Obeyed | WithdrawCommand
"""Any command; the JSON field `type` names which."""

_AnyCommand = TypeVar("_AnyCommand", bound=Command)


def bounded(command: _AnyCommand) -> _AnyCommand:
    """Return a command whose numbers are such as steps and ranks have; ConfigError names the first that is not."""
    for name in ("at_step", "for_steps", "step_interval", "first_n", "num_batches"):
        value = getattr(command, name, None)
        if value is not None and not 0 <= value <= MAX_STEP:
            raise ConfigError(f"{name} must be in [0, {MAX_STEP}], got {_shown(value)}")
    for rank in getattr(command, "ranks", ()):
        if not 0 <= rank < MAX_RANKS:
            raise ConfigError(f"ranks must be in [0, {MAX_RANKS}), got {_shown(rank)}")
    return command


def _shown(value: int) -> str:
    """Return a number, or how large it is: thousands of digits help nobody."""
    return str(value) if abs(value) < 10**18 else f"a number of {value.bit_length()} bits"
