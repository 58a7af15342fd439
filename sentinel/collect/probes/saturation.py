"""SaturationProbe: elements that are zero, units that are dead, and elements where an activation function is flat."""

from __future__ import annotations

import torch
from torch import nn

from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.derived import DerivedEntries, producer
from sentinel.collect.probes.prepared_rows import share_words, write_rows
from sentinel.collect.probes.step_sums import StepSums
from sentinel.collect.probes.token_blocks import blocks, by_channel, leading, tokens_of
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind

QUANTITIES = ("zero", "dead", "saturated")
MARGIN = 0.01
"""Share of a function's range, or of a tensor's largest value, that counts as its limit. Too small: outputs rounded to bf16
(1/256) miss it; too large: outputs that still answer to their input count as saturated."""

Flat = tuple[tuple[float, float], ...]
"""Intervals of outputs, both ends included, in which the function is nearly constant."""

_BELOW = {"gelu": -0.17, "silu": -0.2785, "swish": -0.2785, "mish": -0.3088}
"""Least value of functions that come back to zero on their negative side."""


class SaturationProbe:
    """Counts zero elements, dead units and saturated elements of each activation. Rows are over ones and zeros: shares
    merge.

    `dead`, and `saturated` by the tensor's own largest value, depend on which tokens a rank has: they stay one series a rank
    where ranks hold different parts.

    `M:zero`: elements that are exactly 0. `M:dead`: units (channels) that were 0 for every token of the step.
    `M:saturated`: elements within 1 % of the limits of their function's range; where it has none, or no module is known to
    be one, elements within 1 % of the tensor's own largest value: one in many, unless something clamps them.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._derived = DerivedEntries(context, Kind.SATURATION, "saturation")
        self._sums = StepSums(context, "saturation")
        self._num_rows = 0
        context.look_while("saturation", lambda: context.plan.wants(Kind.SATURATION), self.look)
        context.events.ending.subscribe("saturation", self._end)

    def look(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> None:
        """Count the flat elements of one activation. Reads it some five times; does not wait."""
        if entry.kind != Kind.ACTIVATION:
            return
        module = producer(self._context, entry)
        view = by_channel(tensor, module)
        if view is None:
            return
        flat = flat_of(module)
        own = ("dead",) if flat is not None else ("dead", "saturated")
        wanted = self._derived.due(entry, QUANTITIES, tensor, tuple(tensor.shape), own)
        if not wanted:
            return
        with torch.no_grad():
            largest = largest_of(view)
            hits = []
            for one in wanted:
                if one.name.endswith(":dead"):
                    self._sums.add(one, micro_step, (largest,), tokens_of(view))
                elif one.name.endswith(":zero"):
                    hits.append((one, view.numel() - torch.count_nonzero(view)))
                else:
                    hits.append((one, num_flat(view, flat, largest)))
            if hits:
                words = share_words(torch.stack([number for _, number in hits]), view.numel())
                write_rows(self._context.recording, [one for one, _ in hits], words, micro_step)
        self._num_rows += len(hits)

    def _end(self) -> None:
        for entry, widths in self._sums.take():
            largest = torch.cat([largest for (largest,), _ in widths])
            is_dead = largest == 0  # A sum of the largest magnitudes of the micro-steps.
            write_rows(self._context.recording, [entry], share_words(is_dead.sum().view(1), largest.numel()), -1)
            self._sums.place_last_row(entry)
            self._context.recording.vector(entry, "is_dead", is_dead.to(torch.uint8), "channel")
            self._num_rows += 1
        if self._num_rows:
            self._context.count({"saturation": self._num_rows})
        self._num_rows = 0


def flat_of(module: nn.Module | None) -> Flat | None:
    """Return the intervals of outputs in which an activation function is flat.

    None: no such function, or it has no limits.
    """
    if module is None:
        return None
    name = type(module).__name__.lower()
    if isinstance(module, nn.ReLU6):
        return ((6.0 - 6.0 * MARGIN, 6.0),)  # Its other limit is what `zero` counts.
    if isinstance(module, nn.Hardtanh):
        return _ends(float(module.min_val), float(module.max_val))
    if isinstance(module, (nn.ELU, nn.CELU)):
        return ((-module.alpha, -module.alpha * (1.0 - MARGIN)),)
    if isinstance(module, nn.SELU):
        return ((-1.7581, -1.7581 * (1.0 - MARGIN)),)
    if isinstance(module, (nn.Softmax, nn.Softmax2d)):
        return ((1.0 - MARGIN, 1.0),)
    if isinstance(module, (nn.Softplus, nn.ReLU)) or name.startswith("relu"):
        return ((0.0, 0.0),)
    if isinstance(module, (nn.Tanhshrink, nn.LogSigmoid)):
        return None
    for word, least in _BELOW.items():
        if word in name:
            return ((least * MARGIN, 0.0),)
    if "sigmoid" in name:
        return _ends(0.0, 1.0)
    if "tanh" in name or "softsign" in name:
        return _ends(-1.0, 1.0)
    return None


def _ends(low: float, high: float) -> Flat:
    margin = MARGIN * (high - low)
    return (low, low + margin), (high - margin, high)


def largest_of(view: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each channel, [channels]; NaN where one holds a NaN."""
    dims = leading(view)
    return torch.maximum(view.amax(dims), -view.amin(dims)).float()


def num_flat(view: torch.Tensor, flat: Flat | None, largest: torch.Tensor) -> torch.Tensor:
    """Return how many elements lie in the intervals, 0-dim int64; None: within MARGIN of the tensor's largest magnitude.

    largest: of each channel; a channel with a non-finite value is left out.
    """
    found = torch.zeros((), dtype=torch.int64, device=view.device)
    if flat is not None:
        for piece in blocks(view):
            exact = _exact(piece)
            for low, high in flat:
                found += torch.count_nonzero((exact >= low) & (exact <= high))
        return found
    bound = torch.where(largest.isfinite(), largest, 0.0).amax() * (1.0 - MARGIN)
    bound = torch.where(bound > 0.0, bound, torch.inf)
    for piece in blocks(view):
        exact = _exact(piece)
        found += torch.count_nonzero(exact >= bound) + torch.count_nonzero(exact <= -bound)
    return found


def _exact(piece: torch.Tensor) -> torch.Tensor:
    """Return a piece in a type that bounds can be compared in: next to 1, bf16 has steps of 0.8 %."""
    return piece if piece.dtype is torch.float64 else piece.float()
