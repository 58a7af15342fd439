"""RunCopies: the copies of one run at the join: whose spool is whose, what each node has, and what waits for whom."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from sentinel.errors import WireError
from sentinel.fleet.copied_news import CopiedNews
from sentinel.fleet.copied_pulses import CopiedPulses
from sentinel.fleet.heard_nodes import SILENT_S, UNHEARD_S, HeardNodes
from sentinel.fleet.intake_tally import IntakeTally
from sentinel.fleet.sealed import AbsentNodes, Beat, FilePlace, SpoolChunk, SpoolHead, SpoolHeld
from sentinel.fleet.shipper_sessions import ShipperSessions
from sentinel.fleet.spool_copy import SpoolCopy
from sentinel.fleet.spool_cursor import is_beyond, size_of
from sentinel.fleet.waiting_chunks import WaitingChunks
from sentinel.ingest.arrivals import Unheard
from sentinel.printable import printable
from sentinel.private_files import create_file, make_directory
from sentinel.wire.pulse import NAME as PULSE
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import list_files, list_kept
from sentinel.wire.witness import NAME as WITNESS

WAITING_S = 10.0
"""Where chunks have waited so long for a node, those whose chunks these are were heard, though nothing of them is read."""
WAITED_S = 5.0
"""Where a chunk has waited so long it is said for whom: two beats of nodes that speak every `MAX_PACE_S`, and a second."""
ACKS_A_SECOND = 512
"""Of the files that say what is committed so many are looked at a second: thousands are not looked at with each beat. A node
frees some seconds later what it need not keep."""
OWNER = "node"
"""File in the folder of a copy that names the node from which it comes."""


class RunCopies:
    """Called under the lock of all runs. Moments are monotonic seconds."""

    def __init__(self, run_dir: Path, tally: IntakeTally, *, has_lockstep: bool = True) -> None:
        """run_dir: of the copies; what a former process left there is taken up by `recall`. has_lockstep: ends of steps wait
        for no node while all ranks are in step."""
        self.copies: dict[str, SpoolCopy] = {}
        """Folder of a spool -> its copy."""
        self.heard = HeardNodes()
        self.waiting = WaitingChunks(self.copies, self._is_live, has_lockstep=has_lockstep)
        self.news = CopiedNews()
        """What was written to the copies since it was taken."""
        self._run_dir, self._tally = run_dir, tally
        self._name = printable(run_dir.name)
        self._pulses = CopiedPulses(
            lambda folder, pulse_ns: _put(run_dir / "spool" / folder / PULSE, pulse_ns.to_bytes(8, "little", signed=True))
        )
        self._heads: dict[str, SpoolHead] = {}
        self._witnesses: dict[str, int] = {}
        """Folder of a spool -> bytes of what witnesses saw of it that are here."""
        self._owners: dict[str, str] = {}
        self._numbers: dict[str, tuple[str, int]] = {}
        """Node -> `number` of its newest beat."""
        self._sessions = ShipperSessions()
        self._behind: set[str] = set()
        """Folders of spools that hold more than their copies, or may: their nodes have not spoken yet."""
        self._spoken: set[str] = set()
        """Nodes that have said since the beginning what they hold."""

    def begin(self, now: float) -> None:
        """Give the nodes of what is here as long to report as any that falls silent."""
        self.heard.begin(self._owners.values(), now)
        for folder in self._owners:
            self.waiting.begin(folder, now)

    def recall(self) -> bool:
        """Go on with the copies that an earlier process began; return whether there are any."""
        for path in sorted((self._run_dir / "spool").iterdir()):
            if parse_incarnation_folder(path.name) is None:
                continue
            try:
                owner = json.loads((path / OWNER).read_bytes())
            except (OSError, ValueError):
                continue
            if isinstance(owner, str):
                try:
                    self.copies[path.name] = SpoolCopy(path)
                except OSError as error:
                    why = f"{path}: the copy cannot be read: {error.strerror or error}; that spool is not judged"
                    self._tally.say(f"{self._name}/{path.name}/recall", why)
                    continue
                self._owners[path.name] = owner
                self._behind.add(path.name)
        return bool(self._owners)

    # Whose is whose.

    def owner(self, folder: str) -> str:
        """Return the node that a spool comes from; empty: none."""
        return self._owners.get(folder, "")

    def claim(self, folder: str, node: str) -> str:
        """Return why a spool is not taken from a node; empty: it is its own from now on, if it was nobody's."""
        owner = self._owners.get(folder)
        if owner == node:
            return ""
        if parse_incarnation_folder(folder) is None:
            why = f"run {self._name}: node {node}: expected the folder of a spool, got {printable(folder[:64])!r}"
            self._tally.say(f"{self._name}/{folder}", why)
            return why
        if owner is None:
            return self._begin(folder, node)
        why = f"run {self._name}: spool {folder} is node {owner}'s, and node {node} sends it too: that is refused"
        self._tally.say(f"{self._name}/{folder}/{node}", why)
        return why

    def _begin(self, folder: str, node: str) -> str:
        path = self._run_dir / "spool" / folder
        try:
            if list_files(path) or list_kept(path):
                why = f"run {self._name}: spool {folder} of node {node}: this directory has one that came from no node"
                self._tally.say(f"{self._name}/{folder}/{node}", why)
                return why
            make_directory(path)
            # Whose it is must be known before anything is in it: one that is nobody's is taken from no node.
            _write(path / OWNER, json.dumps(node).encode())
        except OSError as error:
            self._tally.note_disk(f"{path}: {error.strerror or error}")
            return self._tally.disk_problem
        self._owners[folder], self.copies[folder] = node, SpoolCopy(path)
        self.waiting.begin(folder, self.heard.newest_beat)
        self._compare_heads(folder)
        return ""

    # What a node says.

    def is_repeated(self, beat: Beat) -> bool:
        """Return whether a beat came before, or a later one did."""
        newest = self._numbers.get(beat.node, ("", 0))
        return beat.number[0] == newest[0] and beat.node in self._numbers and beat.number <= newest

    def take_beat(self, beat: Beat, join: str, now: float) -> dict[str, SpoolHeld]:
        """Take in what a node has; return what is here of each of its spools. join: this process."""
        node = beat.node
        if beat.number[0]:
            self._numbers[node] = beat.number
            # One that ends may do so beside the one that follows it.
            if not beat.is_ending and not beat.is_leaving and self._sessions.is_shared(node, beat.number[0], now):
                self._tally.counts["shared_names"] += 1
                why = f"several shippers speak as node {node}, in turn: are there two machines with this name?"
                why = f"run {self._name}: {why} give each its own --node; what they send is taken, of all of them"
                self._tally.say(f"{self._name}/{node}/sessions", why)
        if not self.heard.is_live(node, now):
            self.waiting.doubt(now)
        self.heard.take(beat, join, now)
        if node not in self._spoken and not beat.num_quiet:
            self._spoken.add(node)
            self._behind -= {one for one, owner in self._owners.items() if owner == node and one not in self._heads}
        # One that ends waits for what is committed.
        look_s = 0.0 if beat.is_ending else len(self.copies) / ACKS_A_SECOND
        return {folder: self._compared(folder, head, node, now, look_s) for folder, head in beat.spools.items()}

    def _compared(self, folder: str, head: SpoolHead, node: str, now: float, look_s: float) -> SpoolHeld:
        if refused := self.claim(folder, node):
            return SpoolHeld(FilePlace(), refused=refused)
        copy = self.copies[folder]
        former = self._heads.get(folder)
        if former is None or not is_beyond(former.head, head.head):
            # A beat that was on its way for longer than the next one knows less.
            self._heads[folder] = head
            self._compare_heads(folder)
        acked = copy.committed(now, look_s)
        copy.prune(head.first, acked)
        self._pulses.take(node, folder, head.pulse_ns, now, has_moved=former is None or head.head != former.head)
        if head.witness:
            _put(copy.folder / WITNESS, head.witness)
            self._witnesses.pop(folder, None)
        if folder not in self._witnesses:
            self._witnesses[folder] = size_of(copy.folder / WITNESS)
        return SpoolHeld(
            copy.place, acked, self._witnesses[folder], num_away=copy.num_away(acked), gap=copy.gap,
            is_waiting=bool(self.waiting.of(folder)),
        )  # fmt: skip

    def absent(self, now: float, of_any: Mapping[str, float]) -> AbsentNodes:
        """As `HeardNodes.absent`."""
        return self.heard.absent(now, of_any, self.waits_for(now) if self.waiting.waited_s(now) >= WAITED_S else ())

    # What waits for whom.

    def on_the_way(self, now: float) -> frozenset[str]:
        """Return the folders of spools of which more is known to exist than is here, or more waits here for long."""
        behind = {one for one in self._behind if now - self.heard.at.get(self._owners[one], -SILENT_S) < SILENT_S}
        if self.waiting.waited_s(now) >= WAITING_S:
            behind.update(self.waiting.folders())
        return frozenset(behind)

    def unheard(self, now: float) -> dict[str, Unheard]:
        """Return the folders of spools of whose nodes nothing was heard for `UNHEARD_S`."""
        silent = {node: now - heard for node, heard in self.heard.at.items() if now - heard >= UNHEARD_S}
        if not silent:
            return {}
        return {folder: Unheard(node, silent[node]) for folder, node in self._owners.items() if node in silent}

    def _compare_heads(self, folder: str) -> None:
        head = self._heads.get(folder)
        if self._owners[folder] not in self._spoken if head is None else self._is_behind(folder, head.head):
            self._behind.add(folder)
        else:
            self._behind.discard(folder)

    def _is_behind(self, folder: str, head: FilePlace) -> bool:
        """Return whether a spool that ends at `head` holds more than its copy, heartbeats that wait here apart."""
        place = self.copies[folder].place
        if (head.file == place.file and head.offset <= place.offset) or not is_beyond(head, place):
            return False
        # A rank beats once a second: if its heartbeats were waited for it would be behind for good, and hang unseen.
        for one in self.waiting.of(folder):
            if not one.is_beats or one.begin != place:
                return True
            place = one.end
            if not is_beyond(head, place):
                return False
        return True

    def hold(self, chunk: SpoolChunk, now: float) -> None:
        """Keep a chunk of a spool that was claimed, until `release`."""
        self.waiting.hold(chunk, now)
        if chunk.folder in self._behind:
            # What waits behind what waited makes nobody behind who was not.
            self._compare_heads(chunk.folder)

    def waits_for(self, now: float) -> list[str]:
        """Return the nodes that the oldest chunk waits for."""
        oldest = self.waiting.oldest
        return self.heard.not_seen(oldest.came, now) if oldest is not None else []

    def release(self, now: float, may_act: Callable[[], bool]) -> int:
        """Write what no node may be behind of; return the bytes that are new. may_act: asked before each chunk."""
        self._pulses.write_silent(self.heard.at, now)
        until, num_new = self.heard.seen_until(now) if self.waiting.oldest is not None else now, 0
        for chunk in self.waiting.due(until, now, may_act):
            wrote = self._write(chunk)
            if not wrote or chunk.folder in self._behind:
                # What is written was no reason to be behind, and what was is nearer.
                self._compare_heads(chunk.folder)
            num_new += wrote
        return num_new

    def drop_newest(self, now: float) -> None:
        """Forget the chunk that came last: its node sends it again."""
        self._compare_heads(self.waiting.drop_newest(now).folder)
        self._tally.counts["dropped"] += 1

    def _is_live(self, folder: str, now: float) -> bool:
        return self.heard.is_live(self._owners[folder], now)

    def _write(self, chunk: SpoolChunk) -> int:
        copy, counts = self.copies[chunk.folder], self._tally.counts
        repeated, dropped = copy.num_repeated, copy.num_dropped
        try:
            num_new = copy.take(chunk)
        except OSError as error:
            # It is not held, and so comes again.
            self._tally.note_disk(f"{copy.folder}: {error.strerror or error}")
            return 0
        except WireError as error:
            self._tally.say(f"{chunk.run}/{chunk.folder}/{type(error).__name__}", f"run {self._name}: {error}")
            return 0
        if num_new:
            self._tally.note_disk("")
            self.news.add(chunk.folder, copy.take_arrived())
        counts["bytes"] += num_new
        counts["repeated"] += copy.num_repeated - repeated
        counts["dropped"] += copy.num_dropped - dropped
        return num_new


def _put(path: Path, data: bytes) -> None:
    """Write a small file whole, 0600; where the disk takes it not, the former one stays."""
    with contextlib.suppress(OSError):
        _write(path, data)


def _write(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.new")
    with os.fdopen(create_file(draft, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "wb") as file:
        file.write(data)
    draft.replace(path)
