"""copies_health: what people are told of the copies of a join: which nodes are silent, deaf or behind, and what is held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from sentinel.fleet.heard_nodes import MAX_NODES_SAID, SILENT_S
from sentinel.fleet.intake_tally import IntakeTally
from sentinel.fleet.run_copies import RunCopies
from sentinel.join_health import JoinHealth, NodeHealth
from sentinel.printable import printable


def health_of(
    runs: Mapping[str, RunCopies], tally: IntakeTally, counts: Mapping[str, int], now: float, *, max_held_bytes: int
) -> JoinHealth:
    """Return what is known of nodes, of what is held, and of what went wrong. now: monotonic seconds.

    counts: further ones than the tally's. max_held_bytes: most that is held before nothing more is taken.
    """
    nodes = _by_node(one for run in runs.values() for one in run.heard.health(now))
    held_bytes = sum(run.waiting.num_bytes for run in runs.values())
    silent = sorted(one.node for one in nodes if one.silent_s >= SILENT_S)
    problems = list(tally.problems())
    if silent:
        more = f" and {len(silent) - MAX_NODES_SAID} more" if len(silent) > MAX_NODES_SAID else ""
        problems.append(
            f"nodes that said nothing for {SILENT_S:g} s or longer, and are waited for no more: {_names(silent)}{more}"
        )
    if held_bytes >= max_held_bytes:
        problems.append(f"{held_bytes >> 20} MiB are held for nodes that are behind: nothing more is taken")
    problems += (one for name, run in runs.items() for one in _problems_of(name, run, now))
    return JoinHealth(
        nodes=nodes, num_silent=len(silent), held_bytes=held_bytes, are_copies_refused=bool(tally.disk_problem),
        counts={**tally.counts, **counts}, problems=tuple(problems),
    )  # fmt: skip


def _problems_of(name: str, run: RunCopies, now: float) -> Iterator[str]:
    if deaf := run.heard.deaf(now):
        yield (
            f"run {printable(name)}: nodes that speak and do not hear the answers, and are waited for no more: "
            f"{_names(deaf)}; are they given our --key, and may their login hear?"
        )
    if run.waiting.num_bytes and now - run.waiting.dropped_at < SILENT_S:
        yield (
            f"run {printable(name)}: {run.waiting.num_bytes >> 20} MiB wait for nodes that are behind, "
            f"{_names(run.waits_for(now))}; more of it is dropped, and comes again"
        )


def _names(nodes: Iterable[str]) -> str:
    return ", ".join(map(printable, list(nodes)[:MAX_NODES_SAID]))


def _by_node(found: Iterable[NodeHealth]) -> tuple[NodeHealth, ...]:
    """Return one for each node, which may have ranks of several runs."""
    nodes = dict[str, NodeHealth]()
    for one in found:
        other = nodes.get(one.node, one)
        nodes[one.node] = msgspec.structs.replace(
            one, silent_s=min(one.silent_s, other.silent_s), lag_s=max(one.lag_s, other.lag_s),
            lag_bytes=one.lag_bytes + (other.lag_bytes if other is not one else 0),
        )  # fmt: skip
    return tuple(nodes.values())
