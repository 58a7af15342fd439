"""RelayedNodes: the nodes whose partitions a worker has, as one source of what is published to the join."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from sentinel.fleet.node_runs import BEAT_S, MAX_NEXT_BYTES
from sentinel.fleet.relayed_node import RelayedNode
from sentinel.fleet.sealed import Answer, Beat, Published
from sentinel.fleet.subjects import partition_of
from sentinel.worker_health import WorkerHealth

MAX_SAID = 8
"""Most problems of nodes that are said."""


class RelayedNodes:
    """`PublishedRuns` of several nodes. Nothing is said of a node whose partition this worker has no more."""

    def __init__(
        self,
        directory: Path,
        worker: str,
        *,
        kinds: frozenset[str],
        is_held: Callable[[int, int], bool],
        on_outdone: Callable[[int, int], None] = lambda partition, epoch: None,
        clock: Callable[[], float] = time.monotonic,
        on_problem: Callable[[str], None] = lambda problem: None,
        is_signed: bool = False,
    ) -> None:
        """directory: for copies, of this process alone: what lies there is deleted. worker: name of this process.

        kinds: as `digested_kinds` of `NodeRuns`, as is_signed and on_problem. is_held: whether (partition, epoch) is ours.
        on_outdone: told of (partition, epoch) where the join knows a newer epoch than ours.
        """
        self.directory, self.worker = directory, worker
        self._is_held, self._on_outdone = is_held, on_outdone
        self._kinds, self._clock, self._on_problem, self._is_signed = kinds, clock, on_problem, is_signed
        self._nodes: dict[str, RelayedNode] = {}
        self._counts: Counter[str] = Counter()
        """What came of nodes that are not here any more, as of `IntakeTally`."""
        for left in directory.glob("*"):
            shutil.rmtree(left, ignore_errors=True)

    # By partition.

    def of(self, partition: int) -> list[RelayedNode]:
        """Return the nodes of a partition."""
        return [one for one in self._nodes.values() if one.partition == partition]

    def find(self, node: str) -> RelayedNode | None:
        """Return a node; None: it has not spoken."""
        return self._nodes.get(node)

    def begin(self, node: str, epoch: int) -> RelayedNode:
        """Return a node that speaks for the first time under the epoch of its partition."""
        self._let_go_of(node)
        self._nodes[node] = RelayedNode(
            self.directory, node, epoch=epoch, worker=self.worker, kinds=self._kinds, clock=self._clock,
            on_problem=self._on_problem, is_signed=self._is_signed,
        )  # fmt: skip
        return self._nodes[node]

    def drop(self, partition: int) -> None:
        """Let go of the nodes of a partition."""
        for one in self.of(partition):
            self._let_go_of(one.node)

    def _let_go_of(self, node: str) -> None:
        known = self._nodes.pop(node, None)
        if known is not None:
            self._counts.update(known.copies.counts)
            known.delete()

    def release(self) -> None:
        """As `CopiedRuns.release`."""
        for one in self._ours():
            one.release()

    def _ours(self) -> list[RelayedNode]:
        return [one for one in self._nodes.values() if self._is_held(one.partition, one.epoch)]

    def health(self) -> WorkerHealth:
        """Return what is known of nodes, of what came of them, and of what could not be taken or written."""
        nodes = list(self._nodes.values())
        found = [one.copies.health() for one in nodes]
        said = [one for known in found for one in known.nodes]
        counts = Counter(self._counts)
        for known in found:
            counts.update(known.counts)
        problems = list(dict.fromkeys(problem for one in nodes for problem in one.copies.tally.problems()))
        if len(problems) > MAX_SAID:
            problems[MAX_SAID:] = [f"and {len(problems) - MAX_SAID} further problems of nodes"]
        return WorkerHealth(
            num_nodes=len(said), num_silent=sum(one.num_silent for one in found),
            held_bytes=sum(one.held_bytes for one in found), ahead_bytes=sum(one.num_ahead_bytes for one in nodes),
            waiting_bytes=sum(one.num_waiting_bytes for one in nodes), lag_bytes=sum(one.lag_bytes for one in said),
            lag_s=max((one.lag_s for one in said), default=0.0),
            are_copies_refused=any(one.are_copies_refused for one in found), counts=dict(counts), problems=tuple(problems),
        )  # fmt: skip

    # As `PublishedRuns`.

    @property
    def who(self) -> str:
        """Who publishes, for people."""
        return f"worker {self.worker}"

    @property
    def node(self) -> None:
        """Answers are for many nodes."""
        return

    @property
    def is_held(self) -> bool:
        """A worker waits for nothing at its end: what the join has not got the nodes have."""
        return True

    def discover(self) -> None:
        """Nodes say what is new."""

    def send_rows(self) -> None:
        """Another worker can be asked for them."""

    @property
    def pause_s(self) -> float:
        """Nothing is said but what nodes said: there is nothing to be spared."""
        return BEAT_S

    def next(self, max_bytes: int = MAX_NEXT_BYTES) -> Iterator[Published]:
        """Yield what is to be published next, of each node in turn, up to about `max_bytes`."""
        num_bytes = 0
        for one in self._ours():
            if num_bytes > max_bytes:
                return
            for published in one.next():
                if not self._is_held(one.partition, one.epoch):
                    break
                num_bytes += len(published.data)
                yield published

    def take_back(self, published: Published) -> None:
        """As of `NodeRuns`."""
        known = self._nodes.get(published.node)
        if known is not None:
            known.take_back(published)

    def beats(self, *, blocked: str = "", is_ending: bool = False, is_leaving: bool = False) -> Iterator[Beat]:
        """Yield what nodes have said since, each in its own name. is_ending, is_leaving: that a worker ends says no node."""
        for one in self._ours():
            yield from one.beats(blocked=blocked)
            if one.has_left:
                self._let_go_of(one.node)

    def take_answer(self, answer: Answer, *, has_signature: bool = False) -> None:
        """Go by what the join says to a node of ours."""
        known = self._nodes.get(answer.node)
        if known is None:
            return
        if answer.epoch > known.epoch and (has_signature or not self._is_signed):
            self._on_outdone(partition_of(answer.node), answer.epoch)
            return
        known.take_answer(answer, has_signature=has_signature)
        if known.is_outdated:
            self.begin(known.node, known.epoch)
