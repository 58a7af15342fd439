"""Two daemons for one directory, one of which stands by: killed, stopped, replaced. Asserted where people hear of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.messages import Heartbeat
from sentinel.report.alert import RouteConfig, open_alerts
from sentinel.report.sinks.alertmanager import AlertmanagerConfig, AlertmanagerSink
from sentinel.report.sinks.delivery import HttpPoster
from sentinel.testing import Nan, SyntheticRun

from ..support.anomalies import an_incident
from ..support.results import incidents
from ..support.servers import Receiver, alertmanager, get_json, need
from ..support.waiting import wait_for
from ..support.warm import cli

pytestmark = pytest.mark.server


class Candidate:
    """`sentinel serve`, which serves or stands by."""

    def __init__(self, directory: Path, config: Path, log: Path, *options: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "sentinel.cli", "serve", str(directory), "--listen", "127.0.0.1:0",
                    "--open-reads", "--config", str(config), *options,
                ],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.url = str(wait_for(self._own_url, "its address"))

    def _own_url(self) -> str | None:
        assert self.process.poll() is None, self.log
        found = re.search(r"serving \S+ on (http://\S+)", self.log)
        return found[1] if found else None

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        return self.get("/readyz")[0] == 200

    def wait_until_ready(self, timeout_s: float = 200.0) -> None:
        try:
            wait_for(self.is_ready, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.get('/readyz')}\n{self.log[-8000:]}") from error

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(240)


@contextlib.contextmanager
def stage(tmp_path: Path) -> Iterator[tuple[Path, Path, str, Receiver]]:
    """Yield a directory with a run that had a NaN and saves a checkpoint since, a configuration, the Alertmanager's address,
    and who hears of it."""
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700)
    source = SyntheticRun(runs / "it", layers=2, d_model=8, elements=8).plant(Nan(step=12, module="layers.1"))
    source.write(20)
    (runs / "it").chmod(0o700)
    stop = threading.Event()  # Heartbeats: nobody falls silent.

    def beat() -> None:
        while not stop.wait(0.5):
            for rank in range(source.num_ranks):
                source.report(rank, Heartbeat(step=source.step, call_id=0, activity="checkpoint"))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield from _heard(runs, tmp_path)
    finally:
        stop.set()
        thread.join()


def _heard(runs: Path, tmp_path: Path) -> Iterator[tuple[Path, Path, str, Receiver]]:
    with Receiver().running() as receiver, alertmanager(tmp_path, receiver.url) as url:
        config = tmp_path / "daemon.yaml"
        config.write_text(f"notify: {{sinks: [{{type: alertmanager, urls: ['{url}'], resend_interval_s: 1}}]}}\n")
        yield runs, config, url, receiver


def alerts_at(url: str) -> list[dict[str, Any]]:
    return list(get_json(f"{url}/api/v2/alerts"))


def told(receiver: Receiver) -> list[tuple[str, str]]:
    """(status, how it was resolved) of each notification."""
    return [(body["status"], body["alerts"][0]["annotations"].get("resolution", "")) for body in receiver.bodies()]


def page_of(runs: Path) -> str:
    return str(json.loads((runs / ".daemon" / "http.json").read_text())["url"])


def test_what_is_open_stays_open_whoever_serves_and_only_a_resolution_resolves_it(tmp_path: Path) -> None:
    need("prometheus-alertmanager")
    with contextlib.ExitStack() as stack:
        runs, config, url, receiver = stack.enter_context(stage(tmp_path))
        daemons: list[Candidate] = []
        stack.callback(lambda: [one.end(signal.SIGKILL) for one in daemons if one.process.poll() is None])

        def start() -> Candidate:
            daemons.append(Candidate(runs, config, tmp_path / f"daemon{len(daemons)}.log"))
            return daemons[-1]

        def is_sent_again(since: str) -> bool:
            """Whether every alert was sent after this moment, by the Alertmanager's clock."""
            sent = {one["labels"]["incident"]: one["updatedAt"] for one in alerts_at(url)}
            return all(sent.get(name, "") > since for name in names)

        def newest() -> str:
            return str(max(one["updatedAt"] for one in alerts_at(url)))

        active = start()
        active.wait_until_ready()
        wait_for(lambda: alerts_at(url) and receiver.received)
        names = {one["labels"]["incident"] for one in alerts_at(url)}

        standby = start()
        code, page = standby.get("/")
        assert code == 200 and f"Standby of process {active.process.pid} on {os.uname().nodename}" in page
        assert standby.get("/readyz")[0] == 503
        health = json.loads(standby.get("/healthz")[1])
        assert (health["status"], health["problems"]) == ("standby", [])
        assert page_of(runs) == active.url

        active.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        assert standby.get("/readyz")[0] == 503, "who is stopped has the lock still"
        since = newest()
        active.process.send_signal(signal.SIGCONT)
        wait_for(lambda: is_sent_again(since))

        active.end(signal.SIGKILL)
        since = newest()
        standby.wait_until_ready()
        wait_for(lambda: is_sent_again(since))
        assert page_of(runs) == standby.url
        assert f"run it: taken over from process {active.process.pid}" in standby.log

        standby.end(signal.SIGTERM)
        since = newest()
        time.sleep(3)
        last = start()
        last.wait_until_ready()
        wait_for(lambda: is_sent_again(since))

        assert {one["labels"]["incident"] for one in alerts_at(url)} == names
        assert {status for status, _ in told(receiver)} == {"firing"}, "no all-clear that nobody gave"
        assert all(one["endsAt"] > since for one in alerts_at(url))

        opened = {one.id for one in incidents(runs / "it") if one.state == "open"}
        for name in opened:
            done = [*cli(), "resolve", name, "-d", str(runs / "it"), "--who", "ana", "--why", "restarted"]
            assert subprocess.run(done, capture_output=True, timeout=240).returncode == 0
        wait_for(lambda: not alerts_at(url))
        wait_for(lambda: sum(status == "resolved" for status, _ in told(receiver)) == len(opened))
        assert {how for status, how in told(receiver) if status == "resolved"} == {"closed"}


def test_a_clock_that_is_set_back_calls_nothing_off(tmp_path: Path) -> None:
    need("prometheus-alertmanager")
    with Receiver().running() as receiver, alertmanager(tmp_path, receiver.url) as url:
        sink = AlertmanagerSink(AlertmanagerConfig(urls=(url,)), HttpPoster(), {})
        sink.restore(open_alerts([an_incident(time=time.time())], "alertmanager", RouteConfig(), time.time()))
        for offset in (0.0, -7200.0, 3600.0):
            delivery, _ = sink.keep_alive(time.time() + offset)
            assert delivery is not None and delivery.outcome == "sent"

        wait_for(lambda: receiver.received)
        time.sleep(2.5)  # Two group intervals.

        (alert,) = alerts_at(url)
        assert alert["status"]["state"] == "active"
        assert [status for status, _ in told(receiver)] == ["firing"]
