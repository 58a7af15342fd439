"""WorkerHealth: what a worker of a fleet knows of itself and of the nodes behind it, as plain numbers and words."""

from __future__ import annotations

import msgspec


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A worker; of its nodes, those of the partitions that it has now."""

    is_connected: bool = False
    """There is a broker, and it answers."""
    is_renewed: bool = False
    """What it has of the partitions is its own, if it is nothing: others would know otherwise."""
    partitions: dict[int, int] = {}
    """Those that it has -> their epochs."""
    num_workers: int = 0
    """Workers among which it shares the partitions, itself included; 0: it has not looked yet."""
    num_nodes: int = 0
    """Nodes that spoke to it within the last hour."""
    num_silent: int = 0
    """Of them those that said nothing for 30 s."""
    held_bytes: int = 0
    """Bytes that came here and wait until their node has spoken since."""
    ahead_bytes: int = 0
    """Bytes that are here and that the join has not got."""
    waiting_bytes: int = 0
    """Bytes in the spools of nodes that the join has not got, as they said last."""
    lag_bytes: int = 0
    """Of them those that are not here either."""
    lag_s: float = 0.0
    """Seconds for which the longest-waiting of these has waited."""
    is_blocked: bool = False
    """Nothing goes on to the join."""
    are_copies_refused: bool = False
    """The disk does not take the copies of spools."""
    counts: dict[str, int] = {}
    """chunks, bytes, repeated, dropped, refused, taken_partitions, published_messages, published_bytes: since
    the beginning."""
    problems: tuple[str, ...] = ()
    """What is wrong, in words."""
