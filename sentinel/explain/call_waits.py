"""Who waited for whom in the collectives of a step, where the probe `comm` recorded its calls.

A collective ends for all of its ranks when the last of them has called it. Of one call the rank that took the least time
came last, and the others waited for it as much longer as their calls took. Of messages between two ranks (send, recv) nobody
recorded the other end, so nothing is said of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.messages import Descriptor, Vector
from sentinel.place import AXES, Place

CALLS = "calls"
"""Statistic of the vector that has a call in each row: (place among the step's calls, bytes, seconds, ranks of the group,
1 when its result was waited for)."""
_SECONDS, _GROUP, _WAITED = 2, 3, 4
_BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


class CallWait(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank waited for others at one line of code, in one step."""

    call: str
    """`all_reduce@train.py:41`."""
    rank: int
    """Who waited."""
    behind: int
    """Who came last most of the time."""
    seconds: float
    num_calls: int


def call_waits(
    vectors: Mapping[int, Sequence[Vector]], descriptors: Mapping[int, Descriptor], least_s: float = 0.001
) -> list[CallWait]:
    """Return who waited for whom, the longest first; of waits below `least_s` seconds in all nothing.

    vectors, descriptors: by rank, of one step. Empty too where no call was recorded, or the groups are not known.
    """
    sites: dict[str, dict[int, npt.NDArray[np.float64]]] = defaultdict(dict)
    for rank, of_rank in vectors.items():
        names = {one.id: one.name for one in descriptors[rank].tensors}
        for one in of_rank:
            name = names.get(one.tensor, "")
            if one.statistic == CALLS and len(one.shape) == 2 and name.partition("@")[0] not in _BETWEEN_TWO:
                sites[name][rank] = np.frombuffer(one.values, np.dtype(one.dtype)).astype(np.float64).reshape(one.shape)
    places = {rank: one.place for rank, one in descriptors.items()}
    found = [wait for name, calls in sites.items() for wait in _of_site(name, calls, places, least_s)]
    return sorted(found, key=lambda one: (-one.seconds, one.call, one.rank))


def _of_site(
    name: str, calls: Mapping[int, npt.NDArray[np.float64]], places: Mapping[int, Place], least_s: float
) -> Iterable[CallWait]:
    whole = {rank: one for rank, one in calls.items() if one.shape[1] > _WAITED and np.isfinite(one).all()}
    for ranks in _groups(whole, places):
        # Of a call whose wait was not seen, the seconds say nothing.
        seen = np.stack([whole[rank][:, _WAITED] > 0 for rank in ranks]).all(axis=0)
        if not seen.any():
            continue
        seconds = np.stack([whole[rank][seen, _SECONDS] for rank in ranks])
        last = seconds.argmin(axis=0)
        waited = seconds - seconds.min(axis=0)
        for at, rank in enumerate(ranks):
            total = float(waited[at].sum())
            if total >= least_s:
                others = Counter(last[waited[at] > 0].tolist())
                behind = ranks[others.most_common(1)[0][0]]
                yield CallWait(call=name, rank=rank, behind=behind, seconds=total, num_calls=int(seconds.shape[1]))


def _groups(calls: Mapping[int, npt.NDArray[np.float64]], places: Mapping[int, Place]) -> Iterable[list[int]]:
    """Yield the ranks of each group that made the same calls: all of them, or those along the one axis that is as long."""
    sizes = {int(size) for one in calls.values() for size in one[:, _GROUP]}
    if len(sizes) != 1 or len({len(one) for one in calls.values()}) != 1:
        return
    [size] = sizes
    if size == len(calls) > 1:
        yield sorted(calls)
        return
    axes = [axis for axis in AXES if axis != "ep" and {places[rank].size(axis) for rank in calls} == {size}]
    if size < 2 or len(axes) != 1:
        return
    lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(calls):
        lines[tuple(places[rank].coordinate(axis) for axis in AXES if axis not in (*axes, "ep"))].append(rank)
    yield from (ranks for ranks in lines.values() if len(ranks) == size)
