"""DigestBook: the digests that the nodes of a run made, until their steps are judged."""

from __future__ import annotations

import threading
from collections import Counter

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


class DigestBook:
    """The digests of a run, by node and by the frames that they are made of. For any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """max_bytes: most that are kept. Where there are more the steps before the one that was asked for last go first, for
        they are judged; then the newest, which are judged last."""
        self._of_step: dict[int, dict[str, dict[tuple[tuple[bytes, int, int], ...], PackedDigest]]] = {}
        self._bytes_of_step: dict[int, int] = {}
        self._bytes_of_node = Counter[str]()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._asked_step = -1
        self._lock = threading.Lock()

    def add(self, node: str, found: PackedDigest) -> None:
        """Take in a digest that a node made."""
        with self._lock:
            of_node = self._of_step.setdefault(found.step, {}).setdefault(node, {})
            former = of_node.pop(found.of, None)
            if former is None and len(of_node) >= MOST_OF_NODE:
                former = of_node.pop(next(iter(of_node)))
            if former is not None:
                self._count(node, found.step, -former.num_bytes)
            if self._bytes_of_node[node] + found.num_bytes <= MAX_NODE_BYTES:
                self._count(node, found.step, found.num_bytes)
                of_node[found.of] = found
            oldest = min(self._of_step)
            while oldest < self._asked_step - MAX_JUDGED or (
                self._num_bytes > self._max_bytes and len(self._of_step) > LEAST_STEPS
            ):
                self._drop(oldest if oldest < self._asked_step else max(self._of_step))
                oldest = min(self._of_step, default=self._asked_step)

    def find(self, node: str, step: int, of: tuple[tuple[bytes, int, int], ...]) -> NodeDigest | None:
        """Return a node's digest of a step that is made of these frames; None: there is none. WireError: it is none."""
        with self._lock:
            if step != self._asked_step:
                self._asked_step = step
                self._drop_judged()
            found = self._of_step.get(step, {}).get(node, {}).get(of)
        return None if found is None else found.unpack()

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
            self._bytes_of_node[node] -= sum(one.num_bytes for one in of_node.values())
        self._num_bytes -= self._bytes_of_step.pop(step, 0)
