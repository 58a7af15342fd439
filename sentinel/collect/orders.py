"""Commands of the daemon: learned on the writer thread, obeyed by the training thread between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sentinel.collect.plan import Plan, Request, parse_kinds
from sentinel.command import Command, DisableMonitoring, EnableMonitoring, WithdrawCommand
from sentinel.errors import ConfigError
from sentinel.messages import Ack
from sentinel.place import Place


class Obeying(Protocol):
    """What orders need of the monitor."""

    plan: Plan
    current_step: int

    @property
    def place(self) -> Place: ...

    def acknowledge(self, ack: Ack) -> None:
        """Send an answer; called on either thread."""


class Orders:
    """Commands that wait for their step. `receive` and `apply` run on different threads and share one dict."""

    def __init__(self, allowed: Sequence[str], monitor: Obeying) -> None:
        self._allowed = frozenset(allowed)
        self._monitor = monitor
        self._pending: dict[str, EnableMonitoring | DisableMonitoring] = {}
        self._withdrawn: list[WithdrawCommand] = []
        self._active: dict[str, int | None] = {}

    def receive(self, command: Command) -> Ack | None:
        """Take a command in; return the answer. Runs on the writer thread."""
        step = self._monitor.current_step
        if isinstance(command, WithdrawCommand):
            if self._pending.pop(command.withdraws, None) is None:
                self._withdrawn.append(command)
            return Ack(command=command.withdraws, state="withdrawn", step=step, reason=command.reason)
        if command.ranks and self._monitor.place.rank not in command.ranks:
            return None
        name = type(command).__name__
        if name not in self._allowed:
            return Ack(command=command.id, state="refused", step=step, reason=f"{name} is not in allow_commands")
        try:
            parse_kinds(command.kinds)
        except ConfigError as error:
            return Ack(command=command.id, state="refused", step=step, reason=str(error))
        if command.at_step <= step:
            return Ack(command=command.id, state="missed", step=step, reason=f"step {command.at_step} has begun")
        self._pending[command.id] = command
        # The training thread may have begun at_step meanwhile. Whoever takes the command out of the dict has it.
        if self._monitor.current_step > command.at_step and self._pending.pop(command.id, None) is not None:
            return Ack(command=command.id, state="missed", step=step, reason=f"step {command.at_step} has begun")
        return Ack(command=command.id, state="armed", step=step)

    def apply(self, step: int) -> bool:
        """Obey what is due at the beginning of `step`; True when the plan changed. Runs on the training thread."""
        if not (self._pending or self._withdrawn or self._active):
            return False
        plan, changed = self._monitor.plan, False
        for command in [self._withdrawn.pop() for _ in range(len(self._withdrawn))]:
            changed |= plan.drop(command.withdraws)
            self._active.pop(command.withdraws, None)
        for name in list(self._pending):
            order = self._pending.get(name)
            if order is None or order.at_step > step or self._pending.pop(name, None) is None:
                continue
            if order.at_step < step:
                self._answer(name, "missed", step, f"step {order.at_step} has begun")
                continue
            if isinstance(order, EnableMonitoring):
                ends = None if order.for_steps is None else step + order.for_steps
                plan.add(
                    Request(
                        kinds=parse_kinds(order.kinds), targets=order.targets, per_micro_step=order.per_micro_step,
                        ends_before=ends, command=order.id,
                    )
                )  # fmt: skip
                self._active[order.id] = ends
            else:
                plan.disable(parse_kinds(order.kinds), order.targets, from_code=False)
                self._active = {n: e for n, e in self._active.items() if any(r.command == n for r in plan.requests)}
            changed = True
            self._answer(name, "applied", step)
        for name, ends_before in list(self._active.items()):
            if ends_before is not None and step >= ends_before:
                del self._active[name]
                self._answer(name, "ended", step)
        return changed

    def _answer(self, command: str, state: str, step: int, reason: str = "") -> None:
        self._monitor.acknowledge(Ack(command=command, state=state, step=step, reason=reason))
