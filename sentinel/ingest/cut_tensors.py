"""Of which tensors a step has a part only: a rank lost rows, or left out kinds that others measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sentinel.ingest.merge import ClosedStep


def cut_tensors(view: ClosedStep) -> npt.NDArray[np.bool_] | None:
    """Return whether a rank that lost rows, or left some out, holds the tensor and has no row of it: [num_tensors].

    The others' are a part. None: no rank lost or left out any.
    """
    of_decision = view.decision.ranks if view.decision is not None else ()
    losers = frozenset(one.rank for one in of_decision if one.num_lost)
    left_out = {part.rank: part.end_step.left_out if part.end_step is not None else () for part in view.parts}
    is_uneven = len({frozenset(kinds) for kinds in left_out.values()}) > 1
    if not losers and not is_uneven:
        return None
    found = np.zeros(len(view.tensors), np.bool_)
    for part in view.parts:
        # What all left out the same nobody has.
        kinds = left_out[part.rank] if is_uneven else ()
        if part.rank not in losers and not kinds:
            continue
        held, came = view.layout.table_of(part.rank), view.tensors_of(part.rank)
        lacking = np.zeros(len(view.tensors), np.bool_)
        lacking[held[held >= 0]] = True
        lacking[came[came >= 0]] = False
        found |= lacking if part.rank in losers else lacking & np.isin(view.layout.kinds, kinds)
    return found
