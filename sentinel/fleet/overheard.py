"""Overheard: what nodes, workers and the join say within a while: all that `sentinel fleet status` knows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from sentinel.errors import WireError
from sentinel.fleet import subjects
from sentinel.fleet.broker import BrokerConfig, connect
from sentinel.fleet.ended_tasks import within
from sentinel.fleet.sealed import AbsentNodes, Answer, Beat, WorkerReport, unseal

if TYPE_CHECKING:
    from nats.aio.msg import Msg


HEARD = (subjects.BEATS, subjects.ANSWERS, subjects.FRAMES_BEATS, subjects.FRAMES_ANSWERS, subjects.WORKERS)
"""Subjects of all that is heard."""
_NOBODY = AbsentNodes()


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far one node's spools of one run have come."""

    run: str
    node: str
    num_spools: int
    waiting_bytes: int
    """Bytes that the node's spools hold and the join does not."""
    waiting_s: float
    """Seconds for which the longest-waiting of them has waited."""
    head: dict[str, tuple[str, int]]
    """Spool folder -> (file, offset) behind what its process has written."""
    held: dict[str, tuple[str, int]]
    """The same behind what the join holds."""
    acked: dict[str, tuple[int, int]]
    """Spool folder -> (file index, offset) behind what is committed, as the node has it."""
    join: str
    """The join that answers; empty: none does."""
    num_steps_of_digests: int
    """Steps that the join judged of digests, since it began."""
    num_steps_of_rows: int
    """Steps of which it asked for rows, those among them."""
    blocked: list[str]
    """Why something does not go on, in words."""
    found_alone: list[str]
    """What the node found by itself since no join answers, in words."""
    partition: int
    worker: str = ""
    """Which worker passes on what the node says; empty: it speaks to the join itself, or to a worker that is not there."""
    epoch: int = 0
    """Of that worker's lease of the partition."""
    silent: dict[str, float] = {}
    """Of the run, as the join says it: node of which nothing was heard -> seconds for which; a few of them."""
    num_silent: int = 0
    """All of these."""
    waited_for: list[str] = []
    """Of the run, as the join says it: nodes for which what others sent has waited for some seconds; a few of them."""
    num_waited_for: int = 0
    """All of these."""


async def overhear(
    broker: BrokerConfig, listen_s: float, on_worker: Callable[[WorkerReport], None] = lambda report: None
) -> list[NodeStatus]:
    """Return what is said of each run and node within so many seconds; TimeoutError: there is no broker.

    on_worker: told what workers say of themselves, several times each.
    """
    beats: dict[tuple[str, str], Beat] = {}
    answers: dict[tuple[str, str], Answer] = {}
    absent: dict[str, AbsentNodes] = {}
    to_workers: dict[tuple[str, str], Beat] = {}
    by_workers: set[tuple[str, str]] = set()

    async def take(message: Msg) -> None:
        with contextlib.suppress(WireError):
            kind = message.subject.split(".")[2] if message.subject.count(".") > 2 else ""
            if kind in ("beat", "frames-beat"):
                beat = unseal(message.data, Beat)
                (beats if kind == "beat" else to_workers)[beat.run, beat.node] = beat
            elif kind:
                answer = unseal(message.data, Answer)
                if kind == "answer" and not answer.stamp:
                    # To a worker that lost the node: it says nothing else.
                    answers.setdefault((answer.run, answer.node), answer)
                elif kind == "answer":
                    answers[answer.run, answer.node], absent[answer.run] = answer, answer.absent
                else:
                    by_workers.add((answer.run, answer.node))
            else:
                on_worker(unseal(message.data, WorkerReport))

    client = await within(5.0, connect(broker, "sentinel fleet status"))
    try:
        for subject in HEARD:
            await client.subscribe(subject, cb=take)
        await asyncio.sleep(listen_s)
    finally:
        await client.close()
    # What a worker says in a node's name knows more than what the node says to it.
    found = {**to_workers, **beats}
    join = next((one.join for one in answers.values() if one.stamp), "")
    return [
        _status(
            beat,
            answers.get(key),
            absent.get(beat.run, _NOBODY),
            is_unheard=key in to_workers.keys() - by_workers,
            join=join,
        )
        for key, beat in sorted(found.items())
    ]


def _status(
    beat: Beat, answer: Answer | None, absent: AbsentNodes = _NOBODY, *, is_unheard: bool, join: str = ""
) -> NodeStatus:
    """Return how a node is. absent: of its run, as the newest answer has it, to whomever. is_unheard: it ships to workers,
    and none answers. join: one that answers others; empty: none does."""
    said = answer.spools if answer is not None else {}
    blocked = [beat.blocked] if beat.blocked else []
    blocked += beat.refused
    blocked += sorted({one.refused for one in said.values() if one.refused})
    partition = subjects.partition_of(beat.node)
    if is_unheard:
        blocked.append(f"no worker answers, partition {partition}")
    elif answer is None:
        not_this = f"join {join} answers other nodes and not this one: has it the join's --key? See /healthz of the join"
        blocked.append(not_this if join else "no join answers")
    return NodeStatus(
        run=beat.run, node=beat.node, num_spools=len(beat.spools) + beat.num_quiet,
        waiting_bytes=sum(one.waiting_bytes for one in beat.spools.values()),
        waiting_s=max((one.waiting_s for one in beat.spools.values()), default=0.0),
        head={folder: (one.head.file, one.head.offset) for folder, one in beat.spools.items()},
        held={folder: (one.held.file, one.held.offset) for folder, one in said.items()},
        acked={folder: one.acked for folder, one in beat.spools.items()},
        num_steps_of_digests=answer.num_steps[0] if answer is not None else 0,
        num_steps_of_rows=answer.num_steps[1] if answer is not None else 0,
        join=answer.join if answer is not None else "", blocked=blocked, partition=partition, worker=beat.worker,
        epoch=beat.epoch, found_alone=beat.found_alone, silent=dict(absent.silent), num_silent=absent.num_silent,
        waited_for=list(absent.waited_for), num_waited_for=absent.num_waited_for,
    )  # fmt: skip
