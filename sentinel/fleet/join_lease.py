"""JoinLease: the right to be the one join of a broker, as records of who has it in a stream of the broker.

Each record is appended with the sequence that the whole stream must have, so of two that append at once one fails. Who has
the lease appends again every `renew_s`, and stops by its own clock when it could not for `stop_s`; who waits takes it when
nothing was appended for `takeover_s` by its own clock, or at once when it was given back. No two clocks are compared.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from sentinel.errors import MALFORMED
from sentinel.fleet.subjects import LEASE, LEASES
from sentinel.printable import printable

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext

log = logging.getLogger("sentinel.fleet")

REQUEST_S = 1.0
"""Longest wait for an answer of the broker: several fit into `stop_s`."""
MAX_RECORDS = 256
"""Records that the stream keeps; the newest alone counts, the others are for who looks into it."""


def boot_time() -> float:
    """Return seconds that grow also while the machine sleeps, which those of `time.monotonic` do not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When a lease is renewed, let go of and taken over, in seconds."""

    renew_s: float = 2.0
    stop_s: float = 6.0
    """Less than `takeover_s` by more than two clocks drift apart in it, and a write to a disk takes."""
    takeover_s: float = 10.0

    @classmethod
    def of(cls, takeover_s: float) -> LeaseTimes:
        """Return the times in the proportions of the default ones."""
        return cls(renew_s=takeover_s / 5.0, stop_s=takeover_s * 0.6, takeover_s=takeover_s)


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """Who has the lease. Fields are only ever added, last."""

    owner: str
    """Name of its process, for people."""
    holder_id: str
    """Drawn anew by each process: in a container the name of the next one is often the same."""
    epoch: int
    """Grows by one with each new owner."""
    is_free: bool = False
    """It was given back."""
    takeover_s: float = 0.0
    """Who waits takes it no sooner, for its owner goes by that; 0: as who waits has it."""


class JoinLease:
    """`step` is for one thread, again and again; `is_held` and `holder` are for any."""

    def __init__(
        self,
        owner: str,
        times: LeaseTimes = LeaseTimes(),  # noqa: B008 -- frozen
        *,
        clock: Callable[[], float] = boot_time,
        floor: Callable[[], int] = lambda: 0,
    ) -> None:
        """owner: name of this process. clock: monotonic seconds. floor: returns an epoch that is taken already, whatever
        the broker says: asked before each take-over, for a broker may have lost its records.
        """
        self.owner, self.times = owner, times
        self.epoch = 0
        """The highest that was seen."""
        self.held_epoch = 0
        """That of this process; 0: it never had the lease."""
        self.holder = ""
        """Who has it, as far as known; empty: nobody is known to."""
        self.is_lost = False
        """It was held, and is no more; for good: another process may begin anew."""
        self.why_lost = ""
        """In words, where it is not that it was not renewed."""
        self._clock, self._floor = clock, floor
        self._id = secrets.token_hex(8)
        self._held_until = 0.0
        """By our clock; 0: it was not held yet."""
        self._seq: int | None = None
        """Sequence of the stream as it was last seen; None: never."""
        self._changed_at = 0.0
        self._owner_takeover_s = 0.0
        """`takeover_s` of who has it."""

    @property
    def is_held(self) -> bool:
        """Whether this process may act now: asked before each act, for time passes between two."""
        return not self.is_lost and self._clock() < self._held_until

    async def step(self, jetstream: JetStreamContext) -> None:
        """Look, and append what is to be: a renewal, or a take-over. Errors of the broker: it is to be tried again."""
        if self._held_until and not self.is_held:
            self.is_lost = True
        if self.is_lost:
            return
        began = self._clock()
        if self._held_until and await self._append(jetstream, self._record(self.held_epoch)):
            # One request alone: a broker that answers slowly must not cost the lease.
            self._held_until = began + self.times.stop_s
            return
        record = await self._look(jetstream)
        is_mine = record is not None and record.holder_id == self._id
        if self._held_until:
            # A broker that lost its store has no record: it gets ours again.
            if record is not None and not is_mine:
                self.is_lost = True
                return
            epoch = self.held_epoch
        elif record is not None and is_mine:
            # Taken, and the answer was lost.
            epoch = record.epoch
        elif (record is not None and record.is_free) or self._clock() - self._changed_at >= self._wait_s:
            epoch = max(self.epoch, self._floor()) + 1
        else:
            return
        began = self._clock()
        if await self._append(jetstream, self._record(epoch)):
            self.epoch = max(self.epoch, epoch)
            self.held_epoch, self.holder, self._held_until = epoch, self.owner, began + self.times.stop_s

    def take_fence(self) -> None:
        """Take note that a journal is not to be written under our epoch: where one has a higher, the lease is lost.

        The broker may have lost the record of who followed us, and told us that we have it still. For any thread.
        """
        if self._held_until and (known := self._floor()) > self.held_epoch:
            self.why_lost = (
                f"a run here was judged under epoch {known}, of which the broker knows nothing: it lost its store?"
            )
            self.is_lost = True

    async def give_back(self, jetstream: JetStreamContext) -> None:
        """Let go of the lease, so that who waits has it at once."""
        if self.is_held:
            self.is_lost = True
            await self._append(jetstream, self._record(self.held_epoch, is_free=True))

    @property
    def _wait_s(self) -> float:
        return max(self.times.takeover_s, self._owner_takeover_s)

    def _record(self, epoch: int, *, is_free: bool = False) -> LeaseRecord:
        return LeaseRecord(self.owner, self._id, epoch, is_free, self.times.takeover_s)

    async def _look(self, jetstream: JetStreamContext) -> LeaseRecord | None:
        """Return the newest record; None: there is none that can be read."""
        from nats.js.errors import NotFoundError

        state = (await jetstream.stream_info(LEASES)).state
        now = self._clock()
        if state.last_seq != self._seq:
            self._seq, self._changed_at = state.last_seq, now
        if not state.last_seq:
            return None
        try:
            data = (await jetstream.get_msg(LEASES, state.last_seq)).data
            record = msgspec.msgpack.decode(data or b"", type=LeaseRecord)
        except NotFoundError:
            return None
        except MALFORMED as error:
            log.warning("stream %s: expected a record of a lease, got %s", LEASES, error)
            return None
        self.epoch, self._owner_takeover_s = max(self.epoch, record.epoch), record.takeover_s
        self.holder = "" if record.is_free else printable(record.owner[:200])
        return record

    async def _append(self, jetstream: JetStreamContext, record: LeaseRecord) -> bool:
        """Return whether a record was appended behind all that was seen."""
        from nats.js.errors import BadRequestError

        headers = {"Nats-Expected-Stream": LEASES, "Nats-Expected-Last-Sequence": str(self._seq)}
        try:
            told = await jetstream.publish(LEASE, msgspec.msgpack.encode(record), timeout=REQUEST_S, headers=headers)
        except BadRequestError:
            return False  # another was faster
        self._seq, self._changed_at = told.seq, self._clock()
        return True
