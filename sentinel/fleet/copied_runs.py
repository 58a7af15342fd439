"""CopiedRuns: the copies of all runs at the join, and what each node is answered.

What the daemon reads must not run ahead of a node that is slow: a step would close without its ranks. So chunks are held
until every node of the run has spoken since: each beat echoes the newest answer, and so says what that node's spools held
when everything before that answer had come here. Of a spool that holds more than its copy the follower is told that it is
behind. A node that was silent for `SILENT_S` is waited for no more: its ranks are late, or gone, as the daemon decides.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sentinel.control.command_files import COMMAND_FILE
from sentinel.errors import WireError
from sentinel.fleet.copies_health import health_of
from sentinel.fleet.fetched_rows import FetchedRows
from sentinel.fleet.heard_nodes import FORGOTTEN_S
from sentinel.fleet.intake_tally import IntakeTally
from sentinel.fleet.rows_of_runs import RowsOfRuns
from sentinel.fleet.run_copies import RunCopies
from sentinel.fleet.sealed import MAX_COMMANDS, PLAIN_VERSION, Answer, Beat, DigestPiece, Published, RowsPiece, SpoolChunk
from sentinel.fleet.worker_epochs import WorkerEpochs
from sentinel.ingest.arrivals import Arrivals
from sentinel.join_health import JoinHealth
from sentinel.printable import printable
from sentinel.run_name import PARTS_OF_A_RUN

BEGIN_S = 2.0
"""Seconds after the join begins in which nodes may report before anything is taken to be all there is."""
MAX_HELD_BYTES = 64 * 2**20
"""Most bytes of chunks that are held; past it nothing more is taken from the stream."""
STUCK_S = 3.0
"""A run of which chunks have waited so long waits for a node: the others' are held for two beats, half a second."""
MAX_ANSWERED_BYTES = 256 * 2**10
"""Most bytes of commands in one answer; the others come with the next."""
MAX_NAME_BYTES = 200
"""Most bytes of the name of a run or a node."""
IDLE_NODES_A_SECOND = 512
"""Of nodes that have nothing but heartbeats so many are to speak a second: these, and what is said beside them, are half of
what a join of many nodes has to do."""


class CopiedRuns:
    """For the thread of the join; `arrivals`, `release`, `nodes` and `health` also for others."""

    def __init__(
        self,
        directory: Path,
        join: str,
        *,
        begin_s: float = BEGIN_S,
        clock: Callable[[], float] = time.monotonic,
        on_problem: Callable[[str], None] = lambda problem: None,
        wait: Callable[[float], None] = time.sleep,
        has_lockstep: bool = True,
    ) -> None:
        """directory: of the runs. join: name of this process. begin_s: as `BEGIN_S`. has_lockstep: as of `RunCopies`.

        on_problem: told of each thing that is refused, once. wait: as of `FetchedRows`."""
        self.directory, self.join = directory, join
        self.tally = IntakeTally(clock, on_problem)
        self.counts = self.tally.counts
        self._clock, self._has_lockstep = clock, has_lockstep
        self._epochs = WorkerEpochs(clock)
        self._runs: dict[str, RunCopies] = {}
        self._rows = RowsOfRuns(
            directory, lambda run: self._runs.get(run), is_refused=lambda: bool(self.tally.disk_problem), clock=clock,
            wait=wait,
        )  # fmt: skip
        self._heard: dict[str, float] = {}
        """Node -> when it spoke last, of whatever run."""
        self._begun, self._begin_s = clock(), begin_s
        self._lock = threading.Lock()
        self.recall()

    def recall(self) -> None:
        """Begin, with what lies in the directory and nothing else: another process may have written there until now."""
        found = dict[str, RunCopies]()
        for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
            if _is_name(path.name) and (path / "spool").is_dir():
                run = RunCopies(path, self.tally, has_lockstep=self._has_lockstep)
                if run.recall():
                    found[path.name] = run
        with self._lock:
            # Of a long backlog that took longer than a node may be silent.
            self._begun, self._runs = self._clock(), found
            for run in found.values():
                run.begin(self._begun)
            self._rows.forget_all()

    def has_room(self) -> bool:
        """Return whether anything more may be taken from the stream, which is that of all runs.

        Where all is held of runs that wait for a node, and others have something on the way, the newest of it is dropped.
        """
        with self._lock:
            if self._held_bytes < MAX_HELD_BYTES:
                return True
            now = self._clock()
            stuck = [one for one in self._runs.values() if one.waiting.waited_s(now) >= STUCK_S]
            if not any(one not in stuck and (one.waiting.num_bytes or one.on_the_way(now)) for one in self._runs.values()):
                return False
            while self._held_bytes > MAX_HELD_BYTES // 2 and any(one.waiting.num_bytes for one in stuck):
                max(stuck, key=lambda one: one.waiting.num_bytes).drop_newest(now)
            return self._held_bytes < MAX_HELD_BYTES

    @property
    def _held_bytes(self) -> int:
        return sum(run.waiting.num_bytes for run in self._runs.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be written."""
        with self._lock:
            return self._held_bytes

    def arrivals(self, run: str) -> Arrivals:
        """Return what is known of what comes into a run's copies, for the one who follows them."""
        with self._lock:
            known = self._runs.get(run)
            if known is None:
                return Arrivals()
            now = self._clock()
            return Arrivals(known.on_the_way(now), known.news.take(), known.unheard(now))

    def on_the_way(self, run: str) -> frozenset[str]:
        """Return the folders of a run's spools of which more is known to exist than is here, heartbeats apart."""
        with self._lock:
            known = self._runs.get(run)
            return frozenset() if known is None else known.on_the_way(self._clock())

    # What nodes publish.

    def take(self, published: Published) -> None:
        """Take in what a node published."""
        if isinstance(published, SpoolChunk):
            self.take_chunk(published)
        elif isinstance(published, DigestPiece):
            self.take_digest(published)
        else:
            self.take_rows(published)

    def take_chunk(self, chunk: SpoolChunk) -> None:
        """Take in a chunk, which is written when every node of its run has spoken since."""
        with self._lock:
            self.counts["chunks"] += 1
            run = self._claimed(chunk)
            if run is not None:
                run.hold(chunk, self._clock())

    def take_digest(self, piece: DigestPiece) -> None:
        """Take in a part of a digest."""
        with self._lock:
            self.counts["digest_bytes"] += len(piece.data)
            if self._is_former(piece) or self._run(piece.run, piece.node) is None:
                self.counts["refused"] += 1
                return
            try:
                self._rows.of(piece.run).take_digest(piece)
            except WireError as error:
                self.tally.say(f"{piece.run}/{piece.node}/digest", f"run {printable(piece.run)}: {error}")

    def take_rows(self, piece: RowsPiece) -> None:
        """Take in a part of a frame of rows."""
        with self._lock:
            run = self._claimed(piece)
            if run is None:
                return
            copy = run.copies[piece.folder]
            is_whole = not piece.tensors
            if is_whole and piece.num_bytes and copy.away.get((piece.file_index, piece.offset)) != piece.num_bytes:
                self.counts["repeated"] += 1
                return
            try:
                self.counts["rows_bytes"] += self._rows.of(piece.run).take_rows(piece, copy.fill)
            except OSError as error:
                # They are asked for until they can be written.
                self.tally.note_disk(f"{copy.folder}: {error.strerror or error}")
            except WireError as error:
                self.tally.say(f"{piece.run}/{piece.folder}/rows", f"run {printable(piece.run)}: {error}")

    def take_beat(self, beat: Beat, *, is_drained: bool) -> Answer | None:
        """Take in what a node says, and return the answer; None: there is none to a run of such a name, nor to what came
        before. To a worker that lost the node's partition it says by which epoch, and no more."""
        with self._lock:
            if self._is_former(beat):
                self.counts["refused"] += 1
                return Answer(
                    version=PLAIN_VERSION, join=self.join, stamp=0, node=beat.node, run=beat.run, spools={}, to=beat.number,
                    epoch=self._epochs.newest(beat.node),
                )  # fmt: skip
            run = self._run(beat.run, beat.node)
            if run is None:
                self.counts["refused"] += 1
                return None
            if run.is_repeated(beat):
                return None
            if beat.is_leaving:
                self._epochs.forget(beat.node)
            rows, now = self._rows.of(beat.run), self._clock()
            self._heard[beat.node] = now
            spools = run.take_beat(beat, self.join, now)
            return Answer(
                version=PLAIN_VERSION, join=self.join, stamp=int(self._clock() * 1e9), node=beat.node, run=beat.run,
                spools=spools, commands=_unknown_commands(self.directory / beat.run / "control", set(beat.commands)),
                is_drained=is_drained, wanted=rows.wanted(beat.node),
                num_steps=(rows.num_steps, rows.num_fetched), to=beat.number, epoch=self._epochs.newest(beat.node),
                pace_s=sum(len(one.heard.at) for one in self._runs.values()) / IDLE_NODES_A_SECOND,
                absent=run.absent(now, self._heard),
            )  # fmt: skip

    def begin_committed(self, run: str, folder: str) -> None:
        """As `SpoolCopy.begin`, of a spool that was claimed."""
        with self._lock:
            self._runs[run].copies[folder].begin()

    def release(self, may_act: Callable[[], bool] = lambda: True) -> int:
        """Write what no node may be behind of; return the bytes that are new.

        may_act: asked before each chunk: another process may have these copies from one moment to the next.
        """
        with self._lock:
            now = self._clock()
            if now - self._begun < self._begin_s:
                return 0
            self._forget_ended(now)
            return sum(run.release(now, may_act) for run in self._runs.values())

    def _forget_ended(self, now: float) -> None:
        """Let go of the digests of runs of which no node has spoken for an hour: of many runs they would fill the memory."""
        for name, run in self._runs.items():
            if now - run.heard.newest_beat >= FORGOTTEN_S:
                self._rows.forget(name)

    def refuse(self, what: str, why: str) -> None:
        """As `IntakeTally.refuse`, for any thread."""
        with self._lock:
            self.tally.refuse(what, why)

    # The rows that nodes keep.

    def rows_of(self, run: str) -> FetchedRows:
        """Return where the digests of a run are, and the rows that its copies have not got."""
        with self._lock:
            return self._rows.of(run)

    def end(self, why: str) -> None:
        """Have nobody wait for rows any more. why: in words."""
        with self._lock:
            self._rows.end(why)

    # How it is.

    def nodes(self) -> dict[str, dict[str, float]]:
        """Return run -> node -> seconds since it was heard."""
        with self._lock:
            now = self._clock()
            return {name: {node: now - at for node, at in run.heard.at.items()} for name, run in self._runs.items()}

    def health(self) -> JoinHealth:
        """Return what is known of nodes, of what is held, and of what went wrong."""
        with self._lock:
            counts = self._rows.counts()
            return health_of(self._runs, self.tally, counts, self._clock(), max_held_bytes=MAX_HELD_BYTES)

    def _run(self, name: str, node: str) -> RunCopies | None:
        """Return a run, which begins with this where it is new; None: it may not be called so."""
        if not (_is_name(name) and _is_name(node)):
            why = f"node {printable(node[:64])!r}: expected the name of a run, got {printable(name[:64])!r}"
            self.tally.say(f"{node}/{name}", why)
            return None
        if name not in self._runs:
            self._runs[name] = RunCopies(self.directory / name, self.tally, has_lockstep=self._has_lockstep)
            self._runs[name].begin(self._clock())
        return self._runs[name]

    def _claimed(self, one: SpoolChunk | RowsPiece) -> RunCopies | None:
        """Return the run to whose spool this belongs; None: it is not taken from this node, and counted."""
        run = None if self._is_former(one) else self._run(one.run, one.node)
        if run is not None and not run.claim(one.folder, one.node):
            return run
        self.counts["refused"] += 1
        return None

    def _is_former(self, said: Published | Beat) -> bool:
        """Return whether a worker says this that lost the node's partition to another, which has spoken."""
        if not self._epochs.is_former(said.node, said.epoch):
            return False
        newest = self._epochs.newest(said.node)
        who = f"a worker of epoch {said.epoch}" if said.epoch else "itself, or who takes its name,"
        why = f"node {printable(said.node[:64])}: {who} speaks of it, and a worker of epoch {newest} has it: that is refused"
        self.tally.say(f"{said.node[:64]}/epoch/{said.epoch}", why)
        return True


def _unknown_commands(folder: Path, known: set[str]) -> dict[str, bytes]:
    """Return the commands of a run that a node does not name: the oldest first, up to a bound."""
    found, num_bytes = dict[str, bytes](), 0
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


def _is_name(name: str) -> bool:
    """Return whether a run or a node may be called so: visible, no path, short enough for a folder, and no part of a run."""
    # What is long is not remembered: names of strangers would fill the memory.
    return 0 < len(name) <= MAX_NAME_BYTES and _is_folder(name)


@functools.lru_cache(maxsize=8192)
def _is_folder(name: str) -> bool:
    is_path = "/" in name or name.startswith(".")
    return name.isprintable() and not is_path and len(name.encode()) <= MAX_NAME_BYTES and name not in PARTS_OF_A_RUN
