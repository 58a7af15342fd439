"""Joins as processes, over HTTP: one works, the others stand by and take over, whatever happens to the first."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.testing import LossJump

from ..support.fleet_parts import CONFIG, Join, Shipper, assert_same_results, bytes_of, go_on, nan_on, split
from ..support.nats_broker import NatsBroker
from ..support.ports import free_port
from ..support.results import decisions
from ..support.servers import Receiver, get
from ..support.serving import judge_run, small_run
from ..support.waiting import wait_for

pytestmark = [pytest.mark.server, pytest.mark.slow]
TAKEOVER_S = 400.0
"""Longest wait for a standby that takes over 25 s after the last renewal, on a machine that does much else."""


class JoinProcess:
    """`sentinel join`, and what it answers."""

    def __init__(self, joined: Path, server: str, config: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = config.with_name(f"join-{self.url[-5:]}.log")
        arguments = ["join", str(joined), "--server", server, "--listen", self.url[7:], "--open-reads"]
        # A busy machine may keep one from its processor for as long as it takes a standby to take over by default.
        arguments += ["--config", str(config), "--takeover-s", "25"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sentinel.cli", *arguments], stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def name(self) -> str:
        """What other joins call it."""
        return f"{socket.gethostname()}/{self.process.pid}"

    def health(self) -> dict[str, Any]:
        """Return what /healthz says; {}: nothing yet."""
        try:
            return dict(json.loads(get(f"{self.url}/healthz")))
        except OSError:
            assert self.process.poll() is None, self.log.read_text()
            return {}

    def ready(self) -> int:
        """Return the status of /readyz."""
        try:
            get(f"{self.url}/readyz")
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def works(self) -> bool:
        return self.health().get("status") in ("ok", "degraded") and not self.health().get("standby_of")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(TAKEOVER_S)


@pytest.fixture
def joins() -> Iterator[list[JoinProcess]]:
    started: list[JoinProcess] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.wait()


def test_a_standby_says_so_and_takes_over_at_once_from_who_ends_in_order(tmp_path: Path, joins: list[JoinProcess]) -> None:
    joined, config = tmp_path / "joined", tmp_path / "sentinel.yml"
    config.write_text("{}\n")
    with NatsBroker(tmp_path / "broker") as broker:
        first = Join(joined, broker.url)
        wait_for(lambda: not first.intake.standby_of)
        joins.append(JoinProcess(joined, broker.url, config))
        second = joins[0]
        wait_for(lambda: second.health().get("standby_of") == ["j1"], timeout_s=TAKEOVER_S)
        assert (second.health()["status"], second.ready()) == ("standby", 503)
        first.drop()
        wait_for(lambda: second.works() and second.ready() == 200, timeout_s=TAKEOVER_S)
        assert second.end(signal.SIGTERM) == 0, second.log.read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_stopped_join_and_a_killed_one_are_taken_over_and_nothing_is_told_twice(
    tmp_path: Path, joins: list[JoinProcess]
) -> None:
    run = small_run(tmp_path / "whole" / "run")
    run.plant(nan_on(run, 3), LossJump(step=15, factor=50.0))
    run.write(8)
    nodes, joined, config = split(run.directory, tmp_path, 2), tmp_path / "joined", tmp_path / "sentinel.yml"

    def start(server: str) -> JoinProcess:
        joins.append(JoinProcess(joined, server, config))
        return joins[-1]

    def judged() -> int:
        return len(decisions(joined / "run")) if (joined / "run" / ".daemon" / "journal.sqlite").exists() else 0

    with NatsBroker(tmp_path / "broker") as broker, Receiver().running() as receiver:
        config.write_text(f"notify: {{sinks: [{{type: webhook, name: hook, url: '{receiver.url}/'}}]}}\n")
        first = start(broker.url)
        wait_for(first.works, timeout_s=TAKEOVER_S)
        shippers = [Shipper(path, path.name, broker.url) for path in nodes]
        wait_for(lambda: judged() >= 8 and receiver.received, timeout_s=TAKEOVER_S)
        second = start(broker.url)
        wait_for(lambda: second.health().get("standby_of") == [first.name], timeout_s=TAKEOVER_S)
        assert second.ready() == 503

        first.process.send_signal(signal.SIGSTOP)
        run.write(8)
        go_on(run, nodes)
        wait_for(lambda: second.works() and judged() >= 16, timeout_s=TAKEOVER_S)
        assert "which has not ended" in second.log.read_text()
        first.process.send_signal(signal.SIGCONT)
        assert first.process.wait(TAKEOVER_S) == 1
        assert "was not renewed for 15 s" in first.log.read_text()

        third = start(broker.url)
        wait_for(lambda: third.health().get("standby_of") == [second.name], timeout_s=TAKEOVER_S)
        second.end(signal.SIGKILL)
        run.write(8)
        run.end()
        go_on(run, nodes)
        wait_for(lambda: third.works() and judged() >= 24, timeout_s=TAKEOVER_S)
        wait_for(lambda: bytes_of([joined]) >= bytes_of(nodes))
        assert [one.end() for one in shippers] == [True, True]
        assert third.end(signal.SIGTERM) == 0, third.log.read_text()
        told = [alert for _, body in receiver.received for alert in body["alerts"]]

    judge_run(joined / "run", CONFIG, is_over=True)
    judge_run(run.directory, CONFIG, is_over=True)
    assert_same_results(run.directory, joined / "run")
    assert len({alert["key"] for alert in told}) == len(told) and not any(alert["repeated"] for alert in told)
