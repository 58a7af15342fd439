"""Nodes that send digests, a real broker and a join come to the bytes of one daemon, and send few of the rows."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from sentinel.daemon.pipeline_api import ROWS_AWAY, PipelineQueries, PipelineRequest
from sentinel.daemon.serving import ServedRun
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.overheard import overhear
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.testing import BitFlip, BlowUp, LossJump, SyntheticRun

from ..support.fleet_parts import CONFIG, Join, Shipper, assert_same_results, bytes_of, go_on, nan_on, split
from ..support.nats_broker import NatsBroker
from ..support.results import anomalies
from ..support.serving import judge_run, served, small_run
from ..support.waiting import wait_for

pytestmark = [pytest.mark.server, pytest.mark.slow]

SHAPES: dict[str, dict[str, Any]] = {
    "dp4": {"pp": 1, "dp": 4, "layers": 2},
    "tp4 dp2": {"pp": 1, "dp": 2, "tp": 4, "layers": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "pp3 dp2": {"pp": 3, "dp": 2, "layers": 3},
}
STEPS = 40
KINDS = Engine(load_pack()).row_kinds


def with_faults(directory: Path, layout: str, num_nodes: int, num_steps: int = STEPS) -> SyntheticRun:
    options = SHAPES[layout]
    num_ranks = options.get("pp", 1) * options.get("dp", 1) * options.get("tp", 1)
    run = small_run(directory / "run", ranks_per_host=num_ranks // num_nodes, elements=64, **options)
    skewed = BlowUp(step=20, module="layers.0.mlp", factor=4.0, for_steps=12, rank=num_ranks - 1)
    flipped = BitFlip(step=36, module="layers.0.mlp", rank=num_ranks - 1 if options["pp"] == 1 else 1)
    run.plant(nan_on(run, num_ranks - 1), skewed, LossJump(step=34, factor=50.0), flipped)
    run.write(num_steps)
    return run


LONG = (("pp3 dp2", 3), ("dp4", 2), ("dp4", 4), ("pp2 dp2", 2), ("tp4 dp2", 1))


@pytest.mark.parametrize(
    ("layout", "num_nodes"), [("tp4 dp2", 2), *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)]
)
def test_digests_come_to_the_bytes_of_one_daemon(tmp_path: Path, broker: NatsBroker, layout: str, num_nodes: int) -> None:
    run = with_faults(tmp_path / "whole", layout, num_nodes)
    run.end()
    nodes = split(run.directory, tmp_path, num_nodes)
    join = Join(tmp_path / "joined", broker.url, num_nodes=num_nodes)
    shippers = [Shipper(path, path.name, broker.url, KINDS) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    wait_for(lambda: join.turn() or join.copies.rows_of("run").num_steps >= STEPS - 14)
    # Where each rank has a machine of its own nothing merges, the rows of the steps with faults come on top, and on a busy
    # machine what was asked for longer than 3 s ago comes again.
    assert join.intake.num_taken_bytes < (0.75 if layout == "tp4 dp2" else 2.0) * bytes_of(nodes)
    said = asyncio.run(overhear(BrokerConfig(server=broker.url), 1.5))
    assert len(said) == num_nodes and all(one.num_steps_of_digests >= STEPS - 14 for one in said)
    assert [one.end() for one in shippers] == [True] * num_nodes
    join.finish()
    judge_run(run.directory, CONFIG, is_over=True)
    assert_same_results(run.directory, join.run_dir)
    rules = {one.rule for one in anomalies(run.directory)}
    assert {"replica-divergence", "non-finite", "loss-jump"} <= rules and ("rank-skew-layers" in rules or layout != "dp4")
    assert not join.problems and not [one for shipper in shippers for one in shipper.problems]
    rows = join.copies.rows_of("run")
    counts = join.copies.health().counts
    assert (counts["digested_steps"], counts["fetched_steps"]) == (rows.num_steps, rows.num_fetched)
    assert rows.num_steps >= STEPS - 14 and 0 < rows.num_fetched < STEPS // 2 and not rows.num_gone


def test_a_step_whose_rows_lie_on_the_nodes_is_drawn_once_they_have_come_and_says_so_before(
    tmp_path: Path, broker: NatsBroker
) -> None:
    run = small_run(tmp_path / "whole" / "run", ranks_per_host=2)
    run.write(8)
    nodes = split(run.directory, tmp_path, 2)
    join = Join(tmp_path / "joined", broker.url)
    shippers = [Shipper(path, path.name, broker.url, KINDS) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.rows_of("run").num_steps >= 7)
    queries, asked = PipelineQueries(), PipelineRequest(run="run", step=5)

    def told(source: ServedRun) -> dict[str, Any]:
        return queries.answer(source, asked, 7) | {"notes": []}

    assert join.run is not None
    before = queries.answer(join.run, asked, 7)
    assert before["notes"][0] == ROWS_AWAY.format(ranks="the ranks") and not before["num_columns"]
    run.end()
    go_on(run, nodes)
    # Each sends its rows as it ends, for nothing of them is committed.
    assert [one.end() for one in shippers] == [True, True]
    wait_for(lambda: join.turn() or told(join.run)["num_columns"])
    judge_run(run.directory, CONFIG)
    with contextlib.closing(served(run.directory)) as whole:
        assert told(join.run) == PipelineQueries().answer(whole, asked, 7) | {"notes": []}
    join.finish()


@pytest.mark.long
def test_a_machine_that_two_nodes_share_sends_all_its_rows(tmp_path: Path, broker: NatsBroker) -> None:
    run = with_faults(tmp_path / "whole", "dp4", 1)
    run.end()
    nodes = split(run.directory, tmp_path, 2)
    join = Join(tmp_path / "joined", broker.url)
    shippers = [Shipper(path, path.name, broker.url, KINDS) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    assert [one.end() for one in shippers] == [True, True]
    join.finish()
    judge_run(run.directory, CONFIG, is_over=True)
    assert_same_results(run.directory, join.run_dir)
    rows = join.copies.rows_of("run")
    assert not rows.num_steps and rows.num_fetched == STEPS


def test_digests_come_to_the_same_whoever_is_killed(tmp_path: Path, broker: NatsBroker) -> None:
    run = with_faults(tmp_path / "whole", "pp2 dp2", 2, num_steps=14)
    nodes, joined = split(run.directory, tmp_path, 2), tmp_path / "joined"
    join = Join(joined, broker.url)
    shippers = [Shipper(path, path.name, broker.url, KINDS) for path in nodes]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    shippers[0].drop()
    run.write(STEPS - 14)
    run.end()
    go_on(run, nodes)
    join.drop()
    broker.kill()
    assert broker.lose_messages() >= 0
    broker.start()
    shippers[0] = Shipper(nodes[0], "node0", broker.url, KINDS)
    join = Join(joined, broker.url, "j2")
    wait_for(lambda: join.turn() or bytes_of([joined]) >= bytes_of(nodes))
    assert [one.end() for one in shippers] == [True, True]
    join.finish()

    judge_run(run.directory, CONFIG, is_over=True)
    assert_same_results(run.directory, join.run_dir)
    assert not join.problems and not join.copies.rows_of("run").num_gone
