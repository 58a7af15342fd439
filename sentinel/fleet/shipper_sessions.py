"""ShipperSessions: whether one shipper speaks as a node, or several do: machines that were given one name."""

from __future__ import annotations

import math
from collections import defaultdict, deque

RETURNED_S = 30.0
"""A session that comes again so much later, or more, is no sign: nobody keeps beats back for so long, nor two so slow."""
MIN_RETURNS = 10
"""So often within that time sessions come again where several shippers live: each speaks every two seconds at least. A few
beats of a shipper that was just ended may come behind the first of the next one."""
MAX_LEFT = 64
"""No shipper begins anew so often within that time; of more it is not known when they spoke."""


class ShipperSessions:
    """Of the nodes of one run. A shipper draws its session when it begins: where a node has only one, none comes again that
    was left for another. Moments are monotonic seconds."""

    def __init__(self) -> None:
        self._newest: dict[str, str] = {}
        self._left = defaultdict[str, dict[str, float]](dict)
        """Node -> session -> when another one spoke behind it, rising."""
        self._returns = defaultdict[str, deque[float]](lambda: deque(maxlen=MIN_RETURNS))
        """Node -> when a session came again."""

    def is_shared(self, node: str, session: str, now: float) -> bool:
        """Take in who speaks as a node; return whether this shows, with what came before, that several do."""
        newest = self._newest.get(node, session)
        self._newest[node] = session
        if newest == session:
            return False
        left, returns = self._left[node], self._returns[node]
        if now - left.pop(session, -math.inf) < RETURNED_S:
            returns.append(now)
        left[newest] = now
        for one in [one for one, at in left.items() if now - at >= RETURNED_S]:
            del left[one]
        if len(left) >= MAX_LEFT:
            del left[next(iter(left))]
            return True
        return len(returns) == MIN_RETURNS and now - returns[0] < RETURNED_S
