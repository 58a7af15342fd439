"""DaemonHealth: whether the daemon is well, and everything that is wrong with it in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.notifying import Notifying
from sentinel.daemon.serving import ServedRun
from sentinel.join_health import JoinHealth
from sentinel.judge.packs import RulePacks
from sentinel.report.heartbeat import HeartbeatSender
from sentinel.report.silences import Silences
from sentinel.version import VERSION

STUCK_AFTER_S = 30.0
"""Seconds in which the loop neither comes round nor judges a step, after which it is called stuck. Too small: a step that
waits for rows of a node is; too large: a loop that hangs is reported late."""


class DaemonHealth:
    """The loop publishes what it serves at each turn; any thread asks."""

    def __init__(self, packs: RulePacks, config: ConfigInForce, notifying: Notifying, silences: Silences) -> None:
        self.is_stopping = False
        self.heartbeat: HeartbeatSender | None = None
        """None: none is configured."""
        self.join_health: Callable[[], JoinHealth] | None = None
        """How the join is whose daemon this is; None: it is no join's."""
        self.http_problems: list[str] = []
        """Why files of tokens or certificates are not in force as they are now."""
        self.runs: Mapping[str, ServedRun] = {}
        """Those that are served, by name; replaced, never changed."""
        self._problems: Mapping[str, str] = {}
        self._held: Mapping[str, str] = {}
        self._packs, self._config, self._notifying, self._silences = packs, config, notifying, silences
        self._has_caught_up = False
        self._alive_at = time.monotonic()

    def publish(
        self, runs: Mapping[str, ServedRun], problems: Mapping[str, str], held: Mapping[str, str], *, is_caught_up: bool
    ) -> None:
        """Say that the loop came round, which runs it serves, why others are not served, and who serves them: run ->
        process."""
        self.alive()
        if runs != self.runs:
            self.runs = runs
        self._problems, self._held = dict(problems), dict(held)
        self._has_caught_up = not self.is_standby and (self._has_caught_up or is_caught_up)

    def alive(self) -> None:
        """Say that the loop goes on."""
        self._alive_at = time.monotonic()

    @property
    def is_standby(self) -> bool:
        """Whether another daemon serves all runs that there are."""
        return bool(self._held) and not self.runs

    @property
    def is_ready(self) -> bool:
        """Whether everything there was at the start has been judged, nothing stops, and this is no standby."""
        return self._has_caught_up and not self.is_stopping

    def is_at_work(self) -> bool:
        """Return whether runs are served or may be: the loop comes round, and no other daemon serves them."""
        return not self._is_stuck and not self.is_standby and not self.is_stopping

    def describe(self) -> dict[str, Any]:
        """Return the status and every problem in words, as `/healthz` has them."""
        problems = self.problems()
        if self._is_stuck:
            status = "stuck"
        elif self.is_stopping:
            status = "stopping"
        elif self.is_standby:
            status = "standby"
        else:
            status = "degraded" if problems else "ok"
        return {
            "status": status,
            "problems": problems,
            "standby_of": sorted(set(self._held.values())),
            "version": VERSION,
            "pack_hash": self._packs.pack_hash,
            "config_hash": self._config.config_hash,
            "is_dry_run": self._notifying.is_dry_run,
            "num_runs": len(self.runs),
        }

    def problems(self) -> list[str]:
        """Return what is wrong with all parts of the daemon, in words."""
        problems = []
        if self._is_stuck:
            problems.append(f"the loop has judged nothing and not come round for {time.monotonic() - self._alive_at:.0f} s")
        problems += [f"run {name} is not served: {problem}" for name, problem in sorted(self._problems.items())]
        if self._packs.problem:
            problems.append(f"rules: the former ones are in use: {self._packs.problem}")
        if self._config.problem:
            problems.append(f"config: the former one is in force: {self._config.problem}")
        problems += self.http_problems
        problems += [f"silences: {problem}" for problem in self._silences.problems()]
        problems += [f"sink {name}: {problem}" for name, problem in sorted(self._notifying.notifier.problems().items())]
        if self.heartbeat is not None and self.heartbeat.problem:
            problems.append(f"heartbeat: {self.heartbeat.problem}")
        if self.join_health is not None:
            problems += self.join_health().problems
        problems += [
            f"run {name}: {problem}" for name, run in sorted(self.runs.items()) for problem in run.status.problems()
        ]
        return problems

    @property
    def _is_stuck(self) -> bool:
        return time.monotonic() - self._alive_at > STUCK_AFTER_S
