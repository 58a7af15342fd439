"""`sentinel fleet up`: what cannot start says why, what ends is started again, and a whole fleet comes up and goes down."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.cli import fleet_processes
from sentinel.cli.fleet_processes import FleetProcess, FleetProcesses
from sentinel.cli.logged_command import LoggedCommand
from sentinel.cli.main import run_cli
from sentinel.fleet.own_broker import OwnBroker
from sentinel.store.lock import RunLock

from ..support.ports import free_port
from ..support.servers import get, is_up, need
from ..support.serving import small_run
from ..support.waiting import wait_for, wait_for_words


def said_by(directory: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what `sentinel fleet up` says when it does not start."""
    given = ("--broker-port", "0", "--listen", "127.0.0.1:0", *arguments)
    assert run_cli(["fleet", "up", str(directory), *given]) != 0
    return capsys.readouterr().err


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nats-server that only says which version it is."""
    path = tmp_path / "bin" / "nats-server"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\necho nats-server: v2.9.10\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    return path


@pytest.mark.slow
def test_no_server_and_one_that_is_too_old_are_said(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.write_text("#!/bin/sh\necho nats-server: v2.8.4\n")
    said = said_by(tmp_path / "fleet", capsys)
    assert 'expected version 2.9 or newer, got "nats-server: v2.8.4"' in said and "/releases" in said

    server.unlink()
    monkeypatch.setenv("PATH", str(server.parent))
    said = said_by(tmp_path / "fleet", capsys)
    assert "nats-server is not installed" in said and "apt install nats-server" in said


def test_a_port_that_is_taken_is_said(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_processes, "FREED_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = taken.getsockname()[1]

        assert f"127.0.0.1:{port}: expected a free port" in said_by(tmp_path / "f", capsys, "--broker-port", str(port))


def test_a_directory_that_cannot_be_made_or_is_in_use_is_said(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file/f/joined: expected a directory" in said_by(tmp_path / "file" / "f", capsys)

    lock = RunLock(tmp_path / "fleet" / "broker", "test")
    assert f"this fleet is up already, by process {os.getpid()}" in said_by(tmp_path / "fleet", capsys)
    lock.close()


@pytest.mark.slow
def test_a_server_that_ends_at_once_is_said_in_its_own_words(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.write_text('#!/bin/sh\n[ "$1" = --version ] && echo nats-server: v2.9.10 && exit\necho no room; exit 1\n')

    said = said_by(tmp_path / "fleet", capsys)

    assert "broker does not start: no room; see " in said
    users = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "fleet" / "credentials").iterdir()}
    assert users == dict.fromkeys(["ca.pem", "join", "worker", "status", "node-1", "node-2"], 0o600)


@pytest.mark.slow
def test_what_ends_is_started_again_later_and_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_processes, "FIRST_PAUSE_S", 0.01)
    said: list[str] = []
    process = FleetProcess("node-1", LoggedCommand(["sh", "-c", "echo oh; exit 3"], tmp_path / "log"), said.append)
    process.start()

    def has_ended_thrice() -> bool:
        process.watch()
        return sum("ended" in one for one in said) == 3

    wait_for(has_ended_thrice)
    ends = [one for one in said if "ended" in one]
    said_last = f"it said last: oh; see {tmp_path}/log"
    assert ends == [
        f"node-1 ended with exit code 3; it is started again in {pause} s; {said_last}" for pause in ("0.01", "0.02", "0.04")
    ]
    assert (tmp_path / "log").read_text() == "oh\n" * 3


@pytest.mark.slow
def test_what_a_process_said_last_is_not_why_it_was_killed(tmp_path: Path) -> None:
    said: list[str] = []
    script = "echo INFO all well; kill -9 $$"
    process = FleetProcess("join", LoggedCommand(["sh", "-c", script], tmp_path / "log"), said.append)
    process.start()

    def has_ended() -> bool:
        process.watch()
        return bool(said)

    wait_for(has_ended)
    assert said[0].startswith("join was killed by signal 9; it is started again in 0.5 s; it said last: INFO all well; see ")


@pytest.mark.server
@pytest.mark.slow
def test_the_broker_is_asked_whether_it_is_up_without_an_error_in_its_log(tmp_path: Path) -> None:
    need("nats-server")
    own = OwnBroker(tmp_path, ["node-1"], free_port())
    own.prepare()
    server = LoggedCommand(own.command, tmp_path / "log")
    assert not own.is_up
    server.start()
    wait_for(lambda: own.is_up)
    server.end(20.0)

    said = (tmp_path / "log").read_text()
    assert "Server is ready" in said and "[ERR]" not in said


@pytest.mark.slow
def test_all_are_ended_in_order_and_once_more_ends_them_at_once(tmp_path: Path) -> None:
    fleet = FleetProcesses(tmp_path, 2, broker_port=0, join_arguments=[], say=lambda words: None)
    script = f"trap 'echo $0 >> {tmp_path}/ended; exit' TERM; echo $0 > {tmp_path}/up-$0; while :; do sleep 0.01; done"
    stubborn = f"trap '' TERM; echo $0 > {tmp_path}/up-$0; while :; do sleep 0.01; done"

    def begin(script: str) -> None:
        for name in ("broker", "join", "node-1", "node-2"):
            (tmp_path / f"up-{name}").unlink(missing_ok=True)
            background = LoggedCommand(["sh", "-c", script, name], tmp_path / "log")
            fleet._processes[name] = FleetProcess(name, background, lambda words: None)
            background.start()
            wait_for_words(tmp_path / f"up-{name}", name)

    begin(script)
    assert fleet.finish()
    ended = (tmp_path / "ended").read_text().split()
    assert set(ended[:2]) == {"node-1", "node-2"} and ended[2:] == ["join", "broker"]

    begin(stubborn)
    assert not fleet.finish(lambda: True)
    assert [fleet.pid(name) for name in ("broker", "join", "node-1", "node-2")] == [None] * 4


@pytest.mark.long
@pytest.mark.server
@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_fleet_comes_up_judges_what_nodes_write_and_goes_on_where_it_was(tmp_path: Path, num_workers: int) -> None:
    need("nats-server")
    run = small_run(tmp_path / "fleet" / "node-2" / "run")
    run.write(4)
    port = free_port()
    command = [sys.executable, "-m", "sentinel.cli", "fleet", "up", str(tmp_path / "fleet"), "--broker-port", str(port)]
    command += ["--listen", f"127.0.0.1:{free_port()}", "--open-reads", "--json"]
    command += ["--workers", str(num_workers)]
    judged = tmp_path / "fleet" / "joined" / "run" / ".daemon" / "journal.sqlite"
    for number in range(2):
        said = tmp_path / f"said-{number}"
        with said.open("w") as out, (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=out, stderr=log)
        try:
            places = json.loads(wait_for_words(said, "}\n"))
            assert places["server"] == f"tls://127.0.0.1:{port}"
            assert places["nodes"]["node-2"] == {"SENTINEL_DIR": str(tmp_path / "fleet" / "node-2")}
            wait_for(judged.exists, (tmp_path / "log").read_text())
            said_by_join = wait_for(
                lambda page=places["page"]: (text := get(f"{page}/metrics")).count(b"node-2") == 3 and text
            )
            assert {b"sentinel_join_active 1.0", b"sentinel_join_broker_connected 1.0"} <= set(said_by_join.splitlines())
            assert f"sentinel_join_lease_epoch {number + 1}.0".encode() in said_by_join
            assert list(places["workers"]) == [f"worker-{one}" for one in range(1, num_workers + 1)]
            for url in places["workers"].values():
                wait_for(lambda page=url: is_up(f"{page}/metrics"))
                assert b"sentinel_worker_partitions" in get(f"{url}/metrics")
            shippers = (tmp_path / "fleet" / "logs" / "node-2.log").read_text().count("shipping")
            assert shippers == 1 + 2 * number
            pids = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "ship.*node-2"], capture_output=True, text=True)
            os.kill(int(pids.stdout), signal.SIGKILL)
            wait_for_words(tmp_path / "log", "node-2 was killed by signal 9", "node-2: started again")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
    if num_workers:
        assert (tmp_path / "fleet" / "logs" / "worker-1.log").read_text().count("has 64 of 64 partitions") == 2
        return
    copies = list((tmp_path / "fleet" / "joined" / "run" / "spool").rglob("*.spool"))
    assert copies and all(
        path.read_bytes() == (run.directory / path.relative_to(tmp_path / "fleet" / "joined" / "run")).read_bytes()
        for path in copies
    )
