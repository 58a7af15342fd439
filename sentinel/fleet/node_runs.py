"""NodeRuns: the runs of one machine as its shipper follows them: what is to be published, said, and taken from answers."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from sentinel.control.command_files import COMMAND_FILE, place_command
from sentinel.errors import StoreError
from sentinel.fleet.node_run import NodeRun
from sentinel.fleet.node_spool import RESEND_S, NodeSpool
from sentinel.fleet.run_key import UNSIGNED
from sentinel.fleet.sealed import (
    MAX_COMMANDS,
    PLAIN_VERSION,
    Answer,
    Beat,
    DigestPiece,
    FilePlace,
    Published,
    RowsPiece,
    SpoolHead,
    SpoolHeld,
)
from sentinel.fleet.spool_cursor import are_heartbeats
from sentinel.ingest.arrivals import Arrivals
from sentinel.printable import printable
from sentinel.store.run_paths import runs_in
from sentinel.wire.spool import parse_incarnation_folder, read_ack

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
TOLD_S = 8.0
"""A node that is asked to speak less often says for so long nothing of spools of which nothing but heartbeats comes: a join
of thousands compares each with its copy. Heartbeats that were lost are sent again so much later."""
ASKED_S = 0.5
"""So long behind an answer that asks for rows the next such is waited for."""
BUSY_SHARE = 4.0
"""So many times as often as otherwise such a node speaks at most: a join of thousands hears each."""
BUSY_S = 1.0
"""So long behind anything but heartbeats a node speaks several times a second."""
SAID_S = 60.0
"""For so long beats say what was not believed."""
MAX_REFUSED = 8
"""Most reasons of a run that they say, the newest."""
UNANSWERED_S = 30.0
"""A run of which no join has said anything for so long is judged by no one. Too small: the next join begins meanwhile; too
large: nobody sees what goes wrong."""
IDLE_S = 120.0
"""A run in whose spools nothing was written for so long is over, or will say for itself when it goes on."""
MAX_NEXT_BYTES = 8 * 2**20
MAX_SPOOLS = 512
"""Most spools of a run of which one beat speaks: those that wait first, then the newest."""


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
        self._partial: set[int] = set()
        """Those of these that left spools out."""
        self.directory, self.node = directory, node
        self._kinds, self._arrivals = digested_kinds, arrivals
        self._owed_at = -RESEND_S
        """When `send_rows` looked last, monotonic seconds."""
        self._clock, self._on_problem = clock, on_problem
        self._runs: dict[str, NodeRun] = {}
        self._told: set[str] = set()
        self._busy_until, self._asked_until = clock() + BUSY_S, 0.0
        self._pace_s = HEARTBEATS_S
        self.found_alone: Mapping[str, tuple[str, ...]] = {}
        """Run -> what was found in it on this machine while no join answers, in words."""

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
                arrivals = None if self._arrivals is None else functools.partial(self._arrivals, name)
                run = self._runs[name] = NodeRun(path, self.node, self._kinds, arrivals, self._clock)
            folders = {one for one in _names(path / "spool") if parse_incarnation_folder(one) is not None}
            for folder in run.spools.keys() - folders:
                del run.spools[folder]
            for folder in sorted(folders - run.spools.keys()):
                run.spools[folder] = NodeSpool(path / "spool" / folder)

    @property
    def pause_s(self) -> float:
        """Seconds between two times that anything is said, as it is now."""
        now = self._clock()
        if now < self._asked_until:
            return ASKED_BEAT_S
        if now < self._busy_until or any(run.is_waited_for for run in self._runs.values()):
            return max(BEAT_S, self._pace_s / BUSY_SHARE)
        return self._pace_s

    def next(self, max_bytes: int = MAX_NEXT_BYTES) -> Iterator[Published]:
        """Yield what is to be published next: of each spool of which the join has said how far it holds it one chunk, up to
        about `max_bytes` in all. What was yielded is taken for published.

        Digests go before the ends of their steps, for a join that has none asks for all rows. To a join that is another
        than before they go anew, from what it has judged on.
        """
        num_bytes = 0
        for run in self._runs.values():
            beating, has_more, now = [], False, self._clock()
            first: Iterable[DigestPiece | RowsPiece] = itertools.chain(run.digested(), run.asked())
            for one in first:
                num_bytes, has_more, self._busy_until = num_bytes + len(one.data), True, now + BUSY_S
                yield one
            for folder, spool in run.spools.items():
                if spool.held is None or spool.refused:
                    continue
                if num_bytes > max_bytes:
                    return
                begin = spool.cursor.place
                chunk = run.chunk(folder)
                if chunk is None:
                    continue
                # Those of copies have waited where they were written.
                if self._arrivals is None and not chunk.size and are_heartbeats(chunk.data):
                    spool.cursor.seek(begin)
                    beating.append(folder)
                    continue
                num_bytes, has_more, self._busy_until = num_bytes + len(chunk.data), True, now + BUSY_S
                spool.data_end = spool.cursor.place
                yield chunk
            if beating and (has_more or now - run.beaten >= self._pace_s):
                run.beaten = now
                for folder in beating:
                    if (chunk := run.chunk(folder)) is not None:
                        yield chunk

    def take_back(self, published: Published) -> None:
        """Have what could not be published go again: of a chunk all behind it too. For rows the join asks again."""
        if (run := self._runs.get(published.run)) is not None:
            run.take_back(published)

    def send_rows(self) -> None:
        """Have all rows sent that the join has not got and has not committed: this node ends, and cannot be asked then."""
        now = self._clock()
        if now - self._owed_at < RESEND_S:
            return
        self._owed_at = now
        for run in self._runs.values():
            run.owe_rows()

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

    def unanswered(self) -> dict[str, dict[str, tuple[int, int]] | None]:
        """Return run -> folder of a spool -> what a join has committed of it, of runs of which none has said anything for
        `UNANSWERED_S`; None of one in which nothing was written for `IDLE_S`. For any thread.
        """
        now, wall, found = self._clock(), time.time(), dict[str, dict[str, tuple[int, int]] | None]()
        for name, run in list(self._runs.items()):
            if now - run.answered_at < UNANSWERED_S:
                continue
            spools = list(run.spools.items())
            is_written = any(wall - spool.written_at < IDLE_S for _, spool in spools)
            found[name] = {folder: read_ack(spool.cursor.folder) for folder, spool in spools} if is_written else None
        return found

    def wait_anew(self, unanswered: Collection[str]) -> None:
        """Give joins as long to answer as at the beginning, for this process stood still. unanswered: runs of which it was
        known before that none answers. For any thread.
        """
        for name, run in list(self._runs.items()):
            if name not in unanswered:
                run.answered_at = max(run.answered_at, self._clock())

    def beats(self, *, blocked: str = "", is_ending: bool = False, is_leaving: bool = False) -> Iterator[Beat]:
        """Yield what is to be said of each run."""
        now = self._clock()
        for name, run in self._runs.items():
            echo = run.echo
            heads = {folder: spool.head(now) for folder, spool in run.spools.items()}
            if len(heads) > MAX_SPOOLS:
                by_need = sorted(heads, key=lambda one: (heads[one].waiting_bytes == 0, -run.spools[one].mtime))
                heads = {one: heads[one] for one in by_need[:MAX_SPOOLS]}
            heads, num_quiet = self._news(run, heads, now, tells_all=is_ending or is_leaving)
            names = sorted(one for one in _names(run.run_dir / "control") if COMMAND_FILE.fullmatch(one))
            self._num_beats += 1
            self._sent = {number: at for number, at in self._sent.items() if now - at <= EXPIRES_S}
            self._partial &= self._sent.keys()
            self._sent[self._num_beats] = now
            run.refused = {why: (words, at) for why, (words, at) in run.refused.items() if now - at <= SAID_S}
            if num_quiet:
                self._partial.add(self._num_beats)
            yield Beat(
                version=PLAIN_VERSION, node=self.node, run=name, echo=echo, spools=heads, commands=names[-MAX_COMMANDS:],
                blocked=blocked, is_leaving=is_leaving, number=(self._session, self._num_beats),
                refused=[words for words, _ in run.refused.values()], is_ending=is_ending,
                num_quiet=num_quiet, found_alone=list(self.found_alone.get(name, ())),
            )  # fmt: skip

    def _news(
        self, run: NodeRun, heads: dict[str, SpoolHead], now: float, *, tells_all: bool
    ) -> tuple[dict[str, SpoolHead], int]:
        """Return what is to be said of which spools, and of how many nothing is."""
        tells_all |= self._pace_s <= HEARTBEATS_S or now - run.told_all >= TOLD_S or run.told_to != run.echo[0]
        if tells_all:
            run.told_all, run.told_to = now, run.echo[0]
        news = {one: head for one, head in heads.items() if tells_all or not run.spools[one].is_quiet(head)}
        for folder, head in heads.items():
            run.spools[folder].note_beat(head, is_said=folder in news)
        return news, len(heads) - len(news)

    def take_answer(self, answer: Answer, *, has_signature: bool = False) -> None:
        """Go by what the join says: where each spool goes on, what is committed, what is commanded.

        has_signature: by our key.
        """
        run = self._runs.get(answer.run)
        if run is None or answer.node != self.node:
            return
        if self._is_signed:
            if why := self._disbelief(run, answer, has_signature):
                self._refuse(run, answer, why)
                return
            run.answered = answer.to[1]
        if answer.join == run.echo[0] and answer.stamp < run.echo[1]:
            return
        is_new_join = answer.join != run.echo[0]
        if is_new_join and answer.to[1] in self._partial:
            # It does not know of all spools yet: all is said with the next beat, and what is new begins with its answer.
            run.told_to = ""
            return
        run.echo, run.answered_at = (answer.join, answer.stamp), self._clock()
        self._pace_s = min(max(answer.pace_s, HEARTBEATS_S), MAX_PACE_S)
        now, is_lost = self._clock(), False
        self._asked_until = now + ASKED_S if answer.wanted else self._asked_until
        run.want(answer.wanted)
        for folder, said in answer.spools.items():
            spool = run.spools.get(folder)
            if spool is None:
                continue
            if said.refused:
                spool.refused = said.refused
                self._tell(said.refused)
                continue
            is_lost |= spool.take(said, now, is_new_join=is_new_join, is_drained=answer.is_drained)
            if why := spool.commit(said.acked, is_copy=self._arrivals is not None):
                self._tell(why)
        if is_new_join or is_lost:
            run.digest_anew({folder: said.acked for folder, said in answer.spools.items()})
        for name, data in answer.commands.items():
            self._obey(run, name, data)

    def _refuse(self, run: NodeRun, answer: Answer, why: str) -> None:
        """Have it said that an answer is not believed. Its join may be invented: another name is no other reason."""
        words = f"run {answer.run}: join {printable(answer.join[:64])}: {why}; nothing is taken from it"
        words, _ = run.refused.pop(why, (words, 0.0))
        run.refused[why] = words, self._clock()
        while len(run.refused) > MAX_REFUSED:
            del run.refused[next(iter(run.refused))]
        self._tell(words, f"{answer.run}: {why}")

    def _disbelief(self, run: NodeRun, answer: Answer, has_signature: bool) -> str:
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
            spool.head(self._clock()).waiting_bytes
            for run in self._runs.values()
            for spool in run.spools.values()
            if not spool.refused
        )

    def _obey(self, run: NodeRun, name: str, data: bytes) -> None:
        if COMMAND_FILE.fullmatch(name) is None:
            self._tell(f"run {run.run_dir.name}: expected the name of a command, got {printable(name[:64])!r}")
            return
        try:
            place_command(run.run_dir / "control", name, data)
        except StoreError as error:
            self._tell(str(error))

    def _tell(self, problem: str, once: str = "") -> None:
        """Tell of a problem, if it was not. once: what is told of once; empty: these words."""
        once = once or problem
        if once not in self._told and len(self._told) < 1000:
            self._told.add(once)
            self._on_problem(problem)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 -- names alone, several times a second
    except OSError:
        return []
