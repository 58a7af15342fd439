"""DigestBook: the digests that the nodes of a run made, until their steps are judged."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

from sentinel.errors import WireError
from sentinel.fleet.packed_digest import PackedDigest
from sentinel.ingest.node_digest import NodeDigest

MAX_JUDGED = 4096
"""Digests of so many steps before the one that was asked for last are kept: a restart of training goes back to a checkpoint,
and its steps come while those of the former attempt are judged."""
MAX_JUDGED_BYTES, LEAST_JUDGED = 64 * 2**20, 2
"""Most bytes of the digests of these, but for so many steps: a step is judged again behind a snapshot, if at all."""
MAX_BYTES = 256 * 2**20
"""Most bytes of digests of one run that are kept; of what is dropped the rows are asked for."""
MAX_NODE_BYTES = 256 * 2**20
"""Most bytes of the digests of one node; of what it sends beyond that the rows are asked for: it is broken, or lies."""
LEAST_STEPS = 8
"""Digests of so many steps are kept, whatever they take: of 2,000 nodes those of one step come to 150 MB."""
MOST_OF_NODE = 64
"""Most digests of one step that one node has: of so many machines may it have ranks."""
MAX_READY_BYTES, MAX_READY_NODE_BYTES = 512 * 2**20, 8 * 2**20
"""Most bytes of digests of all runs, and of one node in one, that are unpacked as they come: what one node says must not
fill the memory. Those of 2,000 nodes of 8 ranks take 300 MB, as they do while their step is judged."""


class ReadyRoom:
    """Room for what is unpacked before anybody asks for it, of the books of all runs. For any thread."""

    def __init__(self, max_bytes: int = MAX_READY_BYTES) -> None:
        self._left = max_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take so much of it; False: there is not as much."""
        with self._lock:
            if num_bytes > self._left:
                return False
            self._left -= num_bytes
            return True

    def give(self, num_bytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._left += num_bytes


class _Entry:
    """A digest that waits."""

    __slots__ = ("packed", "ready", "ready_bytes")

    def __init__(self, packed: PackedDigest) -> None:
        self.packed = packed
        self.ready: NodeDigest | None = None
        """Unpacked, where there was room."""
        self.ready_bytes = 0


class DigestBook:
    """The digests of a run, by node and by the frames that they are made of. For any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES, room: ReadyRoom | None = None) -> None:
        """max_bytes: most that are kept. Where there are more the steps before the one that was asked for last go first, for
        they are judged; then the newest, which are judged last. room: for those that are unpacked as they come; None: none
        is."""
        self._of_step: dict[int, dict[str, dict[tuple[tuple[bytes, int, int], ...], _Entry]]] = {}
        self._bytes_of_step: dict[int, int] = {}
        self._bytes_of_node, self._ready_of_node = Counter[str](), Counter[str]()
        self._room = room
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._asked_step = -1
        self._lock = threading.Lock()

    def add(self, node: str, found: PackedDigest) -> None:
        """Take in a digest that a node made."""
        with self._lock:
            of_node = self._of_step.setdefault(found.step, {}).setdefault(node, {})
            former = of_node.pop(found.of, None)
            if former is not None and former.packed == found:
                of_node[found.of] = former
                return
            if former is None and len(of_node) >= MOST_OF_NODE:
                former = of_node.pop(next(iter(of_node)))
            if former is not None:
                self._count(node, found.step, -former.packed.num_bytes)
                self._taken(node, former)
            if self._bytes_of_node[node] + found.num_bytes <= MAX_NODE_BYTES:
                self._count(node, found.step, found.num_bytes)
                of_node[found.of] = _Entry(found)
            oldest = min(self._of_step)
            while oldest < self._asked_step - MAX_JUDGED or (
                self._num_bytes > self._max_bytes and len(self._of_step) > LEAST_STEPS
            ):
                self._drop(oldest if oldest < self._asked_step else max(self._of_step))
                oldest = min(self._of_step, default=self._asked_step)
            entry = self._of_step.get(found.step, {}).get(node, {}).get(found.of)
            # Of what takes the place of another, or has none, a few bytes would have the join unpack again and again.
            if entry is not None and former is None:
                self._make_ready(node, entry)

    def find(self, node: str, step: int, of: tuple[tuple[bytes, int, int], ...]) -> NodeDigest | None:
        """Return a node's digest of a step that is made of these frames; None: there is none. WireError: it is none."""
        with self._lock:
            if step != self._asked_step:
                self._asked_step = step
                self._drop_judged()
            entry = self._of_step.get(step, {}).get(node, {}).get(of)
            ready = None if entry is None else self._taken(node, entry)
        return None if entry is None else ready or entry.packed.unpack()

    def _make_ready(self, node: str, entry: _Entry) -> None:
        """Unpack a digest as it comes: when all are here, their step is to be judged at once."""
        packed, room = entry.packed, self._room
        num_bytes = packed.num_bytes_unpacked
        if (
            room is None
            or packed.step <= self._asked_step
            or self._ready_of_node[node] + num_bytes > MAX_READY_NODE_BYTES
            or not room.take(num_bytes)
        ):
            return
        self._ready_of_node[node] += num_bytes
        entry.ready_bytes = num_bytes
        # What is no digest is said when it is asked for.
        with contextlib.suppress(WireError):
            entry.ready = packed.unpack()

    def _taken(self, node: str, entry: _Entry) -> NodeDigest | None:
        """Return what is unpacked of a digest, whose room is free from now on; None: nothing is."""
        ready, num_bytes, entry.ready, entry.ready_bytes = entry.ready, entry.ready_bytes, None, 0
        if num_bytes and self._room is not None:
            self._room.give(num_bytes)
            self._ready_of_node[node] -= num_bytes
        return ready

    def _drop_judged(self) -> None:
        num_bytes = sum(size for step, size in self._bytes_of_step.items() if step < self._asked_step)
        if num_bytes <= MAX_JUDGED_BYTES:
            return
        for step in sorted(one for one in self._of_step if one < self._asked_step)[:-LEAST_JUDGED]:
            num_bytes -= self._bytes_of_step[step]
            self._drop(step)
            if num_bytes <= MAX_JUDGED_BYTES:
                return

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            for step in list(self._of_step):
                self._drop(step)

    def _count(self, node: str, step: int, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bytes_of_step[step] = self._bytes_of_step.get(step, 0) + num_bytes
        self._bytes_of_node[node] += num_bytes

    def _drop(self, step: int) -> None:
        for node, of_node in self._of_step.pop(step).items():
            self._bytes_of_node[node] -= sum(one.packed.num_bytes for one in of_node.values())
            for one in of_node.values():
                self._taken(node, one)
        self._num_bytes -= self._bytes_of_step.pop(step, 0)
