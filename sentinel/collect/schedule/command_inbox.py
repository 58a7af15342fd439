"""Commands of the daemon: learned on the writer thread, obeyed by the training thread between steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from sentinel.collect.schedule.plan import Plan
from sentinel.collect.schedule.trainer_requests import TrainerRequests
from sentinel.collect.schedule.wishes import Dump, parse_kinds, parse_targets
from sentinel.command import (
    ANY_ATTEMPT,
    ChangeConfig,
    Command,
    DescribeStructure,
    DisableMonitoring,
    DumpTensors,
    EnableMonitoring,
    Obeyed,
    RequestAction,
    TraceTensors,
    WithdrawCommand,
)
from sentinel.errors import ConfigError
from sentinel.messages import Ack
from sentinel.monitor_config import Measurement, measurement_of
from sentinel.target import resolve
from sentinel.trace import check_compressor

Planned = EnableMonitoring | DisableMonitoring | ChangeConfig | DumpTensors | TraceTensors | DescribeStructure
"""Commands that change what is measured."""
FROM_FILE = "file-"
"""How the id of a command begins that a rank made for itself from its config file."""


class CommandInbox:
    """Commands that wait for their step. `receive` and `apply` run on different threads and share one dict."""

    def __init__(
        self,
        allowed: Sequence[str],
        plan: Plan,
        *,
        step: Callable[[], int],
        rank: Callable[[], int],
        acknowledge: Callable[[Ack], object],
        attempt: int = ANY_ATTEMPT,
    ) -> None:
        """step: returns the running step, or the next; rank: ours; acknowledge: sends an answer, called on either thread.

        attempt: ours; commands for another one are not for us. ANY_ATTEMPT: not known, every command is.
        """
        self.plan = plan
        self.rank = rank
        self.acknowledge = acknowledge
        self.requests = TrainerRequests(acknowledge, step)
        """What the trainer takes up itself."""
        self._allowed = frozenset(allowed)
        self._step = step
        self._attempt = attempt
        self._pending: dict[str, Obeyed] = {}
        self._withdrawn: list[WithdrawCommand] = []
        self._active: dict[str, int | None] = {}
        self._former: dict[str, tuple[Measurement, str]] = {}
        """The newest ChangeConfig that was obeyed -> what was in force before."""
        self.names: Callable[[], Collection[str]] = tuple
        """Names that targets may mean, asked on the writer thread."""
        self.applied_hash = ""
        """Text of the config file that a daemon ordered last: what it asks goes before what we read ourselves."""

    def receive(self, command: Command) -> Ack | None:
        """Take a command in; return the answer, None for a command to others. Runs on the writer thread."""
        step = self._step()
        if isinstance(command, WithdrawCommand):
            self.requests.withdraw(command.withdraws)
            if self._pending.pop(command.withdraws, None) is None:
                self._withdrawn.append(command)
            return Ack(command=command.withdraws, state="withdrawn", step=step, reason=command.reason)
        if command.ranks and self.rank() not in command.ranks:
            return None
        if ANY_ATTEMPT not in (command.attempt, self._attempt) and command.attempt != self._attempt:
            return None
        name = type(command).__name__
        # What a rank read in its own file is its user's word, whatever the daemon may ask.
        if name not in self._allowed and not command.id.startswith(FROM_FILE):
            return Ack(command=command.id, state="refused", step=step, reason=f"{name} is not in allow_commands")
        if isinstance(command, RequestAction) and (why := self.requests.refusal()):
            return Ack(command=command.id, state="refused", step=step, reason=why)
        try:
            _check(command)
            # Here and not at the step: the training thread only looks up what was found.
            resolve(_targets(command), self.names())
        except ConfigError as error:
            return Ack(command=command.id, state="refused", step=step, reason=str(error))
        if isinstance(command, ChangeConfig) and not command.id.startswith(FROM_FILE):
            self.applied_hash = command.text_hash
            self._pending.pop(FROM_FILE + command.text_hash, None)
        if command.at_step <= step:
            return Ack(command=command.id, state="missed", step=step, reason=f"step {command.at_step} has begun")
        self._pending[command.id] = command
        # The training thread may have begun at_step meanwhile. Whoever takes the command out of the dict has it.
        if self._step() > command.at_step and self._pending.pop(command.id, None) is not None:
            return Ack(command=command.id, state="missed", step=step, reason=f"step {command.at_step} has begun")
        return Ack(command=command.id, state="armed", step=step)

    def forget_own(self) -> list[Ack]:
        """Drop what we read in the file ourselves and have not obeyed yet: the file says something else now."""
        own = [name for name in list(self._pending) if name.startswith(FROM_FILE)]
        dropped = [name for name in own if self._pending.pop(name, None) is not None]
        step = self._step()
        return [Ack(command=name, state="withdrawn", step=step, reason="the file was edited again") for name in dropped]

    def apply(self, step: int) -> bool:
        """Obey what is due at the beginning of `step`; True when the plan changed. Runs on the training thread."""
        self.requests.forget_late(step)
        if not (self._pending or self._withdrawn or self._active):
            return False
        changed = self._take_back()
        for name in list(self._pending):
            order = self._pending.get(name)
            if order is None or order.at_step > step or self._pending.pop(name, None) is None:
                continue
            if order.at_step < step:
                self._answer(name, "missed", step, f"step {order.at_step} has begun")
                continue
            if isinstance(order, RequestAction):
                self.requests.hold(order)
                continue
            self._obey(order, step)
            changed = True
            self._answer(name, "applied", step)
        for name, ends_before in list(self._active.items()):
            if ends_before is not None and step >= ends_before:
                del self._active[name]
                self._answer(name, "ended", step)
        return changed

    def _take_back(self) -> bool:
        plan, changed = self.plan, False
        for command in [self._withdrawn.pop() for _ in range(len(self._withdrawn))]:
            changed |= plan.requests.drop(command.withdraws)
            self._active.pop(command.withdraws, None)
            former = self._former.pop(command.withdraws, None)
            if former is not None:
                plan.change(*former)
                changed = True
        return changed

    def _obey(self, order: Planned, step: int) -> None:
        plan = self.plan
        if isinstance(order, ChangeConfig):
            self._former = {order.id: (plan.config.measurement, plan.config.text_hash)}
            plan.change(measurement_of(order.settings), order.text_hash)
        elif isinstance(order, EnableMonitoring):
            request = plan.requests.enable(
                order.kinds, order.targets, per_micro_step=order.per_micro_step, for_steps=order.for_steps,
                first_step=step, command=order.id,
            )  # fmt: skip
            self._active[order.id] = request.ends_before
        elif isinstance(order, (DumpTensors, TraceTensors)):
            request = plan.requests.enable(
                order.kinds, order.targets, per_micro_step=False, for_steps=order.for_steps, first_step=step,
                command=order.id, step_interval=order.step_interval,
                copy=order.trace if isinstance(order, TraceTensors) else Dump(first_n=order.first_n),
            )  # fmt: skip
            self._active[order.id] = request.ends_before
        elif isinstance(order, DescribeStructure):
            plan.requests.describe_structure(step, order.id)
            self._active[order.id] = step + 1
        else:
            plan.disable(parse_kinds(order.kinds), order.targets, from_code=False)
            self._active = {n: e for n, e in self._active.items() if any(r.command == n for r in plan.requests.all)}

    def _answer(self, command: str, state: str, step: int, reason: str = "") -> None:
        self.acknowledge(Ack(command=command, state=state, step=step, reason=reason))


def _targets(command: Obeyed) -> tuple[str, ...]:
    """Return the targets that a command names."""
    if isinstance(command, (DescribeStructure, RequestAction)):
        return ()
    if isinstance(command, ChangeConfig):
        return measurement_of(command.settings).all_targets()
    return command.targets


def _check(command: Obeyed) -> None:
    """Raise ConfigError for what this version cannot do."""
    if isinstance(command, (DescribeStructure, RequestAction)):
        return
    if isinstance(command, ChangeConfig):
        measurement_of(command.settings)
        return
    parse_kinds(command.kinds)
    parse_targets(command.targets)
    if isinstance(command, DisableMonitoring):
        return
    if command.for_steps is not None and command.for_steps < 1:
        raise ConfigError(f"for_steps must be at least 1, got {command.for_steps}")
    if isinstance(command, (DumpTensors, TraceTensors)) and command.step_interval < 1:
        raise ConfigError(f"step_interval must be at least 1, got {command.step_interval}")
    if isinstance(command, TraceTensors):
        check_compressor("trace.compressor", command.trace.compressor)
    if isinstance(command, DumpTensors) and command.first_n is not None and command.first_n < 1:
        raise ConfigError(f"first_n must be at least 1, got {command.first_n}")
