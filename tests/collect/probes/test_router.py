"""Routers of every make: found, and told as a slow count of their tokens tells them."""

from __future__ import annotations

import copy
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.probes.router_finding import find_routers
from sentinel.collect.probes.routing import balance_of, coupling_of, decide, load_of

from ...support.spools import Said
from ...support.truth import assert_row_of
from .routers import EXPERTS, MAKES, TOP, WIDTH, LinearGate, Net, train_routed

ROUTER = {"kinds": ["router"], "black_box": False}


def truth(like: str, model: Net, inputs: list[torch.Tensor]) -> dict[str, Any]:
    """All quantities of the tokens of one step, in float64, from the inputs of the router."""
    router = model.get_submodule(MAKES[like][1])
    weight = next(p for name, p in router.named_parameters() if name.endswith("weight"))
    logits = torch.cat([x.reshape(-1, WIDTH) for x in inputs]).double() @ weight.detach().double().view(EXPERTS, WIDTH).T
    is_sigmoid = like in ("biased", "titan")
    raw = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    bias = {"biased": "moe.gate.e_score_correction_bias", "titan": "moe.expert_bias"}.get(like)
    chosen_by = raw + model.get_buffer(bias).double() if bias else raw
    scores = raw / raw.sum(-1, keepdim=True)
    load = np.bincount(chosen_by.topk(TOP).indices.flatten(), minlength=EXPERTS).astype(float)
    preferred = np.bincount(scores.topk(TOP).indices.flatten(), minlength=EXPERTS).astype(float)
    p, s, f = load / load.sum(), scores.mean(0).numpy(), preferred / preferred.sum()
    ordered = scores.sort(-1, descending=True).values
    inner = ((f - 1 / EXPERTS) * (s - 1 / EXPERTS)).sum()
    return {
        "logits": logits, "entropy": -(scores * scores.log()).sum(-1),
        "margin": ordered[:, TOP - 1] - ordered[:, TOP],
        "relative_margin": 1 - ordered[:, TOP] / ordered[:, TOP - 1],
        "load": load / len(logits), "max_over_mean": [load.max() / load.mean()],
        "inactive": (load == 0).astype(float), "balance": [EXPERTS * ((p - 1 / EXPERTS) ** 2).sum()],
        "coupling": [EXPERTS * inner],
        "alignment": [inner / np.sqrt(((f - 1 / EXPERTS) ** 2).sum() * ((s - 1 / EXPERTS) ** 2).sum())],
        "counts": load, "bias": None if bias is None else model.get_buffer(bias),
        "weight_similarity": cosines(weight),
    }  # fmt: skip


def cosines(weight: torch.Tensor) -> np.ndarray:
    rows = weight.detach().double().view(EXPERTS, WIDTH)
    rows = rows / rows.norm(dim=1, keepdim=True)
    return (rows @ rows.T).numpy()[np.triu_indices(EXPERTS, 1)]


@pytest.mark.parametrize("like", MAKES)
def test_every_make_of_router(like: str, run: Path) -> None:
    model = Net(like)
    name = MAKES[like][1]
    expected: list[dict[str, Any]] = []
    inputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any) -> None:
        inputs.append(args[0].detach().clone())
        if len(inputs) == 2:
            expected.append(truth(like, model, inputs))
            inputs.clear()

    model.get_submodule(name).register_forward_pre_hook(keep)
    monitor = sentinel.attach(model, config=ROUTER)
    train_routed(model)
    monitor.detach()
    reported = Said(run)

    for step, all_of_it in enumerate(expected):
        counts = all_of_it.pop("counts")
        for quantity, values in all_of_it.items():
            if values is None:
                assert not reported.of(step, "router", f"{name}:{quantity}")
                continue
            assert_row_of(reported.row(step, "router", f"{name}:{quantity}"), values, rel=2e-4)
        (load,) = reported.vectors[step][f"{name}:load", "load"]
        assert load.dtype == np.int64 and load.tolist() == counts.tolist()
        if like in ("flat", "deepspeed"):
            assert reported.row(step, "router", f"{name}:aux_loss")["num_folded"] == 2
    assert reported.ends[0].due["router"] == sum(row["num_folded"] for row in reported.of(0, "router"))
    assert {one.partition(":")[0] for one in reported.names(0, "router")} == {name}  # The gate inside is no second router.
    assert not reported.health, reported.health


@pytest.mark.parametrize("like", MAKES)
def test_training_is_bit_identical(like: str, run: Path) -> None:
    bare = Net(like)
    model = copy.deepcopy(bare)
    expected, after = train_routed(bare), torch.get_rng_state()
    monitor = sentinel.attach(model, config=ROUTER)
    losses = train_routed(model)
    state = torch.get_rng_state()
    monitor.detach()

    assert losses == expected and torch.equal(state, after)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), bare.parameters(), strict=True))
    assert Said(run).of(1, "router")
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_hooks_are_on_routers_alone_and_only_while_wanted(run: Path) -> None:
    model = Net("tuple")

    def hooked() -> set[str]:
        return {name for name, module in model.named_modules() if name and module._forward_hooks}

    monitor = sentinel.attach(model, config={"kinds": ["param"], "black_box": False})
    assert hooked() == set()
    monitor.enable("router", for_steps=1)
    assert hooked() == {"moe.gate"}
    twin = copy.deepcopy(model)
    train_routed(twin, 1)
    train_routed(model, 3)
    assert hooked() == set()
    monitor.detach()

    assert Said(run).steps_of("router") == [0]


def test_a_schedule_and_targets_of_its_own(run: Path) -> None:
    model = Net("linear")
    probe = {"step_interval": 2, "targets": ["moe.gate:load", "moe.gate:entropy"]}
    monitor = sentinel.attach(model, config={"probes": {"router": probe}})
    train_routed(model, 4)
    monitor.detach()

    reported = Said(run)
    assert reported.steps_of("router") == [0, 2]
    assert set(reported.names(0, "router")) == {"moe.gate:load", "moe.gate:entropy"}


def test_what_is_no_router_is_not_taken_for_one() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.gate = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
            self.shared_expert_gate = nn.Linear(WIDTH, 1)

    class Block(LinearGate):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.lstm = Mlp(), nn.LSTM(WIDTH, 4)
            self.shared_expert_gate = nn.Linear(WIDTH, 1)
            self.mlp.router_norm = nn.LayerNorm(WIDTH)

    modules = dict(nn.Sequential(Block()).named_modules())

    assert [one.name for one in find_routers(modules)] == ["0.gate"]
    assert [one.name for one in find_routers(modules, lambda name: name == "0.mlp.gate")] == ["0.gate", "0.mlp.gate"]
    (found,) = find_routers(modules)
    assert (found.num_experts, found.top_k, found.scoring) == (EXPERTS, TOP, "softmax")


def test_a_list_of_experts_tells_a_gate_and_how_wide_it_is() -> None:
    class Holder(nn.Module):
        def __init__(self, experts: int, width: int) -> None:
            super().__init__()
            self.gate = nn.Linear(4, width)
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(experts)])
            self.config = type("Config", (), {"num_experts_per_tok": 2, "scoring_func": "sigmoid"})()

    assert len(find_routers(dict(nn.Sequential(Holder(8, 8)).named_modules()))) == 1
    (local,) = find_routers(dict(nn.Sequential(Holder(2, 8)).named_modules()))  # Expert parallel: this rank's share.
    assert (local.num_experts, local.top_k, local.scoring) == (8, 2, "sigmoid")
    assert not find_routers(dict(nn.Sequential(Holder(8, 12)).named_modules()))


def test_tokens_that_were_dropped_have_no_expert() -> None:
    indices = torch.tensor([[0, 2], [3, -1], [2, 9], [2, 1]])

    assert load_of(indices, 4).tolist() == [1, 1, 3, 1]


def test_extremes_of_balance_and_coupling() -> None:
    even, collapsed = torch.full((8,), 5), torch.tensor([40, 0, 0, 0, 0, 0, 0, 0])

    assert balance_of(even) == pytest.approx(0.0, abs=1e-12)
    assert balance_of(collapsed) == pytest.approx(7.0)
    assert balance_of(torch.zeros(8)) == pytest.approx(1.0)
    coupling, alignment = coupling_of(collapsed, collapsed.double())
    assert (float(coupling), float(alignment)) == pytest.approx((7.0, 1.0))
    assert coupling_of(even, collapsed.double()) == (0.0, 0.0)


def test_logits_that_are_masked_or_all_experts_chosen() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = -torch.inf
    decisions = decide(logits, 4, "softmax")

    assert decisions.margin is None and decisions.entropy.isfinite().all()
    assert decide(logits, 0, "softmax").preferred is None


def test_blocks_of_tokens_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from sentinel.collect.probes import routing

    logits = torch.randn(101, 8, generator=torch.Generator().manual_seed(0))
    whole = decide(logits, 3, "sigmoid")
    monkeypatch.setattr(routing, "BLOCK", 64)
    cut = decide(logits, 3, "sigmoid")

    assert torch.equal(whole.entropy, cut.entropy) and torch.equal(whole.preferred, cut.preferred)
    assert torch.allclose(whole.scores, cut.scores, rtol=1e-6) and torch.equal(whole.margin, cut.margin)


def test_a_router_that_is_not_seen_and_a_model_without_any_are_told(run: Path) -> None:
    model = Net("tuple")
    model.moe.forward = lambda x: x  # type: ignore[method-assign,assignment]
    monitor = sentinel.attach(model, config={**ROUTER, "run": "run"})
    train_routed(model, 1)
    monitor.detach()
    plain = nn.Linear(2, 2)
    monitor = sentinel.attach(plain, config={**ROUTER, "run": "other"})
    plain(torch.ones(2)).sum().backward()
    monitor.detach()

    assert [(one.code, one.site) for one in Said(run).health] == [("blind_probe", "moe.gate")]
    assert [(one.code, one.site) for one in Said(run.parent / "other").health] == [("blind_probe", "router")]


def test_a_router_that_shows_nothing_says_so(run: Path) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 4
            self.table = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.table).sum(-1)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Router())
    monitor = sentinel.attach(model, config=ROUTER)
    model(torch.randn(3, WIDTH)).sum().backward()
    monitor.detach()

    assert [one.code for one in Said(run).health] == ["blind_probe"]


def test_losses_in_megatrons_tracker_are_read_before_it_is_cleared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = {"load_balancing_loss": {"values": torch.zeros(3)}}
    module: Any = types.ModuleType("megatron.core.transformer.moe.moe_utils")
    module.get_moe_layer_wise_logging_tracker = lambda: tracker
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = Net("megatron")
    router = model.get_submodule("moe.router")

    def record(*args: Any) -> None:
        tracker["load_balancing_loss"]["values"][1] += 1.5

    router.register_forward_hook(record)
    # Experts may have an optimizer of their own: that two step in one step is no reason to tell a loss twice.
    optimizers = [torch.optim.SGD(router.parameters(), 0.01), torch.optim.SGD(model.get_submodule("moe").parameters(), 0.01)]
    monitor = sentinel.attach(model, optimizers, config=ROUTER)
    for _ in range(2):
        train_routed(model, 1)
        for optimizer in optimizers:
            optimizer.step()
        tracker["load_balancing_loss"]["values"].zero_()
    monitor.detach()

    reported = Said(run)
    for step in range(2):
        # One layer here, two micro-steps.
        assert_row_of(reported.row(step, "router", ":load_balancing_loss"), [1.5])
        assert reported.vectors[step][":load_balancing_loss", "load_balancing_loss"][0].tolist() == [0.0, 1.5, 0.0]
