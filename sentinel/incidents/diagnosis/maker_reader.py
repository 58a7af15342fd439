"""What made the tensors that are not finite, read from a closed step: the functions of their module, and what went in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sentinel.anomaly import Anomaly, is_nonfinite
from sentinel.incidents.diagnosis.step_facts import FirstBad, Maker, TensorReading
from sentinel.kinds import ACTIVATION_KINDS, BACKWARD_KINDS, labels
from sentinel.order.origin import maker_of
from sentinel.step_view import StepView

MAX_MAKERS = 32
"""Most tensors of a step whose makers are read, in the order of the step: a bound on time."""
MAX_READINGS = 8
"""Most inputs of one of them that are read: a bound on time."""
MAX_BACK = 4
"""Most modules that minus infinities are followed back through: a bound on time."""
_OF_FORWARD = labels(ACTIVATION_KINDS)
_OF_BACKWARD = labels(BACKWARD_KINDS)


class MakerReader:
    """Reads one layout's steps; remembers where its tensors are."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[int]] = {}
        """(kind, name) -> places of tensors of the forward; made when it is asked for."""
        self._read_by: dict[str, list[int]] = {}
        """Module -> places of the outputs of others that it reads."""

    def read(self, view: StepView, anomalies: Sequence[Anomaly], first_bad: Sequence[FirstBad]) -> dict[str, Maker]:
        """Return `<rank>/<kind>/<name>` -> what made it, of the first bad tensors and of those that anomalies name."""
        wanted = [(one.rank, one.kind, one.name) for one in first_bad]
        for one in anomalies:
            if one.event == "onset" and one.rank is not None and is_nonfinite(one) and len(wanted) < MAX_MAKERS:
                if one.kind in _OF_FORWARD:
                    wanted.append((one.rank, one.kind, one.tag_name))
                elif one.kind in _OF_BACKWARD:
                    wanted += [(one.rank, "activation", name) for name in (one.tag_name, *one.consumers)]
        if wanted and not self._places:
            self._learn(view)
        return {
            f"{rank}/{kind}/{name}": self._maker(view, rank, index)
            for rank, kind, name in dict.fromkeys(wanted)
            for index in self._places.get((kind, name), ())
        }

    def _learn(self, view: StepView) -> None:
        for tensor in view.tensors:
            if tensor.kind in _OF_FORWARD:
                self._places.setdefault((tensor.kind, tensor.name), []).append(tensor.index)
                for name in tensor.also:  # Of what modules put out.
                    self._places.setdefault(("activation", name), []).append(tensor.index)
                for name in tensor.consumers:
                    self._read_by.setdefault(name, []).append(tensor.index)

    def _maker(self, view: StepView, rank: int, index: int, depth: int = MAX_BACK) -> Maker:
        tensor = view.tensors[index]
        inputs: list[int] = []
        for made_by in (maker_of(tensor.name, tensor.border, tensor.also), tensor.name) if tensor.border else (tensor.name,):
            inputs += self._read_by.get(made_by, ())
            for name in (made_by, f"{made_by}:1"):
                inputs += self._places.get(("activation_in", name), ())
            if any(at != index for at in inputs):
                break  # The innermost module that is seen.
        if not inputs and tensor.border_index > 0:
            before = tensor.depth, tensor.border_index - 1
            of_forward = [one for one in view.tensors if one.kind in _OF_FORWARD]
            inputs = [one.index for one in of_forward if (one.depth, one.border_index) == before]
        named = [one.partition(":")[2] for one in tensor.functions or () if ":" in one]
        arguments = [at for name in named for kind in _OF_FORWARD for at in self._places.get((kind, name), ())]
        inputs = [at for at in inputs if at != index]
        for at in inputs if depth else ():
            # A rule takes minus infinities for a mask, so that what they make of others is the first that it reports.
            if view.tensors[at].functions and any(one.is_bad for one in _readings(view, rank, [at])):
                return self._maker(view, rank, at, depth - 1)
        return Maker(
            name=tensor.name,
            functions=tensor.functions,
            inputs=_readings(view, rank, inputs),
            arguments={one.name: one for one in _readings(view, rank, arguments)},
            dtype=tensor.dtype,
            is_inf=not view.rows["num_nan"][(view.row_logical == index) & (view.row_rank == rank)].any(),
        )


def _readings(view: StepView, rank: int, places: Sequence[int]) -> tuple[TensorReading, ...]:
    found = []
    for index in places[:MAX_READINGS]:
        for at in np.flatnonzero((view.row_logical == index) & (view.row_rank == rank)).tolist():
            row = view.rows[at]
            is_bad = bool(row["num_nan"] or row["num_pos_inf"] or row["num_neg_inf"])
            name, smallest, largest = view.tensors[index].name, float(row["min"]), float(row["max"])
            found.append(
                TensorReading(name=name, smallest=smallest, largest=largest, num_zero=int(row["num_zero"]), is_bad=is_bad)
            )
    return tuple(found)
