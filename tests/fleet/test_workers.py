"""Machines that only ship, workers, a real broker and a join come to the bytes of one daemon, whoever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.fleet.subjects import TO_WORKERS

from ..support.fleet_parts import CONFIG, Join, Shipper, Worker, assert_same_results, bytes_of, split
from ..support.nats_broker import NatsBroker
from ..support.serving import judge_run
from ..support.waiting import wait_for
from .test_digests import KINDS, STEPS, with_faults

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_workers_come_to_the_bytes_of_one_daemon(tmp_path: Path, broker: NatsBroker) -> None:
    run = with_faults(tmp_path / "whole", "tp4 dp2", 2)
    run.end()
    nodes = split(run, tmp_path, 2)
    join = Join(tmp_path / "joined", broker.url)
    worker = Worker(tmp_path / "worker", broker.url, KINDS)
    shippers = [Shipper(path, path.name, broker.url, ways=TO_WORKERS) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    wait_for(lambda: join.turn() or join.copies.rows_of("run").num_steps >= STEPS - 14)
    assert join.intake.num_taken_bytes < 0.75 * bytes_of(nodes)
    assert [one.end() for one in shippers] == [True, True]
    join.finish()
    worker.end()

    judge_run(run.directory, CONFIG, is_over=True)
    assert_same_results(run.directory, join.run_dir)
    assert not join.problems and not [one for shipper in shippers for one in shipper.problems]
    rows = join.copies.rows_of("run")
    assert 0 < rows.num_fetched < STEPS // 2 and not rows.num_gone
