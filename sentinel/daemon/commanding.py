"""The commands of one run, kept in the journal: proposals in, orders out, answers followed."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec

from sentinel.command import ALARM_KINDS, ANY_ATTEMPT, TrainerAction
from sentinel.control.command_status import CommandStatus
from sentinel.control.command_words import orders_in_words
from sentinel.control.commands import RunCommands
from sentinel.control.config import ControlConfig
from sentinel.control.edits import ConfigFileEdits, ConfigInUse
from sentinel.control.policy import Escalator, first_step
from sentinel.control.proposal import Proposal
from sentinel.errors import ConfigError, StoreError
from sentinel.incident import Incident
from sentinel.messages import Ack
from sentinel.record import KIND_LABELS
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths
from sentinel.trace import Trace, check_compressor

ACTIONS = ("enable", "disable", "dump", "trace", "describe", "request", "withdraw")
"""What a person may ask for over HTTP."""
COMMANDS_FACT = "commands"
EDITS_FACT = "config"
POLICY_FACT = "policy"
SILENT_START_S = 5.0
"""How long proposals wait, after a start, for a frame of a rank: heartbeats come every second."""


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person asks for over HTTP."""

    kinds: tuple[str, ...] = ()
    """Empty: the four of an alarm when enabling, all when disabling."""
    targets: tuple[str, ...] = ()
    statistics: tuple[str, ...] | None = None
    per_micro_step: bool = True
    for_steps: int | None = None
    ranks: tuple[int, ...] = ()
    at_step: int | None = None
    """None: the first step that every rank can still obey."""
    reason: str = ""
    step_interval: int = 1
    """dump, trace: every this many steps."""
    first_n: int | None = None
    """dump: only the first so many elements of each dimension; None: all."""
    trace: Trace = Trace()
    """trace: how tensors become small."""
    request: TrainerAction | None = None
    """request: what the trainer is asked for."""
    num_batches: int = 1
    """request, skip_batches: steps whose batches are passed over."""
    for_s: float = 3600.0
    """request, pause: seconds after which it is over by itself."""
    command: str = ""
    """withdraw: id of the command to forget."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KIND_LABELS]
        if unknown:
            raise ConfigError(f"kinds must be among {', '.join(KIND_LABELS)}, got {', '.join(unknown)}")
        if self.for_steps is not None and self.for_steps < 1:
            raise ConfigError(f"for_steps must be at least 1, got {self.for_steps}")
        if self.step_interval < 1:
            raise ConfigError(f"step_interval must be at least 1, got {self.step_interval}")
        if self.first_n is not None and self.first_n < 1:
            raise ConfigError(f"first_n must be at least 1, got {self.first_n}")
        check_compressor("trace.compressor", self.trace.compressor)
        if self.num_batches < 1:
            raise ConfigError(f"num_batches must be at least 1, got {self.num_batches}")
        if not 0 < self.for_s < math.inf:
            raise ConfigError(f"for_s must be above 0 and finite, got {self.for_s}")


class Commanding:
    """May be called from any thread."""

    def __init__(self, paths: RunPaths, config: ControlConfig, journal: Journal) -> None:
        self._journal = journal
        self._mutex = threading.RLock()
        self._commands = RunCommands(paths.run_dir, audit=journal.audit.add, expires_s=config.expires_s)
        former = journal.values.get(COMMANDS_FACT)
        if former:
            self._commands.load(former.encode())
        self._escalator = Escalator(config, self._commands, journal.audit.add)
        self._kept_policy = journal.values.get(POLICY_FACT) or ""
        if self._kept_policy:
            self._escalator.load(self._kept_policy.encode())
        self._edits = ConfigFileEdits(config, self._commands, journal.audit.add, socket.gethostname())
        self._kept_edits = journal.values.get(EDITS_FACT) or ""
        if self._kept_edits:
            self._edits.load(self._kept_edits.encode())
        self._newest_step = -1
        self._step_time_s: float | None = None
        self._kept = former or ""
        self._started = time.time()
        self.problem = ""
        """Why commands cannot be written; empty when they can."""

    def use(self, config: ControlConfig) -> None:
        """Decide by another configuration from now on; what was commanded stands, and counts."""
        with self._mutex:
            self._escalator.use(config)
            self._edits.config = config
            self._commands.expires_s = config.expires_s

    def turn(
        self,
        ended: Mapping[int, int],
        newest_step: int,
        step_time_s: float | None,
        now: float,
        *,
        attempt: int = ANY_ATTEMPT,
        in_use: Callable[[], Mapping[int, ConfigInUse]] = dict,
        begun_s: float | None = None,
    ) -> None:
        """Follow commands, consider proposals that wait, and look at the trainer's config file.

        ended: live rank -> newest step that it ended (-1: none). now: seconds since the epoch. attempt: as the ranks
        call it. in_use: returns live rank -> the config that it measures by. begun_s: seconds since newest_step began; None:
        not known.
        """
        with self._mutex:
            self._newest_step, self._step_time_s = newest_step, step_time_s
            try:
                self._begin_attempt(attempt, now)
                changed = self._commands.tick(ended, now)
                self._escalator.follow(changed, newest_step=newest_step, step_time_s=step_time_s, now=now, begun_s=begun_s)
                self._edits.turn(in_use, newest_step=newest_step, step_time_s=step_time_s, now=now, mono=time.monotonic())
                self.keep()
                for row in () if self._journal.is_fenced_off else self._journal.outbox.waiting("escalation", now):
                    if not ended:
                        # After a restart no frame has come yet; in a run that is over nobody reads commands any more.
                        if now - self._started > SILENT_START_S:
                            self._journal.outbox.finish_delivery([row.position], "no rank is alive")
                        continue
                    issued = self._escalator.consider(
                        Proposal.read(row.body),
                        newest_step=newest_step,
                        step_time_s=step_time_s,
                        now=now,
                        begun_s=begun_s,
                    )
                    # The commands' memory first: a crash in between finds the key there, and issues nothing twice.
                    self.keep()
                    outcome = f"issued {', '.join(command.id for command in issued)}" if issued else "not issued"
                    self._journal.outbox.finish_delivery([row.position], outcome)
                self.problem = ""
            except StoreError as error:
                self.problem = str(error)

    def takes(self, proposal: Proposal) -> bool:
        """Return whether a policy, or a rule of the proposal itself, asks for anything."""
        return self._escalator.takes(proposal)

    def acknowledge(self, rank: int, ack: Ack, now: float, given: float) -> None:
        """Take a rank's answer. given: when it gave it, by its clock."""
        with self._mutex:
            self._commands.acknowledge(rank, ack, now, given)

    def order(self, action: str, request: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Do what a person asks; StoreError, ConfigError or ValidationError when it cannot be."""
        try:
            order = msgspec.convert(dict(request), ControlRequest)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from error
        with self._mutex:
            at_step = order.at_step
            if at_step is None:
                at_step = first_step(self._newest_step, self._step_time_s, self._escalator.latency_s)
            reason = order.reason or "asked for over HTTP"
            command: Any
            if action == "enable":
                command = self._commands.enable(
                    at_step=at_step,
                    now=now,
                    targets=order.targets,
                    statistics=order.statistics,
                    per_micro_step=order.per_micro_step,
                    for_steps=order.for_steps,
                    ranks=order.ranks,
                    reason=reason,
                    source="http",
                    kinds=order.kinds or ALARM_KINDS,
                )
            elif action == "dump":
                command = self._commands.dump_tensors(
                    at_step=at_step, now=now, kinds=order.kinds or ("wgrad",), targets=order.targets, ranks=order.ranks,
                    for_steps=order.for_steps or 1, step_interval=order.step_interval, first_n=order.first_n,
                    reason=reason, source="http",
                )  # fmt: skip
            elif action == "trace":
                command = self._commands.trace_tensors(
                    at_step=at_step, now=now, kinds=order.kinds or ("activation",), targets=order.targets, ranks=order.ranks,
                    trace=order.trace, for_steps=order.for_steps or 100, step_interval=order.step_interval, reason=reason,
                    source="http",
                )  # fmt: skip
            elif action == "request":
                if order.request is None:
                    raise ConfigError(f"request must be one of {', '.join(get_args(TrainerAction))}, got none")
                command = self._commands.request(
                    order.request, at_step=at_step, now=now, reason=reason, source="http",
                    num_batches=order.num_batches if order.request == "skip_batches" else 0,
                    for_s=order.for_s if order.request == "pause" else 0.0,
                )  # fmt: skip
            elif action == "withdraw":
                if self._commands.known.get(order.command) is None:
                    raise ConfigError(f'command must be the id of a command that is known, got "{order.command[:80]}"')
                command = self._commands.withdraw(order.command, now=now, reason=reason, source="http")
            elif action == "describe":
                command = self._commands.describe(at_step=at_step, now=now, ranks=order.ranks, reason=reason, source="http")
            else:
                command = self._commands.disable(
                    at_step=at_step,
                    now=now,
                    kinds=order.kinds,
                    targets=order.targets,
                    ranks=order.ranks,
                    reason=reason,
                    source="http",
                )
            self.keep()
            return {"command": msgspec.to_builtins(command)}

    def describe(self) -> dict[str, Any]:
        """Return the config in use and the newest commands, for the API."""
        commands = [
            {"state": one.state, "source": one.source, "reason": one.reason, "command": msgspec.to_builtins(one.command)}
            for one in self.statuses()[-20:]
        ]
        return {"config": self.config(), "commands": commands}

    def statuses(self) -> list[CommandStatus]:
        """Return all commands that are remembered, in order of their numbers."""
        with self._mutex:
            return self._commands.known.statuses()

    def orders_about(self, incident: Incident) -> tuple[str, ...]:
        """Return in words what was ordered because of an incident, as it stands now."""
        return orders_in_words(self.statuses(), incident)

    def counts(self) -> dict[str, int]:
        """Return state -> commands that ever entered it."""
        with self._mutex:
            return dict(self._commands.audit.counts)

    @property
    def monitoring_acked_step(self) -> int | None:
        """at_step of the last command that every rank it means acknowledged."""
        return self._commands.monitoring_acked_step

    def is_monitoring(self) -> bool:
        """Return whether some rank measures more now because a command asked for it."""
        with self._mutex:
            return self._commands.known.is_on(self._newest_step)

    @property
    def config_problem(self) -> str:
        """Why the newest text of the trainer's config file is not in force; empty when it is."""
        return self._edits.state.problem

    def config(self) -> dict[str, Any]:
        """Return what is known of the trainer's config file: path, hash and number of its newest text, and the problem."""
        state = self._edits.state
        return {"path": state.path, "text_hash": state.text_hash, "edit": state.edit, "problem": state.problem}

    def edits(self) -> dict[str, int]:
        """Return outcome -> edits of the trainer's config file."""
        with self._mutex:
            return dict(self._edits.counts)

    def _begin_attempt(self, attempt: int, now: float) -> None:
        if attempt > self._commands.attempt:
            self._commands.begin_attempt(now, attempt)
            self._commands.attempt = attempt

    def keep(self) -> None:
        """Put what is known of commands and edits into the journal, if it changed."""
        edits = self._edits.dump().decode()
        if edits != self._kept_edits:
            self._journal.values.put(EDITS_FACT, edits)
            self._kept_edits = edits
        policy = self._escalator.dump().decode()
        if policy != self._kept_policy:
            self._journal.values.put(POLICY_FACT, policy)
            self._kept_policy = policy
        body = self._commands.dump().decode()
        if body != self._kept:
            self._journal.values.put(COMMANDS_FACT, body)
            self._kept = body
