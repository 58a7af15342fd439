"""Policy: which anomalies switch the microscope on, on which ranks, from which step, and how often at most."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.command import ALARM_KINDS, DumpTensors, EnableMonitoring
from sentinel.control.command_status import CommandStatus
from sentinel.control.commands import RunCommands
from sentinel.errors import ConfigError
from sentinel.known_words import near
from sentinel.monitor_config import MEASURED_LABELS
from sentinel.place import Place, depth
from sentinel.record import KIND_LABELS

ESCALATE = "escalate"
"""The action of a rule that asks for more monitoring."""
DUMP = "dump"
"""The action of a rule that asks for raw tensors."""
ASSUMED_STEP_S = 0.1
"""Duration of a step, in seconds, while none is known. Too short: the command is set some steps later than needed; too long:
it comes too late, and is missed."""
MAX_LATENCY_S = 30.0
MAX_LONGER = 3
"""for_steps is doubled at most this often while escalations do not find what they look for."""
MAX_REISSUES = 3

Audit = Callable[[float, str, str, dict[str, Any]], None]
"""(seconds since the epoch, actor, action, details) -> None: `store.audit.Audit.add` is one."""


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the daemon may ask of the trainer by itself."""

    escalate: bool = True
    """Switch module monitoring on when a rule with the action `escalate` fires; false: never."""

    dry_run: bool = False
    """Only write down what would be asked."""

    kinds: tuple[str, ...] = ALARM_KINDS
    """What is measured more."""

    per_micro_step: bool = True
    """One row per micro-step instead of one folded row a step."""

    for_steps: int = 20
    """Steps until the trainer switches it off by itself. Doubled, up to eight times this, while the same run escalates
    again within the hour: the fault comes back more rarely than was looked for."""

    latency_s: float = 0.15
    """Time from a judgement to every rank having read the command. Doubled when a command came too late."""

    cooldown_s: float = 10.0
    """Least time between the end of one escalation and the next."""

    max_per_hour: int = 20
    """Most escalations of a run in an hour."""

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
            raise ConfigError(f"control.kinds must be among {', '.join(KIND_LABELS)}, got {_quoted(unknown, KIND_LABELS)}")
        unknown = [kind for kind in self.dump_kinds if kind not in MEASURED_LABELS]
        if unknown or not self.dump_kinds:
            known = ", ".join(MEASURED_LABELS)
            raise ConfigError(f"control.dump_kinds must be among {known}, got {_quoted(unknown, MEASURED_LABELS)}")
        for name, least in (
            ("for_steps", 1), ("max_per_hour", 0), ("max_edits_per_hour", 0), ("cooldown_s", 0), ("dump_for_steps", 1),
            ("dump_first_n", 1), ("max_dumps_per_hour", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                bound = f"at least {least}" if math.isfinite(value) else "finite"
                raise ConfigError(f"control.{name} must be {bound}, got {value}")
        if not 0 < self.latency_s <= MAX_LATENCY_S:
            raise ConfigError(f"control.latency_s must be in (0, {MAX_LATENCY_S:g}], got {self.latency_s}")
        if not 0 < self.expires_s < math.inf:
            raise ConfigError(f"control.expires_s must be above 0 and finite, got {self.expires_s}")


def _quoted(unknown: Sequence[str], known: Collection[str]) -> str:
    """Return unknown words as a message quotes them, with the nearest known one of the first."""
    return f"{list(unknown)}{near(unknown[0], known)}" if unknown else "none"


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What an anomaly asks for. Made while judging, from the judgement alone, so that a replay proposes the same."""

    key: str
    """Names it for ever: the same proposal becomes one command, however often a crash repeats it."""
    run: str
    attempt: int
    step: int
    """Step of the anomaly."""
    ranks: tuple[int, ...] = ()
    """Ranks of the blast radius; empty: all."""
    targets: tuple[str, ...] = ()
    """Globs of module names; empty: all modules of those ranks."""
    reason: str = ""
    action: str = ESCALATE
    """ESCALATE or DUMP."""

    @property
    def topic(self) -> str:
        """The queue of the outbox that it waits in."""
        return "escalation"

    @property
    def body(self) -> bytes:
        """JSON for the outbox; `Proposal.read` takes it back."""
        return msgspec.json.encode(self)

    @staticmethod
    def read(body: bytes) -> Proposal:
        """Return the proposal that `body` says."""
        return msgspec.json.decode(body, type=Proposal)


def propose(
    anomalies: Sequence[Anomaly],
    actions: Mapping[str, Collection[str]],
    places: Mapping[int, Place],
    first_causes: Collection[str] = (),
    action: str = ESCALATE,
) -> Proposal | None:
    """Return what the anomalies of one step ask for, or None. Pure. action: which of a rule's actions is meant.

    anomalies: of one step, in the total order. actions: rule's name -> its actions. places: rank -> where it lives.
    first_causes: ids of those that nothing explains; empty: the order alone says who is suspected.
    """
    onsets = [one for one in anomalies if one.event == "onset"]
    # A lone finite excursion (`info`) is common on healthy runs: it is written down, not looked into.
    asking = [one for one in onsets if one.severity is not Severity.INFO and action in actions.get(one.rule, ())]
    if not asking:
        return None
    # A rule may ask because of the loss, while another saw where it began: suspect what was seen first.
    suspects = [one for one in onsets if one.id in first_causes] or onsets
    # A logged value says nothing about where: a bad loss may come from anywhere. A group of tensors may span all stages: its
    # members say where, if anybody does.
    located = [one for one in suspects if one.kind in MEASURED_LABELS and not one.num_members]
    ranks = blast_radius(located, places)
    first = asking[0]
    where = located[0].segment or located[0].tag_name if located else "somewhere"
    return Proposal(
        key=f"{first.run}:{first.attempt}:{first.step}:{first.id}" + ("" if action == ESCALATE else f":{action}"),
        run=first.run,
        attempt=first.attempt,
        step=first.step,
        ranks=ranks,
        reason=f"{first.rule}: {first.tag_name} {first.statistic} at step {first.step}, suspected in {where}",
        action=action,
    )


def blast_radius(suspects: Sequence[Anomaly], places: Mapping[int, Place]) -> tuple[int, ...]:
    """Return the ranks to look at: all that hold a suspected pipeline stage; empty for all ranks, or for no suspect.

    Every data- and tensor-parallel rank of the stage is in it: a fault that comes back need not choose the same
    replica. Where no segment is known the neighbours in depth are suspected too: a tensor on a border belongs to two.
    """
    if not suspects or not places:
        return ()
    depths: set[int] = set()
    for one in suspects:
        schedule = next((place.schedule for place in places.values() if place.schedule), "")
        at = depth(schedule, one.pp_stage, one.vpp_stage, one.pp_size)
        depths.update((at,) if one.segment else (at - 1, at, at + 1))
    ranks = [
        rank
        for rank, place in sorted(places.items())
        if any(depth(place.schedule, place.pp_rank, chunk, place.pp_size) in depths for chunk in range(place.vpp_size))
    ]
    return () if len(ranks) == len(places) else tuple(ranks)


def first_step(newest_step: int, step_time_s: float | None, latency_s: float) -> int:
    """Return the first step that every rank can still obey: newest step known + 1 + latency / step time, rounded up."""
    step_s = step_time_s if step_time_s is not None and step_time_s > 0 else ASSUMED_STEP_S
    return newest_step + 1 + math.ceil(latency_s / step_s)


class Escalator:
    """Turns proposals into commands of one run: not while it is on already, not too often, not in a dry run.

    audit: called for every proposal, and with the reason where it was not followed.
    """

    def __init__(self, config: ControlConfig, commands: RunCommands, audit: Audit) -> None:
        self.config = config
        self._commands = commands
        self._audit = audit
        self._latency_s = config.latency_s
        self._times: dict[str, list[float]] = {ESCALATE: [], DUMP: []}
        """Action -> when it was ordered within the last hour, in seconds since the epoch."""
        self._quiet_until = 0.0
        self._last_why_not: dict[str, str] = {}
        self._proposals: dict[str, tuple[Proposal, int]] = {}
        """Id of a command -> what it follows from, and how often it was issued anew."""
        self._again: list[tuple[Proposal, int]] = []

    @property
    def latency_s(self) -> float:
        """Time that a command is given to reach every rank; grows when commands come too late."""
        return self._latency_s

    def consider(
        self, proposal: Proposal, *, newest_step: int, step_time_s: float | None, now: float
    ) -> EnableMonitoring | DumpTensors | None:
        """Return the command that was issued, or None. newest_step: of any rank; now: seconds since the epoch.

        StoreError when the command could not be written: consider it again later.
        """
        times = self._times[proposal.action]
        times[:] = [time for time in times if now - 3600.0 < time <= now]
        is_dump = proposal.action == DUMP
        why_not = self._why_not_dump(proposal, now) if is_dump else self._why_not(proposal, newest_step, now)
        if why_not:
            # A storm of anomalies asks a thousand times: written down once a reason.
            if why_not != self._last_why_not.get(proposal.action):
                details = {"key": proposal.key, "why": why_not, "reason": proposal.reason}
                self._audit(now, "policy", "not_dumped" if is_dump else "not_escalated", details)
            self._last_why_not[proposal.action] = why_not
            return None
        self._last_why_not.pop(proposal.action, None)
        if self.config.dry_run:
            at_step = first_step(newest_step, step_time_s, self._latency_s)
            times.append(now)
            if not is_dump:
                self._quiet_until = now + self.config.cooldown_s
            self._commands.note_dry_run(
                {"key": proposal.key, "at_step": at_step, "ranks": list(proposal.ranks), "reason": proposal.reason}, now
            )
            return None
        return self._issue(proposal, newest_step, step_time_s, now, num_reissues=0)

    def follow(
        self, changed: Sequence[CommandStatus], *, newest_step: int, step_time_s: float | None, now: float
    ) -> list[EnableMonitoring | DumpTensors]:
        """Take note of what became of commands (`RunCommands.tick`); return those issued anew, having come too late.

        StoreError when one could not be written; the next call tries again.
        """
        for status in changed:
            # Only monitoring is followed by quiet: an order to dump changes nothing of what is measured.
            is_over = status.state in ("ended", "withdrawn", "expired", "refused")
            if is_over and not isinstance(status.command, DumpTensors):
                self._quiet_until = max(self._quiet_until, now + self.config.cooldown_s)
            proposal, num_reissues = self._proposals.get(status.command.id, (None, 0))
            if status.state == "withdrawn" and proposal is not None and status.is_late:
                self._latency_s = min(self._latency_s * 2.0, MAX_LATENCY_S)
                if num_reissues < MAX_REISSUES:
                    self._again.append((proposal, num_reissues + 1))
            if status.is_final:
                self._proposals.pop(status.command.id, None)
        issued = []
        while self._again:
            # Taken off the list when it is written: a full disk only delays it.
            proposal, num_reissues = self._again[0]
            issued.append(self._issue(proposal, newest_step, step_time_s, now, num_reissues))
            del self._again[0]
        return issued

    def _why_not(self, proposal: Proposal, newest_step: int, now: float) -> str:
        if not self.config.escalate:
            return "control.escalate is off"
        if self._commands.known.find(proposal.key) is not None:
            return "already issued"
        if self._commands.known.covers(self.config.kinds, proposal.ranks, newest_step):
            return "monitoring is on"
        if now < self._quiet_until <= now + self.config.cooldown_s:
            return "cooling down"
        if len(self._times[ESCALATE]) >= self.config.max_per_hour:
            return f"{self.config.max_per_hour} escalations in the last hour"
        return ""

    def _why_not_dump(self, proposal: Proposal, now: float) -> str:
        times = self._times[DUMP]
        if not self.config.dump:
            return "control.dump is off"
        if self._commands.known.find(proposal.key) is not None:
            return "already issued"
        if times and now - times[-1] < self.config.cooldown_s:
            return "cooling down"
        if len(times) >= self.config.max_dumps_per_hour:
            return f"{self.config.max_dumps_per_hour} dumps in the last hour"
        return ""

    def _issue(
        self, proposal: Proposal, newest_step: int, step_time_s: float | None, now: float, num_reissues: int
    ) -> EnableMonitoring | DumpTensors:
        key = proposal.key if not num_reissues else f"{proposal.key}:again{num_reissues}"
        at_step = first_step(newest_step, step_time_s, self._latency_s)
        times = self._times[proposal.action]
        command: EnableMonitoring | DumpTensors
        if proposal.action == DUMP:
            command = self._commands.dump_tensors(
                at_step=at_step, kinds=self.config.dump_kinds, targets=proposal.targets,
                first_n=self.config.dump_first_n, for_steps=self.config.dump_for_steps, ranks=proposal.ranks,
                reason=proposal.reason, source="policy", key=key, now=now,
            )  # fmt: skip
        else:
            longer = 2 ** min(len(times), MAX_LONGER) if not num_reissues else 1
            command = self._commands.enable(
                at_step=at_step, kinds=self.config.kinds, targets=proposal.targets,
                per_micro_step=self.config.per_micro_step, for_steps=self.config.for_steps * longer,
                ranks=proposal.ranks, reason=proposal.reason, source="policy", key=key, now=now,
            )  # fmt: skip
        if not num_reissues:
            times.append(now)
        self._proposals[command.id] = (proposal, num_reissues)
        return command
