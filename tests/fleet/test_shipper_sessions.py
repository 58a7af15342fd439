"""Machines with one name are noticed, and their spools taken; a shipper that begins anew, or lingers, is no such thing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sentinel.fleet.node_runs import MAX_PACE_S, NodeRuns
from sentinel.fleet.sealed import Beat
from sentinel.fleet.shipper_sessions import MAX_LEFT, MIN_RETURNS, RETURNED_S, ShipperSessions

from .test_copies_of_spools import Fleet, spool_bytes, write
from .test_relayed_node import Chain

SAID = "run run: several shippers speak as node n1, in turn: are there two machines with this name? give each its own --node"


def turns(names: str, *, each_s: float = MAX_PACE_S / 2) -> list[bool]:
    """Return what shows with each beat of sessions that are called by letters, one behind the other."""
    sessions = ShipperSessions()
    return [sessions.is_shared("n1", name, 100.0 + number * each_s) for number, name in enumerate(names)]


def test_two_machines_with_one_name_are_said_once_and_both_are_taken(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "n1")
    fleet.nodes["other machine"] = NodeRuns(tmp_path / "n1b", "n1", clock=lambda: fleet.now)
    spools = [tmp_path / where / "run" / "spool" / f"r{rank:05d}-0123abcd" for rank, where in enumerate(("n1", "n1b"))]
    for _ in range(10):
        for spool in spools:
            write(spool, "000000.spool", b"x" * 1000)
        fleet.settle()

    assert [spool_bytes(fleet.joined / "run" / "spool" / one.name) for one in spools] == [spool_bytes(one) for one in spools]
    assert [one for one in fleet.problems if one.startswith(SAID)] == fleet.problems and len(fleet.problems) == 1
    health = fleet.copies.health()
    assert health.problems == tuple(fleet.problems)
    assert health.counts["shared_names"] > 1 and not health.counts.get("refused")


def test_a_worker_says_it_of_nodes_behind_it(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.turn(number=4)
    other = NodeRuns(tmp_path / "n0", "n0", clock=chain.clock)
    for _ in range(MIN_RETURNS):
        chain.turn()
        other.discover()
        for beat in other.beats():
            chain.worker.take_beat(beat, is_drained=True)

    (problem,) = chain.problems
    assert "several shippers speak as node n0, in turn" in problem
    assert chain.worker.copies.counts["shared_names"] and not chain.join.counts["shared_names"]


def test_one_that_ends_in_order_beside_the_next_one_is_no_other_machine(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "n1")
    beats = [
        Beat(1, "n1", "run", ("", 0), {}, [], number=(name, 1), is_ending=name == "former") for name in ("former", "next")
    ]
    for number in range(2, 3 * MIN_RETURNS):
        for beat in beats:
            said = msgspec.structs.replace(beat, number=(beat.number[0], number))
            assert fleet.copies.take_beat(said, is_drained=True) is not None

    assert not fleet.problems and not fleet.copies.counts["shared_names"]


@pytest.mark.parametrize(
    ("names", "each_s"),
    [
        ("a" * 100, 0.25),
        ("aaaabababbbbbbbb", 0.05),
        ("".join(map(chr, range(1000, 1060))), 1.0),
        ("ab" * 50, RETURNED_S / 2),
    ],
    ids=["one", "a few beats that come late", "one that begins anew each second", "hardly ever"],
)
def test_one_shipper_behind_another_is_no_two(names: str, each_s: float) -> None:
    assert not any(turns(names, each_s=each_s))


@pytest.mark.parametrize(
    "names", ["ab", "aaab", "abc", "".join(map(chr, range(1000, 1100)))], ids=["2", "uneven", "3", "100"]
)
def test_several_in_turn_are_noticed(names: str) -> None:
    found = turns(names * 50, each_s=0.25 if len(names) > 3 else MAX_PACE_S / 2)
    assert not any(found[:MIN_RETURNS]) and found[-1]


def test_what_is_known_of_many_sessions_is_bounded() -> None:
    sessions = ShipperSessions()
    for number in range(10 * MAX_LEFT):
        sessions.is_shared("n1", str(number), 100.0)

    assert len(sessions._left["n1"]) < MAX_LEFT
