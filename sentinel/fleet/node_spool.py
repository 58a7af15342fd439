"""NodeSpool: one spool of a machine as its shipper knows it: how far it is published, held and committed."""

from __future__ import annotations

import os
from pathlib import Path

from sentinel.fleet.sealed import FilePlace, SpoolChunk, SpoolHead, SpoolHeld
from sentinel.fleet.spool_cursor import SpoolCursor, are_heartbeats, last_index
from sentinel.wire.pulse import read_pulse
from sentinel.wire.spool import read_ack, write_ack
from sentinel.wire.spool_files import read_window
from sentinel.wire.witness import MAX_BYTES as MAX_WITNESS_BYTES
from sentinel.wire.witness import NAME as WITNESS

RESEND_S = 3.0
"""What was published and is not held is published again after so long, where it is on its way no more: the stream was
drained, or what was published after it has come."""
MAX_WAITING = 64
"""Moments at which the end of a spool is remembered; a bound on memory."""
MAX_BEATEN_BYTES = 4096
"""Most bytes behind what was published that are looked into."""


class NodeSpool:
    """Moments are monotonic seconds."""

    def __init__(self, folder: Path) -> None:
        self.cursor = SpoolCursor(folder)
        self.held: FilePlace | None = None
        """Behind what the join holds; None: it has not said yet."""
        self.turn = 0
        """As of `SpoolChunk`."""
        self.acked = (0, 0)
        """(file index, offset) behind what the join has committed."""
        self.num_away = 0
        """Frames behind `acked` whose rows the join has not got."""
        self.is_passed_on = True
        """As of `SpoolHeld`."""
        self.refused = ""
        """Why the join takes nothing of it; empty: it does."""
        self.kept_since: float | None = None
        """Since when nothing was published for want of digests; None: something was, or nothing is wanting."""
        self.data_end = FilePlace()
        """Behind the newest of what was published that is not heartbeats."""
        self._said: SpoolHead | None = None
        """What was last said of it."""
        self._sent = FilePlace()
        """Behind what was published by the beat before, said or not."""
        self._moved = 0.0
        """When `held` changed, or all was sent anew."""
        self._witness_bytes = -1
        self._waiting: list[tuple[float, FilePlace]] = []
        """(when, end of the spool then) of what the join does not hold, the oldest first."""

    @property
    def mtime(self) -> float:
        """When anything in its folder was made or deleted last, seconds since the epoch; 0: not known."""
        try:
            return self.cursor.folder.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def written_at(self) -> float:
        """When its newest file was written last, seconds since the epoch; 0: not known."""
        try:
            return (self.cursor.folder / self.cursor.head()[1].file).stat().st_mtime
        except OSError:
            return 0.0

    def head(self, now: float) -> SpoolHead:
        """Return what is to be said of it."""
        first, head, waiting = SpoolCursor(self.cursor.folder, self.held or FilePlace()).head()
        waiting_s = self._waiting_s(head, now)
        if self._is_beaten(head):
            # A rank writes one a second: of one that does nothing else there would always be more than the join has.
            head = self.cursor.place
        witness = _witness(self.cursor.folder)
        return SpoolHead(
            first=first, head=head, sent=self.cursor.place, waiting_bytes=waiting,
            waiting_s=waiting_s,
            acked=read_ack(self.cursor.folder), pulse_ns=read_pulse(self.cursor.folder),
            witness=b"" if len(witness) == self._witness_bytes else witness,
        )  # fmt: skip

    def _waiting_s(self, head: FilePlace, now: float) -> float:
        """Return for how long the oldest byte has waited that the join does not hold. head: the end of the spool."""
        held, waiting = _order(self.held or FilePlace()), self._waiting
        if not waiting or waiting[-1][1] != head:
            waiting.append((now, head))
        while waiting and _order(waiting[0][1]) <= held:
            del waiting[0]
        if len(waiting) > MAX_WAITING:
            # Of what came later it is known a little less well since when.
            del waiting[1]
        return now - waiting[0][0] if waiting else 0.0

    def is_quiet(self, head: SpoolHead) -> bool:
        """Return whether nothing but heartbeats came of it since something was said of it. head: its own, as of now."""
        said = self._said
        return (
            said is not None
            and self.held is not None
            and not self.refused
            and head.head == head.sent
            and not head.witness
            and (head.first, head.acked) == (said.first, said.acked)
            # Of a process that writes nothing more the pulse tells when it ended.
            and (head.sent != self._sent or head.pulse_ns == said.pulse_ns)
            and _order(self.data_end) <= _order(self.held)
        )

    def note_beat(self, head: SpoolHead, *, is_said: bool) -> None:
        """Take note of a beat that says this of it, or nothing."""
        self._said, self._sent = head if is_said else self._said, head.sent

    def _is_beaten(self, head: FilePlace) -> bool:
        """Return whether heartbeats, and nothing else, lie between what was published and the end of the spool."""
        sent = self.cursor.place
        if head.file != sent.file or not 0 < head.offset - sent.offset <= MAX_BEATEN_BYTES:
            return False
        found = read_window(self.cursor.folder / sent.file, sent.offset, head.offset - sent.offset)
        return found is not None and are_heartbeats(found[0])

    def take(self, said: SpoolHeld, now: float, *, is_new_join: bool, is_drained: bool) -> bool:
        """Go by what the join holds; return whether something that was published is lost, and goes again."""
        self.refused = ""
        self._witness_bytes = said.witness_bytes
        is_lost = False
        if self.held is None or is_new_join:
            self._go_back(said.held, now)
        elif self.held != said.held or self.cursor.place == said.held:
            self._moved = now
        elif now - self._moved > RESEND_S and ((is_drained and not said.is_waiting) or said.gap == self.turn):
            self._go_back(said.held, now)
            is_lost = True
        self.held = said.held
        self.num_away, self.is_passed_on = said.num_away, said.is_passed_on
        return is_lost

    def _go_back(self, held: FilePlace, now: float) -> None:
        self.cursor.seek(held)
        self._moved = now
        self.turn += 1

    def take_back(self, chunk: SpoolChunk) -> None:
        """Have a chunk that could not be published read again, and all behind it."""
        place = chunk.after if chunk.size or chunk.offset == 0 else FilePlace(chunk.file, chunk.offset)
        now = self.cursor.place
        if _order(place) <= _order(now):
            self.cursor.seek(place)

    def commit(self, acked: tuple[int, int], *, is_copy: bool) -> str:
        """Write down what the join has committed, for the trainer deletes by it; return why not, empty: it was.

        Never more than this spool has; a copy may yet have less.
        """
        if acked <= self.acked or acked <= read_ack(self.cursor.folder):
            self.acked = max(self.acked, acked)
            return ""
        head = self.cursor.head()[1]
        if not is_copy and acked > _order(head):
            return f"{self.cursor.folder}: the join commits {acked}, and this spool ends at {head}; it is not believed"
        try:
            write_ack(self.cursor.folder, *acked)
            self.acked = acked
        except OSError as error:
            return f"{self.cursor.folder}: cannot be acknowledged: {error.strerror or error}"
        return ""


def _order(place: FilePlace) -> tuple[int, int]:
    return last_index(place.file), place.offset


def _witness(folder: Path) -> bytes:
    try:
        fd = os.open(folder / WITNESS, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, MAX_WITNESS_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)
