"""A histogram of each tensor of the kinds whose schedule asks for one: sign and power of two, bins that never change.

Bins that are the same everywhere add up: over micro-steps, shards, ranks and runs. What is not finite is in no bin; the
tensor's row counts it.
"""

from __future__ import annotations

import torch

from sentinel.collect.hooks.loss_scale import carried
from sentinel.collect.parallel.placements import local_of
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.piecewise_rows import ROOM, side_by_side
from sentinel.collect.rows.buffer import DGRAD_KINDS, UNDIVIDED_KINDS, scaled_kinds
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.kinds import MEASURED_KINDS
from sentinel.record import Kind

LEAST, MOST, END = -64, 16, 128
"""|x| below 2**LEAST is in the bin around zero; the last bin on either side reaches from 2**MOST to 2**END."""
PER_SIDE = MOST - LEAST + 1
NUM_BINS = 2 * PER_SIDE + 1
_ABOVE = (*(2.0**power for power in range(LEAST, MOST + 1)), 2.0**END)
EDGES = (*(-edge for edge in reversed(_ABOVE)), *_ABOVE)
"""164 edges of 163 bins: -2**128, -2**16, -2**15, ..., -2**-64, 2**-64, ..., 2**16, 2**128. A bin holds its edge nearer to
zero, not the other; the middle one holds zeros and neither edge."""
STATISTIC = "histogram"
FOLD_AT = 512
"""Vectors of this probe after which micro-steps are added up before the step ends."""


class Histogram:
    """Counts every measured tensor of a kind into bins, in the steps in which its schedule says `histogram: true`."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._kinds: frozenset[int] = frozenset()
        self._num_added = 0
        context.look_while(STATISTIC, self._is_wanted, self.look)
        context.events.ending.subscribe(STATISTIC, self._end)

    def _is_wanted(self) -> bool:
        plan = self._context.plan
        self._kinds = frozenset(
            int(kind) for kind in MEASURED_KINDS if plan.config.schedule_of(kind).histogram and plan.wants(kind)
        )
        return bool(self._kinds)

    def look(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> None:
        """Count the elements of one tensor, if this step wants a histogram of its kind. Does not wait."""
        if entry.kind not in self._kinds or not self._context.plan.measures(entry, Kind(entry.kind)):
            return
        with torch.no_grad():
            scale = self._scale(entry.kind)
            if entry.kind in DGRAD_KINDS:
                scale = scale * self._context.recording.rows.dgrad_divisor
            counts = counted(local_of(tensor).detach(), scale)
        self._context.recording.vector(entry, STATISTIC, counts, "bin", micro_step, EDGES)
        self._num_added += 1
        if self._num_added % FOLD_AT == 0:
            self._fold()

    def _scale(self, kind: int) -> torch.Tensor | float:
        """Return what the loss was multiplied by, if gradients of this kind carry that now: rows are divided later."""
        scale = carried(kind)
        if scale is not None:
            return scale
        rows = self._context.recording.rows
        if not isinstance(rows.grad_scale, torch.Tensor) and rows.grad_scale != 1.0:  # DeepSpeed's.
            return rows.grad_scale if kind in scaled_kinds(rows.wgrads_are_scaled) else 1.0
        own = getattr(self._context.parameters.storage, "loss_scale", None)  # Megatron's, which reads them unscaled.
        return own if own is not None and kind in UNDIVIDED_KINDS else 1.0

    def _fold(self) -> None:
        self._context.recording.vectors.add_up(STATISTIC, keeps_micro_steps=self._context.plan.per_micro_step)

    def _end(self) -> None:
        if self._num_added:
            self._fold()
            self._num_added = 0


def counted(tensor: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return [NUM_BINS] int64: how many finite elements of a tensor over `scale` fall into each bin. Never waits."""
    total = torch.zeros(NUM_BINS + 1, dtype=torch.int64, device=tensor.device)
    for (piece,) in side_by_side([tensor], ROOM // 4):
        if piece.numel():
            total += _tallied(bin_of(piece, scale))
    return total[:NUM_BINS]


def bin_of(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return the number of the bin of each element over `scale`, int32, flat; NUM_BINS for what is not finite."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.to(torch.float64 if not x.is_floating_point() else torch.float32)
    x = x.reshape(-1)
    if isinstance(scale, torch.Tensor) or scale != 1.0:
        x = x / (scale.to(x.device, non_blocking=True) if isinstance(scale, torch.Tensor) else scale)
    # x = m * 2**e with 0.5 <= |m| < 1: |x| lies in [2**(e-1), 2**e). A zero's exponent says nothing.
    exponent = torch.frexp(x)[1].clamp_(LEAST, MOST + 1).sub_(LEAST)
    exponent.mul_(x.sign().to(torch.int32)).add_(PER_SIDE)
    return exponent.masked_fill_(~x.isfinite(), NUM_BINS)


def _tallied(bins: torch.Tensor) -> torch.Tensor:
    """Return [NUM_BINS + 1] int64: how often each number comes."""
    if bins.is_cpu:
        return torch.bincount(bins, minlength=NUM_BINS + 1)
    if torch.are_deterministic_algorithms_enabled():
        return tallied_in_order(bins)
    # bincount would wait for the largest number. A piece has fewer than 2**24 elements: its counts are exact in fp32.
    return torch.histc(bins.float(), NUM_BINS + 1, -0.5, NUM_BINS + 0.5).long()


def tallied_in_order(bins: torch.Tensor) -> torch.Tensor:
    """As `_tallied`, without atomic additions: torch refuses those where `use_deterministic_algorithms` is on."""
    edges = torch.arange(NUM_BINS + 2, dtype=bins.dtype, device=bins.device)
    return torch.searchsorted(bins.sort()[0], edges).diff()
