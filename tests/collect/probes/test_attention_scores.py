"""Entropy and largest logit of attention, against the whole matrix of scores in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sentinel.collect.probes import attention_scores
from sentinel.collect.probes.attention_scores import AttentionScores, Logits, measure


def logits_of(
    q: torch.Tensor, k: torch.Tensor, mask: Any = None, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """All scaled and masked logits, [batch, heads, queries, keys] float64."""
    q, k = q.double(), k.double()
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    x = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else x + mask.double()
    if causal:
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).tril().logical_not(), -torch.inf)
    return x


def truth(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(entropy of each query, largest logit of each sample and head)."""
    p = x.softmax(-1)
    return -(p * p.log().nan_to_num(0.0, 0.0, 0.0)).sum(-1), x.amax((-1, -2))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(3 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


BLOCKS = [(2**21, 2**22), (64, 64), (37, 12)]
"""(BLOCK_LOGITS, BLOCK_KEYS): everything at once, and so small that rows, heads and keys are all cut."""


@pytest.fixture(params=BLOCKS, ids=["one block", "blocks", "cut keys"])
def cut(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_scores, "BLOCK_LOGITS", request.param[0])
    monkeypatch.setattr(attention_scores, "BLOCK_KEYS", request.param[1])


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((2, 4, 7, 8), (2, 4, 7, 8)),
        ((2, 6, 5, 4), (2, 2, 9, 4)),  # grouped queries, lengths that differ
        ((3, 4, 9, 4), (3, 1, 5, 4)),  # one key head for all
        ((1, 2, 1, 4), (1, 2, 6, 4)),
        ((2, 3, 6, 4), (2, 3, 1, 4)),  # one key: no choice, no entropy
        ((2, 2, 3, 5, 4), (2, 2, 3, 5, 4)),
    ],
)
def test_entropy_and_largest_logit(q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k = tensors(q_shape, k_shape, dtype=dtype)
    for causal in (False, True):
        entropy, largest = truth(logits_of(q, k, causal=causal).flatten(0, -4))

        found = measure(AttentionScores(q, k, causal=0 if causal else None))

        assert found.counts.all()
        assert torch.allclose(found.entropy.double(), entropy, atol=2e-5)
        assert torch.allclose(found.largest.double(), largest, rtol=1e-5)
        mean, top = found.of_heads()
        assert torch.allclose(mean.double(), entropy.mean((0, 2)), atol=2e-5)
        assert torch.allclose(top.double(), largest.amax(0), rtol=1e-5)


@pytest.mark.usefixtures("cut")
def test_masks_of_every_make() -> None:
    q, k = tensors((2, 4, 6, 8), (2, 2, 9, 8))
    generator = torch.Generator().manual_seed(1)
    for shape in [(6, 9), (2, 1, 6, 9), (2, 4, 6, 9), (1, 1, 1, 9), (2, 1, 1, 9)]:
        keep = torch.rand(shape, generator=generator) > 0.4
        keep[..., 0] = True
        bias = torch.randn(shape, generator=generator)
        least = torch.zeros(shape).masked_fill(~keep, torch.finfo(torch.float32).min)
        for mask in (keep, bias, bias.masked_fill(~keep, -torch.inf), least, least.bfloat16()):
            x = logits_of(q, k, keep if mask is least or mask.dtype is torch.bfloat16 else mask)
            entropy, largest = truth(x)

            found = measure(AttentionScores(q, k, mask))

            assert torch.allclose(found.entropy.double(), entropy, atol=2e-5)
            assert torch.allclose(found.largest.double(), largest, rtol=1e-5)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("least", [-math.inf, torch.finfo(torch.float32).min, None])
def test_queries_that_see_nothing_are_left_out(least: float | None) -> None:
    q, k = tensors((2, 2, 4, 8), (2, 2, 5, 8))
    keep = torch.ones(2, 1, 4, 5, dtype=torch.bool)
    keep[0, :, 1:3], keep[1] = False, False
    mask = keep if least is None else torch.zeros(keep.shape).masked_fill(~keep, least)
    entropy, largest = truth(logits_of(q, k, keep))
    seen = keep.any(-1).expand(2, 2, 4)

    found = measure(AttentionScores(q, k, mask))

    assert torch.equal(found.counts, seen)
    assert torch.allclose(found.entropy[seen].double(), entropy[seen], atol=2e-5)
    assert torch.allclose(found.largest[0].double(), largest[0]) and found.largest[1].isneginf().all()
    mean, top = found.of_heads()
    assert mean.isfinite().all() and top.isfinite().all()
    eager = logits_of(q, k, mask).float()
    assert torch.equal(measure(Logits(eager)).counts, seen)


def test_long_calls_are_sampled_evenly_and_always_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = tensors((4, 2, 64, 8), (4, 2, 32, 8))
    whole, _ = truth(logits_of(q, k))

    monkeypatch.setattr(attention_scores, "MOST_LOGITS", 4 * 2 * 32 * 16)
    found = measure(AttentionScores(q, k))

    assert torch.allclose(found.entropy.double(), whole[:, :, 2::4], atol=2e-5)
    assert torch.equal(found.entropy, measure(AttentionScores(q, k)).entropy)
    monkeypatch.setattr(attention_scores, "MOST_LOGITS", 2 * 2 * 32)
    few = measure(AttentionScores(q, k))
    assert torch.allclose(few.entropy.double(), whole[::2, :, 32:33], atol=2e-5)
    monkeypatch.setattr(attention_scores, "MOST_LOGITS", 1)
    assert measure(AttentionScores(q, k)).entropy.shape == (1, 2, 1)


def test_no_temporary_is_larger_than_16_mib() -> None:
    q, k = tensors((2, 8, 2048, 16), (2, 2, 4096, 16))
    largest = 0
    original = torch.Tensor.exp

    with torch.utils._python_dispatch._disable_current_modes():

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal largest
                result = func(*args, **(kwargs or {}))
                for one in result if isinstance(result, (tuple, list)) else [result]:
                    if isinstance(one, torch.Tensor):
                        largest = max(largest, one.numel() * one.element_size() if one._base is None else 0)
                return result

        with Sizes():
            measure(AttentionScores(q, k, causal=0))

    assert 2**20 < largest <= 2**24
    assert torch.Tensor.exp is original


def test_autocast_graph_and_random_numbers_are_left_alone() -> None:
    q, k = (x.requires_grad_() for x in tensors((2, 2, 5, 8), (2, 2, 5, 8)))
    state, versions = torch.get_rng_state(), (q._version, k._version)
    entropy, _ = truth(logits_of(q.detach(), k.detach()))

    with torch.autocast("cpu", torch.bfloat16):
        found = measure(AttentionScores(q, k))

        assert torch.is_autocast_enabled("cpu")
    assert torch.allclose(found.entropy.double(), entropy, atol=2e-5)
    assert not found.entropy.requires_grad and (q._version, k._version) == versions
    assert torch.equal(torch.get_rng_state(), state)


def test_a_nan_is_a_nan_and_not_nothing() -> None:
    q, k = tensors((1, 2, 3, 4), (1, 2, 3, 4))
    q[0, 1, 2, 0] = torch.nan

    found = measure(AttentionScores(q, k))

    assert found.counts.all()
    assert found.entropy.isnan().sum() == 1 and found.largest.isnan().tolist() == [[False, True]]


def test_empty_calls_are_nothing() -> None:
    for q_shape, k_shape in [((0, 2, 3, 4), (0, 2, 3, 4)), ((1, 2, 0, 4), (1, 2, 3, 4)), ((1, 2, 3, 4), (1, 2, 0, 4))]:
        found = measure(AttentionScores(torch.zeros(q_shape), torch.zeros(k_shape)))
        assert found.entropy.numel() == 0 and found.largest.isneginf().all()
