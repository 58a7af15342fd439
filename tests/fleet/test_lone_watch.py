"""While no join answers, a machine judges its own ranks, and says what it finds; what a join has judged it does not say."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from sentinel.cli.fleet import _lines
from sentinel.cli.lone_watch import LoneWatch
from sentinel.decision import Decision
from sentinel.fleet import node_runs
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.node_runs import UNANSWERED_S, NodeRuns
from sentinel.fleet.overheard import _status
from sentinel.fleet.sealed import Answer, FilePlace, SpoolHeld
from sentinel.fleet.shipping import Shipping
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.judge.judge import Judge, Judgement
from sentinel.judge.lone_runs import LoneRuns
from sentinel.messages import EndStep
from sentinel.rules.language.loader import load_pack
from sentinel.step_view import StepView
from sentinel.testing import LossJump, Nan, SyntheticRun

from ..support.fleet_parts import LAYOUTS, Clock, go_on, split
from ..support.ports import free_port
from ..support.serving import small_run
from ..support.waiting import wait_for


def committed(run_dir: Path, judged_step: int) -> dict[str, tuple[int, int]]:
    """Return what a join has committed that has judged so far."""
    return {
        record.incarnation.folder: (record.frame.file_index, record.frame.offset_after)
        for record in RunFollower(run_dir).poll()
        if isinstance(record.message, EndStep) and record.frame.header.step <= judged_step
    }


class Machine:
    """The second of two nodes, which has ranks 2 and 3 of a run, and what is said there."""

    def __init__(self, where: Path) -> None:
        self.run: SyntheticRun = small_run(where / "whole" / "run", pp=1, dp=2, tp=2, layers=2)
        self.run.plant(
            Nan(step=5, module="layers.0.mlp", rank=3), Nan(step=40, module="layers.1.mlp", rank=3),
            LossJump(step=70, factor=50.0),
        )  # fmt: skip
        self.run.write(38)
        self.nodes = split(self.run.directory, where, 2)
        self.clock = Clock()
        self.runs = NodeRuns(self.nodes[1], "node1", clock=self.clock)
        self.runs.discover()
        self.watch = LoneWatch(self.runs, LoneRuns(self.nodes[1], load_pack(), self.clock), self.clock)

    def train(self, num_steps: int) -> None:
        self.run.write(num_steps)
        go_on(self.run, self.nodes)

    def hear(self, *, judged_step: int) -> None:
        """Have a join answer that it has judged so far."""
        ends = committed(self.nodes[1] / "run", judged_step)
        self.runs.take_answer(
            Answer(
                version=1, join="j1", stamp=int(self.clock.now * 1e9), node="node1", run="run",
                spools={folder: SpoolHeld(FilePlace(), acked) for folder, acked in ends.items()},
            )
        )  # fmt: skip

    def looks(self, caplog: pytest.LogCaptureFixture, after_s: float = 1.0) -> list[str]:
        """Look every second for a while; return what is said."""
        caplog.clear()
        until = self.clock.now + after_s
        with caplog.at_level(logging.INFO, "sentinel.fleet"):
            while self.clock.now < until:
                self.clock.now = min(self.clock.now + 1.0, until)
                self.watch.look()
        return [
            record.getMessage()
            for record in caplog.records
            if "alone" in record.getMessage() or "join" in record.getMessage()
        ]


def test_what_goes_wrong_while_no_join_answers_is_said_once_and_nothing_of_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    machine.hear(judged_step=30)
    assert machine.looks(caplog, UNANSWERED_S - 2) == [] and not machine.runs.found_alone
    (begun,) = machine.looks(caplog, 3)
    assert "no join has answered for 30 s" in begun and "run run" in begun
    # The NaN of step 5 was told by the join.
    assert machine.runs.found_alone == {"run": ()}

    machine.train(6)
    (found,) = machine.looks(caplog)
    # It may have come from a rank of the other machine.
    seen = "critical: NaN seen first, of this machine's ranks, in layers.1.mlp"
    assert f"run run: found by this machine alone: {seen}" in found and "born" not in found
    assert "step 40" in found and found.endswith("; other machines may have had it before")
    assert machine.looks(caplog) == [] and len(machine.runs.found_alone["run"]) == 1
    (beat,) = machine.runs.beats()
    assert beat.found_alone == list(machine.runs.found_alone["run"])
    (said,) = [one for one in _lines(_status(beat, None, is_unheard=False)) if "alone" in one]
    assert said.startswith(f"  found by this node alone, as no join answers: {seen}")

    machine.train(24)
    machine.hear(judged_step=66)
    (back,) = machine.looks(caplog)
    assert "a join answers again" in back and not machine.runs.found_alone
    (beat,) = machine.runs.beats()
    assert beat.found_alone == []

    # What that one has judged it has told. It falls silent, and the loss jumps.
    machine.train(6)
    (begun, found) = machine.looks(caplog, UNANSWERED_S + 1)
    assert "no join has answered" in begun and "found by this machine alone: critical: loss" in found


@pytest.mark.parametrize("layout", ["dp4", "pp4", "pp2 tp2", "dp2 tp4", "pp2 dp2, micro-steps"])
def test_of_a_part_of_a_healthy_run_nothing_is_said(tmp_path: Path, layout: str) -> None:
    run = small_run(tmp_path / "whole" / "run", **LAYOUTS[layout])
    run.write(80)
    for directory in split(run.directory, tmp_path, 2):
        lone = LoneRuns(directory, load_pack())
        assert lone.look({"run": {}}) == {"run": ()}
        assert lone._runs["run"]._judge.num_steps_judged >= 77


def test_a_run_of_a_machine_that_no_join_ever_heard_is_judged_from_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    said = machine.looks(caplog, UNANSWERED_S + 1)
    assert len(said) == 2 and "layers.0.mlp" in said[1]


def test_a_machine_that_stood_still_gives_the_join_its_time_to_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    machine.hear(judged_step=30)
    assert machine.looks(caplog, 2.0) == []

    # SIGSTOP and SIGCONT: the join answered others meanwhile.
    machine.clock.now += 600.0
    assert machine.looks(caplog, UNANSWERED_S - 1.0) == []
    machine.hear(judged_step=30)
    assert machine.looks(caplog, UNANSWERED_S - 1.0) == []

    # Of what it knew to be silent it does not say that it answers.
    (begun,) = machine.looks(caplog, 2.0)
    assert "no join has answered" in begun
    machine.clock.now += 600.0
    assert machine.looks(caplog, 2.0) == [] and machine.runs.found_alone == {"run": ()}


def test_a_node_that_begins_while_there_is_no_broker_knows_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_runs, "UNANSWERED_S", 0.0)
    machine = Machine(tmp_path)
    runs = NodeRuns(machine.nodes[1], "node1")
    shipping = Shipping(runs, BrokerConfig(server=f"nats://127.0.0.1:{free_port()}"), drain_s=0.1)
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(asyncio.run(shipping.run())), daemon=True)
    thread.start()
    try:
        # Its spools are found behind it.
        wait_for(lambda: len(runs.unanswered().get("run") or ()) == 2)
    finally:
        shipping.stop()
        thread.join(60.0)
    assert ended == [False]


@pytest.mark.parametrize("counted", [(0, 1), (None, None), (3, None)])
def test_of_a_later_attempt_too_nothing_is_said_that_a_join_has_judged(
    tmp_path: Path, counted: tuple[int | None, int | None]
) -> None:
    before = small_run(tmp_path / "run", pp=1, dp=2, layers=2, attempt=counted[0])
    before.write(5)
    after = small_run(tmp_path / "run", pp=1, dp=2, layers=2, attempt=counted[1], first_step=3, clock=before.clock, seed=1)
    after.plant(Nan(step=6, module="layers.0.mlp", rank=1), Nan(step=30, module="layers.1.mlp", rank=1))
    after.write(20)
    lone, judged = LoneRuns(tmp_path, load_pack()), committed(tmp_path / "run", 22)
    assert lone.look({"run": judged}) == {"run": ()}
    after.write(12)
    (found,) = lone.look({"run": judged})["run"]
    assert "NaN born in layers.1.mlp" in found


def test_of_ranks_that_went_back_what_no_join_has_judged_is_said(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", pp=1, dp=2, layers=2, attempt=None)
    run.write(20)
    judged = committed(tmp_path / "run", 19)
    run.plant(Nan(step=12, module="layers.1.mlp", rank=1))
    run.step = 8
    run.write(8)
    (found,) = LoneRuns(tmp_path, load_pack()).look({"run": judged})["run"]
    assert "NaN born in layers.1.mlp" in found and "step 12" in found


def test_runs_that_are_over_are_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(tmp_path)
    old = time.time() - node_runs.IDLE_S - 5
    for path in machine.nodes[1].rglob("*.spool"):
        os.utime(path, (old, old))
    assert machine.looks(caplog, UNANSWERED_S + 1) == [] and machine.runs.unanswered() == {"run": None}


def test_what_was_found_stays_while_the_job_stands_still_and_is_not_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    machine.hear(judged_step=30)
    machine.train(6)
    assert len(machine.looks(caplog, UNANSWERED_S + 1)) == 2
    old = time.time() - node_runs.IDLE_S - 5
    for path in machine.nodes[1].rglob("*.spool"):
        os.utime(path, (old, old))
    assert machine.looks(caplog) == [] and len(machine.runs.found_alone["run"]) == 1
    machine.train(2)
    assert machine.looks(caplog) == [] and len(machine.runs.found_alone["run"]) == 1


def test_ranks_that_are_read_one_after_the_other_are_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each poll rank 0 is read up to another step than the others, as a look that ends in the middle finds them."""
    run = small_run(tmp_path / "run", pp=1, dp=2, layers=2)
    run.plant(Nan(step=20, module="layers.0.mlp", rank=0))
    run.write(40)
    records, follower = [], RunFollower(run.directory)
    while more := follower.poll():
        records += more
    polls: list[list[SpoolRecord]] = []
    for until in range(4, 48, 4):
        begun = {id(one) for poll in polls for one in poll}
        polls.append(
            [
                one
                for one in records
                if one.frame.header.step < until + 3 * (one.incarnation.rank > 0) and id(one) not in begun
            ]
        )

    def poll(self: RunFollower, *, final: bool = False) -> list[SpoolRecord]:
        return polls.pop(0) if polls else []

    monkeypatch.setattr(RunFollower, "poll", poll)
    lone = LoneRuns(tmp_path, load_pack(), lambda: 0.0)
    (found,) = lone.look({"run": {}})["run"]
    assert "NaN born in layers.0.mlp" in found and "rank 0" in found and "not heard" not in found


def test_a_run_that_cannot_be_judged_is_given_up_and_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("broken", "well"):
        run = small_run(tmp_path / name, pp=1, dp=2, layers=2)
        run.plant(Nan(step=5, module="layers.0.mlp", rank=0))
        run.write(10)
    judge = Judge.judge

    def fails(self: Judge, decision: Decision | None, view: StepView) -> Judgement:
        assert view.run != "broken"
        return judge(self, decision, view)

    monkeypatch.setattr(Judge, "judge", fails)
    lone = LoneRuns(tmp_path, load_pack())
    for _ in range(2):
        found = lone.look({"broken": {}, "well": {}})
        assert found["broken"] == () and len(found["well"]) == 1
    assert caplog.text.count("run broken: what it does is not judged here any more") == 1


def test_what_fails_beside_it_does_not_end_the_shipping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    monkeypatch.setattr("sentinel.cli.lone_watch.LOOK_S", 0.01)
    monkeypatch.setattr(machine.runs, "unanswered", lambda: 1 / 0)
    with machine.watch:
        machine.watch._thread.join(10.0)
    assert "is not judged here any more" in caplog.text and not machine.runs.found_alone
