"""What a step of a large fleet costs its join, by the number of nodes, and what it costs each node; and where that ends.

    python benchmarks/fleet_scale.py [--nodes 4 16 64] [--steps 20] [--layers 8] [--step-s 10]

Simulated: the ranks (`sentinel.testing.SyntheticRun`, 8 of them a node, tensor parallel on each, over pipeline stages and
replicas), the clock, and the broker, whose messages are kept in a file. Real: what a node reads, merges and packs; what the
join checks, copies, merges, judges and commits. Each in a process of its own: processor time and memory are its own.

The first steps of a run are dearer, for descriptors travel and layouts are built of them, and are printed apart (`warm s`).
The last line says what a step costs the join for each node, and at how many nodes a core is full where a step is made every
`--step-s` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.serving import ServedRun
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.sealed import Answer, Beat, DigestPiece, RowsPiece, SpoolChunk, seal, unseal, unseal_published
from sentinel.judge.packs import RulePacks
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.store.run_paths import RunPaths
from sentinel.testing import SyntheticRun

RANKS_PER_NODE = 8
STAGES = 4
JOIN = "bench"
WARM_STEPS = 3
"""Steps after which layouts are known."""


class Fleet:
    """Some nodes, and as much of a join as answers them; what they say is kept."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        carried = Engine(load_pack()).row_kinds
        self.now = 100.0
        self.node_s = 0.0
        self.said: list[tuple[float, bool, bytes]] = []
        """(when, is it a beat, the message); behind the first steps one that is empty"""
        self.num_bytes = 0
        """Published, beats left out."""
        self._nodes = [
            NodeRuns(directory / name, name, digested_kinds=frozenset(carried), clock=lambda: self.now) for name in names
        ]
        (directory / "answered").mkdir()
        self._copies = CopiedRuns(directory / "answered", JOIN, begin_s=0.0, clock=lambda: self.now)

    def ship(self) -> None:
        """Have everything published that lies in the spools."""
        quiet = 0
        while quiet < 3:
            self.now += 0.1
            before = len(self.said)
            for node in self._nodes:
                node.discover()
                began = time.process_time()
                beats = [seal(beat) for beat in node.beats()]
                self.node_s += time.process_time() - began
                for beat in beats:
                    self.said.append((self.now, True, beat))
                    answer = self._copies.take_beat(unseal(beat, Beat), is_drained=True)
                    if answer is not None:
                        node.take_answer(unseal(seal(answer), Answer))
            num_beats = len(self.said) - before
            for node in self._nodes:
                began = time.process_time()
                published = [seal(one) for one in node.next()]
                self.node_s += time.process_time() - began
                for one in published:
                    self.num_bytes += len(one)
                    self.said.append((self.now, False, one))
                    found = unseal_published(one)
                    if isinstance(found, SpoolChunk):
                        self._copies.take_chunk(found)
            self._copies.release()
            quiet = quiet + 1 if len(self.said) - before == num_beats else 0


def written(where: Path, num_nodes: int, layers: int) -> tuple[SyntheticRun, list[str]]:
    """Return a run whose ranks write to the directories of their nodes, and those."""
    pp = min(STAGES, num_nodes)
    run = SyntheticRun(
        where / "whole" / "run", pp=pp, dp=num_nodes // pp, tp=RANKS_PER_NODE, layers=layers, d_model=64, elements=8,
        ranks_per_host=RANKS_PER_NODE,
    )  # fmt: skip
    names = []
    for number in range(num_nodes):
        names.append(f"node{number:04d}")
        (where / names[-1] / "run" / "spool").mkdir(parents=True)
    for folder in (where / "whole" / "run" / "spool").iterdir():
        there = where / names[int(folder.name[1:6]) // RANKS_PER_NODE] / "run" / "spool" / folder.name
        there.symlink_to(folder)
    return run, names


def _read(said: Path) -> Iterator[tuple[float, bool, bytes]]:
    with said.open("rb") as file, contextlib.suppress(EOFError):
        while True:
            yield pickle.load(file)


def join(said: Path, joined: Path) -> dict[str, Any]:
    """Take in what a fleet said, and judge it; returns what that took. Called in a process of its own."""
    now = [100.0]
    joined.mkdir()
    copies = CopiedRuns(joined, JOIN, begin_s=0.0, clock=lambda: now[0])
    packs = RulePacks(())
    packs.load()
    began = time.process_time()
    run: ServedRun | None = None
    judged: list[float] = []
    for at, is_beat, data in _read(said):
        if at != now[0]:
            copies.release()
            now[0] = at
        if not data:
            run = ServedRun(
                RunPaths.of(joined / "run"), DaemonConfig(), packs, on_the_way=lambda: copies.on_the_way("run"),
                rows_from=copies.rows_of("run"), advanced=lambda: judged.append(time.process_time()),
            )  # fmt: skip
            while run.turn(time.time()):
                pass
            warm_s, began = time.process_time() - began, time.process_time()
            judged.clear()
            continue
        if is_beat:
            copies.take_beat(unseal(data, Beat), is_drained=True)
            continue
        found = unseal_published(data)
        if isinstance(found, SpoolChunk):
            copies.take_chunk(found)
        elif isinstance(found, DigestPiece):
            copies.take_digest(found)
        else:
            assert isinstance(found, RowsPiece)
            copies.take_rows(found)
    copies.release()
    intake_s = time.process_time() - began
    began = time.process_time()
    assert run is not None
    while run.turn(time.time()):
        pass
    run.close()
    rows = copies.rows_of("run")
    gaps = np.diff([began, *judged])
    return {
        "intake_s": intake_s, "warm_s": warm_s, "judged_s": float(gaps.sum()),
        "num_judged": len(judged), "longest_s": float(gaps.max()), "num_digested": rows.num_steps,
        "num_fetched": rows.num_fetched, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def _spooled(run: SyntheticRun) -> int:
    return sum(path.stat().st_size for path in run.directory.rglob("*.spool"))


def measured(num_nodes: int, steps: int, layers: int) -> tuple[float, dict[str, float]]:
    """Print a line about so many nodes; return (seconds of a step's judging and intake at the join, all figures)."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        where = Path(name)
        run, names = written(where, num_nodes, layers)
        fleet = Fleet(where, names)
        run.write(WARM_STEPS)
        fleet.ship()
        fleet.said.append((fleet.now, False, b""))
        before = _spooled(run)
        fleet.node_s = fleet.num_bytes = 0
        run.write(steps)
        fleet.ship()
        with (where / "said").open("wb") as file:
            for message in fleet.said:
                pickle.dump(message, file)
        spooled = _spooled(run) - before
        done = subprocess.run(
            [sys.executable, __file__, "--join", str(where / "said"), str(where / "joined")],
            stdout=subprocess.PIPE, check=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found = pickle.loads(done.stdout)
    ranks = num_nodes * RANKS_PER_NODE
    rows = run.rows_per_step
    steady = found["num_judged"]
    step_s = found["judged_s"] / steady + found["intake_s"] / steps
    print(
        f"{num_nodes:6}{ranks:8}{rows:10}{fleet.num_bytes / spooled:8.3f}{1e6 * fleet.node_s / (rows * steps):10.2f}"
        f"{1e3 * found['intake_s'] / steps:10.1f}{found['warm_s']:8.2f}{1e3 * found['judged_s'] / steady:10.1f}"
        f"{1e3 * found['longest_s']:10.1f}{1e3 * step_s / num_nodes:10.3f}{found['rss'] / 2**20:8.0f}"
        f"{found['rss'] / rows:8.0f}{found['num_digested']:6.0f}{found['num_fetched']:6.0f}",
        flush=True,
    )
    return step_s, found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=10.0)
    parser.add_argument("--join", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.join:
        sys.stdout.buffer.write(pickle.dumps(join(*given.join)))
        return
    print(
        f"{'nodes':>6}{'ranks':>8}{'rows':>10}{'bytes':>8}{'node us':>10}{'intake ms':>10}{'warm s':>8}{'judge ms':>10}"
        f"{'longest':>10}{'ms/node':>10}{'MiB':>8}{'B/row':>8}{'digs':>6}{'rows':>6}"
    )
    costs = [measured(nodes, given.steps, given.layers)[0] for nodes in given.nodes]
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
