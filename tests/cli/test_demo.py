"""The demo's own judgement: it must be hard to please."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.cli.demo_falsehoods import falsehoods
from sentinel.cli.demo_machines import ILL_NODE, SHIPPER_KILLED_AT, TwoNodes
from sentinel.cli.demo_plan import DemoOutcome, DemoPlan, judge
from sentinel.cli.demo_receiver import Message, Receiver
from sentinel.cli.demo_story import Scene, story
from sentinel.incident import Incident

from ..support.anomalies import a_nan, an_incident
from ..support.waiting import wait_for
from ..support.warm import cli

PLAN = DemoPlan()


def as_planned(step: int, name: str, *, kind: str = "activation", **others: Any) -> Anomaly:
    """A NaN where and when the demo plants its own, unless said."""
    usual = {"rank": PLAN.rank, "micro_step": PLAN.micro_step, "call_id": 10, "segment": PLAN.segment}
    return a_nan(kind, name, step, **(usual | others))


def rooted(root: Anomaly, **others: Any) -> Incident:
    """An open incident of the step, the severity and the detector of its root."""
    given = {
        "id": f"i-{root.id}", "opened_step": root.step, "last_step": root.step, "severity": root.severity,
        "title": root.tag_name, "root": root.id, "detectors": (root.detector,),
    }  # fmt: skip
    return an_incident(**(given | others))


SPIKE = as_planned(
    PLAN.batch_step, "loss", kind="scalar", statistic="value", detector="LossSpike", rule="loss-spike", rank=None,
    micro_step=None, call_id=None, segment="", value=7.6, severity=Severity.WARNING,
)  # fmt: skip
BORDER = as_planned(PLAN.nan_steps[0], PLAN.segment, border="block_output")
INNER = as_planned(PLAN.nan_steps[1], PLAN.module)


def outcome(anomalies: list[Anomaly], module: str = PLAN.module, early: bool = False, **counts: int) -> DemoOutcome:
    incidents = [rooted(SPIKE), rooted(BORDER, module=module, segment=PLAN.segment)]
    notified = [*incidents, *([rooted(as_planned(3, "x"))] if early else [])]
    return judge(PLAN, anomalies, incidents, notified, **{"num_judged": PLAN.num_steps, "num_dropped": 0, **counts})


def test_what_was_planted_and_found_satisfies_it() -> None:
    found = outcome([SPIKE, BORDER, INNER])

    assert found.holds, found.claims
    assert (found.black_box_step, found.escalated_step) == PLAN.nan_steps[:2]


@pytest.mark.parametrize(
    "found",
    [
        outcome([]),
        outcome([BORDER, INNER]),
        outcome([SPIKE, BORDER]),
        outcome([SPIKE, INNER]),
        outcome([SPIKE, as_planned(PLAN.nan_steps[0], "blocks.0", segment="blocks.0", border="block_output"), INNER]),
        outcome([SPIKE, as_planned(PLAN.nan_steps[0], PLAN.segment, border="block_output", rank=3), INNER]),
        outcome([SPIKE, as_planned(PLAN.nan_steps[0], PLAN.segment, border="block_output", micro_step=1), INNER]),
        outcome([SPIKE, BORDER, as_planned(PLAN.nan_steps[1], "blocks.1.mlp.fc2")]),
        outcome([SPIKE, BORDER, as_planned(PLAN.nan_steps[1], PLAN.module, rank=0)]),
        outcome([SPIKE, BORDER, INNER], module=""),
        outcome([SPIKE, BORDER, INNER], early=True),
        outcome([SPIKE, BORDER, INNER], num_judged=PLAN.num_steps - 1),
        outcome([SPIKE, BORDER, INNER], num_dropped=1),
    ],
)
def test_anything_less_does_not(found: DemoOutcome) -> None:
    assert not found.holds


NAN = rooted(BORDER, module=PLAN.module, segment=PLAN.segment)
BATCH = rooted(SPIKE, suspected="batch", skip_steps=(PLAN.batch_step,))


@pytest.mark.parametrize(
    ("words", "false"),
    [
        ("", NAN),
        ("", BATCH),
        ("", rooted(as_planned(100, "step", detector="SlowRank", kind="health"))),
        ("", rooted(as_planned(100, "x", severity=Severity.INFO))),
        ("nothing was planted at step 250", rooted(as_planned(250, "loss", kind="scalar", rank=3))),
        ("nothing was planted at step 161", rooted(as_planned(161, "grad_norm", kind="scalar"))),
        ("names rank 3", rooted(as_planned(PLAN.nan_steps[0], PLAN.segment, rank=3), segment=PLAN.segment)),
        ("names blocks.0", rooted(BORDER, segment="blocks.0")),
        ("names blocks.1.mlp.fc2", msgspec.structs.replace(NAN, module="blocks.1.mlp.fc2")),
        ("suspects hardware", msgspec.structs.replace(NAN, suspected="hardware")),
        ("suspects batch", msgspec.structs.replace(NAN, suspected="batch", skip_steps=(230,))),
        ("suspects model", msgspec.structs.replace(BATCH, suspected="model", skip_steps=())),
        ("would skip steps", msgspec.structs.replace(BATCH, skip_steps=(159, 160))),
    ],
)
def test_nothing_false_passes(words: str, false: Incident) -> None:
    roots = [SPIKE, BORDER, INNER, as_planned(PLAN.nan_steps[0], PLAN.segment, rank=3)]

    found = falsehoods(PLAN, roots, [NAN, BATCH, false])

    assert ("".join(found) == "") is (words == "")
    assert words in "".join(found)


def test_a_message_about_no_incident_is_false() -> None:
    texts = [f"CRITICAL: {NAN.title}, run x", "CRITICAL: somebody else's, run x"]

    assert falsehoods(PLAN, [BORDER], [NAN], texts) == ['a message about no incident: "CRITICAL: somebody else\'s, run x"']


def test_story_and_report_are_told_of_anything() -> None:
    for found in (outcome([SPIKE, BORDER, INNER]), outcome([])):
        scene = Scene(
            plan=PLAN, outcome=found, topk={230: [msgspec.to_builtins(BORDER)]}, gauges=["sentinel_loss 2.4"],
            messages=[Message(to="Slack", body={"text": "hello", "blocks": []})], run_dir=Path("run"), url="http://x",
            seconds=1.0,
        )  # fmt: skip

        assert list(story(scene))
        assert json.loads(json.dumps(scene.report(), allow_nan=False))["ok"] == found.holds


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_demo_that_is_ended_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    def ours() -> list[str]:
        """The commands of all processes that were started for runs below this directory."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = process.joinpath("environ").read_bytes() + process.joinpath("cmdline").read_bytes()
                if str(tmp_path).encode() in words and process.name != str(demo.pid):
                    found.append(process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
            except OSError:
                continue
        return found

    with (tmp_path / "log").open("wb") as log:
        demo = subprocess.Popen([*cli(), "demo", "--dir", str(tmp_path)], stdout=log, stderr=log)
    wait_for(lambda: re.search(r"^step +\d", (tmp_path / "log").read_text(), re.MULTILINE))
    assert len(ours()) >= 5, "four ranks and a daemon"
    demo.send_signal(number)
    assert demo.wait(120) == 130, (tmp_path / "log").read_text()
    assert "interrupted" in (tmp_path / "log").read_text()
    wait_for(lambda: not ours(), "ranks that end")


def test_receiver_keeps_what_it_is_sent() -> None:
    received: list[Message] = []
    receiver = Receiver(received.append)
    try:
        body = json.dumps({"text": "loss\nspike"}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{receiver.url}/slack", body)) as answer:
            assert answer.status == 200
    finally:
        receiver.close()

    assert (
        [(one.to, one.text) for one in received] == [("Slack", "loss spike")] == [(m.to, m.text) for m in receiver.messages]
    )


class Running:
    """A fleet whose processes have these ids now."""

    def __init__(self, **pids: int | None) -> None:
        self.pids = {name.replace("_", "-"): pid for name, pid in pids.items()}

    def pid(self, name: str) -> int | None:
        return self.pids[name]

    def watch(self) -> None:
        pass


def a_message(*keys: str, repeated: bool = False) -> Message:
    return Message(to="webhook", body={"alerts": [{"key": key, "repeated": repeated} for key in keys]})


@pytest.mark.parametrize(
    ("join", "messages", "holds"),
    [
        (12, [a_message("a"), a_message("b")], [True, True]),
        (12, [a_message("a"), a_message("a", repeated=True)], [True, True]),
        (12, [a_message("a"), a_message("a")], [True, False]),
        (12, [], [True, False]),
        (2, [a_message("a")], [False, True]),
        (None, [a_message("a")], [False, True]),
    ],
)
def test_on_two_nodes_it_wants_kills_and_each_message_once(
    tmp_path: Path, join: int | None, messages: list[Message], holds: list[bool]
) -> None:
    machines = TwoNodes(tmp_path, PLAN, lambda words: None)
    machines._fleet = Running(join=join, node_2=11)  # type: ignore[assignment]
    assert not machines.claims(PLAN, messages)[0].holds

    machines._killed = {ILL_NODE: 1, "join": 2}
    assert [claim.holds for claim in machines.claims(PLAN, messages)] == holds


def test_the_join_is_killed_once_it_has_told_of_the_first_fault_and_noted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("sentinel.cli.demo_machines.os.kill", lambda pid, number: killed.append(pid))
    machines = TwoNodes(tmp_path, PLAN, lambda words: None)
    machines._fleet = Running(join=2, node_2=11)  # type: ignore[assignment]
    told, early = (
        Message(to="webhook", body={"alerts": [{"incident": {"opened_step": step}}]}) for step in (PLAN.batch_step, 7)
    )

    machines.watch(SHIPPER_KILLED_AT - 1, [early], lambda: 0)
    assert not killed
    machines.watch(SHIPPER_KILLED_AT, [early, told], lambda: 1)
    assert killed == [11]
    for _ in range(2):
        machines.watch(PLAN.batch_step + 1, [early, told], lambda: 0)
    assert killed == [11, 2]
