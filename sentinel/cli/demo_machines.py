"""Where the demo trains and is judged: one machine with a daemon, or two nodes whose spools reach a join over a broker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from sentinel.cli.companion import Companion
from sentinel.cli.demo_plan import Claim, DemoPlan
from sentinel.cli.demo_receiver import Message
from sentinel.cli.fleet_processes import FleetProcesses, free_port
from sentinel.fleet.broker_users import JOIN

NUM_RANKS = 4
RUN = "demo"
"""Name of the run on the two nodes."""
ILL_NODE = "node-2"
SHIPPER_KILLED_AT = 40
"""Step at which that node's shipper is killed."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One launcher of ranks."""

    options: tuple[str, ...]
    """Of examples/gpt/launch.py."""
    runs: Path
    """The directory of runs that its ranks write into."""
    run: str


class DemoMachines(Protocol):
    """What watches the trainer of a demo."""

    run_dir: Path
    """Where what was found is written."""
    private: Path
    """For files of the demo itself."""
    state_log: Path
    """Log of what judges."""

    @property
    def words(self) -> str:
        """What it is, for people."""

    @property
    def url(self) -> str:
        """Of the page; empty: it is not up yet."""

    @property
    def is_ready(self) -> bool:
        """Whether what is written now would be judged now."""

    @property
    def problem(self) -> str:
        """Why nothing is judged any more, nor will be; empty: it is."""

    @property
    def pid(self) -> int | None:
        """Process id of what judges; None: it does not run just now."""

    def start(self, config: Path) -> None:
        """Start what watches. config: of the daemon, or the join."""

    def watch(self, step: int, messages: Sequence[Message], num_pending: Callable[[], int]) -> None:
        """Look after it; to be called often. step: newest that was trained. num_pending: returns messages yet to send."""

    def launches(self) -> list[Launch]:
        """Return how the ranks are started."""

    def claims(self, plan: DemoPlan, messages: Sequence[Message]) -> tuple[Claim, ...]:
        """Return what is promised beside what every demo promises."""

    def finish(self, timeout_s: float) -> None:
        """End what watches."""


class OneMachine:
    """Ranks and the daemon on one disk."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.private, self.state_log = run_dir, run_dir / "demo", run_dir / ".daemon" / "daemon.log"
        self._daemon: Companion | None = None

    @property
    def words(self) -> str:
        return f"daemon: process {self.pid}, page {self.url}"

    @property
    def url(self) -> str:
        return _address(self.run_dir / ".daemon")

    @property
    def is_ready(self) -> bool:
        return bool(self.url)

    @property
    def problem(self) -> str:
        return "" if self._daemon is None else self._daemon.problem

    @property
    def pid(self) -> int | None:
        return None if self._daemon is None else self._daemon.pid

    def start(self, config: Path) -> None:
        self._daemon = Companion(
            # Anybody on this machine may see a demo, and a page that opens without a token is half of it.
            [str(self.run_dir), "--owned", "--listen", "127.0.0.1:0", "--open-reads", "--config", str(config)],
            self.state_log,
        )

    def watch(self, step: int, messages: Sequence[Message], num_pending: Callable[[], int]) -> None:
        if self._daemon is not None:
            self._daemon.watch()

    def launches(self) -> list[Launch]:
        return [Launch(options=("-n", str(NUM_RANKS)), runs=self.run_dir.parent, run=self.run_dir.name)]

    def claims(self, plan: DemoPlan, messages: Sequence[Message]) -> tuple[Claim, ...]:
        return ()

    def finish(self, timeout_s: float) -> None:
        if self._daemon is not None:
            self._daemon.finish(timeout_s)


class TwoNodes:
    """Ranks on two nodes that share no directory: of one the shipper is killed while it trains, and the join is too."""

    def __init__(self, directory: Path, plan: DemoPlan, say: Callable[[str], None]) -> None:
        self.run_dir, self.private = directory / "joined" / RUN, directory / "demo"
        self.state_log = directory / "logs" / "join.log"
        self._directory, self._plan, self._say = directory, plan, say
        self._fleet: FleetProcesses | None = None
        self._killed: dict[str, int] = {}
        """Name -> process id that was killed."""

    @property
    def words(self) -> str:
        return f"2 nodes, a broker, and the join: process {self.pid}, page {self.url}"

    @property
    def url(self) -> str:
        return "" if self._fleet is None else self._fleet.url

    @property
    def problem(self) -> str:
        return ""

    @property
    def pid(self) -> int | None:
        return None if self._fleet is None else self._fleet.pid(JOIN)

    def start(self, config: Path) -> None:
        # The page stays where it is when the join is started again.
        listen = f"127.0.0.1:{free_port()}"
        arguments = ["--listen", listen, "--open-reads", "--config", str(config), "--stream-mib", "64"]
        self._fleet = FleetProcesses(self._directory, 2, broker_port=0, join_arguments=arguments, say=self._say)
        self._fleet.start()
        self._say("the join waits whether another has the lease of the broker")

    @property
    def is_ready(self) -> bool:
        """Whether the join has the lease, and judges."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def watch(self, step: int, messages: Sequence[Message], num_pending: Callable[[], int]) -> None:
        if self._fleet is None:
            return
        self._fleet.watch()
        if step >= SHIPPER_KILLED_AT:
            self._kill(ILL_NODE, step)
        # Once it has told of the first fault and written down that it did: the second is for the next.
        if JOIN not in self._killed and self._has_told(messages) and not num_pending():
            self._kill(JOIN, step)

    def _has_told(self, messages: Sequence[Message]) -> bool:
        return any(
            alert["incident"]["opened_step"] == self._plan.batch_step
            for one in messages
            if one.to == "webhook"
            for alert in one.body["alerts"]
        )

    def launches(self) -> list[Launch]:
        assert self._fleet is not None
        port = str(free_port())
        return [
            Launch(
                options=("-n", str(NUM_RANKS // 2), "--nnodes", "2", "--node-rank", str(number), "--master-port", port),
                runs=path, run=RUN,
            )
            for number, path in enumerate(self._fleet.nodes.values())
        ]  # fmt: skip

    def claims(self, plan: DemoPlan, messages: Sequence[Message]) -> tuple[Claim, ...]:
        alerts = [alert for one in messages if one.to == "webhook" for alert in one.body["alerts"]]
        # One that may have been sent before the kill comes again, and says so; its key tells receivers.
        keys = [alert["key"] for alert in alerts if not alert["repeated"]]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        now = {name: None if self._fleet is None else self._fleet.pid(name) for name in self._killed}
        return (
            Claim(
                text=f"the shipper of {ILL_NODE} and the join were killed meanwhile, and were started again",
                holds=set(self._killed) == {ILL_NODE, JOIN}
                and all(now[name] not in (None, pid) for name, pid in self._killed.items()),
                found=", ".join(f"{name}: {pid} was killed, {now[name]} runs" for name, pid in self._killed.items())
                or "none",
            ),
            Claim(
                text="what was told was told once",
                holds=bool(keys) and not twice,
                found=f"twice: {', '.join(twice)}" if twice else f"{len(keys)} messages, each once",
            ),
        )

    def finish(self, timeout_s: float) -> None:
        if self._fleet is not None:
            self._fleet.finish()

    def _kill(self, name: str, step: int) -> None:
        if name in self._killed or self._fleet is None or (pid := self._fleet.pid(name)) is None:
            return
        self._killed[name] = pid
        self._say(f"  step {step}: {name}, process {pid}, is killed (SIGKILL)")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _address(state: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((state / "http.json").read_bytes())["url"]).rstrip("/")
    return ""
