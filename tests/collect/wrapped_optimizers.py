"""Optimizers in the forms that people publish: two phases, evaluations of their own, wrappers around another optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around a base optimizer: `first_step` and `second_step`, or `step` with a closure."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(grads).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old"]
        self.update()
        if zero_grad:
            self.zero_grad()

    def update(self) -> None:
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class HandSAM(SAM):
    """The same, that writes the update itself: no optimizer of torch steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        torch.optim.Optimizer.__init__(self, params, {"rho": 0.05, "lr": lr})

    def update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)


class Minimizer:
    """Two phases around an optimizer that knows nothing of them; no optimizer itself, and no `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, rho: float = 0.05) -> None:
        self.optimizer = optimizer
        self.model = model
        self.rho = rho
        self.state: defaultdict[Any, dict[str, torch.Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def ascent_step(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                self.state[p]["eps"] = self.rho * p.grad / (p.grad.norm() + 1e-12)
                p.add_(self.state[p]["eps"])
        self.optimizer.zero_grad()

    @torch.no_grad()
    def descent_step(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.sub_(self.state[p]["eps"])
        self.optimizer.step()
        self.optimizer.zero_grad()


class Evaluating(torch.optim.Optimizer):
    """Runs forward and backward twice inside a `step` that takes no closure, as GSAM does."""

    def __init__(self, params: Any, base: torch.optim.Optimizer) -> None:
        super().__init__(params, {})
        self.base = base
        self.evaluate: Callable[[], torch.Tensor]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for phase in range(2):
            self.base.zero_grad()
            with torch.enable_grad():
                self.evaluate().backward()
            if phase == 0:
                moved = [(p, 0.01 * p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
                for p, by in moved:
                    p.data.add_(by)
        for p, by in moved:
            p.data.sub_(by)
        self.base.step()


class Lookahead(torch.optim.Optimizer):
    """Slow weights around a fast optimizer; like many published wrappers it never calls `Optimizer.__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 3) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        self.every, self.num = every, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        self.num += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.num % self.every == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Accumulating(torch.optim.Optimizer):
    """Steps its inner optimizer at every second call."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.num = inner, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num += 1
        if self.num % 2 == 0:
            self.inner.step()
            self.inner.zero_grad()


class Modes(torch.optim.Optimizer):
    """Schedule-free in form: the weights are others in `train()` than in `eval()`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def _move(self, by: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], by)

    def eval(self) -> None:
        self._move(0.1)

    def train(self) -> None:
        self._move(-0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("z", p.detach().clone()).sub_(group["lr"] * p.grad)
                    p.sub_(group["lr"] * 0.5 * p.grad)


class Deriving(torch.optim.Adam):
    """Its step calls that of its class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)
