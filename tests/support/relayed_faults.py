"""The fleet of `fleet_faults` with workers between its nodes and its joins, and what may go wrong with workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from sentinel.errors import WireError
from sentinel.fleet.partition_leases import PartitionLeases
from sentinel.fleet.relayed_nodes import RelayedNodes
from sentinel.fleet.sealed import Answer, Beat, SpoolChunk, in_messages, seal, seal_published, unseal, unseal_published
from sentinel.fleet.subjects import partition_of

from .fleet_faults import KINDS, FaultyFleet, Hearer, Leases, RecordedFleet, drive_at_once


class FaultyWorker:
    """One process of `sentinel worker`, a turn at a time."""

    def __init__(self, world: RelayedFleet, name: str) -> None:
        self.world, self.name = world, name
        self.problems: list[str] = []
        self.leases = PartitionLeases(name, clock=world.clock)
        self.nodes = RelayedNodes(
            world.place(name), name, kinds=KINDS, is_held=self.leases.is_held, on_outdone=self._outdone,
            clock=world.clock, on_problem=self.problems.append,
        )  # fmt: skip
        self.stopped_until = self.cut_until = 0.0
        self.is_dead = False
        self._epochs: dict[int, int] = {}
        """Those under which it works on partitions."""
        self._renew_at = 0.0
        self._position = 0

    def _outdone(self, partition: int, epoch: int) -> None:
        self.world.counts["worker outdone"] += 1
        self.leases.raise_floor(partition, epoch)

    @property
    def is_away(self) -> bool:
        return self.is_dead or self.world.now < max(self.stopped_until, self.cut_until) or self.world.is_down

    def turn(self) -> None:
        world = self.world
        if self.is_dead or world.now < self.stopped_until:
            return
        if world.now >= self._renew_at and not self.is_away:
            with contextlib.suppress(TimeoutError):
                if self._step():
                    self._renew_at = world.now + self.leases.times.renew_s
        self._go_by_leases()
        if not self.is_away:
            self._take()
        self.nodes.release()
        if not self.is_away:
            self._publish()

    def _step(self) -> bool:
        found: list[bool] = []

        async def step() -> None:
            found.append(await self.leases.step(self.world.tables))  # type: ignore[arg-type]

        drive_at_once(step())
        return found[0]

    def _go_by_leases(self) -> None:
        held = self.leases.held()
        for partition in [one for one, epoch in self._epochs.items() if held.get(one) != epoch]:
            self.nodes.drop(partition)
            self.world.counts["partition let go of, with nodes"] += partition in self.world.partitions
        if held != self._epochs:
            # A partition is read from the beginning of what lies there.
            self._position = 0
        self._epochs = held

    def _take(self) -> None:
        world = self.world
        batch = [(seq, data) for seq, data in world.frames if seq > self._position][:64]
        if world.rng.random() < 0.2:
            world.rng.shuffle(batch)
        for seq, data in batch:
            self._position = max(self._position, seq)
            with contextlib.suppress(WireError):
                for chunk in unseal_published(data):
                    known = self.nodes.find(chunk.node)
                    if known is not None and isinstance(chunk, SpoolChunk):
                        known.take_chunk(chunk)
        if world.rng.random() < 0.3:
            taken = {one.node for partition in self._epochs for one in self.nodes.of(partition)}
            world.frames = [
                (seq, data)
                for seq, data in world.frames
                if seq > self._position or unseal_published(data)[0].node not in taken
            ]

    def _publish(self) -> None:
        world = self.world
        for _ in range(world.rng.randrange(1, 4)):
            for published in in_messages(self.nodes.next()):
                outcome = world.publish(seal_published(published))
                if outcome != "acknowledged":
                    for one in published:
                        self.nodes.take_back(one)
        for beat in self.nodes.beats():
            world.say("beat", seal(beat))

    def hear(self, data: bytes) -> None:
        """Hear a node, or the join."""
        if self.is_away:
            return
        with contextlib.suppress(WireError):
            self.nodes.take_answer(unseal(data, Answer))
            return
        beat = unseal(data, Beat)
        partition = partition_of(beat.node)
        epoch = self._epochs.get(partition, 0)
        if not self.leases.is_held(partition, epoch):
            return
        known = self.nodes.find(beat.node) or self.nodes.begin(beat.node, epoch)
        is_drained = not any(seq > self._position for seq, _ in self.world.frames)
        answer = known.take_beat(beat, is_drained=is_drained)
        if answer is not None:
            self.world.say("frames-answer", seal(answer))


class RelayedFleet(FaultyFleet):
    """One schedule of faults, of workers too."""

    node_says = "frames-beat"
    has_holes = True
    longest_silence_s = 14.0
    """That of a worker that is followed by another, some ten seconds later, comes to it."""

    def __init__(self, directory: Path, recorded: RecordedFleet, seed: int) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.workers: list[FaultyWorker] = []
        self._directory, self._num_workers = directory, 0
        super().__init__(directory, recorded, seed)
        self.partitions = {partition_of(node.name) for node in self.nodes}
        self.tables = Leases(self)

    def place(self, name: str) -> Path:
        """Return the directory of a worker, which is made."""
        found = self._directory / name
        found.mkdir(exist_ok=True)
        return found

    def publish_of_node(self, data: bytes) -> str:
        return self.publish(data, self.frames)

    def hearers(self, what: str) -> Sequence[Hearer]:
        if what == "beat":
            return self.joins
        return self.nodes if what == "frames-answer" else self.workers

    def further_faults(self, span: float) -> dict[str, Callable[[], None]]:
        if not self.workers or self.unheard_s > self.longest_silence_s / 2:
            return {}
        worker = self.rng.choice(self.workers)
        return {
            "worker killed": lambda: setattr(worker, "is_dead", True),
            "worker stopped": lambda: setattr(worker, "stopped_until", self.now + span),
            "worker cut off": lambda: setattr(worker, "cut_until", self.now + span),
            "broker loses its tables": lambda: setattr(self.tables, "records", []),
            "broker loses frames": lambda: setattr(self, "frames", self.frames[: self.rng.randrange(len(self.frames) + 1)]),
        }

    def tick(self) -> None:
        super().tick()
        self.workers = [one for one in self.workers if not one.is_dead]
        while len(self.workers) < 2:
            self._num_workers += 1
            self.workers.append(FaultyWorker(self, f"worker-{self._num_workers}"))
        for worker in list(self.workers):
            worker.turn()

    def heal(self) -> None:
        super().heal()
        for worker in self.workers:
            worker.stopped_until = worker.cut_until = 0.0
