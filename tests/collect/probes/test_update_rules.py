"""Each formula against what the weights really show, in float64, for each optimizer and option."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from sentinel.collect.probes.piecewise_rows import side_by_side
from sentinel.collect.probes.update_rules import Given, difference, needs_norm_before, rule_of

SHAPES = ((6, 5), (7,), (3, 4, 2))
NUM_STEPS = 4
WIDE = functools.partial(torch.tensor, dtype=torch.float64)


class Lion(optim.Optimizer):
    """As its authors and lion-pytorch write it."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        self._init_lr, self.decoupled_wd = lr, options.pop("decoupled_weight_decay", False)
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                decay = group["weight_decay"] / (self._init_lr if self.decoupled_wd else 1.0)
                p.mul_(1.0 - group["lr"] * decay)
                p.add_(m.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Adafactor(optim.Optimizer):
    """The arithmetic of transformers.optimization.Adafactor."""

    __module__ = "transformers.optimization"

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {
            "lr": None, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None, "weight_decay": 0.0,
            "scale_parameter": True, "relative_step": True, "warmup_init": False,
        }  # fmt: skip
        super().__init__(params, {**defaults, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        def rms(x: torch.Tensor) -> torch.Tensor:
            return x.norm(2) / x.numel() ** 0.5

        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["RMS"] = rms(p)
                lr = group["lr"]
                if group["relative_step"]:
                    lr = min(1e-6 * state["step"] if group["warmup_init"] else 1e-2, state["step"] ** -0.5)
                if group["scale_parameter"]:
                    lr = lr * max(group["eps"][1], state["RMS"])
                beta2 = 1.0 - state["step"] ** group["decay_rate"]
                square = p.grad**2 + group["eps"][0]
                if p.dim() > 1:
                    rows = state.setdefault("exp_avg_sq_row", torch.zeros(p.shape[:-1], dtype=p.dtype))
                    columns = state.setdefault("exp_avg_sq_col", torch.zeros(p.shape[:-2] + p.shape[-1:], dtype=p.dtype))
                    rows.mul_(beta2).add_(square.mean(-1), alpha=1 - beta2)
                    columns.mul_(beta2).add_(square.mean(-2), alpha=1 - beta2)
                    factor = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * columns.unsqueeze(-2).rsqrt()
                    update = factor * p.grad
                else:
                    second = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                    second.mul_(beta2).add_(square, alpha=1 - beta2)
                    update = second.rsqrt() * p.grad
                update = update / (rms(update) / group["clip_threshold"]).clamp(min=1.0) * lr
                if group["beta1"] is not None:
                    first = state.setdefault("exp_avg", torch.zeros_like(p))
                    update = first.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"]).clone()
                if group["weight_decay"]:
                    p.add_(p, alpha=-group["weight_decay"] * lr)
                p.add_(-update)


def scheduled(optimizer: Any) -> Any:
    """A scheduler wraps `step` on the instance, and changes the rate behind each step."""
    return optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adamw": (optim.AdamW, {"weight_decay": 0.3}),
    "adamw_no_decay": (optim.AdamW, {"weight_decay": 0.0}),
    "adamw_amsgrad": (optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw_maximize": (optim.AdamW, {"maximize": True, "weight_decay": 0.1}),
    "adamw_foreach": (optim.AdamW, {"foreach": True, "weight_decay": 0.1, "betas": (0.7, 0.8), "eps": 1e-3}),
    "adamw_fused": (optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "adamw_lr_tensor": (optim.AdamW, {"lr": WIDE(0.02), "weight_decay": 0.1, "foreach": False}),
    "adamw_betas_tensor": (
        optim.AdamW, {"betas": (WIDE(0.9), WIDE(0.99)), "lr": WIDE(0.01), "foreach": False},
    ),
    "adam": (optim.Adam, {}),
    "adam_l2": (optim.Adam, {"weight_decay": 0.3}),
    "adam_decoupled": (optim.Adam, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    "sgd": (optim.SGD, {}),
    "sgd_l2": (optim.SGD, {"weight_decay": 0.2}),
    "sgd_maximize": (optim.SGD, {"weight_decay": 0.2, "maximize": True}),
    "sgd_momentum": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.2}),
    "sgd_dampened": (optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "sgd_nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.2}),
    "sgd_nesterov_foreach": (
        optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.2, "foreach": True, "maximize": True},
    ),
    "sgd_fused": (optim.SGD, {"momentum": 0.9, "fused": True, "weight_decay": 0.1}),
    "lion": (Lion, {}),
    "lion_decay": (Lion, {"weight_decay": 0.3, "betas": (0.95, 0.98)}),
    "lion_decoupled": (Lion, {"weight_decay": 0.03, "decoupled_weight_decay": True}),
    "adafactor": (optim.Adafactor, {}),
    "adafactor_decay": (optim.Adafactor, {"weight_decay": 0.2, "lr": 0.3, "maximize": True}),
    "adafactor_foreach": (optim.Adafactor, {"weight_decay": 0.1, "foreach": True, "eps": (1e-3, 1e-2), "d": 1.5}),
    "adafactor_lr_tensor": (optim.Adafactor, {"lr": WIDE(0.05), "foreach": False}),
    "adafactor_of_transformers": (Adafactor, {}),
    "adafactor_of_transformers_warmup": (Adafactor, {"warmup_init": True, "weight_decay": 0.1}),
    "adafactor_of_transformers_momentum": (Adafactor, {"beta1": 0.9, "weight_decay": 0.1}),
    "adafactor_of_transformers_own_rate": (
        Adafactor,
        {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "clip_threshold": 0.5, "weight_decay": 0.1},
    ),
    "muon": (optim.Muon, {}),
    "muon_plain": (optim.Muon, {"nesterov": False, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}),
}  # fmt: skip


def trained(build: Callable[..., Any], options: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any], nn.Parameter, Any]]:
    """Yield (optimizer, group, parameter, (weights before, norm before)) of each step and parameter of two groups."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 5), (5, 8)] if build is optim.Muon else SHAPES
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    lr = 0.03 if options.get("lr") is None and build is not Adafactor else options.get("lr")
    more = {} if build is Adafactor else {"lr": 0.5 * lr}
    groups = [{"params": params[:1]}, {"params": params[1:], **more}]
    optimizer = build(groups, **{"lr": lr, **options})
    scheduler = scheduled(optimizer) if lr is not None else None
    for _ in range(NUM_STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        before = [(p.detach().clone(), p.detach().norm()) for p in params]
        optimizer.step()
        for group in optimizer.param_groups:
            for p in group["params"]:
                yield optimizer, group, p, next(b for q, b in zip(params, before, strict=True) if q is p)
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("most", [10**6, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_what_the_weights_show(name: str, most: int) -> None:
    num_checked = 0
    for optimizer, group, p, (before, norm) in trained(*CASES[name]):
        rule = rule_of(optimizer)
        assert rule is not None
        expected = p.detach() - before

        formula = rule(Given(optimizer, group, optimizer.state[p], p, p.grad, norm if needs_norm_before(rule) else None))
        assert formula is not None
        seen = list(side_by_side([*formula.tensors, p.detach(), expected], most))
        if formula.prepare is not None:
            formula.prepare((pieces[:-2] for pieces in seen), torch.float64)
        for *pieces, param, truth in seen:
            out = torch.empty(param.shape, dtype=torch.float64)
            formula.write(out, tuple(pieces), param)

            assert float(expected.abs().max()) > 1e-9
            # torch orthogonalises in bf16 and does not always add up alike.
            assert torch.allclose(out, truth, rtol=2e-2 if "muon" in name else 1e-8, atol=1e-3 if "muon" in name else 1e-13)
            num_checked += 1
    assert num_checked >= NUM_STEPS * 2


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_decay_in_another_place_is_another_update(name: str) -> None:
    """The positive control: the formulas tell a decay apart that is not there."""
    optimizer, group, p, (before, _) = list(trained(CASES[name][0], {**CASES[name][1], "weight_decay": 0.3}))[-1]
    rule = rule_of(optimizer)
    assert rule is not None
    formula = rule(Given(optimizer, {**group, "weight_decay": 0.0}, optimizer.state[p], p, p.grad))
    assert formula is not None
    out = torch.empty_like(p)
    formula.write(out, formula.tensors, p.detach())

    assert not torch.allclose(out, p.detach() - before, rtol=1e-3, atol=1e-6)


class Changed(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)
        return super().step(closure)


class Renamed(optim.AdamW):
    """Steps as its base does."""


@pytest.mark.parametrize(
    ("build", "is_known"),
    [(Renamed, True), (Changed, False), (optim.NAdam, False), (optim.RMSprop, False), (optim.LBFGS, False)],
)
def test_only_rules_that_are_known_have_a_formula(build: Callable[..., Any], is_known: bool) -> None:
    optimizer = build([nn.Parameter(torch.zeros(3))], lr=0.1)

    assert (rule_of(optimizer) is not None) is is_known


def test_a_variant_of_lion_has_no_formula() -> None:
    for _, group, p, _ in trained(Lion, {"cautious_factor": 0.0, "correction": True}):
        optimizer = Lion([p], 0.1)
        rule = rule_of(optimizer)
        assert rule is not None
        state = {"exp_avg": torch.zeros_like(p)}
        assert rule(Given(optimizer, group, state, p, p.grad)) is None
        usual = {**group, "correction": False, "cautious_factor": 1.0}
        assert rule(Given(optimizer, usual, state, p, p.grad)) is not None


def test_the_difference_is_taken_in_the_type_of_the_room() -> None:
    before, after = torch.full((3,), 1.0, dtype=torch.bfloat16), torch.full((3,), 1.0078125, dtype=torch.bfloat16)
    formula = difference(before)
    out = torch.empty(3)
    formula.write(out, formula.tensors, after)

    assert out.tolist() == [0.0078125] * 3
