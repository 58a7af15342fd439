"""RelayedNode: what a worker does for one node that only ships: it does what `sentinel node` would do there.

It copies the node's spools as a join does, and publishes of the copies, under the node's name, what `sentinel node`
publishes of spools. It vouches for nothing: the node goes on where the copies end, but may delete what the join has
committed; and what the node's spools hold, and as of when, is what the node said after the join had been heard.
"""

from __future__ import annotations

import secrets
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.heard_nodes import SILENT_S
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.sealed import MAX_COMMANDS, AbsentNodes, Answer, Beat, DigestPiece, Published, SpoolChunk, SpoolHead
from sentinel.fleet.spool_copy import MAX_INDEX
from sentinel.fleet.subjects import partition_of, token
from sentinel.private_files import make_directory

MAX_AHEAD_BYTES = 512 * 2**20
"""Most bytes of a node's spools that a worker has and the join has not: past it nothing more of its partition is taken."""
MAX_HELD_BYTES = 16 * 2**20
"""Bytes of a node that wait for its beat, past which no more is taken: what is made of them at once takes some 0.3 s."""
MAX_ECHOES = 256
"""Answers to a node of which it is known what the join had said by then: those of a minute."""


class RelayedNode:
    """Of one worker, under one epoch of the node's partition. Not for several threads at once."""

    def __init__(
        self,
        directory: Path,
        node: str,
        *,
        epoch: int,
        worker: str,
        kinds: frozenset[str],
        clock: Callable[[], float],
        on_problem: Callable[[str], None],
        is_signed: bool,
    ) -> None:
        """directory: of the copies of all nodes; what is there of this one is deleted: it may be of another time.

        kinds: as `digested_kinds` of `NodeRuns`, as is_signed. worker: name of this process. clock: monotonic seconds.
        """
        self.node, self.epoch, self.partition = node, epoch, partition_of(node)
        self._clock, self._heard_at = clock, clock()
        self.num_ahead_bytes = 0
        """Bytes that are here and that the join has not got."""
        self.num_waiting_bytes = 0
        """What the join had not got when the node last spoke, on the node and here."""
        self.has_left = False
        """The node ended, and the join was told so."""
        self.is_outdated = False
        """Of what is here the beginning is missing for the join that works now: it is to be copied anew."""
        self._directory, self._worker = directory / token(node), worker
        # Another worker may be called the same, and its answers count by another clock.
        self._name = f"{worker} {secrets.token_hex(4)}"
        shutil.rmtree(self._directory, ignore_errors=True)
        make_directory(self._directory)
        # Digests are of all ranks of the node: what is copied is read when all of it is here.
        self.copies = CopiedRuns(
            self._directory, self._name, begin_s=0.0, clock=clock, on_problem=on_problem, has_lockstep=False
        )
        self._runs = NodeRuns(
            self._directory, node, digested_kinds=kinds, arrivals=self.copies.arrivals, clock=clock,
            on_problem=on_problem, is_signed=is_signed,
        )  # fmt: skip
        self._begun: dict[tuple[str, str], int] = {}
        """(run, folder) of spools of which the join has spoken -> the file with which their copies begin."""
        self._said: dict[str, Beat] = {}
        """Run -> what the node said last, if it was not passed on yet."""
        self._echoes: defaultdict[str, deque[tuple[int, tuple[str, int]]]] = defaultdict(lambda: deque(maxlen=MAX_ECHOES))
        """Run -> (stamp of an answer to the node, echo of the join's newest answer by then)."""
        self._absent: dict[str, AbsentNodes] = {}
        """Run -> what the join said last of its nodes: here the others are not known."""
        self._ready: deque[Published] = deque()
        """What is to be published next."""
        self._is_due = False
        """There may be more."""
        self._has_copied = False
        """More was written into the copies than was looked at."""

    def delete(self) -> None:
        """Delete the copies: the node has all that matters."""
        shutil.rmtree(self._directory, ignore_errors=True)

    # For the node.

    def has_room(self) -> bool:
        """Return whether anything more may be taken."""
        return self.copies.held_bytes < MAX_HELD_BYTES and (self.num_ahead_bytes < MAX_AHEAD_BYTES or self._is_silent)

    @property
    def _is_silent(self) -> bool:
        """Whether it has said nothing for `SILENT_S`: how far it is ahead stays as it was, and others wait for nobody."""
        return self._clock() - self._heard_at >= SILENT_S

    def take_chunk(self, chunk: SpoolChunk) -> None:
        """Take in what the node published of a spool of which the join has spoken; other chunks come again."""
        if (chunk.run, chunk.folder) in self._begun and not (self._is_silent and self.num_ahead_bytes >= MAX_AHEAD_BYTES):
            self.copies.take_chunk(chunk)

    def release(self) -> None:
        """As `CopiedRuns.release`, where what was copied before has been looked at."""
        if not self._has_copied and self.copies.release():
            self._is_due = self._has_copied = True

    def take_beat(self, beat: Beat, *, is_drained: bool) -> Answer | None:
        """Take in what the node says, to be passed on, and return the answer.

        None as of `CopiedRuns.take_beat`, and while the join has not spoken of each spool: until then nobody knows where the
        node is to go on.
        """
        self._heard_at = self._clock()
        # Of what is committed nothing is kept here.
        heads = {folder: msgspec.structs.replace(head, first=MAX_INDEX) for folder, head in beat.spools.items()}
        answer = self.copies.take_beat(msgspec.structs.replace(beat, spools=heads), is_drained=is_drained)
        if answer is None:
            return None
        self._said[beat.run] = beat
        make_directory(self._directory / beat.run / "spool")
        self._runs.discover()
        if beat.is_ending:
            self._runs.send_rows()
            self._is_due = True
        theirs = self._runs.held(beat.run)
        if answer.spools.keys() - theirs.keys():
            return None
        self._echoes[beat.run].append((answer.stamp, self._runs.echo(beat.run)))
        # What is committed is the join's word already: it lies beside the copy.
        is_passed_on = beat.is_ending and self._runs.is_held
        spools = {
            folder: theirs[folder] if theirs[folder].refused else msgspec.structs.replace(ours, is_passed_on=is_passed_on)
            for folder, ours in answer.spools.items()
        }
        return msgspec.structs.replace(answer, spools=spools, absent=self._absent.get(beat.run, AbsentNodes()))

    # For the join.

    def next(self) -> Iterator[Published]:
        """Yield what is to be published next, digests before the ends of their steps; what is not taken comes again."""
        if not self._ready and self._is_due:
            # All at once: what is copied meanwhile might be such an end.
            self._ready.extend(map(self._with_epoch, self._runs.next()))
            self._is_due, self._has_copied = bool(self._ready), False
        while self._ready:
            yield self._ready.popleft()

    def take_back(self, published: Published) -> None:
        """As of `NodeRuns`."""
        self._runs.take_back(published)
        self._is_due = True

    def take_answer(self, answer: Answer, *, has_signature: bool) -> None:
        """Go by what the join says; the node hears of it with its next answer. What was said to another worker passes by."""
        if has_signature and not self._runs.is_to(answer):
            return
        self._runs.take_answer(answer, has_signature=has_signature)
        self._is_due = True
        if self._runs.echo(answer.run) != (answer.join, answer.stamp):
            return
        self._absent[answer.run] = answer.absent
        for folder in self._runs.held(answer.run).keys() & answer.spools.keys():
            said, begun = answer.spools[folder], self._begun.get((answer.run, folder))
            if said.refused:
                continue
            if begun is None:
                self.copies.begin_committed(answer.run, folder)
                self._begun[answer.run, folder] = said.acked[0]
            elif said.acked[0] < begun:
                self.is_outdated = True

    def beats(self, *, blocked: str) -> Iterator[Beat]:
        """Yield what the node has said since, in its name."""
        if not self._said:
            return
        self.num_ahead_bytes = 0
        for beat in self._runs.beats(blocked=blocked):
            self.num_ahead_bytes += sum(head.waiting_bytes for head in beat.spools.values())
            said = self._said.pop(beat.run, None)
            if said is not None:
                self.has_left |= said.is_leaving
                yield self._passed_on(said, beat)

    def _passed_on(self, said: Beat, ours: Beat) -> Beat:
        """Return what a node said as the join is to hear it."""
        on_the_way = self.copies.on_the_way(said.run)
        spools = {
            folder: head if (copied := ours.spools.get(folder)) is None else _summed(head, copied, folder in on_the_way)
            for folder, head in said.spools.items()
        }
        self.num_waiting_bytes = sum(head.waiting_bytes for head in spools.values())
        return msgspec.structs.replace(
            ours, spools=spools, echo=self._echo(said), is_leaving=said.is_leaving, epoch=self.epoch, worker=self._worker,
            commands=sorted({*said.commands, *ours.commands})[-MAX_COMMANDS:], blocked=said.blocked or ours.blocked,
            refused=[*said.refused, *ours.refused],
        )  # fmt: skip

    def _echo(self, said: Beat) -> tuple[str, int]:
        """Return what of the join the worker had heard when it gave the answer that the node had heard when it looked."""
        echoes, found = self._echoes[said.run], ("", 0)
        while said.echo[0] == self._name and echoes and echoes[0][0] <= said.echo[1]:
            found = echoes[0][1]
            if len(echoes) == 1 or echoes[1][0] > said.echo[1]:
                break
            echoes.popleft()
        return found

    def _with_epoch(self, published: Published) -> Published:
        if isinstance(published, DigestPiece):
            # No two of a node have the same number, whoever made them.
            return msgspec.structs.replace(published, epoch=self.epoch, number=(self.epoch << 32) + published.number)
        return msgspec.structs.replace(published, epoch=self.epoch)


def _summed(said: SpoolHead, copied: SpoolHead, is_on_the_way: bool) -> SpoolHead:
    """Return what a node says of a spool, behind which its copy is, as of both. is_on_the_way: more than heartbeats is."""
    # Heartbeats that are here, and are not passed on yet, are as little waited for as those that the node holds.
    head = said.head if is_on_the_way else copied.head
    return msgspec.structs.replace(
        said, head=head, sent=copied.sent, witness=copied.witness, waiting_bytes=said.waiting_bytes + copied.waiting_bytes,
        waiting_s=max(said.waiting_s, copied.waiting_s),
    )  # fmt: skip
