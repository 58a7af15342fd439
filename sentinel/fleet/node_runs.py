"""NodeRuns: the runs of one machine as its shipper follows them: what is to be published, said, and taken from answers."""

from __future__ import annotations

import functools
import itertools
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from sentinel.control.command_files import COMMAND_FILE, place_command
from sentinel.errors import StoreError
from sentinel.fleet.node_digests import RunDigests
from sentinel.fleet.run_key import UNSIGNED
from sentinel.fleet.sealed import (
    MAX_COMMANDS,
    MAX_MESSAGE_BYTES,
    PLAIN_VERSION,
    ROOM_BYTES,
    THIN_VERSION,
    Answer,
    Beat,
    DigestPiece,
    FilePlace,
    Published,
    RowsPiece,
    SpoolChunk,
    SpoolHead,
    SpoolHeld,
)
from sentinel.fleet.spool_cursor import SpoolCursor, are_heartbeats, frames_of_rows, last_index, size_of, without_payloads
from sentinel.ingest.arrivals import Arrivals
from sentinel.ingest.step_parts import AwayFrame
from sentinel.printable import printable
from sentinel.store.run_paths import runs_in
from sentinel.wire.frame import MAX_FRAME_BYTES
from sentinel.wire.pulse import read_pulse
from sentinel.wire.spool import parse_incarnation_folder, read_ack, write_ack
from sentinel.wire.spool_files import file_name, read_name, read_window
from sentinel.wire.witness import MAX_BYTES as MAX_WITNESS_BYTES
from sentinel.wire.witness import NAME as WITNESS

CHUNK_BYTES = MAX_MESSAGE_BYTES - ROOM_BYTES
THINNED_BYTES = 4 * 2**20
"""Most bytes of a spool that one chunk without rows stands for, and of rows that are read at once."""
MAX_UNSENT_BYTES = 64 * 2**20
"""Most bytes of digests of a run that wait for a broker that did not take them; of others the join asks for the rows."""
RESEND_S = 3.0
"""What was published and is not held is published again after so long, where it is on its way no more: the stream was
drained, or what was published after it has come."""
EXPIRES_S = 30.0
"""An answer to a beat that was sent longer ago is not believed, where answers are signed."""
BEAT_S = 0.25
"""Seconds between what a node says while it publishes anything but heartbeats, and `BUSY_S` behind it."""
ASKED_BEAT_S = 0.05
"""The same while rows are asked for: a join that looks closely at a backlog asks for those of each step, and waits."""
HEARTBEATS_S, MAX_PACE_S = 1.0, 2.0
"""Heartbeats wait for so long for anything else of their run to go with: each of a machine's ranks writes one a second. So
long is also the time between what a node says that has nothing else. A join of many nodes asks for more, up to the second:
a rank of which nothing comes for 5 s may have been stopped, and is not known to hang (`ingest/liveness.py`)."""
ASKED_S = 0.5
"""So long behind an answer that asks for rows the next such is waited for."""
BUSY_S = 1.0
"""So long behind anything but heartbeats a node speaks several times a second."""
SAID_S = 60.0
"""For so long beats say what was not believed."""
MAX_NEXT_BYTES = 8 * 2**20
MAX_SPOOLS = 512
"""Most spools of a run of which one beat speaks: those that wait first, then the newest."""


class _Spool:
    def __init__(self, folder: Path) -> None:
        self.cursor = SpoolCursor(folder)
        self.held: FilePlace | None = None
        """Behind what the join holds; None: it has not said yet."""
        self.moved = 0.0
        """When `held` changed, or all was sent anew, monotonic seconds."""
        self.turn = 0
        """As of `SpoolChunk`."""
        self.acked = (0, 0)
        self.num_away = 0
        """Frames behind `acked` whose rows the join has not got."""
        self.is_passed_on = True
        """As of `SpoolHeld`."""
        self.witness_bytes = -1
        self.refused = ""
        self.waits_since: float | None = None
        self.kept_since: float | None = None
        """Since when nothing was published for want of digests; None: something was, or nothing is wanting."""

    def go_back(self, held: FilePlace, now: float) -> None:
        """Have all sent again that lies behind what the join holds."""
        self.cursor.seek(held)
        self.moved = now
        self.turn += 1


class _NodeRun:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.spools: dict[str, _Spool] = {}
        self.echo = ("", 0)
        self.digests: RunDigests | None = None
        """None: no join has said yet what it has judged, or none are made."""
        self.unsent: deque[DigestPiece] = deque()
        """Pieces of digests that could not be published, in their order."""
        self.wanted: dict[AwayFrame, float] = {}
        """Frame that the join asks for -> when it was sent last, monotonic seconds."""
        self.owed: dict[AwayFrame, float] = {}
        """The same of frames that the join is to have before this node ends."""
        self.num_digests = 0
        self.answered = 0
        """The newest beat to which an answer was taken."""
        self.refused: dict[str, float] = {}
        """What was not believed, in words -> when last, monotonic seconds."""
        self.beaten = -HEARTBEATS_S
        """When heartbeats were published last, monotonic seconds."""


class NodeRuns:
    """Reads spools; writes `ack` files and commands. Not for several threads at once."""

    def __init__(
        self,
        directory: Path,
        node: str,
        *,
        digested_kinds: frozenset[str] | None = None,
        arrivals: Callable[[str], Arrivals] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_problem: Callable[[str], None] = lambda problem: None,
        is_signed: bool = False,
    ) -> None:
        """directory: of the runs of this machine. on_problem: told of each thing that goes wrong, once.

        digested_kinds: spools are published without their rows, for which digests stand that carry the rows of these kinds;
        None: spools are published as they are. arrivals: where the spools are copies, returns what is known of what
        comes into those of a run; None: trainers write them here. is_signed: nothing is taken from an answer that is not
        signed, came before, or answers no beat of the last `EXPIRES_S`.
        """
        self._is_signed = is_signed
        self._session, self._num_beats = secrets.token_hex(8), 0
        self._sent: dict[int, float] = {}
        """Beat -> when it was sent, monotonic seconds, for so long as it may be answered."""
        self.directory, self.node = directory, node
        self._kinds, self._arrivals = digested_kinds, arrivals
        self._owed_at = -RESEND_S
        """When `send_rows` looked last, monotonic seconds."""
        self._clock, self._on_problem = clock, on_problem
        self._runs: dict[str, _NodeRun] = {}
        self._told: set[str] = set()
        self._busy_until, self._asked_until = clock() + BUSY_S, 0.0
        self._pace_s = HEARTBEATS_S

    @property
    def who(self) -> str:
        """Who publishes, for people."""
        return f"node {self.node}"

    def discover(self) -> None:
        """Take in runs and spools that are new, and let go of what is gone."""
        found = {path.name: path for path in runs_in(self.directory)}
        for name in self._runs.keys() - found.keys():
            del self._runs[name]
        for name, path in found.items():
            if not name.isprintable():
                self._tell(f"run {printable(name)!r}: expected visible characters in its name; it is not shipped")
                continue
            run = self._runs.get(name)
            if run is None:
                run = self._runs[name] = _NodeRun(path)
            folders = {one for one in _names(path / "spool") if parse_incarnation_folder(one) is not None}
            for folder in run.spools.keys() - folders:
                del run.spools[folder]
            for folder in sorted(folders - run.spools.keys()):
                run.spools[folder] = _Spool(path / "spool" / folder)

    @property
    def pause_s(self) -> float:
        """Seconds between two times that anything is said, as it is now."""
        now = self._clock()
        if now < self._asked_until:
            return ASKED_BEAT_S
        if now < self._busy_until or any(run.wanted or not run.echo[0] for run in self._runs.values()):
            return BEAT_S
        return self._pace_s

    def next(self, max_bytes: int = MAX_NEXT_BYTES) -> Iterator[Published]:
        """Yield what is to be published next: of each spool of which the join has said how far it holds it one chunk, up to
        about `max_bytes` in all. What was yielded is taken for published.

        Digests go before the ends of their steps, for a join that has none asks for all rows. To a join that is another
        than before they go anew, from what it has judged on.
        """
        num_bytes = 0
        for name, run in self._runs.items():
            beating, has_more, now = [], False, self._clock()
            first: Iterable[DigestPiece | RowsPiece] = itertools.chain(self._digested(name, run), self._asked(name, run))
            for one in first:
                num_bytes, has_more, self._busy_until = num_bytes + len(one.data), True, now + BUSY_S
                yield one
            for folder, spool in run.spools.items():
                if spool.held is None or spool.refused:
                    continue
                if num_bytes > max_bytes:
                    return
                begin = spool.cursor.place
                chunk = self._chunk(name, folder, spool)
                if chunk is None:
                    continue
                # Those of copies have waited where they were written.
                if self._arrivals is None and not chunk.size and are_heartbeats(chunk.data):
                    spool.cursor.seek(begin)
                    beating.append((folder, spool))
                    continue
                num_bytes, has_more, self._busy_until = num_bytes + len(chunk.data), True, now + BUSY_S
                yield chunk
            if beating and (has_more or now - run.beaten >= self._pace_s):
                run.beaten = now
                for folder, spool in beating:
                    if (chunk := self._chunk(name, folder, spool)) is not None:
                        yield chunk

    def take_back(self, published: Published) -> None:
        """Have a chunk that could not be published read again, and all behind it, and a digest published again. For rows
        the join asks again."""
        if isinstance(published, DigestPiece) and (run := self._runs.get(published.run)) is not None:
            run.unsent.append(published)
            while sum(len(one.data) for one in run.unsent) > MAX_UNSENT_BYTES:
                run.unsent.popleft()
        spool = self._spool(published.run, published.folder) if isinstance(published, SpoolChunk) else None
        if spool is None or not isinstance(published, SpoolChunk):
            return
        chunk = published
        place = chunk.after if chunk.size or chunk.offset == 0 else FilePlace(chunk.file, chunk.offset)
        now, then = spool.cursor.place, place
        if (last_index(then.file), then.offset) <= (last_index(now.file), now.offset):
            spool.cursor.seek(place)

    def send_rows(self) -> None:
        """Have all rows sent that the join has not got and has not committed: this node ends, and cannot be asked then."""
        now = self._clock()
        if now - self._owed_at < RESEND_S:
            return
        self._owed_at = now
        for run in self._runs.values():
            for spool in run.spools.values():
                if spool.num_away and not spool.refused:
                    for frame in frames_of_rows(spool.cursor.folder, spool.acked):
                        run.owed.setdefault(frame, now - RESEND_S)

    @property
    def is_held(self) -> bool:
        """Whether the join has all there is, and every row that it has not committed."""
        spools = [spool for run in self._runs.values() for spool in run.spools.values() if not spool.refused]
        return not self.num_waiting_bytes and not self.num_away and all(spool.is_passed_on for spool in spools)

    def held(self, run: str) -> dict[str, SpoolHeld]:
        """Return what the join said last of each spool of a run of which it said anything."""
        known = self._runs.get(run)
        return {
            folder: SpoolHeld(spool.held or FilePlace(), spool.acked, refused=spool.refused)
            for folder, spool in (() if known is None else known.spools.items())
            if spool.held is not None or spool.refused
        }

    def is_to(self, answer: Answer) -> bool:
        """Return whether an answer is to a beat of ours, or says not to which."""
        return answer.to[0] in ("", self._session)

    def echo(self, run: str) -> tuple[str, int]:
        """Return (join, stamp) of the newest answer of a run; ("", 0): there was none."""
        known = self._runs.get(run)
        return ("", 0) if known is None else known.echo

    @property
    def num_away(self) -> int:
        """Frames of rows that the join has not got, and not committed, as it said last."""
        return sum(spool.num_away for run in self._runs.values() for spool in run.spools.values() if not spool.refused)

    def _chunk(self, name: str, folder: str, spool: _Spool) -> SpoolChunk | None:
        begin = spool.cursor.place
        most = self._most_bytes(name, folder, spool)
        if most <= 0:
            return None
        piece = spool.cursor.next(min(most, CHUNK_BYTES if self._kinds is None else THINNED_BYTES))
        data, away = (b"", ()) if piece is None else (piece.data, ()) if self._kinds is None else without_payloads(piece)
        if len(data) + 16 * len(away) > CHUNK_BYTES:
            # What is not rows is long: in smaller pieces.
            spool.cursor.seek(begin)
            piece, away = spool.cursor.next(min(most, CHUNK_BYTES)), ()
            data = b"" if piece is None else piece.data
        if piece is None:
            return None
        return SpoolChunk(
            version=THIN_VERSION if away else PLAIN_VERSION, node=self.node, run=name, folder=folder, file=piece.file,
            offset=piece.offset, after=piece.after, size=piece.size, data=data, away=away, turn=spool.turn,
        )  # fmt: skip

    def _most_bytes(self, name: str, folder: str, spool: _Spool) -> int:
        """Return how many bytes may be published next: of steps whose digests were made, while there are more to make.

        The join asks for the rows of a step that ends before its digest comes: of a backlog it did for nearly every one.
        """
        digests, place = self._runs[name].digests, spool.cursor.place
        until = digests.read_until(folder) if digests is not None else None
        index = last_index(place.file)
        if until is None or until[0] > index + 1:
            most = THINNED_BYTES
        elif until[0] == index:
            most = until[1] - place.offset
        else:
            is_over = not place.file or size_of(spool.cursor.folder / place.file) <= place.offset
            most = until[1] if is_over and until[0] > index else 0 if until[0] < index else THINNED_BYTES
        now = self._clock()
        spool.kept_since = None if most > 0 else now if spool.kept_since is None else spool.kept_since
        # A spool that cannot be read for digests is published all the same.
        return most if spool.kept_since is None or now - spool.kept_since < RESEND_S else THINNED_BYTES

    def _digested(self, name: str, run: _NodeRun) -> Iterator[DigestPiece]:
        while run.unsent:
            yield run.unsent.popleft()
        for data in run.digests.next() if run.digests is not None else ():
            run.num_digests += 1
            cuts = range(0, len(data), CHUNK_BYTES)
            for part, at in enumerate(cuts):
                yield DigestPiece(
                    version=THIN_VERSION, node=self.node, run=name, number=run.num_digests, part=part, num_parts=len(cuts),
                    data=data[at : at + CHUNK_BYTES],
                )  # fmt: skip

    def _asked(self, name: str, run: _NodeRun) -> Iterator[RowsPiece]:
        """Yield the rows that were asked for, unless they are on their way."""
        now, num_bytes = self._clock(), 0
        for sent_at, frame in [(asked, one) for asked in (run.wanted, run.owed) for one in asked]:
            spool = run.spools.get(frame.folder)
            if spool is None or now - sent_at[frame] < RESEND_S or num_bytes > THINNED_BYTES:
                continue
            sent_at[frame] = now
            found = read_window(spool.cursor.folder / file_name(frame.file_index), frame.offset, frame.num_bytes)
            data = b"" if found is None or len(found[0]) < frame.num_bytes else found[0]
            if not data and self._arrivals is not None and _is_behind(spool.cursor.head()[1], frame):
                sent_at[frame] = now - RESEND_S  # Not here yet.
                continue
            num_bytes += len(data)
            for at in range(0, max(len(data), 1), CHUNK_BYTES):
                yield RowsPiece(
                    version=THIN_VERSION, node=self.node, run=name, folder=frame.folder, file_index=frame.file_index,
                    offset=frame.offset, num_bytes=len(data), at=at, data=data[at : at + CHUNK_BYTES],
                )  # fmt: skip

    def beats(self, *, blocked: str = "", is_ending: bool = False, is_leaving: bool = False) -> Iterator[Beat]:
        """Yield what is to be said of each run."""
        now = self._clock()
        for name, run in self._runs.items():
            echo = run.echo
            heads = {folder: self._head(spool, now) for folder, spool in run.spools.items()}
            if len(heads) > MAX_SPOOLS:
                by_need = sorted(heads, key=lambda one: (heads[one].waiting_bytes == 0, -_mtime(run.spools[one])))
                heads = {one: heads[one] for one in by_need[:MAX_SPOOLS]}
            names = sorted(one for one in _names(run.run_dir / "control") if COMMAND_FILE.fullmatch(one))
            self._num_beats += 1
            self._sent = {number: at for number, at in self._sent.items() if now - at <= EXPIRES_S}
            self._sent[self._num_beats] = now
            yield Beat(
                version=PLAIN_VERSION, node=self.node, run=name, echo=echo, spools=heads, commands=names[-MAX_COMMANDS:],
                blocked=blocked, is_leaving=is_leaving, number=(self._session, self._num_beats),
                refused=[why for why, at in run.refused.items() if now - at <= SAID_S], is_ending=is_ending,
            )  # fmt: skip

    def take_answer(self, answer: Answer, *, has_signature: bool = False) -> None:
        """Go by what the join says: where each spool goes on, what is committed, what is commanded.

        has_signature: by our key.
        """
        run = self._runs.get(answer.run)
        if run is None or answer.node != self.node:
            return
        if self._is_signed:
            if why := self._disbelief(run, answer, has_signature):
                why = f"run {answer.run}: join {printable(answer.join[:64])}: {why}; nothing is taken from it"
                run.refused[why] = self._clock()
                self._tell(why)
                return
            run.answered = answer.to[1]
        if answer.join == run.echo[0] and answer.stamp < run.echo[1]:
            return
        is_new_join = answer.join != run.echo[0]
        run.echo = (answer.join, answer.stamp)
        self._pace_s = min(max(answer.pace_s, HEARTBEATS_S), MAX_PACE_S)
        now = self._clock()
        if self._kinds is not None:
            self._asked_until = now + ASKED_S if answer.wanted else self._asked_until
            run.wanted = {
                frame: run.wanted.get(frame, now - RESEND_S)
                for frame in answer.wanted
                if frame.folder in run.spools and 0 < frame.num_bytes <= MAX_FRAME_BYTES and frame.offset >= 0
            }
        is_lost = False
        for folder, said in answer.spools.items():
            spool = run.spools.get(folder)
            if spool is None:
                continue
            if said.refused:
                spool.refused = said.refused
                self._tell(said.refused)
                continue
            spool.refused = ""
            spool.witness_bytes = said.witness_bytes
            if spool.held is None or is_new_join:
                spool.go_back(said.held, now)
            elif spool.held != said.held or spool.cursor.place == said.held:
                spool.moved = now
            elif now - spool.moved > RESEND_S and ((answer.is_drained and not said.is_waiting) or said.gap == spool.turn):
                spool.go_back(said.held, now)
                is_lost = True
            spool.held = said.held
            spool.num_away, spool.is_passed_on = said.num_away, said.is_passed_on
            self._commit(spool, said.acked)
        if self._kinds is not None and (is_new_join or is_lost):
            self._digest_anew(run, {folder: said.acked for folder, said in answer.spools.items()})
        for name, data in answer.commands.items():
            self._obey(run, name, data)

    def _digest_anew(self, run: _NodeRun, committed: Mapping[str, tuple[int, int]]) -> None:
        """Make digests from what the join has judged on: another join has none of ours, the stream may have lost some."""
        assert self._kinds is not None
        run.unsent.clear()
        arrivals = functools.partial(self._arrivals or _unknown, run.run_dir.name)
        run.digests = RunDigests(run.run_dir, self._kinds, arrivals, committed)

    def _disbelief(self, run: _NodeRun, answer: Answer, has_signature: bool) -> str:
        """Return why an answer is not believed; empty: it is. No clock but ours has a say."""
        session, number = answer.to
        if not has_signature:
            return f"its answer is forged: {UNSIGNED}"
        if session != self._session or number > self._num_beats:
            return "its answer is repeated: it was given to another shipper, or to this one before it was started anew"
        if number <= run.answered:
            return "its answer is repeated: that beat, or a later one, was answered before"
        if number not in self._sent:
            return f"its answer is expired: the beat that it answers is older than {EXPIRES_S:g} s"
        return ""

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of all spools that the join does not hold."""
        return sum(
            self._head(spool, self._clock()).waiting_bytes
            for run in self._runs.values()
            for spool in run.spools.values()
            if not spool.refused
        )

    def _spool(self, run: str, folder: str) -> _Spool | None:
        known = self._runs.get(run)
        return None if known is None else known.spools.get(folder)

    def _head(self, spool: _Spool, now: float) -> SpoolHead:
        first, head, waiting = SpoolCursor(spool.cursor.folder, spool.held or FilePlace()).head()
        spool.waits_since = None if waiting == 0 else now if spool.waits_since is None else spool.waits_since
        witness = _witness(spool.cursor.folder)
        return SpoolHead(
            first=first, head=head, sent=spool.cursor.place, waiting_bytes=waiting,
            waiting_s=0.0 if spool.waits_since is None else now - spool.waits_since,
            acked=read_ack(spool.cursor.folder), pulse_ns=read_pulse(spool.cursor.folder),
            witness=b"" if len(witness) == spool.witness_bytes else witness,
        )  # fmt: skip

    def _commit(self, spool: _Spool, acked: tuple[int, int]) -> None:
        """Write down what the join has committed: the trainer deletes by it. Never more than this spool has; a copy may yet
        have less.
        """
        if acked <= spool.acked or acked <= read_ack(spool.cursor.folder):
            spool.acked = max(spool.acked, acked) if acked <= spool.acked else acked
            return
        head = spool.cursor.head()[1]
        if self._arrivals is None and acked > (last_index(head.file), head.offset):
            self._tell(f"{spool.cursor.folder}: the join commits {acked}, and this spool ends at {head}; it is not believed")
            return
        try:
            write_ack(spool.cursor.folder, *acked)
            spool.acked = acked
        except OSError as error:
            self._tell(f"{spool.cursor.folder}: cannot be acknowledged: {error.strerror or error}")

    def _obey(self, run: _NodeRun, name: str, data: bytes) -> None:
        if COMMAND_FILE.fullmatch(name) is None:
            self._tell(f"run {run.run_dir.name}: expected the name of a command, got {printable(name[:64])!r}")
            return
        try:
            place_command(run.run_dir / "control", name, data)
        except StoreError as error:
            self._tell(str(error))

    def _tell(self, problem: str) -> None:
        if problem not in self._told and len(self._told) < 1000:
            self._told.add(problem)
            self._on_problem(problem)


def _is_behind(head: FilePlace, frame: AwayFrame) -> bool:
    """Return whether a spool that ends there lacks a frame for it has not come yet. What was thinned comes no more."""
    of_head = (last_index(head.file), head.offset if isinstance(read_name(head.file), int) else math.inf)
    return of_head < (frame.file_index, frame.offset + frame.num_bytes)


def _unknown(run: str) -> Arrivals:
    return Arrivals()


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


def _mtime(spool: _Spool) -> float:
    try:
        return spool.cursor.folder.stat().st_mtime
    except OSError:
        return 0.0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 -- names alone, several times a second
    except OSError:
        return []
