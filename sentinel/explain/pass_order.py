"""What each rank did in a step: passes of micro-steps through chunks, in program order, and where each stands when drawn.

No record says when a pass began. Its rows have the order in which their rank measured them (call_id), so that the order of
the passes of one rank is known; between ranks a micro-step goes up the chunks of the model and comes down again. A drawing
puts each pass, all of them equally wide, as early as these two orders allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.kinds import KINDS, Phase
from sentinel.messages import Descriptor
from sentinel.record import Flag, Kind
from sentinel.step_view import RankStep

FORWARD, BACKWARD, WGRAD = "F", "B", "W"
"""Ways of a pass; W: a stretch of weight gradients alone, as zero-bubble schedules have it."""
ALL = -1
"""The micro-step of a pass whose rows were folded over all of them."""
MOST_PASSES = 4096
"""Passes of one rank that are drawn; a bound on an answer."""

_NONE, _FORWARD, _BACKWARD, _WGRAD = range(4)
_WORDS = {_FORWARD: FORWARD, _BACKWARD: BACKWARD, _WGRAD: WGRAD}
_OF_PHASE = {Phase.FORWARD: _FORWARD, Phase.BACKWARD: _BACKWARD, Phase.WGRAD_UNREDUCED: _WGRAD}
_WAY_OF_KIND = np.full(256, _NONE, np.int64)
for _kind in Kind:
    _phase = KINDS[_kind].phase
    _WAY_OF_KIND[int(_kind)] = _NONE if _phase is None else _OF_PHASE.get(_phase, _NONE)


class MicroPass(msgspec.Struct, frozen=True, array_like=True):
    """One micro-step on its way through one chunk."""

    way: str
    """`F`, `B` or `W`."""
    vpp_stage: int
    micro_step: int
    """ALL: the rows of all micro-steps were folded into one."""


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did in the step, in its program order."""

    rank: int
    lane: tuple[int, ...]
    """Where it stands on all axes but the pipeline's: ranks of one lane hand micro-steps to one another."""
    pp_stage: int
    depths: tuple[tuple[int, int], ...]
    """(vpp_stage, depth in the whole model) of each of its chunks."""
    passes: tuple[MicroPass, ...]

    @property
    def is_folded(self) -> bool:
        """Whether the order of its micro-steps is not known."""
        return any(one.micro_step == ALL for one in self.passes)


class RankOrders:
    """Makes the orders of the ranks of a step. Ranks whose rows tell the same share one tuple of passes."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, ...], tuple[MicroPass, ...]] = {}

    def of(self, part: RankStep) -> RankOrder:
        """Return what a rank did in a step, by the rows that it has of it."""
        place, rows = part.descriptor.place, part.rows
        chunks = _chunks(part.descriptor, rows["tensor"])
        told = (*(rows[name].tobytes() for name in ("kind", "micro_step", "flags", "call_id")), chunks.tobytes())
        passes = self._known.get(told)
        if passes is None:
            passes = self._known.setdefault(told, tuple(_passes(rows, chunks)))
        return RankOrder(
            rank=part.rank,
            lane=(place.dp_rank, place.tp_rank, place.cp_rank, place.ep_rank),
            pp_stage=place.pp_rank,
            depths=tuple((one.vpp_stage, one.depth) for one in part.descriptor.chunks),
            passes=passes,
        )


def _passes(rows: npt.NDArray[np.void], chunks: npt.NDArray[np.int64]) -> list[MicroPass]:
    """Return the passes that rows tell of. chunks: [rows], the vpp_stage of each."""
    way = _WAY_OF_KIND[rows["kind"]]
    micro_step = rows["micro_step"].astype(np.int64)
    kept = np.flatnonzero((way != _NONE) & ((micro_step >= 0) | (rows["flags"] & int(Flag.FOLDED) != 0)))
    kept = kept[np.argsort(rows["call_id"][kept], kind="stable")]
    way, micro_step, chunk = way[kept], micro_step[kept], chunks[kept]
    # A backward makes gradients of data and of weights by turns: they are one pass.
    direction = np.where(way == _WGRAD, _BACKWARD, way)
    key = np.stack([direction, chunk, micro_step])
    first = np.flatnonzero(np.r_[True, (key[:, 1:] != key[:, :-1]).any(axis=0)]) if len(kept) else np.empty(0, np.int64)
    ends = np.r_[first[1:], len(kept)]
    found = []
    for begin, end in zip(first[:MOST_PASSES].tolist(), ends.tolist(), strict=False):
        is_wgrad = bool((way[begin:end] == _WGRAD).all())
        word = WGRAD if is_wgrad else _WORDS[int(direction[begin])]
        found.append(MicroPass(word, int(chunk[begin]), int(micro_step[begin])))
    return found


def _chunks(descriptor: Descriptor, tensors: np.ndarray) -> npt.NDArray[np.int64]:
    size = 1 + max((one.id for one in descriptor.tensors), default=0)
    chunks = np.zeros(size, np.int64)
    for one in descriptor.tensors:
        chunks[one.id] = one.chunk
    return chunks[np.minimum(tensors.astype(np.int64), size - 1)]


def places_of(orders: Iterable[RankOrder]) -> dict[int, tuple[int, ...]]:
    """Return rank -> the column at which each of its passes stands: 0 and up, rising.

    A forward comes behind that of the chunk before it, a backward behind that of the chunk after it and behind the forward
    of the last chunk; what is not there is not waited for. Ranks of lanes that did the same stand alike.
    """
    lanes: dict[tuple[int, ...], list[RankOrder]] = {}
    for one in orders:
        lanes.setdefault(one.lane, []).append(one)
    known: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    found: dict[int, tuple[int, ...]] = {}
    for lane in lanes.values():
        lane.sort(key=lambda one: (one.pp_stage, one.rank))
        key = tuple((one.depths, one.passes) for one in lane)
        if key not in known:
            known[key] = _placed(lane)
        found.update(zip((one.rank for one in lane), known[key], strict=True))
    return found


def _placed(lane: Sequence[RankOrder]) -> list[tuple[int, ...]]:
    steps = [[(one.way, dict(rank.depths).get(one.vpp_stage, 0), one.micro_step) for one in rank.passes] for rank in lane]
    left = {item for rank in steps for item in rank}
    last = max((at for _, at, _ in left), default=0)
    ends: dict[tuple[str, int, int], int] = {}
    columns: list[list[int]] = [[] for _ in lane]
    while any(len(at) < len(rank) for at, rank in zip(columns, steps, strict=True)):
        has_moved = False
        for at, rank in zip(columns, steps, strict=True):
            while len(at) < len(rank):
                before = [one for one in _before(rank[len(at)], last) if one in left]
                if any(one not in ends for one in before):
                    break
                _place(at, rank, ends, max((ends[one] for one in before), default=0))
                has_moved = True
        if not has_moved:
            # The two orders contradict each other (rows were lost): whoever is furthest behind goes on by its own.
            waiting = [at for at, rank in enumerate(steps) if len(columns[at]) < len(rank)]
            behind = min(waiting, key=lambda one: columns[one][-1] if columns[one] else -1)
            _place(columns[behind], steps[behind], ends, 0)
    return [tuple(one) for one in columns]


def _place(
    at: list[int], rank: Sequence[tuple[str, int, int]], ends: dict[tuple[str, int, int], int], earliest: int
) -> None:
    item = rank[len(at)]
    at.append(max(earliest, at[-1] + 1 if at else 0))
    ends.setdefault(item, at[-1] + 1)


def _before(item: tuple[str, int, int], last: int) -> list[tuple[str, int, int]]:
    way, at, micro_step = item
    if way == FORWARD:
        return [(FORWARD, at - 1, micro_step)]
    if way == WGRAD:
        return [(BACKWARD, at, micro_step)]
    return [(BACKWARD, at + 1, micro_step), (FORWARD, last, micro_step)]


def words_of(passes: Sequence[MicroPass]) -> str:
    """Return an order in words: `F0 F1 B0 B1`; where there are several chunks with the chunk: `F0.1`; `F*`: all folded."""
    has_many = len({one.vpp_stage for one in passes}) > 1
    return " ".join(
        one.way + ("*" if one.micro_step == ALL else str(one.micro_step)) + (f".{one.vpp_stage}" if has_many else "")
        for one in passes
    )
