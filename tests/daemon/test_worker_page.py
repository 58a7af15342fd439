"""What is shown of a worker: its health in words, whether it is ready, and what systemd hears."""

from __future__ import annotations

import json
import socket
import urllib.error
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.daemon.daemon_health import STUCK_AFTER_S
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.worker_page import WorkerPage
from sentinel.errors import ConfigError
from sentinel.worker_health import WorkerHealth

from ..support.servers import get, get_json
from ..support.snapshots import a_worker
from ..support.waiting import wait_for


class Shown:
    """A page without HTTP, whose worker and clock the test moves."""

    def __init__(self, directory: Path, **environ: str) -> None:
        self.worker, self.now = a_worker(), 100.0
        self.page = WorkerPage(directory, None, environ, lambda: self.worker, clock=lambda: self.now)

    def change(self, **changes: Any) -> None:
        self.worker = msgspec.structs.replace(self.worker, **changes)


def test_a_worker_with_its_share_is_well_and_ready(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    shown.page.look()

    assert shown.page.is_ready()
    assert shown.page.health() == {
        "status": "ok", "problems": [], "standby_of": [], "version": shown.page.health()["version"], "num_partitions": 64,
        "num_workers": 2, "num_nodes": 5,
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{"is_connected": False}, {"is_renewed": False}])
def test_one_that_the_broker_does_not_know_is_not_ready(tmp_path: Path, changes: dict[str, bool]) -> None:
    shown = Shown(tmp_path)
    shown.change(**changes)

    assert not shown.page.is_ready()


def test_of_more_workers_than_partitions_one_that_has_none_is_ready(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    shown.change(partitions={}, num_workers=65)

    assert shown.page.is_ready()


def test_problems_are_said_and_counted_and_a_loop_that_hangs_is_stuck(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    shown.change(problems=("nothing goes on to the join: the broker is away",))

    assert (shown.page.health()["status"], len(shown.page.health()["problems"])) == ("degraded", 1)
    assert b"sentinel_problems 1.0" in shown.page.metrics("")[0]
    shown.now += STUCK_AFTER_S + 1
    assert shown.page.health()["status"] == "stuck" and not shown.page.is_ready()
    assert "not come round for 31 s" in shown.page.health()["problems"][0]
    shown.page.look()
    assert shown.page.health()["status"] == "degraded"
    assert b'sentinel_disk_free_bytes{directory="copies"}' in shown.page.metrics("")[0]


def test_systemd_hears_that_it_works_that_it_lives_and_that_it_ends(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(10)
        shown = Shown(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="1")
        with shown.page:
            shown.page.look()
        assert [listening.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]
    assert shown.page.health()["status"] == "stopping" and not shown.page.is_ready()


def test_metrics_and_health_alone_are_served_and_to_whom_the_gate_lets_in(tmp_path: Path) -> None:
    worker = WorkerHealth(problems=("broker nats://x: it is not reached",))
    page = WorkerPage(tmp_path, HttpConfig(has_token_reads=True), {}, lambda: worker)
    assert page._server is not None
    url = page._server.url
    with page:
        page.look()
        assert wait_for(lambda: get_json(f"{url}/healthz")) == {"status": "degraded"}, "the words are for who may read"
        for path, status in (("/metrics", 401), ("/", 404), ("/api/v1/runs", 404), ("/readyz", 503)):
            with pytest.raises(urllib.error.HTTPError, match=str(status)):
                get(url + path)
        with pytest.raises(ConfigError, match="in use"):
            WorkerPage(tmp_path, HttpConfig(port=page._server.port), {}, lambda: worker)
    assert len(json.loads((tmp_path / "tokens.json").read_text())["read"]) > 16
