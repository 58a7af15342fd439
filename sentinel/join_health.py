"""JoinHealth: what the join of a fleet knows of itself and its nodes, as plain numbers and words."""

from __future__ import annotations

import msgspec


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One node as its own beats have it, over all of its runs."""

    node: str
    silent_s: float
    """Since its newest beat."""
    lag_bytes: int
    """Bytes of its spools that the join does not hold."""
    lag_s: float
    """Seconds for which the longest-waiting of them has waited."""


class JoinHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A join, whether it works or stands by."""

    is_active: bool = False
    """It holds the lease, and judges."""
    epoch: int = 0
    """Of the lease, the highest that was seen: one more with each join that took over."""
    is_connected: bool = False
    """There is a broker, and it answers."""
    nodes: tuple[NodeHealth, ...] = ()
    """Nodes that spoke to this process, within the last hour."""
    num_silent: int = 0
    """Of them those that are waited for no more."""
    held_bytes: int = 0
    """Bytes that are held until every node has spoken since."""
    are_copies_refused: bool = False
    """The disk does not take the copies of spools."""
    counts: dict[str, int] = {}
    """`chunks`, `bytes`, `repeated`, `dropped`, `refused`, `digested_steps`, `fetched_steps`, `gone_frames`, `shared_names`:
    since the beginning."""
    problems: tuple[str, ...] = ()
    """What is wrong, in words."""
