"""Values that no merge of shards' values can give: ratios and angles of whole tensors, formed of sums over all shards.

Each rank that holds a shard sends its own sums beside its own value. Of two sums, the value is the root of the first over
the second (`update_ratio`: the squares of the update, and of the weights before it); of three, the first over the root of
the product of the others (a cosine: the product, and both squares). Ranks of older versions send no sums: their values
stay theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sentinel.ingest.digest import Digest
from sentinel.record import NO_ANGLE, NO_SCALE, STATS_DTYPE

if TYPE_CHECKING:
    from sentinel.ingest.merge import ClosedStep
    from sentinel.ingest.model_layout import ModelLayout

NUM_SUMS = (2, 3)
"""Numbers of sums that a value is formed of."""


class WholeTensorValues:
    """What is formed in one layout; built once, used every step."""

    def __init__(self, layout: ModelLayout) -> None:
        parts: dict[int, tuple[int, ...]] = {}
        for rank, descriptor in layout.descriptors.items():
            for tensor in descriptor.tensors:
                if len(tensor.parts) in NUM_SUMS:
                    ids = np.array([tensor.id, *tensor.parts], np.uint32)
                    value, *sums = (int(one) for one in layout.logical_of(rank, ids))
                    if value >= 0 and min(sums) >= 0:
                        parts.setdefault(value, tuple(sums))
        self._of = {
            number: (
                np.array([value for value, sums in parts.items() if len(sums) == number], np.intp),
                np.array([sums for sums in parts.values() if len(sums) == number], np.intp).reshape(-1, number),
            )
            for number in NUM_SUMS
        }
        self._is_part = np.zeros(len(layout.tensors) + 1, np.bool_)
        """[num_tensors + 1]; the last stands for tensors that no descriptor knows."""
        self._is_part[[one for sums in parts.values() for one in sums]] = True
        self._num_copies = layout.num_copies

    def form(self, view: ClosedStep, found: Digest) -> Digest:
        """Return the digest of a step with the values formed; those of which a rank's own is not finite stay as they are."""
        if not self._is_part.any():
            return found
        sums, is_there = self._sums(view)
        stats, present = found.stats.copy(), found.present.copy()
        for number, (index, of) in self._of.items():
            values, is_defined = _quotients(sums[of]) if number == 2 else _cosines(sums[of])
            is_known = is_there[of].all(axis=1) & ~found.is_bad[index]
            here, values, is_defined = index[is_known], values[is_known], is_defined[is_known]
            made = np.zeros(len(here), STATS_DTYPE)
            made["count"], made["num_zero"] = is_defined, is_defined & (values == 0.0)
            made["mean"] = np.where(is_defined, values, 0.0)
            made["min"], made["max"] = np.where(is_defined, values, np.inf), np.where(is_defined, values, -np.inf)
            stats[here], present[here] = made, is_defined
        return found._replace(stats=stats, present=present)

    def spread(self, is_cut: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which tensors are not whole, [num_tensors]: those given, and what is formed of sums that are not."""
        found = is_cut.copy()
        for index, of in self._of.values():
            found[index] |= is_cut[of].any(axis=1)
        return found

    def _sums(self, view: ClosedStep) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return the sums over all shards, and whether any came, [num_tensors + 1] each: of copies, the lowest rank's."""
        view = view.carrying(frozenset())
        sums, is_there = np.zeros(len(self._is_part)), np.zeros(len(self._is_part), np.bool_)
        logical = view.row_logical
        at = np.flatnonzero(self._is_part[logical] & (view.rows["count"] == 1) & (view.row_copy < self._num_copies))
        # Ranks rise along the rows: the first row of a copy is that of the lowest rank.
        _, first = np.unique(view.row_copy[at], return_index=True)
        at = at[first]
        np.add.at(sums, logical[at], view.rows["mean"][at])
        is_there[logical[at]] = True
        return sums, is_there


def _quotients(sums: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return the roots of the first over the second of [n, 2] sums of squares, and where they are defined."""
    norms = np.sqrt(np.maximum(sums, 0.0))
    is_defined = ~(norms[:, 1] <= NO_SCALE * norms[:, 0])
    return np.divide(norms[:, 0], norms[:, 1], out=np.zeros(len(norms)), where=is_defined), is_defined


def _cosines(sums: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return the cosines of [n, 3] products and squares, and where they are defined."""
    norms = np.sqrt(np.maximum(sums[:, 1], 0.0)) * np.sqrt(np.maximum(sums[:, 2], 0.0))
    is_defined = norms > NO_ANGLE
    return np.clip(np.divide(sums[:, 0], norms, out=np.zeros(len(norms)), where=is_defined), -1.0, 1.0), is_defined
