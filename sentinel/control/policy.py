"""Policy: which alarms ask what of the trainer, from which step, how often and how dearly at most."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from sentinel.command import DumpTensors, EnableMonitoring, RequestAction
from sentinel.control.command_status import CommandStatus
from sentinel.control.commands import RunCommands
from sentinel.control.config import (
    DUMP,
    ESCALATE,
    MAX_LATENCY_S,
    ControlConfig,
    PolicyAction,
    PolicyConfig,
    PolicyReach,
)
from sentinel.control.monitoring_cost import HOUR_S, MonitoringCost
from sentinel.control.proposal import Proposal, RuleAlarm

ASSUMED_STEP_S = 0.1
"""Duration of a step, in seconds, while none is known. Too short: the command is set some steps later than needed; too long:
it comes too late, and is missed."""
LEAST_LATENCY_S = 0.03
"""Least time that a command is given: ranks look into their folder every 20 ms while they train."""
LATENCY_MARGIN = 1.5
"""Times what the slowest of the last commands took. Smaller: a busy moment makes one late; larger: steps are lost."""
NUM_LATENCIES = 8
"""Commands from which that is taken."""
MAX_LONGER = 3
"""for_steps is doubled at most this often while escalations do not find what they look for."""
MAX_REISSUES = 3
REQUEST_COOLDOWN_S = 600.0
REQUESTS_PER_HOUR = 1

Audit = Callable[[float, str, str, dict[str, Any]], None]
"""(seconds since the epoch, actor, action, details) -> None: `store.audit.Audit.add` is one."""
Ordered: TypeAlias = EnableMonitoring | DumpTensors | RequestAction
"""What a policy orders."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy with every value known."""

    name: str
    action: PolicyAction
    reach: PolicyReach
    kinds: tuple[str, ...]
    per_micro_step: bool
    for_steps: int
    num_batches: int
    for_s: float
    cooldown_s: float
    max_per_hour: int
    is_dry: bool
    off_key: str = ""
    """The key of the configuration that switches it off altogether; empty: none does."""


IS_ON = "monitoring is on"


class OrderOrigin(msgspec.Struct, kw_only=True):
    """What a command follows from, so that it can be issued anew."""

    policy: str
    proposal: Proposal
    reason: str
    num_reissues: int = 0


class PolicyMemory(msgspec.Struct, kw_only=True):
    """What one policy ordered of late."""

    times: list[float] = []
    """When it ordered something within the last hour, seconds since the epoch."""
    quiet_until: float = 0.0
    last_why_not: str = ""
    covered: OrderOrigin | None = None
    """The newest that was not ordered because monitoring is on that no rank is known to have begun."""


class EscalatorState(msgspec.Struct, kw_only=True):
    """What a restart keeps of an Escalator."""

    policies: dict[str, PolicyMemory] = {}
    origins: dict[str, OrderOrigin] = {}
    """Id of a command -> what it follows from."""
    again: list[OrderOrigin] = []
    """What has yet to be issued anew."""
    took_s: list[float] = []
    """What the newest commands took from being written to the answer of the last rank; one that was late, as if it had taken
    what the next is given."""


def first_step(newest_step: int, step_time_s: float | None, latency_s: float, begun_s: float | None = None) -> int:
    """Return the first step that every rank can still obey.

    newest_step: known of any rank. begun_s: seconds since it began; None: not known, it may end in this moment.
    """
    step_s = step_time_s if step_time_s is not None and step_time_s > 0 else ASSUMED_STEP_S
    if begun_s is None:
        return newest_step + 1 + math.ceil(latency_s / step_s)
    # One that takes longer than usual may end in this moment as well.
    return newest_step + max(math.ceil((latency_s + min(begun_s, step_s)) / step_s), 1)


class Escalator:
    """Turns proposals into commands of one run: not what is on already, not too often, not too dearly, not in a dry run.

    audit: called for every order, and with the reason where none was given.
    """

    def __init__(self, config: ControlConfig, commands: RunCommands, audit: Audit) -> None:
        self._commands = commands
        self._audit = audit
        self._cost = MonitoringCost()
        self._state = EscalatorState()
        self.use(config)

    def use(self, config: ControlConfig) -> None:
        """Decide by a configuration from now on; what was ordered stands, and counts."""
        self.config = config
        self._own = {name: _of_rules(name, config) for name in (ESCALATE, DUMP)}
        """What rules ask for themselves."""
        self._named = [(one, _of_config(one, config)) for one in config.policies]
        self._policies = {**self._own, **{policy.name: policy for _, policy in self._named}}

    # What a restart keeps.

    def dump(self) -> bytes:
        """Return what was ordered, and what waits, as JSON."""
        return msgspec.json.encode([self._state, self._cost.state])

    def load(self, body: bytes) -> None:
        """Take back what `dump` returned."""
        self._state, self._cost.state = msgspec.json.decode(body, type=tuple[EscalatorState, dict[int, float]])

    @property
    def latency_s(self) -> float:
        """Time that a command is given to reach every rank: by what the last ones took, more after one that was late."""
        took = self._state.took_s
        return max(LATENCY_MARGIN * max(took), LEAST_LATENCY_S) if took else self.config.latency_s

    def takes(self, proposal: Proposal) -> bool:
        """Return whether a policy, or a rule of the proposal itself, asks for anything."""
        return any(True for _ in self._orders(proposal))

    def consider(
        self, proposal: Proposal, *, newest_step: int, step_time_s: float | None, now: float, begun_s: float | None = None
    ) -> list[Ordered]:
        """Return the commands that were issued. newest_step, begun_s: as of `first_step`; now: seconds since the epoch.

        StoreError when one could not be written: consider it again later, what was issued is not issued twice.
        """
        issued = []
        for policy, alarm in self._orders(proposal):
            memory = self._memory(policy, now)
            why_not = self._why_not(policy, memory, proposal, newest_step, now)
            if why_not:
                # A storm of anomalies asks a thousand times: written down once a reason.
                if why_not != memory.last_why_not:
                    details = {"key": proposal.key, "policy": policy.name, "why": why_not, "reason": proposal.reason(alarm)}
                    self._audit(now, "policy", _refusal(policy), details)
                memory.last_why_not = why_not
                if why_not == IS_ON:
                    memory.covered = OrderOrigin(policy=policy.name, proposal=proposal, reason=proposal.reason(alarm))
                continue
            memory.last_why_not = ""
            origin = OrderOrigin(policy=policy.name, proposal=proposal, reason=proposal.reason(alarm))
            if policy.is_dry:
                self._note_dry_run(
                    policy, memory, origin, first_step(newest_step, step_time_s, self.latency_s, begun_s), now
                )
            else:
                issued.append(self._issue(origin, newest_step, step_time_s, now, begun_s))
        return issued

    def follow(
        self,
        changed: Sequence[CommandStatus],
        *,
        newest_step: int,
        step_time_s: float | None,
        now: float,
        begun_s: float | None = None,
    ) -> list[Ordered]:
        """Take note of what became of commands (`RunCommands.tick`); return those issued anew, having come too late.

        StoreError when one could not be written; the next call tries again.
        """
        self._cost.note(newest_step, step_time_s, now, is_on=self._commands.known.is_on(newest_step))
        state = self._state
        for status in changed:
            command = status.command
            origin = state.origins.get(command.id)
            if status.state == "armed" and status.source == "policy":
                self._note_latency(max(now - status.issued, 0.0))
            if status.state in ("ended", "withdrawn", "expired", "refused"):
                self._quieten(command, origin, status.ended or now)
            covered = self._take_covered(status)
            # Of monitoring that some ranks began, those that came too late may be the ones that matter. What a trainer is
            # asked for is not asked twice.
            is_partial = status.state == "partial" and not isinstance(command, RequestAction)
            if (status.state == "withdrawn" or is_partial) and origin is not None and status.is_late:
                self._note_latency(min(self.latency_s * 2.0, MAX_LATENCY_S) / LATENCY_MARGIN)
                if origin.num_reissues < MAX_REISSUES:
                    state.again.append(msgspec.structs.replace(origin, num_reissues=origin.num_reissues + 1))
                elif covered is not None:
                    # What came meanwhile counted on it.
                    state.again.append(covered)
            if status.is_final:
                state.origins.pop(command.id, None)
        issued = []
        while state.again:
            # Taken off the list when it is written: a full disk only delays it.
            if state.again[0].policy in self._policies:
                issued.append(self._issue(state.again[0], newest_step, step_time_s, now, begun_s))
            del state.again[0]
        return issued

    # Inside.

    def _orders(self, proposal: Proposal) -> Iterator[tuple[Policy, RuleAlarm]]:
        """Yield each policy that the alarms call for, once, with the first alarm that does."""
        seen: set[str] = set()
        for alarm in proposal.alarms:
            named = next((policy for config, policy in self._named if _takes(config, alarm)), None)
            own = [self._own[action] for action in alarm.actions if action in self._own]
            for policy in own if named is None else [named]:
                if policy.name not in seen and policy.action != "nothing":
                    seen.add(policy.name)
                    yield policy, alarm

    def _memory(self, policy: Policy, now: float) -> PolicyMemory:
        memory = self._state.policies.setdefault(policy.name, PolicyMemory())
        memory.times = [time for time in memory.times if now - HOUR_S < time <= now]
        return memory

    def _why_not(self, policy: Policy, memory: PolicyMemory, proposal: Proposal, newest_step: int, now: float) -> str:
        known = self._commands.known
        if policy.off_key and not getattr(self.config, policy.off_key):
            return f"control.{policy.off_key} is off"
        if known.find(_key(proposal, policy)) is not None:
            return "already issued"
        if policy.action == "enable":
            ranks, targets = _reach(policy, proposal)
            if known.covers(policy.kinds, ranks, newest_step, targets):
                return IS_ON
        if now < memory.quiet_until <= now + policy.cooldown_s:
            return "cooling down"
        if len(memory.times) >= policy.max_per_hour:
            what = {"enable": "escalations", "dump": "dumps"}.get(policy.action, "requests")
            return f"{policy.max_per_hour} {what} in the last hour"
        if policy.action == "enable" and self._cost.lost_s(now) > self.config.max_overhead * HOUR_S:
            return f"measuring more cost {self._cost.lost_s(now):.0f} s of the last hour (control.max_overhead)"
        return ""

    def _take_covered(self, status: CommandStatus) -> OrderOrigin | None:
        """Return what was not ordered because of this command, once nothing more comes of that; it counts no more."""
        origin = self._state.origins.get(status.command.id)
        if origin is None or status.state not in ("applied", "partial", "ended", "withdrawn"):
            return None
        if status.state == "withdrawn" and origin.num_reissues < MAX_REISSUES:
            return None
        memory = self._state.policies.setdefault(origin.policy, PolicyMemory())
        covered, memory.covered = memory.covered, None
        return covered

    def _note_latency(self, took_s: float) -> None:
        self._state.took_s = [*self._state.took_s, took_s][-NUM_LATENCIES:]

    def _note_dry_run(self, policy: Policy, memory: PolicyMemory, origin: OrderOrigin, at_step: int, now: float) -> None:
        memory.times.append(now)
        memory.quiet_until = now + policy.cooldown_s
        ranks, targets = _reach(policy, origin.proposal)
        details = {
            "key": origin.proposal.key, "policy": policy.name, "action": policy.action, "at_step": at_step,
            "ranks": list(ranks), "targets": list(targets), "reason": origin.reason,
        }  # fmt: skip
        self._commands.audit.dry_run(details, now)

    def _quieten(self, command: Any, origin: OrderOrigin | None, ended: float) -> None:
        """Leave time behind the end of what was ordered: behind monitoring, whoever ordered it, before any other.

        ended: when that was, which may be long ago for a daemon that catches up.
        """
        for policy in self._policies.values():
            is_own = origin is not None and origin.policy == policy.name
            if is_own or (policy.action == "enable" and not isinstance(command, (DumpTensors, RequestAction))):
                memory = self._state.policies.setdefault(policy.name, PolicyMemory())
                memory.quiet_until = max(memory.quiet_until, ended + policy.cooldown_s)

    def _issue(
        self, origin: OrderOrigin, newest_step: int, step_time_s: float | None, now: float, begun_s: float | None
    ) -> Ordered:
        policy, proposal, again = self._policies[origin.policy], origin.proposal, origin.num_reissues
        memory = self._memory(policy, now)
        key = _key(proposal, policy) + (f":again{again}" if again else "")
        at_step = first_step(newest_step, step_time_s, self.latency_s, begun_s)
        ranks, targets = _reach(policy, proposal)
        command: Ordered
        if policy.action == "dump":
            command = self._commands.dump_tensors(
                at_step=at_step, kinds=policy.kinds, targets=targets, first_n=self.config.dump_first_n,
                for_steps=policy.for_steps, ranks=ranks, reason=origin.reason, source="policy", key=key, now=now,
            )  # fmt: skip
        elif policy.action == "enable":
            longer = 2 ** min(len(memory.times), MAX_LONGER) if not again else 1
            command = self._commands.enable(
                at_step=at_step, kinds=policy.kinds, targets=targets, per_micro_step=policy.per_micro_step,
                for_steps=policy.for_steps * longer, ranks=ranks, reason=origin.reason, source="policy", key=key, now=now,
            )  # fmt: skip
        else:
            assert policy.action != "nothing"
            command = self._commands.request(
                policy.action, at_step=at_step, now=now, reason=origin.reason, source="policy", key=key,
                num_batches=policy.num_batches if policy.action == "skip_batches" else 0,
                for_s=policy.for_s if policy.action == "pause" else 0.0,
            )  # fmt: skip
        if not again:
            memory.times.append(now)
            if policy.action != "enable":
                memory.quiet_until = now + policy.cooldown_s
        self._state.origins[command.id] = origin
        return command


def _of_rules(name: str, config: ControlConfig) -> Policy:
    """Return the policy that stands for an action that rules name themselves."""
    is_dump = name == DUMP
    return Policy(
        name=name, action="dump" if is_dump else "enable", reach="blast_radius",
        kinds=config.dump_kinds if is_dump else config.kinds, per_micro_step=config.per_micro_step,
        for_steps=config.dump_for_steps if is_dump else config.for_steps, num_batches=0, for_s=0.0,
        cooldown_s=config.cooldown_s, max_per_hour=config.max_dumps_per_hour if is_dump else config.max_per_hour,
        is_dry=config.dry_run, off_key=name,
    )  # fmt: skip


def _of_config(one: PolicyConfig, config: ControlConfig) -> Policy:
    """Return a policy with what it leaves open taken from the keys beside it."""
    own = _of_rules(DUMP if one.action == "dump" else ESCALATE, config)
    is_request = one.action not in ("enable", "dump")
    cooldown_s = REQUEST_COOLDOWN_S if is_request else own.cooldown_s
    max_per_hour = REQUESTS_PER_HOUR if is_request else own.max_per_hour
    return Policy(
        name=one.name, action=one.action, reach=one.reach, kinds=one.kinds or own.kinds,
        per_micro_step=own.per_micro_step if one.per_micro_step is None else one.per_micro_step,
        for_steps=own.for_steps if one.for_steps is None else one.for_steps, num_batches=one.num_batches, for_s=one.for_s,
        cooldown_s=cooldown_s if one.cooldown_s is None else one.cooldown_s,
        max_per_hour=max_per_hour if one.max_per_hour is None else one.max_per_hour,
        is_dry=config.dry_run or one.dry_run, off_key="" if is_request else own.off_key,
    )  # fmt: skip


def _takes(config: PolicyConfig, alarm: RuleAlarm) -> bool:
    return (
        alarm.severity.level >= config.min_severity.level
        and (not config.rules or any(fnmatch.fnmatchcase(alarm.rule, glob) for glob in config.rules))
        and (not config.detectors or alarm.detector in config.detectors)
    )


def _key(proposal: Proposal, policy: Policy) -> str:
    return proposal.key if policy.name == ESCALATE else f"{proposal.key}:{policy.name}"


def _reach(policy: Policy, proposal: Proposal) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ranks and the targets that a command of this policy means; empty: all of them."""
    if policy.reach == "all":
        return (), ()
    if policy.reach == "neighbours" and proposal.neighbours:
        return (), proposal.neighbours
    return proposal.ranks, ()


def _refusal(policy: Policy) -> str:
    """Return the word of the audit for an order that was not given."""
    return {"enable": "not_escalated", "dump": "not_dumped"}.get(policy.action, "not_requested")
