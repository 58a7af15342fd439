"""PartitionWorker: takes the spools that nodes ship to workers, and sends the join what `sentinel node` would send there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sentinel.errors import WireError
from sentinel.fleet import subjects
from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, connect, ensure_worker_streams, error_words
from sentinel.fleet.ended_tasks import end_all
from sentinel.fleet.intake_tally import IntakeTally
from sentinel.fleet.join_lease import REQUEST_S
from sentinel.fleet.partition_leases import PartitionLeases
from sentinel.fleet.relayed_nodes import RelayedNodes
from sentinel.fleet.run_key import UNSIGNED, RunKey
from sentinel.fleet.sealed import Beat, SpoolChunk, WorkerReport, seal, unseal, unseal_published
from sentinel.fleet.shipping import Shipping
from sentinel.fleet.stream_reader import StreamReader
from sentinel.printable import printable
from sentinel.worker_health import WorkerHealth

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

log = logging.getLogger("sentinel.fleet")

BATCH = 16
"""Messages of a partition that are taken at once."""
RELEASE_S = 0.05
REPORT_S = 0.5
LOOK_S = 0.1
"""Pause between two looks whether all that we do is still ours."""


class _Partition:
    """One that this worker has, under one epoch."""

    def __init__(self, number: int, epoch: int, reader: StreamReader, subscription: Subscription) -> None:
        self.number, self.epoch, self.reader, self.subscription = number, epoch, reader, subscription
        self.reading: asyncio.Task[None] | None = None
        """From when on a node of it has spoken."""


class PartitionWorker:
    """The work of `sentinel worker`."""

    def __init__(
        self,
        directory: Path,
        broker: BrokerConfig,
        leases: PartitionLeases,
        *,
        kinds: frozenset[str],
        stream_bytes: int = STREAM_BYTES,
        replicas: int = 1,
        key: RunKey | None = None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """directory: for copies, of this process alone. kinds: as of `RelayedNodes`. key: as of `JoinIntake` and `Shipping`.

        stream_bytes: most that the stream of frames holds, where it is made here; replicas: servers that hold it. on_look:
        called each time that `health` is new, in the loop of `run`.
        """
        self.health = WorkerHealth()
        """How it is, of each half second; for any thread."""
        self._broker, self._leases, self._key, self._streams = broker, leases, key, (stream_bytes, replicas)
        self._on_look = on_look
        self._problems: set[str] = set()
        self._tally = IntakeTally(time.monotonic, self._tell)
        """Of messages of nodes."""
        self.nodes = RelayedNodes(
            directory, leases.owner, kinds=kinds, is_held=leases.is_held, on_outdone=leases.raise_floor,
            on_problem=self._tell, is_signed=key is not None,
        )  # fmt: skip
        self._client: Client | None = None
        self._unrenewed = ""
        """Why the partitions could not be renewed when it was tried last, in words; empty: they were."""
        self._num_taken = 0
        self._shipping = Shipping(self.nodes, broker, drain_s=0.0, key=key)
        self._partitions: dict[int, _Partition] = {}
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Have `run` end; for any thread."""
        if self._loop is None:
            self._stop.set()
        else:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self) -> None:
        """Work until `stop`, and give back all partitions. ConfigError."""
        self._loop = asyncio.get_running_loop()
        looking = asyncio.ensure_future(self._look())
        try:
            await self._work()
        finally:
            await end_all([looking])

    async def _work(self) -> None:
        connecting = asyncio.ensure_future(connect(self._broker, f"sentinel worker {self._leases.owner}", self._reconnected))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            await end_all([connecting, stopping])
            return
        client = self._client = await connecting
        log.info("worker: copies in %s are made from %s", self.nodes.directory, self._broker.shown)
        works = (self._shipping.run(), self._keep(client), self._release(), self._report(client))
        tasks = [stopping, *map(asyncio.ensure_future, works)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for number in list(self._partitions):
                await self._let_go(number)
            await end_all(tasks)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._leases.give_back(client.jetstream(timeout=REQUEST_S)), 2.0)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), 2.0)

    async def _reconnected(self) -> None:
        for one in self._partitions.values():
            one.reader.begin_anew()

    # Which partitions are ours.

    async def _keep(self, client: Client) -> None:
        """Renew the leases, and begin and end with partitions as they come and go."""
        from nats.errors import Error

        jetstream = client.jetstream(timeout=REQUEST_S)
        loop, renew_at, has_streams = asyncio.get_running_loop(), 0.0, False
        while True:
            now = loop.time()
            if now >= renew_at and client.is_connected:
                renew_at = now + self._leases.times.renew_s / 4
                try:
                    if not has_streams:
                        await ensure_worker_streams(jetstream, *self._streams)
                    has_streams = False
                    if await self._leases.step(jetstream):
                        renew_at = now + self._leases.times.renew_s
                    has_streams, self._unrenewed = True, ""
                except (TimeoutError, Error, OSError) as error:
                    words = error_words(error)
                    if words != self._unrenewed:
                        self._unrenewed = words
                        log.warning("worker: its partitions cannot be renewed: %s; it is tried again", words)
            await self._go_by_leases(client)
            await asyncio.sleep(min(LOOK_S, self._leases.times.renew_s / 4))

    async def _go_by_leases(self, client: Client) -> None:
        held = self._leases.held()
        for number, one in list(self._partitions.items()):
            if held.get(number) != one.epoch:
                await self._let_go(number)
        for number, epoch in held.items():
            if number not in self._partitions:
                await self._begin(client, number, epoch)

    async def _begin(self, client: Client, number: int, epoch: int) -> None:
        from nats.errors import Error

        async def take_beat(message: Msg) -> None:
            await self._take_beat(client, partition, message)

        reader = StreamReader(
            subjects.FRAMES_STREAM, subjects.in_partition(subjects.FRAMES, number), take=self._take_message,
            has_room=lambda: all(one.has_room() for one in self.nodes.of(number)),
            may_act=lambda: self._leases.is_held(number, epoch), is_shared=True, batch=BATCH,
        )  # fmt: skip
        try:
            subscription = await client.subscribe(subjects.in_partition(subjects.FRAMES_BEATS, number), cb=take_beat)
        except (Error, OSError):
            return  # The connection was lost: it is tried again.
        self._num_taken += 1
        partition = self._partitions[number] = _Partition(number, epoch, reader, subscription)

    async def _let_go(self, number: int) -> None:
        from nats.errors import Error

        one = self._partitions.pop(number)
        self.nodes.drop(number)
        if one.reading is not None:
            one.reading.cancel()
        with contextlib.suppress(Error, OSError):
            await one.subscription.unsubscribe()

    async def _read(self, client: Client, partition: _Partition) -> None:
        """Read the frames of a partition as long as it is ours."""
        from nats.errors import Error

        jetstream = client.jetstream()
        while self._leases.is_held(partition.number, partition.epoch):
            try:
                await partition.reader.read(jetstream)
            except (TimeoutError, Error, OSError) as error:
                why = error_words(error)
                self._tell(f"frames of partition {partition.number} cannot be read: {why}; it is tried again")
                await asyncio.sleep(0.5)

    # What nodes send.

    def _take_message(self, message: Msg) -> None:
        try:
            published = unseal_published(message.data)
        except WireError as error:
            self._refuse(f"{message.subject}: {error}")
            return
        for one in published:
            if not isinstance(one, SpoolChunk) or not subjects.is_of(message.subject, one.run, one.node):
                self._refuse(f"{message.subject}: expected a chunk of that node's spool, got another message: it is refused")
                return
            node = self.nodes.find(one.node)
            if node is not None:
                node.take_chunk(one)

    async def _take_beat(self, client: Client, partition: _Partition, message: Msg) -> None:
        from nats.errors import Error

        if not self._leases.is_held(partition.number, partition.epoch):
            return
        try:
            beat = unseal(message.data, Beat)
        except WireError as error:
            self._refuse(f"{message.subject}: {error}")
            return
        if self._key is not None and not self._key.has_signed(message.subject, message.data, message.headers):
            self._refuse(f"{message.subject}: {UNSIGNED}")
            return
        if not subjects.is_of(message.subject, beat.run, beat.node) or subjects.partition_of(beat.node) != partition.number:
            self._refuse(
                f"{message.subject}: a message there says that it is node {printable(beat.node[:64])}'s: it is refused"
            )
            return
        node = self.nodes.find(beat.node) or self.nodes.begin(beat.node, partition.epoch)
        if partition.reading is None:
            partition.reading = asyncio.ensure_future(self._read(client, partition))
        answer = node.take_beat(beat, is_drained=partition.reader.is_drained)
        if answer is not None and client.is_connected:
            with contextlib.suppress(Error, OSError):
                subject, data = subjects.frames_answer(answer.run, answer.node), seal(answer)
                headers = self._key.headers(subject, data) if self._key is not None else None
                await client.publish(subject, data, headers=headers)

    async def _release(self) -> None:
        while True:
            self.nodes.release()
            await asyncio.sleep(RELEASE_S)

    def _refuse(self, why: str) -> None:
        self._tally.refuse(why, why)

    def _tell(self, problem: str) -> None:
        if problem not in self._problems and len(self._problems) < 1000:
            self._problems.add(problem)
            log.warning("worker: %s", problem)

    # For people.

    async def _look(self) -> None:
        """Say how it is, from the beginning, also while there is no broker."""
        while True:
            self.health = self._looked()
            self._on_look()
            await asyncio.sleep(REPORT_S)

    def _looked(self) -> WorkerHealth:
        known, shipping = self.nodes.health(), self._shipping
        is_connected, problems = self._client is not None and self._client.is_connected, list[str]()
        if not is_connected:
            problems.append(f"broker {self._broker.shown}: it is not reached; nodes keep what is new in their spools")
        elif self._unrenewed:
            problems.append(f"its partitions cannot be renewed: {self._unrenewed}")
        if is_connected and shipping.blocked:
            problems.append(f"nothing goes on to the join: {shipping.blocked}")
        counts = {
            **known.counts, "refused": known.counts.get("refused", 0) + self._tally.counts["refused"],
            "taken_partitions": self._num_taken, "published_messages": shipping.num_published,
            "published_bytes": shipping.num_published_bytes,
        }  # fmt: skip
        return msgspec.structs.replace(
            known, is_connected=is_connected, is_renewed=self._leases.is_renewed, partitions=self._leases.held(),
            num_workers=self._leases.num_workers, is_blocked=bool(shipping.blocked), counts=counts,
            problems=(*problems, *self._tally.problems(), *known.problems),
        )  # fmt: skip

    async def _report(self, client: Client) -> None:
        """Say who has which partitions, and how far it is."""
        from nats.errors import Error

        while True:
            if client.is_connected:
                partitions = self._leases.held()
                nodes = {one: self.nodes.of(one) for one in partitions}
                report = WorkerReport(
                    worker=self._leases.owner, partitions=partitions,
                    num_nodes={number: len(found) for number, found in nodes.items() if found},
                    waiting_bytes={
                        number: sum(one.num_waiting_bytes for one in found) for number, found in nodes.items() if found
                    },
                    num_workers=self._leases.num_workers, num_refused=self._tally.counts["refused"],
                    blocked=self._shipping.blocked,
                )  # fmt: skip
                with contextlib.suppress(Error, OSError):
                    await client.publish(subjects.WORKERS, seal(report))
            await asyncio.sleep(REPORT_S)
