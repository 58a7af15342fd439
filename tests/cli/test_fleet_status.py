"""`sentinel fleet status` says of whom nothing is heard, and for whom others wait, and does not end with 0 then."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest

from sentinel.cli.main import run_cli
from sentinel.fleet.overheard import NodeStatus, _status
from sentinel.fleet.sealed import AbsentNodes, Answer, Beat

BEAT = Beat(1, "n1", "llama", ("", 0), {}, [])
ANSWER = Answer(1, "j1", 5, "n1", "llama", {})


def status(absent: AbsentNodes, *arguments: str) -> int:
    """Return how it ends where two nodes of a run speak."""

    async def overhear(*heard: object) -> list[NodeStatus]:
        beats = [BEAT, Beat(1, "n2", "llama", ("", 0), {}, [])]
        return [_status(beat, ANSWER, absent, is_unheard=False) for beat in beats]

    with patch("sentinel.cli.fleet.overhear", overhear):
        return run_cli(["fleet", "status", "--server", "nats://127.0.0.1:9", *arguments])


def test_a_node_of_which_nothing_is_heard_is_named_once_and_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(AbsentNodes((("n3", 41.2), ("n\n4", 310.0)), 5)) == 1

    nodes, absent = (lines := capsys.readouterr().out.splitlines())[:2], lines[2:]
    assert [line.split("  ")[:2] for line in nodes] == [["llama", "node n1"], ["llama", "node n2"]]
    see = "and it is waited for no more; see whether its machine and its `sentinel node` or `sentinel ship` live"
    see += ", or wait: a machine that was given back is listed for an hour"
    assert absent == [
        f"llama  node n3  silent: nothing was heard of it for 41 s, {see}",
        f"llama  node n\\n4  silent: nothing was heard of it for 310 s, {see}",
        "llama  and 3 more nodes are silent",
    ]


def test_it_is_said_for_whom_the_others_wait(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(AbsentNodes(waited_for=("n3", "n4"), num_waited_for=9)) == 1

    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "llama  what others sent waits for n3, n4 and 7 more; see whether machine and shipper live"


def test_where_all_speak_all_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(AbsentNodes()) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_as_json_each_node_of_the_run_bears_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(AbsentNodes((("n3", 41.2),), 1, ("n4",), 1), "--json") == 1

    for line in capsys.readouterr().out.splitlines():
        found = json.loads(line)
        assert (found["silent"], found["num_silent"]) == ({"n3": 41.2}, 1)
        assert (found["waited_for"], found["num_waited_for"]) == (["n4"], 1)
