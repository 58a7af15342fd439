"""CopiedRuns: the copies of all runs at the join: whose spool is whose, what waits for whom, what each node is answered.

What the daemon reads must not run ahead of a node that is slow: a step would close without its ranks. So chunks are held
until every node of the run has spoken since: each beat echoes the newest answer, and so says what that node's spools held
when everything before that answer had come here. Of a spool that holds more than its copy the follower is told that it is
behind. A node that was silent for `SILENT_S` is waited for no more: its ranks are late, or gone, as the daemon decides.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from sentinel.control.command_files import COMMAND_FILE
from sentinel.errors import WireError
from sentinel.fleet.fetched_rows import FetchedRows
from sentinel.fleet.sealed import (
    MAX_COMMANDS,
    PLAIN_VERSION,
    Answer,
    Beat,
    DigestPiece,
    FilePlace,
    RowsPiece,
    SpoolChunk,
    SpoolHead,
    SpoolHeld,
)
from sentinel.fleet.spool_copy import SpoolCopy
from sentinel.fleet.spool_cursor import last_index
from sentinel.join_health import JoinHealth, NodeHealth
from sentinel.printable import printable
from sentinel.private_files import create_file, make_directory
from sentinel.wire.pulse import NAME as PULSE
from sentinel.wire.spool import parse_incarnation_folder, read_ack
from sentinel.wire.witness import NAME as WITNESS

SILENT_S = 30.0
"""A node that said nothing for so long is waited for no more."""
BEGIN_S = 2.0
"""Seconds after the join begins in which nodes may report before anything is taken to be all there is."""
MAX_HELD_BYTES = 64 * 2**20
"""Most bytes of chunks that are held; past it nothing more is taken from the stream."""
MAX_ANSWERED_BYTES = 256 * 2**10
"""Most bytes of commands in one answer; the others come with the next."""
FORGOTTEN_S = 3600.0
"""A node that said nothing for so long is spoken of no more: what its ranks are is said of the run."""
REFUSED_S = 300.0
"""What was refused within so long is a problem."""
MAX_REFUSED_SAID = 8
OWNER = "node"
"""File in the folder of a copy that names the node from which it comes."""


class _Run:
    def __init__(self) -> None:
        self.copies: dict[str, SpoolCopy] = {}
        self.heads: dict[str, SpoolHead] = {}
        self.owners: dict[str, str] = {}
        self.heard: dict[str, float] = {}
        """Node -> when its newest beat came, monotonic seconds."""
        self.seen_until: dict[str, float] = {}
        """Node -> the moment of this clock as of which its heads are known."""
        self.spoke: dict[str, tuple[float, int, float]] = {}
        """Node -> (when its newest beat came, bytes that wait there, seconds for which they have)."""
        self.held: deque[tuple[float, SpoolChunk]] = deque()
        self.numbers: dict[str, tuple[str, int]] = {}
        """Node -> `number` of its newest beat."""
        self.spoken: set[str] = set()
        """Nodes that have said since the beginning what they hold."""

    def is_behind(self, folder: str, copy: SpoolCopy) -> bool:
        """Return whether a spool holds more than its copy, or may: its node has not spoken yet."""
        head = self.heads.get(folder)
        if head is None:
            return self.owners[folder] not in self.spoken
        return _is_beyond(head.head, copy.place)


class CopiedRuns:
    """For the thread of the join; `on_the_way` and `release` also for others."""

    def __init__(
        self,
        directory: Path,
        join: str,
        *,
        begin_s: float = BEGIN_S,
        clock: Callable[[], float] = time.monotonic,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """directory: of the runs. join: name of this process. begin_s: as `BEGIN_S`.

        on_problem: told of each thing that is refused, once."""
        self.directory, self.join = directory, join
        self.counts: Counter[str] = Counter()
        """chunks, bytes, repeated, dropped, refused: since the beginning."""
        self.refused: dict[str, str] = {}
        """What is refused -> why."""
        self.disk_problem = ""
        """Why the newest bytes could not be written; empty: they were."""
        self._refused_at: dict[str, float] = {}
        self._clock, self._on_problem = clock, on_problem
        self._runs: dict[str, _Run] = {}
        self._rows: dict[str, FetchedRows] = {}
        self._begun, self._begin_s = clock(), begin_s
        self._held_bytes = 0
        self._lock = threading.Lock()
        self.recall()

    def recall(self) -> None:
        """Begin, with what lies in the directory and nothing else: another process may have written there until now."""
        with self._lock:
            self._begun, self._held_bytes = self._clock(), 0
            self._runs.clear()
            for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
                if _is_name(path.name) and (path / "spool").is_dir():
                    self._recall(path)

    @property
    def is_full(self) -> bool:
        """Whether so much is held that nothing more may be taken."""
        return self._held_bytes >= MAX_HELD_BYTES

    def on_the_way(self, run: str) -> frozenset[str]:
        """Return the folders of a run's spools of which more is known to exist than is here."""
        with self._lock:
            known = self._runs.get(run)
            if known is None:
                return frozenset()
            now = self._clock()
            return frozenset(
                folder
                for folder, copy in known.copies.items()
                if now - known.heard.get(known.owners[folder], -SILENT_S) < SILENT_S and known.is_behind(folder, copy)
            )

    def take_chunk(self, chunk: SpoolChunk) -> None:
        """Take in a chunk, which is written when every node of its run has spoken since."""
        with self._lock:
            self.counts["chunks"] += 1
            if self._claim(chunk.run, chunk.folder, chunk.node):
                self.counts["refused"] += 1
                return
            self._runs[chunk.run].held.append((self._clock(), chunk))
            self._held_bytes += len(chunk.data)

    def rows_of(self, run: str) -> FetchedRows:
        """Return where the digests of a run are, and the rows that its copies have not got."""
        with self._lock:
            return self._rows_of(run)

    def take_digest(self, piece: DigestPiece) -> None:
        """Take in a part of a digest."""
        with self._lock:
            self.counts["digest_bytes"] += len(piece.data)
            if not self._is_run(piece.run, piece.node):
                self.counts["refused"] += 1
                return
            try:
                self._rows_of(piece.run).take_digest(piece)
            except WireError as error:
                self._refuse(f"{piece.run}/{piece.node}/digest", f"run {printable(piece.run)}: {error}")

    def take_rows(self, piece: RowsPiece) -> None:
        """Take in a part of a frame of rows."""
        with self._lock:
            if self._claim(piece.run, piece.folder, piece.node):
                self.counts["refused"] += 1
                return
            copy = self._runs[piece.run].copies[piece.folder]
            if piece.num_bytes and copy.away.get((piece.file_index, piece.offset)) != piece.num_bytes:
                self.counts["repeated"] += 1
                return
            try:
                self.counts["rows_bytes"] += self._rows_of(piece.run).take_rows(piece, copy.fill)
            except (OSError, WireError) as error:
                what = f"{piece.run}/{piece.folder}/rows/{type(error).__name__}"
                self._refuse(what, f"run {printable(piece.run)}: {error}")

    def end(self, why: str) -> None:
        """Have nobody wait for rows any more. why: in words."""
        with self._lock:
            for rows in self._rows.values():
                rows.why_ended = why

    def take_beat(self, beat: Beat, *, is_drained: bool) -> Answer | None:
        """Take in what a node says, and return the answer; None: there is none to a run of such a name."""
        with self._lock:
            if not self._is_run(beat.run, beat.node):
                self.counts["refused"] += 1
                return None
            run = self._runs.setdefault(beat.run, _Run())
            now = self._clock()
            if beat.number[0] == run.numbers.get(beat.node, ("", 0))[0] and beat.number <= run.numbers[beat.node]:
                return None  # it came before
            if beat.number[0]:
                run.numbers[beat.node] = beat.number
            run.heard[beat.node] = now
            run.spoken.add(beat.node)
            run.spoke[beat.node] = (
                now,
                sum(one.waiting_bytes for one in beat.spools.values()),
                max((one.waiting_s for one in beat.spools.values()), default=0.0),
            )
            if beat.echo[0] == self.join:
                run.seen_until[beat.node] = max(run.seen_until.get(beat.node, 0.0), beat.echo[1] / 1e9)
            if beat.is_leaving:
                run.heard.pop(beat.node, None)
                run.spoke.pop(beat.node, None)
            rows = self._rows_of(beat.run)
            spools = {folder: self._answered(run, beat, folder, head) for folder, head in beat.spools.items()}
            return Answer(
                version=PLAIN_VERSION, join=self.join, stamp=int(self._clock() * 1e9), node=beat.node, run=beat.run,
                spools=spools, commands=self._commands(beat.run, set(beat.commands)),
                is_drained=is_drained and not run.held, wanted=rows.wanted(beat.node),
                num_steps=(rows.num_steps, rows.num_fetched), to=beat.number,
            )  # fmt: skip

    def release(self) -> int:
        """Write what no node may be behind of; return the bytes that are new."""
        with self._lock:
            now = self._clock()
            return sum(self._release(name, run, now) for name, run in self._runs.items())

    def refuse(self, what: str, why: str) -> None:
        """Count what cannot be taken in, and say once why. what: of which there may be more; why: in words."""
        with self._lock:
            self.counts["refused"] += 1
            self._refuse(what, why)

    def nodes(self) -> dict[str, dict[str, float]]:
        """Return run -> node -> seconds since it was heard."""
        with self._lock:
            now = self._clock()
            return {name: {node: now - at for node, at in run.heard.items()} for name, run in self._runs.items()}

    def health(self) -> JoinHealth:
        """Return what is known of nodes, of what is held, and of what went wrong; for any thread."""
        with self._lock:
            now = self._clock()
            nodes = dict[str, NodeHealth]()
            for run in self._runs.values():
                for node, (at, lag_bytes, lag_s) in run.spoke.items():
                    if now - at >= FORGOTTEN_S:
                        continue
                    other = nodes.get(node)
                    nodes[node] = NodeHealth(
                        node=node,
                        silent_s=now - at if other is None else min(now - at, other.silent_s),
                        lag_bytes=lag_bytes + (0 if other is None else other.lag_bytes),
                        lag_s=max(lag_s, 0.0 if other is None else other.lag_s),
                    )
            silent = sorted(one.node for one in nodes.values() if one.silent_s >= SILENT_S)
            problems = [f"the copies cannot be written: {self.disk_problem}"] if self.disk_problem else []
            if silent:
                more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
                names = ", ".join(map(printable, silent[:8])) + more
                problems.append(f"nodes that said nothing for {SILENT_S:g} s or longer, and are waited for no more: {names}")
            if self.is_full:
                problems.append(f"{self._held_bytes >> 20} MiB are held for nodes that are behind: nothing more is taken")
            recent = [self.refused[what] for what, at in self._refused_at.items() if now - at < REFUSED_S]
            problems += recent[:MAX_REFUSED_SAID]
            if len(recent) > MAX_REFUSED_SAID:
                problems.append(f"and {len(recent) - MAX_REFUSED_SAID} further refusals")
            rows = list(self._rows.values())
            counts = {
                **self.counts,
                "digested_steps": sum(one.num_steps for one in rows),
                "fetched_steps": sum(one.num_fetched for one in rows),
                "gone_frames": sum(one.num_gone for one in rows),
            }
            return JoinHealth(
                nodes=tuple(nodes.values()), num_silent=len(silent), held_bytes=self._held_bytes,
                are_copies_refused=bool(self.disk_problem), counts=counts, problems=tuple(problems),
            )  # fmt: skip

    def _release(self, name: str, run: _Run, now: float) -> int:
        if now - self._begun < self._begin_s and run.held:
            return 0
        live = [node for node, heard in run.heard.items() if now - heard < SILENT_S]
        until = min((run.seen_until.get(node, 0.0) for node in live), default=now)
        num_new = 0
        while run.held and run.held[0][0] <= until:
            _, chunk = run.held.popleft()
            self._held_bytes -= len(chunk.data)
            num_new += self._write(run, chunk)
        return num_new

    def _write(self, run: _Run, chunk: SpoolChunk) -> int:
        copy = run.copies[chunk.folder]
        repeated, dropped = copy.num_repeated, copy.num_dropped
        try:
            num_new = copy.take(chunk)
        except OSError as error:
            # It is not held, and so comes again.
            self._note_disk(f"{copy.folder}: {error.strerror or error}")
            return 0
        except WireError as error:
            self._refuse(f"{chunk.run}/{chunk.folder}/{type(error).__name__}", f"run {printable(chunk.run)}: {error}")
            return 0
        if num_new:
            self._note_disk("")
        self.counts["bytes"] += num_new
        self.counts["repeated"] += copy.num_repeated - repeated
        self.counts["dropped"] += copy.num_dropped - dropped
        return num_new

    def _answered(self, run: _Run, beat: Beat, folder: str, head: SpoolHead) -> SpoolHeld:
        refused = self._claim(beat.run, folder, beat.node)
        if refused:
            return SpoolHeld(FilePlace(), refused=refused)
        copy = run.copies[folder]
        former = run.heads.get(folder)
        if former is None or not _is_beyond(former.head, head.head):
            # A beat that was on its way for longer than the next one knows less.
            run.heads[folder] = head
        copy.prune(head.first)
        if head.pulse_ns > 0:
            _put(copy.folder / PULSE, head.pulse_ns.to_bytes(8, "little", signed=True))
        if head.witness:
            _put(copy.folder / WITNESS, head.witness)
        try:
            witness_bytes = (copy.folder / WITNESS).lstat().st_size
        except OSError:
            witness_bytes = 0
        return SpoolHeld(copy.place, read_ack(copy.folder), witness_bytes, num_away=copy.num_away())

    def _commands(self, run: str, known: set[str]) -> dict[str, bytes]:
        """Return the commands of a run that a node does not name: the oldest first, up to a bound."""
        folder, found, num_bytes = self.directory / run / "control", dict[str, bytes](), 0
        try:
            names = sorted(name for name in os.listdir(folder) if COMMAND_FILE.fullmatch(name))  # noqa: PTH208
        except OSError:
            return {}
        # A node with many commands names its newest alone: those before them are there.
        oldest = min(known) if len(known) >= MAX_COMMANDS else ""
        for name in names:
            if name in known or name < oldest:
                continue
            try:
                data = (folder / name).read_bytes()
            except OSError:
                continue
            num_bytes += len(data)
            if num_bytes > MAX_ANSWERED_BYTES:
                break
            found[name] = data
        return found

    def _rows_of(self, run: str) -> FetchedRows:
        found = self._rows.get(run)
        if found is None:
            found = self._rows[run] = FetchedRows(
                self.directory / run, owner=functools.partial(self._owner, run),
                is_heard=functools.partial(self._is_heard, run),
            )  # fmt: skip
        return found

    # For the thread that judges, without the lock: each reads one entry.

    def _owner(self, run: str, folder: str) -> str:
        known = self._runs.get(run)
        return "" if known is None else known.owners.get(folder, "")

    def _is_heard(self, run: str, node: str) -> bool:
        known = self._runs.get(run)
        return known is not None and self._clock() - known.heard.get(node, -math.inf) < SILENT_S

    # Whose is whose.

    def _is_run(self, run: str, node: str) -> bool:
        if _is_name(run) and _is_name(node):
            return True
        self._refuse(
            f"{node}/{run}", f"node {printable(node[:64])!r}: expected the name of a run, got {printable(run[:64])!r}"
        )
        return False

    def _claim(self, run: str, folder: str, node: str) -> str:
        """Return why a spool is not taken from a node; empty: it is its own from now on, if it was nobody's."""
        if not self._is_run(run, node):
            return "its run's name cannot be used"
        if parse_incarnation_folder(folder) is None or len(folder) > 64:
            why = f"run {run}: node {node}: expected the folder of a spool, got {printable(folder[:64])!r}"
            self._refuse(f"{run}/{folder}", why)
            return why
        known = self._runs.setdefault(run, _Run())
        owner = known.owners.get(folder)
        if owner is None:
            path = self.directory / run / "spool" / folder
            try:
                if path.exists():
                    why = f"run {run}: spool {folder} of node {node}: this directory has one that came from no node"
                    self._refuse(f"{run}/{folder}/{node}", why)
                    return why
                make_directory(path)
                _put(path / OWNER, json.dumps(node).encode())
            except OSError as error:
                self._note_disk(f"{path}: {error.strerror or error}")
                return self.disk_problem
            known.owners[folder], known.copies[folder] = node, SpoolCopy(path)
            return ""
        if owner != node:
            why = f"run {run}: spool {folder} is node {owner}'s, and node {node} sends it too: that is refused"
            self._refuse(f"{run}/{folder}/{node}", why)
            return why
        return ""

    def _recall(self, run_dir: Path) -> None:
        """Go on with the copies of a run that an earlier process began."""
        run = _Run()
        for path in sorted((run_dir / "spool").iterdir()):
            if parse_incarnation_folder(path.name) is None:
                continue
            try:
                owner = json.loads((path / OWNER).read_bytes())
            except (OSError, ValueError):
                continue
            if isinstance(owner, str):
                run.owners[path.name], run.copies[path.name] = owner, SpoolCopy(path)
        if run.owners:
            # They have as long to report as any that falls silent.
            run.heard = dict.fromkeys(run.owners.values(), self._begun)
            self._runs[run_dir.name] = run

    def _note_disk(self, problem: str) -> None:
        if problem and problem != self.disk_problem:
            self._on_problem(problem)
        self.disk_problem = problem

    def _refuse(self, what: str, why: str) -> None:
        if what not in self.refused and len(self.refused) < 1000:
            self.refused[what] = why
            self._on_problem(why)
        if what in self.refused:
            self._refused_at[what] = self._clock()


def _is_name(name: str) -> bool:
    """Return whether a run or a node may be called so: visible, no path, and short enough for a folder."""
    return name.isprintable() and "/" not in name and not name.startswith(".") and 0 < len(name.encode()) <= 200


def _is_beyond(head: FilePlace, place: FilePlace) -> bool:
    return (last_index(head.file), head.offset if head.file == place.file else 0) > (
        last_index(place.file),
        place.offset if head.file == place.file else 0,
    )


def _put(path: Path, data: bytes) -> None:
    """Write a small file whole, 0600; where the disk takes it not, the former one stays."""
    draft = path.with_name(f".{path.name}.new")
    with contextlib.suppress(OSError):
        with os.fdopen(create_file(draft, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "wb") as file:
            file.write(data)
        draft.replace(path)
