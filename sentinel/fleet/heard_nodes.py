"""HeardNodes: which nodes of a run speak, which hear what they are answered, and for whom the others wait."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping

from sentinel.fleet.sealed import AbsentNodes, Beat
from sentinel.join_health import NodeHealth

SILENT_S = 30.0
"""A node that said nothing for so long is waited for no more."""
UNHEARD_S = 5.0
"""Of a node that said nothing for so long nothing is heard: its ranks may be dead with it. Twice what the slowest pause."""
DEAF_S = 60.0
"""A node that speaks, and for so long shows by nothing that it hears the answers, is waited for no more."""
FORGOTTEN_S = 3600.0
"""A node that said nothing for so long is spoken of no more: what its ranks are is said of the run."""
ABSENT_S = 1.0
"""So old may be what is said of nodes that are silent or waited for: thousands are not looked through for each answer."""
MAX_NODES_SAID = 8


class HeardNodes:
    """Of one run. Moments are monotonic seconds."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        """Node -> when its newest beat came."""
        self.newest_beat = -math.inf
        """When any node spoke last."""
        self._seen_until: dict[str, float] = {}
        """Node -> the moment of this clock as of which its heads are known."""
        self._spoke: dict[str, tuple[float, int, float]] = {}
        """Node -> (when its newest beat came, bytes that wait there, seconds for which they have)."""
        self._unheard: dict[str, float] = {}
        """Node -> when the first answer was given since it last showed that it had heard one."""
        self._by_seen: list[tuple[float, str]] = []
        """A heap of (moment as of which its heads were known, node), one of each that was live when it came to the top."""
        self._in_heap = set[str]()
        self._absent, self._absent_at = AbsentNodes(), -math.inf

    def begin(self, nodes: Iterable[str], now: float) -> None:
        """Give nodes as long to report as any that falls silent."""
        self.at, self.newest_beat = dict.fromkeys(nodes, now), now
        self._by_seen, self._in_heap = [(-math.inf, node) for node in self.at], set(self.at)

    def take(self, beat: Beat, join: str, now: float) -> None:
        """Take note of what a node says. join: this process."""
        node = beat.node
        self.at[node] = self.newest_beat = now
        self._spoke[node] = (
            now,
            sum(one.waiting_bytes for one in beat.spools.values()),
            max((one.waiting_s for one in beat.spools.values()), default=0.0),
        )
        if beat.echo[0] == join and beat.echo[1] / 1e9 > self._seen_until.get(node, 0.0):
            self._seen_until[node] = beat.echo[1] / 1e9
            self._unheard.pop(node, None)
        self._unheard.setdefault(node, now)
        if node not in self._in_heap:
            self._in_heap.add(node)
            heapq.heappush(self._by_seen, (-math.inf, node))
        if beat.is_leaving:
            del self.at[node], self._spoke[node], self._unheard[node]

    def is_live(self, node: str, now: float) -> bool:
        """Return whether a node is waited for."""
        at = self.at.get(node)
        return at is not None and now - at < SILENT_S and now - self._unheard.get(node, now) < DEAF_S

    def deaf(self, now: float) -> list[str]:
        """Return the nodes that speak, and do not hear."""
        return sorted(
            node for node, since in self._unheard.items() if now - since >= DEAF_S and now - self.at[node] < SILENT_S
        )

    def seen_until(self, now: float) -> float:
        """Return the moment as of which it is known what the spools of all nodes held that are waited for."""
        while self._by_seen:
            at, node = self._by_seen[0]
            seen = self._seen_until.get(node, 0.0)
            if not self.is_live(node, now):
                heapq.heappop(self._by_seen)
                self._in_heap.discard(node)
            elif seen != at:
                heapq.heapreplace(self._by_seen, (seen, node))
            else:
                return at
        return now

    def not_seen(self, since: float, now: float) -> list[str]:
        """Return the nodes that are waited for of whose spools nothing is known as of a moment."""
        return sorted(one for one in self.at if self.is_live(one, now) and self._seen_until.get(one, 0.0) < since)

    def health(self, now: float) -> list[NodeHealth]:
        """Return how each node is that spoke within the hour."""
        return [
            NodeHealth(node=node, silent_s=now - at, lag_bytes=lag_bytes, lag_s=lag_s)
            for node, (at, lag_bytes, lag_s) in self._spoke.items()
            if now - at < FORGOTTEN_S
        ]

    def absent(self, now: float, of_any: Mapping[str, float], waited_for: Iterable[str]) -> AbsentNodes:
        """Return which nodes are silent, and which are waited for, as it was at most `ABSENT_S` ago.

        of_any: node -> when it spoke last of any run: a node whose run was deleted there says nothing of that one.
        """
        if now - self._absent_at >= ABSENT_S:
            silent = sorted(
                (now - of_any.get(node, at), node)
                for node, (at, _, _) in self._spoke.items()
                if SILENT_S <= now - at < FORGOTTEN_S and now - of_any.get(node, at) >= SILENT_S
            )
            waited = list(waited_for)
            named = tuple((node, silent_s) for silent_s, node in silent[:MAX_NODES_SAID])
            self._absent = AbsentNodes(named, len(silent), tuple(waited[:MAX_NODES_SAID]), len(waited))
            self._absent_at = now
        return self._absent
