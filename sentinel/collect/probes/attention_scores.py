"""Entropy and largest logit of attention, formed anew from queries and keys in small blocks: no matrix of all scores.

Scores are in fp32 (fp64 for fp64 tensors). Autocast, the graph and random numbers are left as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch

MOST_LOGITS = 1 << 24
"""Most logits formed for one call; a bound on time: up to there every query counts, past it a strided sample of them."""
MOST_ROWS = 1 << 18
"""Most queries of all heads and samples taken in one call; a bound on time and memory where keys are few."""
BLOCK_LOGITS = 1 << 21
"""Logits formed in one go: 8 MiB of fp32."""
MAP_HEADS, MAP_QUERIES = 16, 512
"""Most heads and queries of which a trace shows what they attend to."""
BLOCK_KEYS = 1 << 22
"""Elements of keys converted in one go: 16 MiB of fp32."""

Mod = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Entropy and largest logit of the queries of one call. `batch` and `rows` may be a sample of the call's."""

    entropy: torch.Tensor
    """[batch, heads, rows] nats; means nothing where `counts` is false."""
    counts: torch.Tensor
    """[batch, heads, rows] whether the query attends to anything: a row that is masked throughout has no distribution."""
    largest: torch.Tensor
    """[batch, heads] largest logit, scaled and masked; -inf where no query counts."""

    def of_heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mean entropy in nats, largest logit) of each head: [heads] fp32 each; NaN: no query of the head counts."""
        num = self.counts.sum((0, 2))
        total = torch.where(self.counts, self.entropy, 0.0).sum((0, 2))
        largest = self.largest.amax(0)
        mean = torch.where(num > 0, total / num.clamp(min=1), torch.nan)
        return mean.float(), torch.where(largest == -torch.inf, torch.nan, largest).float()


class AttentionScores:
    """The logits of softmax(q @ k.T * scale + mask), by blocks.

    q: [batch, heads, queries, width]; k: [batch, key heads, keys, width], where a key head serves as many heads as there
    are. mask: broadcastable to [batch, heads, queries, keys], true where attended, or added. causal: None, or by how much
    the diagonal up to which is attended lies right of the main one.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: int | None = None,
        scale: float | None = None,
        score_mod: Mod | None = None,
        mask_mod: Mod | None = None,
    ) -> None:
        q, k = (x.detach()[(None,) * (3 - x.dim())] for x in (q, k))
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])  # type: ignore[no-untyped-call]
        num_heads, key_heads = max(q.shape[-3], k.shape[-3]), k.shape[-3]
        self.q = _flat(q.expand(*lead, num_heads, *q.shape[-2:]))
        self.k = _flat(k.expand(*lead, *k.shape[-3:]))
        self.shape = self.q.shape[0], num_heads, q.shape[-2], k.shape[-2]
        self.group, rest = divmod(num_heads, key_heads)
        if rest or q.shape[-1] != k.shape[-1]:
            raise ValueError(f"queries {tuple(q.shape)} and keys {tuple(k.shape)} do not fit")
        self.scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.mask = None if mask is None else _flat(mask.detach().expand(*lead, *self.shape[1:]))
        self.causal = causal
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.floor = _floor(self.mask.dtype) if self.mask is not None and self.mask.is_floating_point() else -math.inf
        self.dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.width = q.shape[-1]

    def block(self, batch: slice, heads: slice, rows: torch.Tensor, keys: slice) -> torch.Tensor:
        """Return logits [batch, heads, rows, keys], -inf where masked. heads: whole groups, or within one."""
        k = self.k[batch, heads.start // self.group : (heads.stop - 1) // self.group + 1, keys].to(self.dtype)
        q = self.q[batch, heads].index_select(2, rows).to(self.dtype)
        num_batch, num_heads, num_rows, _ = q.shape
        q = q.reshape(num_batch, k.shape[1], -1, self.width)
        x = torch.matmul(q, k.transpose(2, 3)).mul_(self.scale).view(num_batch, num_heads, num_rows, -1)
        if self.score_mod is not None or self.mask_mod is not None:
            at = self._positions(batch, heads, rows, keys)
            if self.score_mod is not None:
                x = self.score_mod(x, *at)
            if self.mask_mod is not None:
                x = x.masked_fill(~self.mask_mod(*at), -torch.inf)
        if self.mask is not None:
            mask = self.mask[batch, heads, :, keys].index_select(2, rows)
            x = x.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else x.add_(mask)
        if self.causal is not None:
            at_key = torch.arange(keys.start, keys.stop, device=x.device)
            x = x.masked_fill_(at_key > rows[:, None] + self.causal, -torch.inf)
        return x

    def _positions(self, batch: slice, heads: slice, rows: torch.Tensor, keys: slice) -> tuple[torch.Tensor, ...]:
        """Return (batch, head, query, key), each broadcastable to a block: what flex_attention's functions are given."""
        b, h, k = (torch.arange(one.start, one.stop, device=rows.device) for one in (batch, heads, keys))
        return b[:, None, None, None], h[:, None, None], rows[:, None], k


class Logits:
    """Logits that the model has formed itself, the input of its softmax: [batch, heads, queries, keys]."""

    causal = None
    group = 1
    width = 1

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = _flat(logits.detach())
        self.shape = self.logits.shape[0], self.logits.shape[1], self.logits.shape[2], self.logits.shape[3]
        self.floor = _floor(logits.dtype)
        self.dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32

    def block(self, batch: slice, heads: slice, rows: torch.Tensor, keys: slice) -> torch.Tensor:
        """As `AttentionScores.block`."""
        return self.logits[batch, heads, :, keys].index_select(2, rows).to(self.dtype)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, ...] of what has any number of dimensions before the heads."""
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


def _floor(dtype: torch.dtype) -> float:
    """Return what no logit reaches unless it is masked: masks are often the least number of a type, not -inf."""
    return torch.finfo(dtype).min / 2.0


def measure(scores: AttentionScores | Logits) -> Measured:
    """Return entropy and largest logit of each query of a call, or of a strided sample of the queries. Does not wait.

    Cost: that of forming at most MOST_LOGITS logits. Temporaries of at most 16 MiB.
    """
    batch, heads, queries, keys = scores.shape
    rows = max(1, min(queries, MOST_LOGITS // max(1, batch * heads * keys), MOST_ROWS // max(1, batch * heads)))
    most = max(1, min(batch, MOST_LOGITS // max(1, heads * keys), MOST_ROWS // max(1, heads)))
    if rows > 1:
        most = batch
    if not batch * heads * queries * keys:
        empty = scores.logits if isinstance(scores, Logits) else scores.q
        none = torch.zeros((0, heads, 0), device=empty.device)
        return Measured(none, none.bool(), torch.full((1, heads), -torch.inf, device=empty.device))
    at = _strided(queries, rows, scores)
    with torch.no_grad(), torch.autocast(at.device.type, enabled=False):
        made = [_rows(scores, one, group, at) for one, group in _tiles(scores, most, rows)]
    per_batch = math.ceil(heads / made[0][0].shape[1])
    samples = [made[first : first + per_batch] for first in range(0, len(made), per_batch)]
    entropy, top = (
        torch.cat([torch.cat([group[which] for group in sample], 1) for sample in samples]) for which in range(2)
    )
    counts = ~(top <= scores.floor)
    return Measured(entropy, counts, torch.where(counts, top, -torch.inf).amax(-1))


def attention_map(scores: AttentionScores | Logits) -> torch.Tensor:
    """Return what queries of the first sample give each key: [heads, queries, keys] fp32, rows of a query that is masked
    throughout NaN. At most MAP_HEADS heads and MAP_QUERIES queries, evenly spread; fewer where keys are many."""
    _, heads, queries, keys = scores.shape
    rows = max(1, min(queries, MAP_QUERIES, BLOCK_LOGITS // max(1, keys)))
    at = _strided(queries, rows, scores)
    with torch.no_grad(), torch.autocast(at.device.type, enabled=False):
        maps = [
            scores.block(slice(0, 1), slice(head, head + 1), at, slice(0, keys))[0, 0].softmax(-1)
            for head in range(min(heads, MAP_HEADS))
        ]
        return torch.stack(maps).float()


def _strided(queries: int, rows: int, scores: AttentionScores | Logits) -> torch.Tensor:
    """Return the positions of `rows` queries, evenly spread: all of them where there are no more."""
    device = (scores.logits if isinstance(scores, Logits) else scores.q).device
    return (torch.arange(rows, device=device) * 2 + 1) * queries // (2 * rows)


def _tiles(scores: AttentionScores | Logits, most_batch: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield (batch, heads): so many that their logits and keys stay small, the heads of one sample one behind the other."""
    batch, heads, _, keys = scores.shape
    keys = min(keys, max(1, BLOCK_KEYS // scores.width))
    of_head = keys * max(min(rows, max(1, BLOCK_LOGITS // keys)), 1)
    num_heads = min(heads, max(1, BLOCK_LOGITS // of_head), max(1, scores.group * BLOCK_KEYS // (keys * scores.width)))
    num_heads = num_heads // scores.group * scores.group or 1
    num_batch = 1
    if num_heads == heads:
        num_batch = max(
            1, min(BLOCK_LOGITS // (of_head * heads), BLOCK_KEYS * scores.group // (keys * scores.width * heads))
        )
    # A sample of the batch is strided too.
    step = batch // most_batch
    if step > 1:
        num_batch = 1
    for first in range(0, step * most_batch, num_batch if step == 1 else step):
        for head in range(0, heads, num_heads):
            yield slice(first, min(batch, first + num_batch)), slice(head, min(heads, head + num_heads))


def _rows(
    scores: AttentionScores | Logits, batch: slice, heads: slice, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (entropy, largest logit) of the queries at `at`: [batch, heads, rows] each."""
    keys = scores.shape[3]
    keys_each = min(keys, max(1, BLOCK_KEYS // scores.width), BLOCK_LOGITS)
    pairs = (batch.stop - batch.start) * (heads.stop - heads.start)
    rows_each = max(1, BLOCK_LOGITS // (keys_each * pairs))
    parts = []
    for some in at.split(rows_each):  # type: ignore[no-untyped-call]
        running: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        for first in range(0, keys, keys_each):
            x = scores.block(batch, heads, some, slice(first, min(keys, first + keys_each)))
            fresh = _sums(x)
            running = fresh if running is None else _joined(running, fresh)
        assert running is not None
        top, total, weighted = running
        parts.append(((total.log() - weighted / total).clamp_(min=0.0), top))
    return torch.cat([entropy for entropy, _ in parts], -1), torch.cat([top for _, top in parts], -1)


def _sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (m, sum of exp(x - m), sum of exp(x - m) * (x - m)) over the last dimension, m being its largest value."""
    top = x.amax(-1)
    away = x - torch.where(top == -torch.inf, 0.0, top)[..., None]
    weight = away.exp()
    # 0 * -inf is no number; what is so far away has no weight.
    return top, weight.sum(-1), weight.mul_(away.clamp_(min=-1e4)).sum(-1)


def _joined(
    one: tuple[torch.Tensor, torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums of `_sums` over the keys of both."""
    top = torch.maximum(one[0], other[0])
    total, weighted = torch.zeros_like(top), torch.zeros_like(top)
    for m, z, t in (one, other):
        away = torch.where(m == -torch.inf, 0.0, m - top)
        share = torch.where(m == -torch.inf, 0.0, away.exp())
        total += share * z
        weighted += share * (t + z * away.clamp(min=-1e4))
    return top, total, weighted
