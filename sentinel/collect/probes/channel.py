"""Channels: the RMS of each over the tokens of a step. Outlier features are a few channels far above the others."""

from __future__ import annotations

import torch

from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.derived import DerivedEntries, producer
from sentinel.collect.probes.step_sums import StepSums
from sentinel.collect.probes.token_blocks import blocks, by_channel, leading, tokens_of
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind

QUANTITIES = ("channel_rms", "mean_over_std")
TOP = 8
"""Channels named, the largest RMS first."""
MOST_RATIO = 2.0**30
"""Largest |mean| / std recorded; also that of a channel that does not vary at all."""
SUMS_BYTES = 2 * 2**20
"""Bytes of per-channel sums written a step; a bound on the spool, 87,000 channels. Rows and largest channels always come."""


class Channel:
    """Sums each channel of activations over the tokens and micro-steps of a step, and writes its rows when the step ends.

    `M:channel_rms` is a row over channels: its kurtosis is that of the outlier-feature literature, its max the largest
    channel. `M:mean_over_std` is a row over channels of |mean| / std. Values that are not finite are left out. A module that
    is called at several widths in a step (an activation function that layers share) has the channels of all of them.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._derived = DerivedEntries(context, Kind.CHANNEL, "channel")
        self._sums = StepSums(context, "channel")
        self._entries: dict[int, list[TensorEntry]] = {}
        """Id of a source -> its entries of this step."""
        context.look_while("channel", lambda: context.plan.wants(Kind.CHANNEL), self.look)
        context.events.ending.subscribe("channel", self._end)

    def look(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> None:
        """Add an activation to the sums of its channels. Reads it twice; does not wait."""
        if entry.kind != Kind.ACTIVATION:
            return
        view = by_channel(tensor, producer(self._context, entry))
        if view is None:
            return
        entries = self._derived.due(entry, QUANTITIES, tensor, (view.shape[-1],))
        if not entries:
            return
        self._entries[entry.id] = entries
        with torch.no_grad():
            self._sums.add(entry, micro_step, channel_sums(view), tokens_of(view))

    def _end(self) -> None:
        recording = self._context.recording
        entries, self._entries = self._entries, {}
        num_rows = num_bytes = 0
        for source, widths in self._sums.take():
            wanted = entries[source.id]
            # Called at several widths, a module has the channels of all of them, in the order in which they came.
            count, total, square = (torch.cat(parts) for parts in zip(*(one.parts for one in widths), strict=True))
            size = count.clamp(min=1.0)
            mean, rms = total / size, (square / size).sqrt()
            for entry in wanted:
                if entry.name.endswith(QUANTITIES[0]):
                    recording.observe(entry, rms, -1)
                    self._sums.place_last_row(source)
                    top = rms.topk(min(TOP, rms.numel()))
                    recording.vector(entry, "top_channels", top.indices, "channel")
                    recording.vector(entry, "top_channel_rms", top.values.float(), "channel")
                    if num_bytes + 24 * rms.numel() <= SUMS_BYTES:
                        num_bytes += 24 * rms.numel()
                        recording.vector(entry, "channel_sums", torch.stack((count, total, square)), "power,channel")
                else:
                    recording.observe(entry, mean_over_std(mean, rms), -1)
                    self._sums.place_last_row(source)
            num_rows += len(wanted)
        if num_rows:
            self._context.count({"channel": num_rows})


def channel_sums(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (count, sum, sum of squares) of the finite values of each channel: [channels] float64 each.

    view: [..., channels] floats. No temporary is larger than 16 MiB.
    """
    dims = leading(view)
    shape = (view.shape[-1],)
    count, total, square = (torch.zeros(shape, dtype=torch.float64, device=view.device) for _ in range(3))
    for piece in blocks(view):
        x = piece if piece.dtype is torch.float64 else piece.float()
        number = torch.full(shape, tokens_of(piece), dtype=torch.float64, device=view.device)
        center = x.mean(dims)
        away = x - center
        squares = torch.linalg.vector_norm(away, dim=dims).double().square()
        if not (x.is_cpu and squares.sum().isfinite()):  # Looking costs no wait on a CPU, and nearly every block is finite.
            is_finite = x.isfinite()
            number = is_finite.sum(dims).double()
            center = torch.where(is_finite, x, 0.0).sum(dims).div_(number.clamp(min=1.0)).nan_to_num_(0.0, 0.0, 0.0)
            away = torch.where(is_finite, x - center, 0.0)
            squares = away.square().sum(dims, dtype=torch.float64)
        # Sums about the mean of a block, in fp32, then moved to zero in fp64: so a large mean costs no digits.
        rest, wide = away.sum(dims).double(), center.double()
        count += number
        total += rest + number * wide
        square += squares + 2.0 * wide * rest + number * wide.square()
    return count, total, square


def mean_over_std(mean: torch.Tensor, rms: torch.Tensor) -> torch.Tensor:
    """Return |mean| / std of each channel, [channels] float64, at most MOST_RATIO; 0 where a channel is all zeros."""
    away = mean.abs()
    std = (rms.square() - mean.square()).clamp(min=0.0).sqrt()
    ratio = away / torch.maximum(std, away / MOST_RATIO)
    return torch.where(away > 0.0, ratio, 0.0)
