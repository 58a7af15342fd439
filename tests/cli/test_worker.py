"""`sentinel worker`: what it refuses before it asks any broker; and how `sentinel fleet status` tells of one."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from sentinel.cli.main import BAD_USAGE, CLEAN, run_cli
from sentinel.fleet.sealed import WorkerReport
from sentinel.store.lock import RunLock

NOWHERE = "nats://127.0.0.1:9"


def test_a_directory_that_another_worker_has_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "relayed" / "node0").mkdir(parents=True)
    lock = RunLock(tmp_path, "test")
    assert run_cli(["worker", str(tmp_path), "--server", NOWHERE]) == BAD_USAGE
    lock.close()

    said = capsys.readouterr().err
    assert f"{tmp_path}: another worker has it, process {os.getpid()} on " in said and "give each a DIRECTORY" in said
    assert (tmp_path / "relayed" / "node0").is_dir()


def test_a_lease_that_is_too_short_and_a_server_that_is_none_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["worker", str(tmp_path / "w"), "--server", NOWHERE, "--takeover-s", "0.5"]) == BAD_USAGE
    assert run_cli(["worker", str(tmp_path / "w"), "--server", "broker"]) == BAD_USAGE
    assert run_cli(["worker", str(tmp_path / "w"), "--server", NOWHERE, "--listen", "0.0.0.0:9465"]) == BAD_USAGE

    said = capsys.readouterr().err
    assert "--takeover-s: expected 1 at least, got 0.5" in said and "--server: expected nats://HOST:PORT" in said
    assert "http.listen 0.0.0.0:9465: without TLS" in said
    assert not (tmp_path / "w").exists()


def test_status_says_which_partitions_a_worker_has_and_what_waits(capsys: pytest.CaptureFixture[str]) -> None:
    report = WorkerReport(
        worker="host/1", partitions={0: 1, 1: 1, 2: 1, 7: 1, 9: 3}, num_nodes={1: 2, 9: 1}, waiting_bytes={1: 2**20, 9: 0},
        num_workers=2, num_refused=4, blocked="the broker is away",
    )  # fmt: skip

    async def overhear(broker: object, listen_s: float, on_worker: object) -> list[object]:
        on_worker(report)  # type: ignore[operator]
        return []

    with patch("sentinel.cli.fleet.overhear", overhear):
        assert run_cli(["fleet", "status", "--server", NOWHERE]) != CLEAN
        assert run_cli(["fleet", "status", "--server", NOWHERE, "--json"]) != CLEAN
    *lines, as_json = capsys.readouterr().out.splitlines()
    assert lines == [
        "no node spoke within 1.5 s",
        "worker host/1  5 partitions, of 3 nodes  1.0 MiB wait  4 messages refused",
        "  partitions 0-2, 7  epoch 1",
        "  partitions 9  epoch 3",
        "  blocked: the broker is away",
    ]
    assert '"9":{"epoch":3,"num_nodes":1,"waiting_bytes":0}' in as_json


def test_what_lies_in_its_directory_beside_its_copies_is_not_touched(tmp_path: Path) -> None:
    from sentinel.fleet.relayed_nodes import RelayedNodes

    (tmp_path / "relayed" / "n0" / "run").mkdir(parents=True)
    (tmp_path / "other").write_text("mine")
    RelayedNodes(tmp_path / "relayed", "w1", kinds=frozenset(), is_held=lambda partition, epoch: True)
    assert not list((tmp_path / "relayed").iterdir()) and (tmp_path / "other").read_text() == "mine"
