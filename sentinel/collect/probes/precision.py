"""Low precision: what a tensor would lose as fp16, bf16 or fp8, and how many powers of two its values span."""

from __future__ import annotations

import torch

from sentinel.collect.kernels.tensor_memory import in_storage_order, is_dense, pieces, plain
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.derived import DerivedEntries
from sentinel.collect.probes.prepared_rows import observe_some, share_words, write_rows
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.kinds import ELEMENT_KINDS
from sentinel.record import Kind

LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp16": 65504.0, "bf16": 3.3895313892515355e38}
"""Format to its largest number, rising: what is larger overflows."""
SMALLEST = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16, "fp16": 2.0**-24, "bf16": 2.0**-133}
"""Format to its smallest subnormal number, falling: up to half of it rounds to zero (ties go to even)."""

QUANTITIES = (
    *(f"{name}_underflow" for name in SMALLEST), *(f"{name}_overflow" for name in LARGEST), "dynamic_range",
)  # fmt: skip

CHUNK = 1 << 20
"""Elements converted at a time: 4 MiB of fp32."""


class Precision:
    """Counts, of every tensor that is measured and of all activations and their gradients, what each format would lose.

    Rows `NAME:KIND.fp16_underflow` and so on are over the finite elements, 1 where the format loses one: their mean is the
    share, and shares of shards merge. `NAME:KIND.dynamic_range` is log2 of the largest over the smallest nonzero magnitude,
    a value for each observation and shard. Gradients are counted with the loss scale in them: that is what is cast.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._derived = DerivedEntries(context, Kind.PRECISION, "precision")
        self._quantities = {kind: tuple(f"{kind.label}.{one}" for one in QUANTITIES) for kind in ELEMENT_KINDS}
        self._num_rows = 0
        context.look_while("precision", lambda: context.plan.wants(Kind.PRECISION), self.look)
        context.events.ending.subscribe("precision", self._end)

    def look(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> None:
        """Count what each format would lose of a tensor. Does not wait for an accelerator."""
        kind = Kind(entry.kind)
        if kind not in ELEMENT_KINDS or not tensor.is_floating_point():
            return
        entries = self._derived.due(entry, self._quantities[kind], tensor, entry.shape)
        if not entries:
            return
        num_rows = len(entries)
        with torch.no_grad():
            shares, span, is_there = look_closely(plain(tensor))
            chosen = [self._quantities[kind].index(one.name.rpartition(":")[2]) for one in entries]
            if chosen[-1] == len(QUANTITIES) - 1:
                observe_some(self._context.recording, entries[-1], span, is_there, micro_step)
                entries, chosen = entries[:-1], chosen[:-1]
            if chosen:
                words = shares if len(chosen) == len(shares) else torch.stack([shares[at] for at in chosen])
                write_rows(self._context.recording, entries, words, micro_step)
        self._num_rows += num_rows

    def _end(self) -> None:
        if self._num_rows:
            self._context.count({"precision": self._num_rows})
        self._num_rows = 0


def look_closely(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ([8, 12] int64 words of the shares among QUANTITIES, [1] dynamic range, [1] whether it is defined) of a tensor.

    The dynamic range is log2 of the largest over the smallest nonzero magnitude. Does not wait for an accelerator.

    Source of the definitions: TransformerEngine's debug statistics (underflows, overflows, dynamic_range); shares there are
    of all elements too.
    """
    device = tensor.device
    lost = torch.zeros(8, dtype=torch.int64, device=device)
    num = torch.zeros((), dtype=torch.int64, device=device)
    low = torch.full((), torch.inf, dtype=torch.float64, device=device)
    high = torch.zeros((), dtype=torch.float64, device=device)
    flat = in_storage_order(tensor) if is_dense(tensor) else tensor
    for piece in pieces(flat, CHUNK):
        if piece.numel() == 0:
            continue
        size = piece.abs() if piece.dtype in (torch.float32, torch.float64) else piece.float().abs_()
        if size.is_cpu:
            num += _look_on_cpu(size, lost, low, high)
        else:
            num += _look(size, lost, low, high)
    span = torch.log2(high) - torch.log2(low)
    return share_words(lost, num), span.view(1), (high > 0.0).view(1)


def _look(size: torch.Tensor, lost: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Add what a piece loses, widen its range, and return the number of its finite elements. Reads no value on the host."""
    is_finite = size.isfinite()
    size = size.masked_fill_(~is_finite, 0.0)
    some = torch.where(size == 0.0, torch.inf, size)
    torch.minimum(low, some.amin(), out=low)
    torch.maximum(high, size.amax(), out=high)
    lost += torch.stack(
        [*((some <= least / 2.0).sum() for least in SMALLEST.values()), *((size > most).sum() for most in LARGEST.values())]
    )
    return is_finite.sum()


def _look_on_cpu(size: torch.Tensor, lost: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> int:
    """As `_look`, where looking at values costs no wait: formats that lose nothing are not counted."""
    num = size.numel()
    largest = size.amax().item()
    if not largest < torch.inf:
        is_finite = size.isfinite()
        num = int(is_finite.count_nonzero())
        size = size.masked_fill_(~is_finite, 0.0)
        largest = size.amax().item()
    smallest = size.amin().item()
    if smallest == 0.0:
        size = size.masked_fill_(size == 0.0, torch.inf)
        smallest = size.amin().item()
    if smallest < torch.inf:
        low.clamp_(max=smallest)
        high.clamp_(min=largest)
    for at, least in enumerate(SMALLEST.values()):
        if smallest > least / 2.0:
            break
        lost[at] += (size <= least / 2.0).count_nonzero()
    for at, most in enumerate(LARGEST.values(), len(SMALLEST)):
        if largest <= most:
            break
        # Zeros were made infinite, so that the smallest could be seen.
        lost[at] += ((size > most) & (size < torch.inf)).count_nonzero()
    return num
