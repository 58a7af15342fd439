"""PartitionLeases: which worker has which partitions of the nodes, as tables of it in a stream of the broker.

Each record is the whole table, appended with the sequence that the stream must have, so of two workers that append at once
one fails, looks again, and loses nothing. The times and clocks are those of the join's lease: a worker that could not append
for `stop_s` has no partition any more, by its own clock; what it had is taken by others when it appended nothing for
`takeover_s` by theirs, or at once when it gave it back. Each time that a partition is taken its epoch grows by one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from sentinel.errors import MALFORMED
from sentinel.fleet.join_lease import REQUEST_S, LeaseTimes, boot_time
from sentinel.fleet.subjects import NUM_PARTITIONS, PARTITIONS, PARTITIONS_STREAM
from sentinel.printable import printable

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext

log = logging.getLogger("sentinel.fleet")

MAX_FLOOR = 2**30
"""Epochs above it are a lie: no worker took a partition so often, and there must be room above what is believed."""


class WorkerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One worker that works. Fields are only ever added, last."""

    name: str
    """Of its process, for people."""
    num_renewals: int
    """Grows with each record that it appends."""
    takeover_s: float
    """Who waits takes its partitions no sooner, for it goes by that."""


class PartitionOwner(msgspec.Struct, frozen=True, array_like=True):
    """Who has a partition. Fields are only ever added, last."""

    holder_id: str
    """Of a worker; empty: it was given back."""
    epoch: int


class PartitionTable(msgspec.Struct, frozen=True, array_like=True):
    """Who has which partitions. Fields are only ever added, last."""

    workers: dict[str, WorkerEntry] = {}
    """Drawn anew by each worker, and by one that lost its leases -> the worker."""
    owners: dict[int, PartitionOwner] = {}
    """Partition -> who has it; those that nobody ever had are missing."""


class PartitionLeases:
    """`step` is for one thread, again and again; so are `held` and `is_held`."""

    def __init__(
        self,
        owner: str,
        times: LeaseTimes = LeaseTimes(),  # noqa: B008 -- frozen
        *,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """owner: name of this process. clock: monotonic seconds."""
        self.owner, self.times = owner, times
        self.num_workers = 0
        """Workers that work, this one included, as they were last seen; 0: it has not looked yet."""
        self._clock = clock
        self._id = secrets.token_hex(8)
        self._former: set[str] = set()
        """What we were called before the leases were lost: nobody else is, so that nobody is waited for."""
        self._held: dict[int, int] = {}
        self._held_until = 0.0
        self._floors: dict[int, int] = {}
        self._lied_of: set[int] = set()
        """Partitions of which an epoch was named that no worker can have."""
        self._num_renewals = 0
        self._seq: int | None = None
        self._seen: dict[str, tuple[int, float]] = {}
        """Worker -> (its renewals, when they changed by our clock)."""
        self._empty_since: float | None = None
        self._takes_from = 0.0
        """Nothing is taken before."""

    def held(self) -> dict[int, int]:
        """Return the partitions that this process has now -> their epochs."""
        return dict(self._held) if self._clock() < self._held_until else {}

    def is_held(self, partition: int, epoch: int) -> bool:
        """Return whether this process may act for a partition now: asked before each act, for time passes between two."""
        return self._held.get(partition) == epoch and self._clock() < self._held_until

    @property
    def is_renewed(self) -> bool:
        """Whether what `held` says, if it is nothing, was renewed in time."""
        return self._clock() < self._held_until

    def raise_floor(self, partition: int, epoch: int) -> None:
        """Let go of a partition that a newer epoch is known of, and take it, if at all, under a higher one: a broker may
        have lost its records.
        """
        if epoch > MAX_FLOOR:
            if partition not in self._lied_of:
                self._lied_of.add(partition)
                log.warning("partition %d: a node names epoch %d, which no worker has: that is refused", partition, epoch)
            return
        if self._held.get(partition, epoch) < epoch:
            log.warning("partition %d: epoch %d is known, and ours is lower: it is let go of", partition, epoch)
            del self._held[partition]
        self._floors[partition] = max(self._floors.get(partition, 0), epoch)

    async def step(self, jetstream: JetStreamContext) -> bool:
        """Look, and append what is to be; return whether it was: else it is to be tried again soon.

        Errors of the broker: likewise. It takes an even share of the partitions, and gives back what is above.
        """
        began = self._clock()
        if self._held_until and began >= self._held_until:
            self._lapse()
        table = await self._look(jetstream)
        if table is None:
            # Others may have some: they append again what a broker has lost.
            self._empty_since = began if self._empty_since is None else self._empty_since
            if not self._held and began - self._empty_since < self.times.takeover_s:
                return False
            if self._held:
                self._takes_from = began + self.times.takeover_s
            table = PartitionTable()
        live = self._live(table, began)
        mine = self._kept(table)
        share = -(-NUM_PARTITIONS // len(live))
        ours = {one: owner.epoch for one, owner in table.owners.items() if owner.holder_id == self._id} | mine
        for partition in sorted(mine)[share:]:
            del mine[partition]
        # From here on, whatever comes of the record, nothing is done for what is given back.
        self._held = dict(mine)
        free = self._free(table, live.keys() - {self._id}, mine) if began >= self._takes_from else []
        for partition in free[: share - len(mine)]:
            known = table.owners.get(partition)
            mine[partition] = max(self._floors.get(partition, 0), known.epoch if known is not None else 0) + 1
        # What we had, and have no more, others may have at once, above all that is known of its epochs.
        owners = table.owners | {
            one: PartitionOwner("", max(epoch, self._floors.get(one, 0))) for one, epoch in ours.items() if one not in mine
        }
        owners |= {one: PartitionOwner(self._id, epoch) for one, epoch in mine.items()}
        entry = WorkerEntry(self.owner, self._num_renewals + 1, self.times.takeover_s)
        if not await self._append(jetstream, PartitionTable({**live, self._id: entry}, owners)):
            return False
        if mine.keys() != self._held.keys():
            log.info("worker: has %d of %d partitions, beside %d others", len(mine), NUM_PARTITIONS, len(live) - 1)
        self._held, self._held_until, self.num_workers = mine, began + self.times.stop_s, len(live)
        self._num_renewals += 1
        return True

    async def give_back(self, jetstream: JetStreamContext) -> None:
        """Let go of all, so that others have it at once."""
        if not self.held():
            return
        self._held = {}
        table = await self._look(jetstream) or PartitionTable()
        owners = {
            one: PartitionOwner("", owner.epoch) if owner.holder_id == self._id else owner
            for one, owner in table.owners.items()
        }
        workers = {one: entry for one, entry in table.workers.items() if one != self._id}
        await self._append(jetstream, PartitionTable(workers, owners))

    def _lapse(self) -> None:
        log.error("worker: its partitions were not renewed for %g s: it lets go of all, and begins anew", self.times.stop_s)
        self._former.add(self._id)
        self._id, self._held, self._held_until, self._num_renewals = secrets.token_hex(8), {}, 0.0, 0

    def _live(self, table: PartitionTable, now: float) -> dict[str, WorkerEntry]:
        """Return the workers that work, this one included."""
        for one, entry in table.workers.items():
            if self._seen.get(one, (-1, 0.0))[0] != entry.num_renewals:
                self._seen[one] = (entry.num_renewals, now)
        self._seen = {one: seen for one, seen in self._seen.items() if one in table.workers}
        mine = WorkerEntry(self.owner, self._num_renewals, self.times.takeover_s)
        return {
            self._id: mine,
            **{
                one: entry
                for one, entry in table.workers.items()
                if one not in (self._id, *self._former)
                and now - self._seen[one][1] < max(self.times.takeover_s, entry.takeover_s)
            },
        }

    def _kept(self, table: PartitionTable) -> dict[int, int]:
        """Return what we have as far as no other has taken it, and what we took where the answer to that was lost."""
        ours = {
            one: owner.epoch
            for one, owner in table.owners.items()
            if owner.holder_id == self._id and owner.epoch >= self._floors.get(one, 0)
        }
        return ours | {one: epoch for one, epoch in self._held.items() if one not in table.owners}

    def _free(self, table: PartitionTable, others: Collection[str], mine: Collection[int]) -> list[int]:
        """Return the partitions that nobody has who works."""
        known = table.owners
        return [
            one
            for one in range(NUM_PARTITIONS)
            if one not in mine and (one not in known or known[one].holder_id not in others)
        ]

    async def _look(self, jetstream: JetStreamContext) -> PartitionTable | None:
        """Return the newest table; None: there is none that can be read."""
        from nats.js.errors import NotFoundError

        self._seq = (await jetstream.stream_info(PARTITIONS_STREAM)).state.last_seq
        if not self._seq:
            return None
        try:
            data = (await jetstream.get_msg(PARTITIONS_STREAM, self._seq)).data
            found = msgspec.msgpack.decode(data or b"", type=PartitionTable)
        except NotFoundError:
            return None
        except MALFORMED as error:
            log.warning("stream %s: expected a table of partitions, got %s", PARTITIONS_STREAM, printable(str(error)))
            return None
        self._empty_since = None
        return found

    async def _append(self, jetstream: JetStreamContext, table: PartitionTable) -> bool:
        """Return whether a table was appended behind all that was seen."""
        from nats.js.errors import BadRequestError

        headers = {"Nats-Expected-Stream": PARTITIONS_STREAM, "Nats-Expected-Last-Sequence": str(self._seq)}
        try:
            await jetstream.publish(PARTITIONS, msgspec.msgpack.encode(table), timeout=REQUEST_S, headers=headers)
        except BadRequestError:
            return False  # another was faster
        return True
