"""A whole fleet in one thread, by one clock that does not wait: nodes, a broker, joins on one directory, a sink, and faults.

What decides is the real thing: NodeRuns, CopiedRuns, JoinLease, ServedRun, the journals and the files. The broker is a list
that repeats, reorders, refuses, forgets and is cut off, as a seed says; so a schedule is the same whenever it is run.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import pytest

from sentinel.daemon import commits, serving, snapshots
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.serving import ServedRun
from sentinel.errors import StoreError, WireError
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.join_lease import JoinLease
from sentinel.fleet.known_epochs import highest_epoch
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.sealed import (
    MAX_MESSAGE_BYTES,
    Answer,
    Beat,
    in_messages,
    seal,
    seal_published,
    unseal,
    unseal_published,
)
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.store.journal import Commit
from sentinel.store.lease_fence import FencedOff
from sentinel.store.run_paths import RunPaths
from sentinel.testing import BitFlip, BlowUp, LossJump, SyntheticRun
from sentinel.wire.spool import read_ack
from sentinel.wire.spool_files import file_name, list_files

from .fleet_parts import nan_on, split
from .results import decisions, result_bytes
from .serving import NOW, judge_run, loaded_packs, small_run

CONFIG = msgspec.convert(
    {
        "judging": {"snapshot_interval_s": 0.0},
        "notify": {
            "sinks": [{"type": "webhook", "name": "hook", "url": "http://127.0.0.1:9/", "route": {"min_severity": "info"}}]
        },
    },
    DaemonConfig,
)
QUICK = """\
rules:
  - {name: quick-gradients, detector: AnomalyTurbulence, args: {warmup: 5}, match: {kind: dgrad, statistic: norm}}
"""
TOPIC = "alert:hook"
STEPS = 24
TICK_S = 0.25
LONGEST_CUT_S = 18.0
LONGEST_SILENCE_S = 26.0
"""Less than `SILENT_S`, whatever goes wrong one after the other: a node that is away for longer is waited for no more, and
the outcome is another."""
MAX_TICKS, HELD_TICKS = 800, 8
KINDS = Engine(load_pack()).row_kinds
"""Those of which digests carry the rows."""


class Hearer(Protocol):
    """Whoever hears what is said."""

    def hear(self, data: bytes) -> None: ...


class RecordedFleet:
    """A run that one daemon judged on one disk, and where its ranks were after each step."""

    def __init__(self, run_dir: Path, sizes: Sequence[dict[str, int]], pruned: str = "") -> None:
        """sizes: after each step, file below the spool -> bytes of it; the last, those of all. pruned: the one of these
        files that was deleted before anybody read it.
        """
        # A rule whose onsets ask for rows that no digest carries.
        quick = run_dir.parent / "quick.yaml"
        quick.write_text(QUICK)
        self.packs = loaded_packs(quick)
        self.run_dir, self.sizes, self.pruned = run_dir, sizes, pruned
        self.spool = run_dir / "spool"
        self.whole = run_dir.parent / "whole" / "run"
        shutil.copytree(run_dir, self.whole, copy_function=shutil.copyfile)
        with frozen_time():
            judge_run(self.whole, CONFIG, self.packs, is_over=True)
        self.told = {key for key, _ in outbox(self.whole)}
        assert self.told

    @classmethod
    def synthetic(cls, directory: Path, *, is_pruned: bool = False, **options: Any) -> RecordedFleet:
        """Return a run that nobody trained. options: as of `small_run`."""
        run: SyntheticRun = small_run(directory / "run", file_bytes=40_000, **options)
        of_copies = BitFlip(step=9, module="layers.1", rank=1, for_steps=2)
        of_gradients = BlowUp(step=18, module="layers.2", kind="dgrad", factor=1e3, for_steps=2)
        run.plant(nan_on(run, 3), LossJump(step=15, factor=50.0), of_copies, of_gradients)
        sizes = []
        for _ in range(STEPS):
            run.write(1)
            sizes.append(spool_sizes(run.directory))
        run.end()
        sizes.append(spool_sizes(run.directory))
        pruned = f"{run.folder(1).name}/{file_name(1)}" if is_pruned else ""
        if pruned:
            (run.directory / "spool" / pruned).unlink()
        return cls(run.directory, sizes, pruned)


def spool_sizes(run_dir: Path) -> dict[str, int]:
    """Return file below the spool of a run -> bytes of it."""
    spool = run_dir / "spool"
    return {str(path.relative_to(spool)): path.stat().st_size for path in spool.rglob("*.spool")}


@contextlib.contextmanager
def frozen_time() -> Iterator[None]:
    """Have no rank fall silent by the clock of a machine that does much else."""
    clock = SimpleNamespace(monotonic=lambda: 1000.0, time=lambda: NOW)
    with pytest.MonkeyPatch.context() as patch:
        for module in (serving, commits, snapshots):
            patch.setattr(module, "time", clock)
        yield


def outbox(run_dir: Path) -> list[tuple[str, str]]:
    """Return (key, outcome) of all that was to be sent."""
    with contextlib.closing(sqlite3.connect(RunPaths.of(run_dir).journal)) as db:
        return db.execute("SELECT key, outcome FROM outbox WHERE topic = ? ORDER BY position", (TOPIC,)).fetchall()


class Leases:
    """The stream of leases, as far as `JoinLease` asks for it."""

    def __init__(self, world: FaultyFleet) -> None:
        self._world = world
        self.records: list[bytes] = []
        self.first = 1

    @property
    def last(self) -> int:
        return self.first + len(self.records) - 1

    async def stream_info(self, _: str) -> Any:
        self._world.refuse_if_down()
        return SimpleNamespace(state=SimpleNamespace(last_seq=self.last))

    async def get_msg(self, _: str, seq: int) -> Any:
        from nats.js.errors import NotFoundError

        if not self.first <= seq <= self.last:
            raise NotFoundError
        return SimpleNamespace(data=self.records[seq - self.first])

    async def publish(self, _: str, data: bytes, *, timeout: float, headers: dict[str, str]) -> Any:
        from nats.js.errors import BadRequestError

        self._world.refuse_if_down()
        if int(headers["Nats-Expected-Last-Sequence"]) != self.last:
            raise BadRequestError
        self.records.append(data)
        return SimpleNamespace(seq=self.last)


class FaultyNode:
    """The disk of a machine, its trainers, and its shipper."""

    def __init__(self, world: FaultyFleet, directory: Path) -> None:
        self.world, self.name = world, directory.name
        self.spool = directory / "run" / "spool"
        self.directory = directory
        self.away_until = self.stopped_until = 0.0
        self.deaf_until = self.dumb_until = 0.0
        """It hears nothing, it is not heard: a link that works one way."""
        self.skew_s = 0.0
        self.heard_at = world.now
        """When a join heard it last."""
        self.problems: list[str] = []
        self.folders = sorted(path.name for path in self.spool.iterdir())
        self.begin()

    def begin(self, skew_s: float = 0.0) -> None:
        """Start the shipper, or start it anew after a kill, by a clock that is ahead or behind."""
        self.skew_s = skew_s
        self.runs = NodeRuns(
            self.directory, self.name, digested_kinds=self.world.digested_kinds,
            clock=lambda: self.world.now + self.skew_s, on_problem=self.problems.append,
        )  # fmt: skip

    def write(self, sizes: dict[str, int], torn: int) -> None:
        """Have the ranks write up to these sizes, and a few bytes of what follows."""
        recorded = self.world.recorded
        for name, size in sizes.items():
            folder = name.split("/")[0]
            if folder not in self.folders or name == recorded.pruned or name in self.world.deleted:
                continue
            path = self.spool / name
            has = path.stat().st_size if path.exists() else 0
            data = (recorded.spool / name).read_bytes()[has : size + torn]
            if data:
                with path.open("ab") as file:
                    file.write(data)

    def delete_acknowledged(self) -> None:
        """Do what a trainer does with files that are committed."""
        for folder in self.folders:
            index, _ = read_ack(self.spool / folder)
            for number in list_files(self.spool / folder):
                if number < index:
                    (self.spool / folder / file_name(number)).unlink()
                    self.world.deleted.add(f"{folder}/{file_name(number)}")
                    self.world.counts["deleted after commit"] += 1

    def turn(self) -> None:
        world, rng = self.world, self.world.rng
        if world.now < self.stopped_until:
            return
        self.runs.discover()
        is_cut = world.now < max(self.away_until, self.dumb_until) or world.is_down
        if not is_cut:
            for _ in range(rng.randrange(1, 4)):
                for chunks in list(in_messages(self.runs.next())):
                    outcome = world.publish_of_node(seal_published(chunks))
                    if outcome != "acknowledged":
                        for chunk in chunks:
                            self.runs.take_back(chunk)
                        break
            for beat in self.runs.beats(blocked="the broker is full" if world.is_full else ""):
                world.say(world.node_says, seal(beat))

    def hear(self, data: bytes) -> None:
        if self.world.now >= max(self.away_until, self.deaf_until, self.stopped_until):
            answer = unseal(data, Answer)
            if answer.node == self.name:
                self.runs.take_answer(answer)


class WorkingJoin:
    """One process of `sentinel join`: the intake and the daemon's part, a turn at a time."""

    def __init__(self, world: FaultyFleet, name: str) -> None:
        self.world, self.name = world, name
        self.problems: list[str] = []
        self.copies = CopiedRuns(
            world.joined, name, clock=world.clock, on_problem=self.problems.append, wait=self._wait_for_rows
        )
        self.is_waiting = False
        """For rows, in the middle of a turn."""
        self.lease = JoinLease(name, clock=world.clock, floor=lambda: highest_epoch(world.joined))
        self.run: ServedRun | None = None
        self.stopped_until = self.cut_until = 0.0
        self.is_dead = False
        self._has_begun = False
        self._renew_at = 0.0
        self._position = 0
        self._is_drained = False
        self.stalled: threading.Thread | None = None
        self._goes_on = threading.Event()
        self._armed: tuple[str, float, threading.Event] | None = None
        self.disarm: Callable[[], None] = lambda: None

    def turn(self) -> None:
        world = self.world
        if self.is_dead or self.is_waiting or world.now < self.stopped_until or self.stalled is not None:
            return
        if not self._listen():
            return
        if self._armed is None or self.run is None:
            self.act()
        else:
            self._act_until_it_stalls()

    def _wait_for_rows(self, seconds: float) -> None:
        """Let time pass in which all others live on, and what comes for this one is taken."""
        self.is_waiting = True
        self.world.tick()
        self.is_waiting = False
        if not self.lease.is_held:
            self.copies.end("the lease was lost")
        elif self.world.now >= self.stopped_until:
            self._listen()
            self.copies.release()

    def _listen(self) -> bool:
        """Look after the lease, and take what has come; return whether it may act."""
        world = self.world
        if world.now >= self._renew_at and world.now >= self.cut_until:
            with contextlib.suppress(TimeoutError):
                drive_at_once(self.lease.step(world.leases))
                self._renew_at = world.now + self.lease.times.renew_s
        if not self.lease.is_held:
            if self._has_begun and not self.is_waiting:
                self.kill()
            return False
        if not self._has_begun:
            world.note_epoch(self.lease.held_epoch)
            self.copies.recall()
            self._has_begun, self._position = True, 0
        if not world.is_down and world.now >= self.cut_until:
            self._take()
        return True

    def act(self) -> None:
        """Write copies, judge and tell: what a process that was stopped goes on with, whatever the lease is by then."""
        self.copies.release()
        try:
            if self.run is None and len(self.copies.nodes().get("run", {})) == len(self.world.nodes):
                self.run = ServedRun(
                    RunPaths.of(self.world.joined / "run"), CONFIG, self.world.recorded.packs,
                    arrivals=lambda: self.copies.arrivals("run"), epoch=self.lease.held_epoch,
                    rows_from=self.copies.rows_of("run"),
                )  # fmt: skip
            if self.run is not None:
                while self.run.turn(NOW):
                    pass
                self.tell()
        except StoreError as error:
            if isinstance(error, FencedOff):
                self.world.counts["fenced off"] += 1
                self.lease.take_fence()
            self.problems.append(str(error))
            self.close_run()

    def tell(self) -> None:
        assert self.run is not None
        for row in self.run.journal.outbox.waiting(TOPIC, NOW + 1e9):
            self.run.journal.outbox.begin_delivery({row.position: row.key})
            self.world.sink[row.key].append(row.tries > 0)
            self.run.journal.outbox.finish_delivery([row.position], "sent")

    def hear(self, data: bytes) -> None:
        if self.is_dead or self.stalled is not None or not self._has_begun or not self.lease.is_held:
            return
        if self.world.now >= max(self.stopped_until, self.cut_until):
            with contextlib.suppress(WireError):
                beat = unseal(data, Beat)
                answer = self.copies.take_beat(beat, is_drained=self._is_drained)
                self.world.note_heard(beat.node)
                if answer is not None:
                    self.world.say("answer", seal(answer))

    def stall(self, where: str, span: float) -> None:
        """Have the next act of a kind stop in the middle of a turn for a while.

        where: before the commit, before the `files` behind it, before `telling`, or while it is under way (`told`).
        """
        if self.run is None or self.is_dead or self._armed is not None:
            return
        run, reached = self.run, threading.Event()
        commit, append, begin = run.journal.commit, run._files.append, run.journal.outbox.begin_delivery

        def disarm() -> None:
            run.journal.commit, run._files.append = commit, append  # type: ignore[method-assign]
            run.journal.outbox.begin_delivery = begin  # type: ignore[method-assign]
            self._armed = None

        def stop() -> None:
            disarm()
            reached.set()
            self._goes_on.wait(120.0)

        def late_commit(one: Commit) -> None:
            stop()
            commit(one)

        def late_append(one: Commit) -> None:
            stop()
            append(one)

        def late_telling(deliveries: Any) -> None:
            if where == "told":
                begin(deliveries)
            stop()
            if where == "telling":
                begin(deliveries)

        if where == "commit":
            run.journal.commit = late_commit  # type: ignore[method-assign]
        elif where == "files":
            run._files.append = late_append  # type: ignore[method-assign]
        else:
            run.journal.outbox.begin_delivery = late_telling  # type: ignore[method-assign]
        self._armed, self.disarm = (where, span, reached), disarm

    def _act_until_it_stalls(self) -> None:
        assert self._armed is not None
        (where, span, reached), done = self._armed, threading.Event()

        def act() -> None:
            self.act()
            done.set()

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        while not reached.is_set() and not done.is_set():
            reached.wait(0.002)
        if reached.is_set():
            self.stalled, self.stopped_until = thread, self.world.now + span
            self.world.counts[f"stalled: {where}"] += 1
        else:
            thread.join()

    def go_on(self) -> None:
        """End a stall."""
        if self.stalled is not None:
            self._goes_on.set()
            self.stalled.join(120.0)
            self.stalled = None
            self._goes_on.clear()

    def close_run(self) -> None:
        if self.run is not None:
            with contextlib.suppress(StoreError):
                self.run.close()
            self.run = None

    def kill(self) -> None:
        self.go_on()
        self.close_run()
        self.is_dead = True
        for name in ("digested_steps", "fetched_steps"):
            self.world.counts[name] += self.copies.health().counts[name]

    def _take(self) -> None:
        world = self.world
        batch = [(seq, data) for seq, data in world.stream if seq > self._position][:64]
        if not self.copies.has_room():
            return
        if world.rng.random() < 0.2:
            world.rng.shuffle(batch)
        for seq, data in batch:
            self._position = max(self._position, seq)
            for _ in range(2 if world.rng.random() < 0.1 else 1):
                try:
                    for published in unseal_published(data):
                        self.copies.take(published)
                except WireError as error:
                    self.copies.refuse("stream", str(error))
        self._is_drained = not any(seq > self._position for seq, _ in world.stream)
        if world.rng.random() < 0.3:
            world.stream = [(seq, data) for seq, data in world.stream if seq > self._position]


class FaultyFleet:
    """One schedule of faults."""

    node_says = "beat"
    """As what it is heard what nodes say."""
    has_holes = False
    """Whether copies lack rows."""
    digested_kinds: frozenset[str] | None = None
    """As of `NodeRuns`, for the nodes."""
    longest_silence_s = LONGEST_SILENCE_S
    """Past it nothing keeps a node from being heard for longer."""

    def __init__(self, directory: Path, recorded: RecordedFleet, seed: int) -> None:
        self.rng, self.recorded, self.seed = random.Random(seed), recorded, seed
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        self.stream: list[tuple[int, bytes]] = []
        self.seq = 0
        self.is_down = False
        self.down_until = self.full_until = 0.0
        self.deleted: set[str] = set()
        self.leases = Leases(self)
        self.said: list[tuple[float, str, bytes]] = []
        self.sink: defaultdict[str, list[bool]] = defaultdict(list)
        """Key -> of each time that it was sent, whether it was said to be a repeat."""
        self.epochs: list[int] = []
        self.joined = directory / "joined"
        self.joined.mkdir(mode=0o700)
        paths = split(recorded.run_dir, directory, 2)
        for path in directory.glob("node*/run/spool/*/*.spool"):
            path.unlink()
        self.nodes = [FaultyNode(self, path) for path in paths]
        self.joins: list[WorkingJoin] = []
        self._num_joins = 0
        self._next_step = 0

    def clock(self) -> float:
        return self.now

    @property
    def is_full(self) -> bool:
        return self.now < self.full_until

    def refuse_if_down(self) -> None:
        if self.is_down:
            raise TimeoutError

    def note_epoch(self, epoch: int) -> None:
        assert not self.epochs or epoch > self.epochs[-1], f"epoch {epoch} after {self.epochs}"
        self.epochs.append(epoch)

    @property
    def unheard_s(self) -> float:
        """For how long no join has heard any of the nodes."""
        return max(self.now - one.heard_at for one in self.nodes)

    def note_heard(self, name: str) -> None:
        """Take note that a join heard a node."""
        for node in self.nodes:
            if node.name == name:
                node.heard_at = self.now

    def publish_of_node(self, data: bytes) -> str:
        """As `publish`, of what comes from a node."""
        return self.publish(data)

    def publish(self, data: bytes, stream: list[tuple[int, bytes]] | None = None) -> str:
        """Take, lose or refuse a message; returns which of it the one who published learns."""
        stream = self.stream if stream is None else stream
        assert len(data) <= MAX_MESSAGE_BYTES
        if self.is_full or self.is_down:
            self.counts["publishes refused"] += 1
            return "refused"
        if self.rng.random() < 0.03:
            return "lost"
        self.seq += 1
        stream.append((self.seq, data))
        if self.rng.random() < 0.05:
            self.seq += 1
            stream.append((self.seq, data))
        return "acknowledged" if self.rng.random() > 0.03 else "unanswered"

    def say(self, what: str, data: bytes) -> None:
        if self.rng.random() > 0.05:
            self.said.append((self.now + self.rng.choice((0.0, 0.0, 0.25, 1.0)), what, data))
            if self.rng.random() < 0.05:
                self.said.append((self.now + self.rng.random() * 3.0, what, data))

    # What goes wrong.

    def fault(self) -> None:
        """Have one thing go wrong, for a while."""
        rng = self.rng
        span = min(rng.uniform(1.0, LONGEST_CUT_S), max(TICK_S, self.longest_silence_s - self.unheard_s))
        node, join = rng.choice(self.nodes), rng.choice(self.joins)
        faults: dict[str, Callable[[], None]] = {
            "shipper killed": node.begin,
            "shipper stopped": lambda: setattr(node, "stopped_until", self.now + span),
            "node cut off": lambda: setattr(node, "away_until", self.now + span),
            "node deaf": lambda: setattr(node, "deaf_until", self.now + span),
            "node not heard": lambda: setattr(node, "dumb_until", self.now + span),
            "all nodes cut off": lambda: self._cut_off(span),
            "clock of a node off by an hour": lambda: node.begin(rng.choice((-3600.0, 3600.0))),
            "join killed": join.kill,
            "join stopped": lambda: setattr(join, "stopped_until", self.now + span),
            "join cut off": lambda: setattr(join, "cut_until", self.now + span),
            "join stalls before commit": lambda: self._stall("commit"),
            "join stalls before files": lambda: self._stall("files"),
            "join stalls before telling": lambda: self._stall("telling"),
            "join stalls while telling": lambda: self._stall("told"),
            "broker killed": lambda: setattr(self, "down_until", self.now + span),
            "broker loses its tail": self._lose,
            "broker loses its leases": self._lose_leases,
            "broker full": lambda: setattr(self, "full_until", self.now + span),
            "junk in the stream": self._junk,
            "files deleted after commit": self._delete,
        }
        faults |= self.further_faults(span)
        name = rng.choice(sorted(faults))
        self.counts[name] += 1
        faults[name]()

    def further_faults(self, span: float) -> dict[str, Callable[[], None]]:
        """Return what else may go wrong. span: for how long."""
        return {}

    def hearers(self, what: str) -> Sequence[Hearer]:
        """Return who hears something that was said."""
        return self.joins if what == "beat" else self.nodes

    def _stall(self, where: str) -> None:
        for one in self.joins:
            one.stall(where, self.rng.choice((1.0, 12.0, 15.0)))

    def _cut_off(self, span: float) -> None:
        for node in self.nodes:
            node.away_until = self.now + span

    def _delete(self) -> None:
        for node in self.nodes:
            node.delete_acknowledged()

    def _lose(self) -> None:
        self.stream = self.stream[: self.rng.randrange(len(self.stream) + 1)]

    def _lose_leases(self) -> None:
        del self.leases.records[self.rng.randrange(len(self.leases.records) + 1) :]
        if self.rng.random() < 0.5:
            self.leases.records = []

    def _junk(self) -> None:
        for data in (b"", os.urandom(40), seal(Answer(1, "x", 0, "n", "run", {})), bytes(MAX_MESSAGE_BYTES + 1)):
            self.seq += 1
            self.stream.append((self.seq, data))

    # The course of it.

    def _write(self) -> None:
        if self._next_step < len(self.recorded.sizes):
            torn = self.rng.choice((0, 0, 50)) if self._next_step < len(self.recorded.sizes) - 2 else 0
            for node in self.nodes:
                node.write(self.recorded.sizes[self._next_step], torn)
            self._next_step += 1

    def tick(self) -> None:
        self.now += TICK_S
        was_down, self.is_down = self.is_down, self.now < self.down_until
        if was_down and not self.is_down and self.rng.random() < 0.5:
            self._lose()
        for join in self.joins:
            if join.stalled is not None and self.now >= join.stopped_until:
                join.go_on()
                self.counts["stalls ended"] += 1
            elif not join.is_dead and join.stopped_until and self.now >= join.stopped_until:
                # It goes on with what it was about to do, and looks at the lease afterwards.
                join.stopped_until = 0.0
                if join.run is not None and not join.is_waiting:
                    join.act()
        self.joins = [one for one in self.joins if not one.is_dead]
        while len(self.joins) < 2:
            self._num_joins += 1
            self.joins.append(WorkingJoin(self, f"host/{self._num_joins}"))
        for node in self.nodes:
            node.turn()
        due, self.said = [one for one in self.said if one[0] <= self.now], [one for one in self.said if one[0] > self.now]
        for _, what, data in due:
            if not self.is_down:
                for one in self.hearers(what):
                    one.hear(data)
        for join in list(self.joins):
            join.turn()

    def heal(self) -> None:
        """End all faults."""
        self.down_until = self.full_until = 0.0
        for node in self.nodes:
            node.away_until = node.stopped_until = node.deaf_until = node.dumb_until = 0.0
        for join in self.joins:
            join.go_on()
            join.disarm()
            join.stopped_until = join.cut_until = 0.0

    def run(self) -> None:
        """Live through the schedule, and compare what came of it with one daemon's."""
        with frozen_time():
            try:
                self._live()
            finally:
                for join in self.joins:
                    join.kill()
        self._compare()

    def _live(self) -> None:
        recorded = self.recorded
        self._write()
        for _ in range(400):
            self.tick()
            if any(one.run is not None for one in self.joins):
                break
        for _ in range(MAX_TICKS):
            if self._next_step >= len(recorded.sizes):
                break
            if self.rng.random() < 0.25:
                self._write()
            if self.rng.random() < 0.15:
                self.fault()
            self.tick()
        self.heal()
        num_held = 0
        for _ in range(MAX_TICKS):
            self.tick()
            # A lease that the broker has forgotten may still be lost.
            working = [one for one in self.joins if one.run is not None and one.lease.is_held]
            num_held = num_held + 1 if working and self._is_held() else 0
            if num_held > HELD_TICKS:
                break
        else:
            raise AssertionError(f"seed {self.seed}: not all is held after {MAX_TICKS} ticks: {dict(self.counts)}")
        join = working[0]
        assert join.run is not None
        join.run.finish(NOW, is_over=True, deadline=float("inf"))
        join.tell()

    def _is_held(self) -> bool:
        held = 0
        for name, size in self.recorded.sizes[-1].items():
            path = self.joined / "run" / "spool" / name
            held += name == self.recorded.pruned or name in self.deleted or (path.exists() and path.stat().st_size == size)
        return held == len(self.recorded.sizes[-1])

    def _compare(self) -> None:
        words = f"seed {self.seed}: {dict(self.counts)}"
        one, other = self.recorded.whole, self.joined / "run"
        for path in other.glob("spool/*/*.spool"):
            whole = (self.recorded.spool / path.relative_to(other / "spool")).read_bytes()
            assert self.has_holes or path.read_bytes() == whole, f"{words}: {path}"
        if self.recorded.pruned:
            # Which steps lack it depends on how far the others were when it was missed, on one disk as well.
            assert any(1 in one.missing for one in decisions(other)), f"{words}: nobody says that a rank's rows are missing"
            assert {path.name for path in other.glob(f"spool/{Path(self.recorded.pruned).parent}/*.spool")}, words
        else:
            assert result_bytes(one) == result_bytes(other), words
            assert decisions(one) == decisions(other), words
            assert set(self.sink) == self.recorded.told, words
        assert {outcome for _, outcome in outbox(other)} <= {"sent"}, words
        for key, repeats in self.sink.items():
            # A sink with a key takes the first; whoever sends it again says so, but for one who was stopped while sending.
            assert sum(not is_repeat for is_repeat in repeats) <= 1 + self.counts["stalled: begun"], (
                f"{words}: {key} {repeats}"
            )
        assert self.epochs == sorted(set(self.epochs)), words


class DigestedFleet(FaultyFleet):
    """One schedule of faults of a fleet whose nodes send digests in place of rows."""

    has_holes = True
    digested_kinds = KINDS


def drive_at_once(steps: Coroutine[Any, Any, None]) -> None:
    """Run what waits for nothing."""
    with contextlib.suppress(StopIteration):
        steps.send(None)
        raise AssertionError("it waits")
