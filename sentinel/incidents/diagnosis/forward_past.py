"""ForwardPast: what a replica measured in a step's forward before a place, held against what the others measured there."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sentinel.incidents.diagnosis.step_facts import Upstream
from sentinel.kinds import ACTIVATION_KINDS
from sentinel.step_view import StepView

UNLIKE = 8.0
"""Times that a tensor of one replica is larger or smaller than in the others when it is unlike them. Smaller: other batches
make replicas unlike; larger: a replica that went wrong by less passes for like."""
FORWARD_NUMBERS = tuple(int(kind) for kind in ACTIVATION_KINDS)


class _Largest(NamedTuple):
    """What replicas measured of the forward: an entry each tensor and replica, tensors rising, and replicas of one."""

    tensor: np.ndarray
    lane: np.ndarray
    rms: np.ndarray
    """The largest of the rows."""
    peak: np.ndarray
    was_bad: np.ndarray
    """Whether any of the rows holds a non-finite value."""


class ForwardPast:
    """Of one step: the largest of each tensor and replica is formed once, and only where a place has something before it."""

    def __init__(self, view: StepView, *, depth: np.ndarray, is_forward: np.ndarray, lane_of: np.ndarray) -> None:
        """view: with the rows of the forward. depth, is_forward: [tensors] as of `LogicalTensor.depth`, and whether it is of
        the forward and merged over replicas. lane_of: [ranks] the replica of each.
        """
        self._view, self._depth, self._is_forward, self._lane_of = view, depth, is_forward, lane_of

    @cached_property
    def _largest(self) -> _Largest:
        view, rows = self._view, self._view.rows
        at = np.flatnonzero(np.isin(rows["kind"], FORWARD_NUMBERS) & (view.row_logical >= 0))
        at = at[self._is_forward[view.row_logical[at]]]
        tensor, lane = view.row_logical[at].astype(np.int64), self._lane_of[view.row_rank[at]]
        order = np.argsort(tensor * (int(lane.max(initial=0)) + 1) + lane, kind="stable")
        at, tensor, lane = at[order], tensor[order], lane[order]
        count = np.maximum(rows["count"][at].astype(np.float64), 1.0)
        with np.errstate(all="ignore"):
            rms = np.sqrt(rows["m2"][at] / count + rows["mean"][at] ** 2)
            peak = np.maximum(np.abs(rows["min"][at]), np.abs(rows["max"][at]))
        is_bad = (rows["num_nan"][at] | rows["num_pos_inf"][at] | rows["num_neg_inf"][at]) != 0
        starts = np.flatnonzero(np.r_[np.ones(min(len(at), 1), np.bool_), (np.diff(tensor) != 0) | (np.diff(lane) != 0)])
        if len(at):
            rms, peak = np.maximum.reduceat(rms, starts), np.maximum.reduceat(peak, starts)
            is_bad = np.logical_or.reduceat(is_bad, starts)
        return _Largest(tensor[starts], lane[starts], rms, peak, is_bad)

    def upstream(self, depth: int, position: int, lane: int) -> Upstream:
        """Hold what a replica measured before a place, a depth and the position of a site, against the other replicas'."""
        is_earlier = (self._depth < depth) | ((self._depth == depth) & (self._view.site_pos < position))
        before = np.flatnonzero(is_earlier[self._largest.tensor]) if (is_earlier & self._is_forward).any() else ()
        if not len(before):
            return Upstream(num_measured=0, num_blocks=0)
        of_tensor, of_lane, rms, peak, was_bad = (one[before] for one in self._largest)
        largest = {"rms": rms, "largest value": peak}
        ends = np.flatnonzero(np.r_[np.diff(of_tensor) != 0, True]) + 1
        num_measured = num_blocks = begin = 0
        unlike = ""
        for end in ends.tolist():
            own = np.flatnonzero(of_lane[begin:end] == lane) + begin
            if len(own) and end - begin > 1:
                info = self._view.tensors[int(of_tensor[begin])]
                num_measured += 1
                num_blocks += info.border == "block_output"
                for name, values in largest.items():
                    here = float(values[own[0]])
                    usual = float(np.median(np.delete(values[begin:end], own[0] - begin)))
                    is_unlike = not math.isfinite(here) or here > UNLIKE * usual or usual > UNLIKE * here
                    if not unlike and (was_bad[own[0]] or (is_unlike and usual > 0)):
                        unlike = f"the {name} of {info.kind} of {info.name} was {here:.3g} against {usual:.3g} elsewhere"
            begin = end
        return Upstream(num_measured=num_measured, num_blocks=num_blocks, unlike=unlike)
