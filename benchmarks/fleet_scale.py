"""What a step of a large fleet costs its join, by the number of nodes, and what it costs each node; and where that ends.

    python benchmarks/fleet_scale.py [--nodes 4 16 64] [--steps 20] [--layers 8] [--step-s 10] [--said /tmp] [--collector]
        [--paced-as 2048] [--nan] [--rounds 1]

Simulated: the ranks (`sentinel.testing.SyntheticRun`, 8 of them a node, tensor parallel on each, over pipeline stages and
replicas), the clock, and the broker, whose messages are kept in a file. Real: what a node reads, merges and packs; what the
join checks, copies, merges, judges and commits. Each in a process of its own: processor time and memory are its own.

A step is made every `--step-s` seconds; behind it each rank writes a heartbeat a second and sets its pulse, and nodes speak
as they do. All nodes say at one moment that the step has ended; the join takes it in as fast as it can, and looks at what
came each time that took it a tenth of a second (`TURN_S`), and whenever the clock goes on. With `--paced-as` nodes that have
nothing but heartbeats speak as often as a join of so many nodes asks them to: what it says of each node then holds for a
fleet of that size. What is not in it is the client of the broker (`fleet_client.py`), over which a node sends one message or
two a second and hears half as many. What it takes to read the messages' file is left out.

The bytes of each step are freed once they are shipped, and so many nodes as fit work at a time (`GROUP_NODES`), so that
16,384 ranks fit into a machine; the join then takes in what all said in the order of its time.

The first steps of a run are dearer, for descriptors travel and layouts are built of them, and are printed apart (`warm s`).
`MiB`: the join's largest size. `B/row`: what of its size at the end, once it has given back what is free, came with the
run, for a row of a rank, digests of the steps in it. `longest`: of processor time, from when the last frame of a step, or
digest, begins to be taken in, until what was found in the step is committed, and told; each is printed below. `told`: the
same from the first digest on: where all nodes speak at one moment, what came last has waited for so long. The last line says
what a step costs the join for each node, and at how many nodes a core is full where a step is made every `--step-s` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import heapq
import operator
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import numpy as np

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.garbage import LATEST_S, Garbage
from sentinel.daemon.run_turns import PlainTurns
from sentinel.daemon.serving import ServedRun
from sentinel.fleet.copied_runs import IDLE_NODES_A_SECOND, CopiedRuns
from sentinel.fleet.node_runs import BEAT_S, NodeRuns
from sentinel.fleet.sealed import (
    Answer,
    Beat,
    DigestPiece,
    SpoolChunk,
    in_messages,
    seal,
    seal_published,
    unseal,
    unseal_published,
)
from sentinel.judge.packs import RulePacks
from sentinel.messages import Heartbeat
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan, SyntheticRun
from sentinel.wire.pulse import PulseWriter

RANKS_PER_NODE = 8
STAGES = 4
JOIN = "bench"
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
GROUP_NODES = 256
"""Nodes of one process, which come after each other; a multiple of the stages."""
WARM_STEPS = 3
"""Steps after which layouts are known."""
TURN_S = 0.1
"""Processor time in which what came is taken in before the daemon looks at it."""


class Fleet:
    """Some nodes, and as much of a join as answers them; what they say goes into a file."""

    def __init__(self, directory: Path, names: list[str], said: BinaryIO, num_paced: int) -> None:
        """said: takes what nodes say. num_paced: nodes of a fleet whose join asks for this one's pace; 0: this one."""
        carried = Engine(load_pack()).row_kinds
        self.now = 100.0
        self.node_s = 0.0
        self.num_bytes = 0
        """Published, beats left out."""
        self._said, self._num_said = said, 0
        """(when, is it a beat, the message); behind the first steps one that is empty"""
        self._nodes = [
            NodeRuns(directory / name, name, digested_kinds=frozenset(carried), clock=lambda: self.now) for name in names
        ]
        self._spoke = [0.0] * len(self._nodes)
        self._pace_s = num_paced / IDLE_NODES_A_SECOND
        (directory / "answered").mkdir()
        self._copies = CopiedRuns(directory / "answered", JOIN, begin_s=0.0, clock=lambda: self.now)

    def say(self, message: bytes, *, is_beat: bool = False) -> None:
        """Have a message reach the join."""
        pickle.dump((self.now, is_beat, message), self._said)
        self._num_said += 1

    def ship(self, seconds: float) -> None:
        """Have what lies in the spools published, and what there is to say said, for so long, in steps of a beat."""
        until = self.now + seconds
        while self.now < until:
            self.now += BEAT_S
            for at, node in enumerate(self._nodes):
                if self.now - self._spoke[at] >= node.pause_s:
                    self._spoke[at] = self.now
                    self._speak(node)
            for node in self._nodes:
                began = time.process_time()
                published = [seal_published(one) for one in in_messages(node.next())]
                self.node_s += time.process_time() - began
                for message in published:
                    self.num_bytes += len(message)
                    self.say(message)
                    for one in unseal_published(message):
                        if isinstance(one, SpoolChunk):
                            self._copies.take(one)
            self._copies.release()

    def discover(self) -> None:
        """Have nodes look for runs and spools."""
        for node in self._nodes:
            node.discover()

    def _speak(self, node: NodeRuns) -> None:
        began = time.process_time()
        beats = [seal(beat) for beat in node.beats()]
        self.node_s += time.process_time() - began
        for beat in beats:
            self.say(beat, is_beat=True)
            answer = self._copies.take_beat(unseal(beat, Beat), is_drained=True)
            if answer is not None:
                paced = msgspec.structs.replace(answer, pace_s=self._pace_s or answer.pace_s)
                node.take_answer(unseal(seal(paced), Answer))


def written(
    where: Path, num_nodes: int, group: range, layers: int, *, has_nan: bool = False
) -> tuple[SyntheticRun, list[str]]:
    """Return a run of so many nodes, of which the ranks of these write to the directories of their nodes, and those.

    has_nan: in the second of the steady steps a NaN is born in each group of nodes, and in the next all is NaN.
    """
    pp = min(STAGES, num_nodes)
    run = SyntheticRun(
        where / "whole" / "run", pp=pp, dp=num_nodes // pp, tp=RANKS_PER_NODE, layers=layers, d_model=64, elements=8,
        ranks_per_host=RANKS_PER_NODE, ranks=ranks_of(group),
    )  # fmt: skip
    if has_nan:
        run.plant(Nan(step=WARM_STEPS + 1, module=run.modules()[1], is_skipped=False))
    names = []
    for number in group:
        names.append(f"node{number:04d}")
        (where / names[-1] / "run" / "spool").mkdir(parents=True)
    for folder in (where / "whole" / "run" / "spool").iterdir():
        node = f"node{int(folder.name[1:6]) // RANKS_PER_NODE:04d}"
        (where / node / "run" / "spool" / folder.name).symlink_to(folder)
    return run, names


def ranks_of(group: range) -> range:
    """Return the ranks of these nodes."""
    return range(group.start * RANKS_PER_NODE, group.stop * RANKS_PER_NODE)


def fleet(
    said: Path, num_nodes: int, first_node: int, steps: int, layers: int, step_s: int, num_paced: int, has_nan: int
) -> dict[str, float]:
    """Have the ranks and nodes of a group work, and what nodes say go into a file; returns what that took. In a process of
    its own."""
    group = range(first_node, min(num_nodes, first_node + GROUP_NODES))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, said.open("wb") as file:
        run, names = written(Path(name), num_nodes, group, layers, has_nan=bool(has_nan))
        nodes, spooled = Fleet(Path(name), names, file, num_paced), 0
        pulses = {rank: PulseWriter(run.folder(rank)) for rank in ranks_of(group)}
        nodes.discover()
        nodes.ship(3 * BEAT_S)
        for step in range(WARM_STEPS + steps):
            if step == WARM_STEPS:
                nodes.say(b"")
                nodes.node_s = nodes.num_bytes = spooled = 0
            spooled -= _spooled(run)
            run.write(1)
            # All is published with the first beat, and released by what is said in the two behind it.
            nodes.ship(1.0)
            for _ in range(1, step_s):
                for rank in ranks_of(group):
                    run.report(rank, Heartbeat(step=step, call_id=0, activity="train"), step)
                    pulses[rank].beat(int(nodes.now * 1e9))
                nodes.ship(1.0)
            spooled += _spooled(run)
            _free_written(run)
        nodes.ship(1.0)
        return {
            "rows": sum(map(run.num_rows, ranks_of(group))), "published": nodes.num_bytes, "spooled": spooled,
            "node_s": nodes.node_s,
        }  # fmt: skip


def _spooled(run: SyntheticRun) -> int:
    return sum(path.stat().st_size for path in run.directory.rglob("*.spool"))


def _free_written(run: SyntheticRun) -> None:
    """Have what is shipped take no memory, its place in the files apart."""
    for path in run.directory.rglob("*.spool"):
        with path.open("r+b") as file:
            if _LIBC.fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, 0, path.stat().st_size):
                raise OSError(ctypes.get_errno(), "fallocate", str(path))


class Told(PlainTurns):
    """Notes when what was found in a step is told: a join lets others go on then, and so do those who send it."""

    is_share_over = True

    def __init__(self) -> None:
        self.at: list[float] = []
        """Processor time, one a step."""

    def give_way(self) -> None:
        """Note it."""
        self.at.append(time.process_time())


def _read(said: Path) -> Iterator[tuple[float, bool, bytes]]:
    with said.open("rb") as file, contextlib.suppress(EOFError):
        while True:
            yield pickle.load(file)


def _read_all(said: Sequence[Path]) -> Iterator[tuple[float, bool, bytes]]:
    """Yield what all groups said, in the order of its time."""
    return heapq.merge(*map(_read, said), key=operator.itemgetter(0))


def _reading_s(said: Sequence[Path]) -> float:
    """Return the processor time that it takes to read what is said behind the first steps, which no broker would ask for."""
    began = 0.0
    for _, _, data in _read_all(said):
        began = began or (0.0 if data else time.process_time())
    return time.process_time() - began


def join(said: Sequence[Path], joined: Path, *, has_collector: bool) -> dict[str, Any]:
    """Take in what the groups of a fleet said, and judge it; returns what that took. Called in a process of its own."""
    now = [100.0]
    before = _bytes_now()
    joined.mkdir()
    copies = CopiedRuns(joined, JOIN, begin_s=0.0, clock=lambda: now[0])
    packs = RulePacks(())
    packs.load()
    # As the daemon has it.
    garbage = None if has_collector else Garbage(time.monotonic())
    began = time.process_time()
    run: ServedRun | None = None
    turns_s, verdicts, num_judged = 0.0, list[float](), 0
    told, digested_at, framed_at, waits = Told(), 0.0, 0.0, list[float]()
    turned_at = 0.0

    def turn(*, is_last: bool = False) -> None:
        """Have the run judge what came since."""
        nonlocal run, turns_s, digested_at, turned_at
        begun, num_before = time.process_time(), len(told.at)
        copies.release()
        if run is None and (joined / "run" / "spool").is_dir():
            run = ServedRun(
                RunPaths.of(joined / "run"), DaemonConfig(), packs, arrivals=lambda: copies.arrivals("run"),
                rows_from=copies.rows_of("run"), turns=told,
            )  # fmt: skip
        while run is not None and run.turn(time.time()) and (is_last or len(told.at) == num_before):
            pass
        turned_at = time.process_time()
        turns_s += turned_at - begun
        if len(told.at) > num_before:
            verdicts.append(told.at[-1] - framed_at)
            waits.append(told.at[-1] - digested_at)
            digested_at = 0.0

    warm_s = 0.0
    is_steady = False
    for at, is_beat, data in _read_all(said):
        begun = time.process_time()
        if at != now[0] or begun - turned_at >= TURN_S:
            turn()
            now[0], begun = at, time.process_time()
        if not data and is_steady:
            continue
        if not data:
            is_steady = True
            warm_s, began, turns_s, num_judged = time.process_time() - began, time.process_time(), 0.0, len(told.at)
            verdicts.clear()
            waits.clear()
            continue
        if is_beat:
            if (answer := copies.take_beat(unseal(data, Beat), is_drained=True)) is not None:
                seal(answer)
            continue
        framed_at = begun
        for one in unseal_published(data):
            if isinstance(one, DigestPiece):
                digested_at = digested_at or begun
            copies.take(one)
    turn(is_last=True)
    rows = copies.rows_of("run")
    took = time.process_time() - began
    if garbage is not None:
        garbage.turn(time.monotonic() + LATEST_S, is_idle=True)
    found = {
        "intake_s": took - turns_s - _reading_s(said), "warm_s": warm_s, "judged_s": turns_s,
        "num_judged": len(told.at) - num_judged, "longest_s": max(verdicts), "verdicts": verdicts,
        "told_s": max(waits),
        "num_digested": rows.num_steps,
        "num_fetched": rows.num_fetched, "most_bytes": _most_bytes(),
        "run_bytes": _bytes_now() - before,
    }  # fmt: skip
    assert run is not None
    run.close()
    return found


def _bytes_now() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _in_its_own_process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found: dict[str, Any] = pickle.loads(done.stdout)
    return found


def measured(
    num_nodes: int, steps: int, layers: int, step_s: float, num_paced: int, has_nan: bool, where: Path, rounds: int,
    options: Sequence[str],
) -> float:  # fmt: skip
    """Print a line about so many nodes for each of the rounds of their join; return the mean seconds of a step there.

    num_paced: as of `Fleet`. has_nan: as of `written`. options: of the join's process.
    """
    with tempfile.TemporaryDirectory(dir=where) as name:
        said, nodes = list[str](), Counter[str]()
        for first in range(0, num_nodes, GROUP_NODES):
            said.append(f"{name}/said{first}")
            numbers = (num_nodes, first, steps, layers, round(step_s), num_paced, int(has_nan))
            nodes.update(_in_its_own_process("--fleet", said[-1], *map(str, numbers)))
        costs = list[float]()
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as joined:
                found = _in_its_own_process("--join", f"{joined}/joined", *said, *options)
            costs.append(_shown(num_nodes, steps, nodes, found))
    return sum(costs) / rounds


def _shown(num_nodes: int, steps: int, nodes: Mapping[str, float], found: Mapping[str, Any]) -> float:
    """Print a line; return the seconds of a step's judging and intake at the join. nodes, found: of `fleet` and `join`."""
    ranks = num_nodes * RANKS_PER_NODE
    rows = nodes["rows"]
    steady = found["num_judged"]
    cost_s = (found["judged_s"] + found["intake_s"]) / steps
    print(
        f"{num_nodes:6}{ranks:8}{rows:10}{nodes['published'] / nodes['spooled']:8.3f}"
        f"{1e6 * nodes['node_s'] / (rows * steps):10.2f}"
        f"{1e3 * found['intake_s'] / steps:10.1f}{found['warm_s']:8.2f}{1e3 * found['judged_s'] / steady:10.1f}"
        f"{1e3 * found['longest_s']:10.1f}{1e3 * found['told_s']:10.1f}"
        f"{1e3 * cost_s / num_nodes:10.3f}{found['most_bytes'] / 2**20:8.0f}"
        f"{found['run_bytes'] / rows:8.0f}{found['num_digested']:6.0f}{found['num_fetched']:6.0f}",
        flush=True,
    )
    if found["verdicts"]:
        print("       steps in turn, ms: " + ", ".join(f"{1e3 * one:.0f}" for one in found["verdicts"]), flush=True)
    return cost_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=10.0)
    parser.add_argument("--said", type=Path, default=Path(tempfile.gettempdir()), help="where what nodes say is kept")
    parser.add_argument("--collector", action="store_true", help="leave cyclic garbage to the interpreter, as before")
    parser.add_argument("--join", nargs="+", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--paced-as", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="times that the join takes in and judges the same messages")
    parser.add_argument("--nan", action="store_true", help="a NaN is born, and in the step behind it all is NaN")
    parser.add_argument("--fleet", nargs=8, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fleet:
        said, *numbers = given.fleet
        sys.stdout.buffer.write(pickle.dumps(fleet(Path(said), *map(int, numbers))))
        return
    if given.join:
        sys.stdout.buffer.write(pickle.dumps(join(given.join[1:], given.join[0], has_collector=given.collector)))
        return
    print(
        f"{'nodes':>6}{'ranks':>8}{'rows':>10}{'bytes':>8}{'node us':>10}{'intake ms':>10}{'warm s':>8}{'judge ms':>10}"
        f"{'longest':>10}{'told':>10}{'ms/node':>10}{'MiB':>8}{'B/row':>8}{'digs':>6}{'rows':>6}"
    )
    options = ["--collector"] if given.collector else []
    shape = (given.steps, given.layers, given.step_s, given.paced_as, given.nan)
    costs = [measured(nodes, *shape, given.said, given.rounds, options) for nodes in given.nodes]
    if len(costs) < 2:
        return
    each, fixed = np.polyfit(given.nodes, costs, 1)
    full = (given.step_s - fixed) / each
    print(
        f"a step costs the join {1e3 * fixed:.1f} ms and {1e3 * each:.2f} ms a node; with one each {given.step_s:g} s a "
        f"core is full at {full:.0f} nodes ({full * RANKS_PER_NODE:.0f} ranks) of this model"
    )


if __name__ == "__main__":
    main()
