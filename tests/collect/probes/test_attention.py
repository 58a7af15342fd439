"""Attention of whole modules, whoever computes it, and that nobody notices."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.nn.functional import softmax as softmax_by_name

import sentinel
from sentinel.collect.probes.attention_calls import calls

from ...support.spools import Said
from ...support.training import train_steps
from ...support.truth import assert_row_of
from ..llama import Llama, one
from .test_attention_scores import logits_of, truth

ATTENTION = {"kinds": ["attention"], "black_box": False}
WIDTH, HEADS, LENGTH = 16, 4, 6


def apart(x: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attend(nn.Module):
    """Projects and attends, in the way that `how` says; keeps the logits that it should have."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.num_heads = how, HEADS
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.softmax = nn.Softmax(-1)
        self.expected: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        other = x if context is None else context
        q, k, v = apart(self.q(x)), apart(self.k(other)), apart(self.v(other))
        y, logits = getattr(self, self.how)(q, k, v)
        self.expected.append(logits.detach())
        return y.transpose(1, 2).flatten(2)

    def sdpa(self, q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v), logits_of(q, k)

    def causal(self, q: Any, k: Any, v: Any) -> Any:
        return by_name(q, k, v, is_causal=True, scale=0.7), logits_of(q, k, causal=True, scale=0.7)

    def dropped(self, q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(query=q, key=k, value=v, dropout_p=0.5), logits_of(q, k)

    def masked(self, q: Any, k: Any, v: Any) -> Any:
        mask = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None]
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, False), logits_of(q, k, mask)

    def grouped(self, q: Any, k: Any, v: Any) -> Any:
        k, v = k[:, ::2], v[:, ::2]
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), logits_of(q, k)

    def lower_right(self, q: Any, k: Any, v: Any) -> Any:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        bias = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, bias), logits_of(q, k, mask)

    def flexible(self, q: Any, k: Any, v: Any) -> Any:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cpu")
        q, k, v = q.detach(), k.detach(), v.detach()  # It has no backward on a CPU.
        y = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.3 * (h + 1) * (i - j), block_mask=mask)
        at = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        logits = logits_of(q, k) + 0.3 * torch.arange(1, HEADS + 1)[:, None, None] * at
        return y, logits.masked_fill(at < 0, -torch.inf)

    def eager(self, q: Any, k: Any, v: Any) -> Any:
        x = q @ k.transpose(2, 3) / 2 + torch.full((q.shape[2], k.shape[2]), torch.finfo(torch.float32).min).triu(1)
        return F.softmax(x, dim=-1, dtype=torch.float32) @ v, x.detach().double()

    def eager_by_name(self, q: Any, k: Any, v: Any) -> Any:
        x = q @ k.transpose(2, 3)
        return softmax_by_name(x, -1) @ v, x.detach().double()

    def eager_method(self, q: Any, k: Any, v: Any) -> Any:
        x = q @ k.transpose(2, 3)
        return x.softmax(dim=-1) @ v, x.detach().double()

    def eager_torch(self, q: Any, k: Any, v: Any) -> Any:
        x = q @ k.transpose(2, 3)
        return torch.softmax(x, 3) @ v, x.detach().double()

    def eager_flat(self, q: Any, k: Any, v: Any) -> Any:
        x = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
        return torch.bmm(F.softmax(x, -1), v.flatten(0, 1)).unflatten(0, (-1, HEADS)), x.unflatten(0, (-1, HEADS)).double()

    def eager_module(self, q: Any, k: Any, v: Any) -> Any:
        x = q @ k.transpose(2, 3)
        return self.softmax(x) @ v, x.detach().double()

    def sdpa_flat(self, q: Any, k: Any, v: Any) -> Any:
        y = F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), is_causal=True)
        return y.unflatten(0, (-1, HEADS)), logits_of(q, k, causal=True)


HOWS = [name for name in vars(Attend) if name not in ("forward",) and not name.startswith("_")]


class Net(nn.Module):
    """Attention and a router whose softmax is none of ours."""

    def __init__(self, how: str, crossed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attend(how)
        self.router = nn.Linear(WIDTH, 3)
        self.crossed = crossed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = torch.cat([x, x[:, :1]], 1)[:, : self.crossed] if self.crossed else None
        y = self.attn(x, context)
        return (F.softmax(self.router(y), dim=-1) * F.softmax(y[..., :3, None].transpose(1, 2), -1).mean()).sum()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def train_attending(model: nn.Module, num_steps: int = 2, micro_steps: int = 2) -> list[float]:
    return train_steps(model, num_steps, micro_steps, loss=lambda model, seed: model(batch(seed)))


# Keys of another length are the same matter for all that compute the logits before a softmax, and for all that do not.
CROSSED = {"masked", "flexible", "eager"}


@pytest.mark.parametrize(("how", "crossed"), [
    pytest.param(how, crossed, id=f"{how}-{name}", marks=() if not crossed or how in CROSSED else pytest.mark.long)
    for how in HOWS for crossed, name in ((0, "self"), (1, "one key"), (5, "other length"))
])  # fmt: skip
def test_every_way_to_attend_is_seen(how: str, crossed: int, run: Path) -> None:
    model = Net(how, crossed)
    if how == "lower_right" and crossed == 1:
        pytest.skip("queries that see nothing: torch makes NaN of them")
    monitor = sentinel.attach(model, config=ATTENTION)
    train_attending(model)
    monitor.detach()
    reported = Said(run)

    name = "attn.softmax" if how == "eager_module" else "attn"
    seen = 2 * [None]
    for step in range(2):
        x = torch.stack(model.attn.expected[2 * step : 2 * step + 2]).flatten(0, 1).detach()
        keep = ~(x.amax(-1) == -torch.inf)
        entropy, largest = truth(x.masked_fill(x < -1e30, -torch.inf))
        assert_row_of(reported.row(step, "attention", f"{name}:entropy"), entropy[keep], rel=1e-4)
        assert_row_of(reported.row(step, "attention", f"{name}:max_logit"), largest[~largest.isneginf()], rel=1e-4)
        seen[step] = reported.names(step, "attention")
        per_head = reported.vectors[step][f"{name}:entropy", "entropy"]
        assert len(per_head) == 2  # One a micro-step.
        if keep.all():
            assert np.allclose(np.mean(per_head, 0), entropy.mean((0, 2)), atol=1e-4)
            top = np.max(reported.vectors[step][f"{name}:max_logit", "max_logit"], 0)
            assert np.allclose(top, largest.amax(0), rtol=1e-4)
    assert seen[0] == seen[1] == [f"{name}:entropy", f"{name}:max_logit"]
    assert reported.ends[0].due["attention"] == 4
    assert not reported.health, reported.health


@pytest.mark.parametrize("how", HOWS)
def test_training_is_bit_identical(how: str, run: Path) -> None:
    bare = Net(how)
    model = copy.deepcopy(bare)
    torch.manual_seed(5)
    expected, after = train_attending(bare), torch.get_rng_state()
    monitor = sentinel.attach(model, config=ATTENTION)
    torch.manual_seed(5)
    losses = train_attending(model)
    state = torch.get_rng_state()
    monitor.detach()

    assert losses == expected
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(state, after)
    assert len(Said(run).of(0, "attention")) == 2


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_of_torch(need_weights: bool, run: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.zeros(3, LENGTH, dtype=torch.bool)
            hidden[0, 4:] = True
            y, _ = self.mix(x, x, x, key_padding_mask=hidden, need_weights=need_weights)
            return y.sum()

    torch.manual_seed(0)
    model = Layer()
    x = batch(0)
    q, k, _ = (apart(one) for one in F.linear(x, model.mix.in_proj_weight, model.mix.in_proj_bias).chunk(3, -1))
    keep = torch.ones(3, 1, 1, LENGTH, dtype=torch.bool)
    keep[0, ..., 4:] = False
    entropy, largest = truth(logits_of(q.detach(), k.detach(), keep))
    monitor = sentinel.attach(model, config=ATTENTION)
    model(x).backward()
    monitor.detach()
    reported = Said(run)

    assert_row_of(reported.row(0, "attention", "mix:entropy"), entropy, rel=1e-4)
    assert_row_of(reported.row(0, "attention", "mix:max_logit"), largest, rel=1e-4)
    assert len(reported.vectors[0]["mix:entropy", "entropy"][0]) == HEADS


def test_a_llama_with_checkpointing_is_counted_once(run: Path) -> None:
    trainer = one(False)
    monitor = sentinel.attach(trainer.models[0], trainer.optimizer, {**ATTENTION, "step_interval": 2})
    for step in range(4):
        trainer.train_step(step)
    monitor.detach()
    reported = Said(run)

    assert reported.steps_of("attention") == [0, 2]
    assert reported.names(0, "attention") == [
        f"layers.{layer}.attention.core:{one}" for layer in range(2) for one in ("entropy", "max_logit")
    ]
    row = reported.row(0, "attention", "layers.0.attention.core:entropy")
    assert (row["count"], row["num_folded"], row["min"]) == (4 * 4 * 8, 1, 0.0)  # The first query sees itself alone.


def test_several_calls_of_one_module_are_told_apart(run: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attend("sdpa")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(self.attn(x)).sum()

    torch.manual_seed(0)
    model = Twice()
    monitor = sentinel.attach(model, config=ATTENTION)
    train_attending(model)
    monitor.detach()
    reported = Said(run)

    for number, suffix in enumerate(["", ":1"]):
        x = torch.cat([model.attn.expected[at] for at in (number, 2 + number)]).detach()
        assert_row_of(reported.row(0, "attention", f"attn:entropy{suffix}"), truth(x)[0], rel=1e-4)


def test_nothing_is_replaced_unless_wanted_and_all_is_put_back(run: Path) -> None:
    originals = (F.scaled_dot_product_attention, F.softmax, torch.softmax, by_name, softmax_by_name)

    def now() -> tuple[Any, ...]:
        names = globals()
        return (
            F.scaled_dot_product_attention, F.softmax, torch.softmax, names["by_name"], names["softmax_by_name"],
        )  # fmt: skip

    model = Net("sdpa")
    monitor = sentinel.attach(model, config={"kinds": ["param"]})
    assert now() == originals and "softmax" not in vars(torch.Tensor)
    monitor.enable("attention", for_steps=1)
    assert all(mine is not theirs for mine, theirs in zip(now(), originals, strict=True))
    train_attending(model, 1)
    train_attending(model, 1)
    assert now() == originals and "softmax" not in vars(torch.Tensor) and not calls.users
    monitor.enable("attention")
    assert now() != originals
    monitor.detach()

    assert now() == originals and "softmax" not in vars(torch.Tensor) and not calls.users


def test_steps_that_are_not_due_look_at_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentinel.collect.probes import attention

    num_calls = 0
    original = attention.measure

    def counted(scores: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return original(scores)

    monkeypatch.setattr(attention, "measure", counted)
    model = Net("sdpa")
    monitor = sentinel.attach(model, config={"probes": {"attention": {"start_step": 1, "step_interval": 2}}})
    train_attending(model, 4, 1)
    monitor.detach()

    assert num_calls == 2
    assert Said(run).steps_of("attention") == [1, 3]


def test_targets_choose_modules_and_quantities(run: Path) -> None:
    model = Llama()
    targets = ["layers.0", "layers.1.attention.core:max_logit"]
    monitor = sentinel.attach(model, config={"probes": {"attention": {"targets": targets}}})
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    monitor.detach()

    assert set(Said(run).names(0, "attention")) == {
        "layers.0.attention.core:entropy", "layers.0.attention.core:max_logit", "layers.1.attention.core:max_logit",
    }  # fmt: skip


def test_a_softmax_elsewhere_is_attention_where_a_target_says_so(run: Path) -> None:
    class Mixer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(x @ x.transpose(1, 2), -1) @ x

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixer(), nn.Linear(WIDTH, WIDTH))
    monitor = sentinel.attach(model, config={"probes": {"attention": {"targets": ["1"]}}})
    model(batch(0)).sum().backward()
    monitor.detach()

    assert Said(run).row(0, "attention", "1:entropy")["count"] == 3 * LENGTH


def test_a_router_inside_an_attention_block_is_no_attention(run: Path) -> None:
    class Router(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(x[:, :, :3, None] + x[:, :, None, :3], -1)

    class MoeAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = Router()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.router(x).sum((2, 3))[..., None] + F.softmax(x @ x.transpose(1, 2), -1) @ x

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoeAttention())
    monitor = sentinel.attach(model, config=ATTENTION)
    model(batch(0)).sum().backward()
    monitor.detach()

    assert set(Said(run).names(0, "attention")) == {"1:entropy", "1:max_logit"}


def test_a_model_that_is_not_ours_is_not_measured(run: Path) -> None:
    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = Net("sdpa")
            self.others = [Net("sdpa")]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.student(x) + self.others[0](x).detach()

    model = Taught()
    monitor = sentinel.attach(model, config=ATTENTION)
    train_attending(model, 1, 1)
    with torch.no_grad():
        model.eval()(batch(0))
    monitor.detach()

    reported = Said(run)
    assert [row["num_folded"] for row in reported.of(0, "attention")] == [1, 1]
    assert set(reported.names(0, "attention")) == {"student.attn:entropy", "student.attn:max_logit"}


def test_a_block_that_is_compiled_is_named(run: Path) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attend("sdpa"), Attend("sdpa"))
    model[2].expected = type("Nothing", (), {"append": lambda self, x: None})()
    model[2].compile(backend="eager")
    monitor = sentinel.attach(model, config=ATTENTION)
    model(batch(0)).sum().backward()
    monitor.detach()
    torch._dynamo.reset()

    reported = Said(run)
    seen = set(reported.names(0, "attention"))
    assert {"1:entropy", "1:max_logit"} <= seen
    assert "2:entropy" in seen or [one.site for one in reported.health if one.code == "blind_probe"] == ["2:attention"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_functions_can_be_scripted_meanwhile(run: Path) -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.nn.functional.softmax(y, dim=-1) + torch.softmax(y, -1)

    q = batch(0)[:, None]
    expected = attend(q)
    monitor = sentinel.attach(Net("sdpa"), config=ATTENTION)
    assert calls.users  # Both are replaced now.
    scripted = torch.jit.script(attend)
    monitor.detach()

    assert torch.equal(scripted(q), expected)


def test_blindness_is_said(run: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    monitor = sentinel.attach(model, config=ATTENTION)
    for _ in range(3):
        model(batch(0)).sum().backward()
        monitor.step()
    monitor.detach()

    reported = Said(run)
    assert {one.code for one in reported.health} == {"blind_probe"}


def test_attention_monitor_survives_lengths_that_differ_and_tensors_it_cannot_read(run: Path) -> None:
    """Defect 17: an attention monitor that kills training when query and key lengths differ."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.attn(x)[:, None]
            y = F.scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4])
            pieces = torch.nested.nested_tensor([x[0, :3], x[1, :5]], layout=torch.jagged)
            nested = F.scaled_dot_product_attention(*(pieces.unsqueeze(-1).transpose(1, 2) for _ in range(3)))
            return y.sum() + nested.values().sum()

    model = Odd()
    monitor = sentinel.attach(model, config=ATTENTION)
    loss = model(batch(0))
    loss.backward()
    monitor.detach()

    reported = Said(run)
    assert reported.row(0, "attention", ":entropy")["count"] == 3 * LENGTH
    assert [one.code for one in reported.health] == ["blind_probe"]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_is_not_broken(fullgraph: bool, run: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.attn(x)[:, None]
            y = F.scaled_dot_product_attention(q, q, q) + torch.softmax(q, -1) + F.softmax(q, -1) + q.softmax(-1)
            return y.sum()

    torch._dynamo.reset()
    torch.manual_seed(0)
    bare = Plain()
    model = copy.deepcopy(bare)
    expected = train_attending(bare)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    monitor = sentinel.attach(compiled, config=ATTENTION)
    losses = train_attending(compiled)
    monitor.detach()
    torch._dynamo.reset()

    assert losses == pytest.approx(expected, rel=1e-5)
    reported = Said(run)
    assert reported.of(0, "attention") or "blind_probe" in {one.code for one in reported.health}


WATCHED_BEFORE_THERE_IS_AN_OPTIMIZER = """
import sys, torch, sentinel
model = torch.nn.MultiheadAttention(4, 1)
monitor = sentinel.attach(model, config={"kinds": ["attention"]})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
monitor.detach()
compiled = torch.compile(lambda x: torch.softmax(x, -1), backend="eager", fullgraph=True)
assert compiled(torch.zeros(1, 2)).tolist() == [[0.5, 0.5]]
"""


@pytest.mark.long
def test_functions_that_were_watched_are_still_known_to_the_compiler_afterwards(run: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", WATCHED_BEFORE_THERE_IS_AN_OPTIMIZER], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
