"""What an optimizer has just added to a parameter, computed from its state: one formula for each update rule.

All are read behind the step, from the state as the step has left it and the weights as they are now. With a = what the
rule takes away beside the decay, and decoupled decay by the share d = lr * weight_decay, the new weights are
p' = (1 - d) p - a, so what was added is p' - p = -(a + d p') / (1 - d): no former weights are needed, and low precision of
p' touches the small term alone. Numbers may be tensors on the device (capturable, lr as a tensor): nothing waits for them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sentinel.collect.parallel.placements import is_dense, is_dtensor, local_of

Number = Any
"""A float, or a 0-dim float64 tensor on the parameter's device."""
Pieces = tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Formula:
    """An update as a function of a few tensors shaped like the parameter, element by element."""

    tensors: Pieces
    """[*parameter's local shape] each: what `direct` is given piece by piece."""
    direct: Callable[..., None]
    """(out, *pieces, param's piece): write the direction, in out's type, before it is scaled. Neither waits nor draws."""
    scale: Number = -1.0
    """Factor of the direction."""
    decay: Number = 0.0
    """Factor of the weights after the step, which times that are added."""
    is_normalised: bool = False
    """The direction is the first moment over the root of the second, both corrected: Adam's step before its rate."""
    prepare: Callable[[Iterator[Pieces], torch.dtype], None] | None = None
    """Called once with an iterator over all pieces of `tensors`, and out's type, before the first piece is computed."""

    def write(self, out: torch.Tensor, pieces: Pieces, param: torch.Tensor, direction: torch.Tensor | None = None) -> None:
        """Write the update of a piece into `out`. direction: of the piece, if it was computed before; None: compute it."""
        if direction is None:
            self.direct(out, *pieces, param)
        else:
            out.copy_(direction)
        out.mul_(self.scale)
        if isinstance(self.decay, torch.Tensor):
            out.add_(param.to(out.dtype) * self.decay.to(out.dtype))
        elif self.decay != 0.0:
            out.add_(param, alpha=self.decay)


@dataclasses.dataclass
class Given:
    """One parameter behind the step, as this rank holds it."""

    optimizer: Any
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    """The optimizer's state of the parameter; tensors may be DTensors."""
    param: torch.Tensor
    """The parameter itself."""
    grad: torch.Tensor
    norm_before: torch.Tensor | None = None
    """0-dim: norm of the weights before the step, where the rule asked for it."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece of the parameter."""
        return local_of(self.param).detach()

    def number(self, key: str, default: Any = 0.0) -> Number:
        """Return a number of the optimizer's group, `default` where it has none."""
        value = self.group.get(key, default)
        return as_number(default if value is None else value, self.local.device)

    def kept(self, key: str) -> torch.Tensor | None:
        """Return this rank's piece of a tensor of the state, if it is shaped and cut as the parameter is."""
        tensor = self.state.get(key)
        if not isinstance(tensor, torch.Tensor) or not is_cut_alike(tensor, self.param):
            return None
        local = local_of(tensor)
        return local if local.shape == self.local.shape else None

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's piece of the gradient, if it is cut as the parameter is."""
        return local_of(self.grad).detach() if is_cut_alike(self.grad, self.param) else None


Rule = Callable[[Given], "Formula | None"]


def rule_of(optimizer: Any) -> Rule | None:
    """Return the formula of an optimizer's rule; None: none is known, and the update is the difference of the weights."""
    for name, rule in _TORCH.items():
        kind = getattr(torch.optim, name, None)
        if kind is not None and isinstance(optimizer, kind) and _steps_as(optimizer, kind):
            return rule
    kind, module = type(optimizer), type(optimizer).__module__
    if kind.__name__ in ("Lion", "FusedLion"):
        return lion
    if kind.__name__ == "Adafactor" and module.startswith("transformers."):
        return adafactor_of_transformers
    return None


def needs_norm_before(rule: Rule | None) -> bool:
    """Return whether a rule scales by the norm of the weights before the step."""
    return rule is adafactor


def reaches(rule: Rule, param: Any, grad: Any) -> bool:
    """Return whether a rule's formula can be computed for a parameter from this rank's piece of it."""
    if grad is not None and not is_dense(grad):
        return False  # Formulas go element by element.
    if rule in (adafactor, adafactor_of_transformers, muon):
        return not is_dtensor(param)  # They use sums over the whole parameter: those of a shard are others.
    return rule not in (sgd, lion) or grad is None or is_cut_alike(grad, param)


def as_number(value: Any, device: torch.device) -> Number:
    """Return a number as a float if it lies on the host, else as a 0-dim tensor on the device: no wait."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    value = local_of(value).detach()
    if value.is_cpu:
        return float(value)
    return value.reshape(()).double() if device.type != "mps" else value.reshape(())


def difference(before: torch.Tensor) -> Formula:
    """Return the formula of an unknown rule: weights after the step less those before, in out's type."""

    def direct(out: torch.Tensor, before: torch.Tensor, param: torch.Tensor) -> None:
        out.copy_(param).sub_(before)

    return Formula((before,), direct, 1.0)


# -- the rules -----------------------------------------------------------------------------------------------------------


def adam(given: Given) -> Formula | None:
    """Adam and AdamW, with amsgrad, maximize, L2 or decoupled decay. Source: torch/optim/adam.py, _single_tensor_adam."""
    group = given.group
    first, second = given.kept("exp_avg"), given.kept("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
    if first is None or second is None or "step" not in given.state:
        return None
    beta1, beta2 = (as_number(beta, given.local.device) for beta in group["betas"])
    step = as_number(given.state["step"], given.local.device)
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    root, eps = correction2**0.5, given.number("eps")

    def direct(out: torch.Tensor, first: torch.Tensor, second: torch.Tensor, param: torch.Tensor) -> None:
        out.copy_(second).sqrt_().div_(root).add_(eps)
        torch.div(first, out, out=out)
        out.div_(correction1)

    formula = _decayed((first, second), direct, given.number("lr"), given, bool(group.get("decoupled_weight_decay")))
    formula.is_normalised = True
    return formula


def sgd(given: Given) -> Formula | None:
    """SGD with momentum, dampening, Nesterov, L2 decay. Source: torch/optim/sgd.py, _single_tensor_sgd."""
    group = given.group
    lr, momentum, decay = given.number("lr"), given.number("momentum"), given.number("weight_decay")
    buffer = given.kept("momentum_buffer")
    if not _is_zero(momentum) and not group.get("nesterov"):
        if buffer is None:
            return None

        def follow(out: torch.Tensor, buffer: torch.Tensor, param: torch.Tensor) -> None:
            out.copy_(buffer)

        return Formula((buffer,), follow, -lr)
    gradient = given.gradient()
    if gradient is None or (not _is_zero(momentum) and buffer is None) or _is_at_least_one(lr * decay):
        return None
    sign = -1.0 if group.get("maximize") else 1.0

    def direct(out: torch.Tensor, gradient: torch.Tensor, *rest: torch.Tensor) -> None:
        out.copy_(gradient).mul_(sign)
        if len(rest) > 1:
            out.add_(rest[0].to(out.dtype) * momentum)

    tensors = (gradient,) if buffer is None or _is_zero(momentum) else (gradient, buffer)
    # The decay is part of the gradient, by the former weights: p' = p - lr (g + w p + ...), so again (1 - lr w) p.
    return _decayed(tensors, direct, lr, given, True)


def lion(given: Given) -> Formula | None:
    """Lion, after the momentum has taken the gradient in. Source: Chen et al. 2023, arXiv 2302.06675, algorithm 2.

    With m' = b2 m + (1 - b2) g behind the step, b1 m + (1 - b1) g = (b1 / b2) m' + (1 - b1 / b2) g. Where m is kept in low
    precision the sign is another one for elements whose sum is rounding alone.
    """
    group, optimizer = given.group, given.optimizer
    known = {"params", "lr", "initial_lr", "betas", "weight_decay", "maximize", "foreach", "use_triton", "name", "step"}
    if any(value for key, value in group.items() if key not in known and not (key == "cautious_factor" and value == 1.0)):
        return None  # A variant whose arithmetic is not known.
    momentum, gradient = given.kept("exp_avg"), given.gradient()
    beta1, beta2 = (as_number(beta, given.local.device) for beta in group["betas"])
    if momentum is None or gradient is None or _is_zero(beta2) or set(given.state) - {"exp_avg", "step"}:
        return None
    share = beta1 / beta2
    sign = -1.0 if group.get("maximize") else 1.0

    def direct(out: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, param: torch.Tensor) -> None:
        out.copy_(momentum).mul_(share).add_(gradient.to(out.dtype) * (sign * (1 - share))).sign_()

    decay = given.number("weight_decay")
    if getattr(optimizer, "decoupled_wd", False):  # lion-pytorch: the decay follows the schedule of the rate, not its size.
        decay = decay / as_number(getattr(optimizer, "_init_lr", 1.0), given.local.device)
    return _decayed((momentum, gradient), direct, given.number("lr"), given, True, decay)


def adafactor(given: Given) -> Formula | None:
    """torch's Adafactor, of whole parameters. Source: torch/optim/_adafactor.py, _single_tensor_adafactor."""
    param, grad, state = given.local, given.grad, given.state
    if is_dtensor(given.param) or given.norm_before is None or "step" not in state:
        return None
    eps1, eps2 = given.group["eps"]
    least = torch.finfo(param.dtype).eps if eps1 is None else float(eps1)
    lr, step = given.number("lr"), as_number(state["step"], param.device)
    rate = _smaller(lr, 1 / step**0.5)
    size = given.norm_before.double() / math.sqrt(param.numel())
    alpha = size.clamp(min=float(eps2)) * rate
    if param.dim() > 1:
        rows, columns = state.get("row_var"), state.get("col_var")
        if rows is None or columns is None:
            return None
        mean = rows.mean(dim=-2, keepdim=True).clamp(min=least)
        tensors: Pieces = (*(one.expand_as(param) for one in (rows, columns, mean)), grad.detach())
    else:
        variance = given.kept("variance")
        if variance is None:
            return None
        tensors = (variance, grad.detach())
    sign = -1.0 if given.group.get("maximize") else 1.0
    formula = _clipped(tensors, _factored(least * least, sign, False), float(given.group["d"]), alpha, given)
    return _with_decay(formula, lr * given.number("weight_decay"))


def adafactor_of_transformers(given: Given) -> Formula | None:
    """transformers' Adafactor. Source: transformers/optimization.py, Adafactor.step."""
    group, state, param = given.group, given.state, given.local
    if is_dtensor(given.param) or "step" not in state:
        return None
    rate: Number = group["lr"]
    step = as_number(state["step"], param.device)
    if group.get("relative_step"):
        rate = _smaller(1e-6 * step if group.get("warmup_init") else 1e-2, 1 / step**0.5)
    rate = as_number(rate, param.device) if rate is not None else None
    if rate is None:
        return None
    if group.get("scale_parameter"):
        size = as_number(state["RMS"], param.device)  # Of the weights before the step: kept by the step itself.
        rate = rate * (size.clamp(min=group["eps"][1]) if isinstance(size, torch.Tensor) else max(group["eps"][1], size))
    decay = rate * given.number("weight_decay")
    if group.get("beta1") is not None:
        first = given.kept("exp_avg")
        if first is None:
            return None

        def follow(out: torch.Tensor, first: torch.Tensor, param: torch.Tensor) -> None:
            out.copy_(first)

        return _with_decay(Formula((first,), follow, -1.0), decay)
    if param.dim() > 1:
        rows, columns = state.get("exp_avg_sq_row"), state.get("exp_avg_sq_col")
        if rows is None or columns is None:
            return None
        mean = rows.mean(dim=-1, keepdim=True).unsqueeze(-1)
        factors = (rows.unsqueeze(-1), columns.unsqueeze(-2), mean)
        tensors: Pieces = (*(one.expand_as(param) for one in factors), given.grad.detach())
    else:
        second = given.kept("exp_avg_sq")
        if second is None:
            return None
        tensors = (second, given.grad.detach())
    formula = _clipped(tensors, _factored(0.0, 1.0, True), float(group["clip_threshold"]), rate, given)
    return _with_decay(formula, decay)


def muon(given: Given) -> Formula | None:
    """torch's Muon, of whole matrices: its orthogonalisation is done once more. Source: torch/optim/_muon.py.

    Holds three bf16 matrices of the parameter's shape while it runs: it cannot be computed in pieces.
    """
    module = sys.modules.get("torch.optim._muon")
    orthogonal = getattr(module, "_zeropower_via_newtonschulz", None)
    adjusted = getattr(module, "_adjust_lr", None)
    buffer, gradient, group = given.kept("momentum_buffer"), given.gradient(), given.group
    if orthogonal is None or adjusted is None or buffer is None or gradient is None or is_dtensor(given.param):
        return None
    moved = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
    whole = orthogonal(moved, group["ns_coefficients"], group["ns_steps"], group["eps"])
    lr = given.number("lr")

    def direct(out: torch.Tensor, whole: torch.Tensor, param: torch.Tensor) -> None:
        out.copy_(whole)

    formula = Formula((whole,), direct, -lr * adjusted(1.0, group["adjust_lr_fn"], given.local.shape))
    return _with_decay(formula, lr * given.number("weight_decay"))


_TORCH: dict[str, Rule] = {"AdamW": adam, "Adam": adam, "SGD": sgd, "Adafactor": adafactor, "Muon": muon}
"""Class of torch.optim -> rule; of its subclasses those that step as it does."""


# -- what they share -----------------------------------------------------------------------------------------------------


def _decayed(
    tensors: Pieces, direct: Callable[..., None], lr: Number, given: Given, is_decoupled: bool, decay: Number = None
) -> Formula:
    weight_decay = given.number("weight_decay") if decay is None else decay
    return _with_decay(Formula(tensors, direct, -lr), lr * weight_decay if is_decoupled else 0.0)


def _with_decay(formula: Formula, share: Number) -> Formula:
    """Add the decay of the former weights by `share`, in terms of the new ones."""
    if isinstance(share, torch.Tensor) or share != 0.0:
        formula.scale = formula.scale / (1 - share)
        formula.decay = -share / (1 - share)
    return formula


def _factored(least: float, sign: float, is_rooted: bool) -> Callable[..., None]:
    """Return the direction of Adafactor: the gradient over the root of the second moment, whole or factored.

    is_rooted: the roots are taken of the factors, as transformers does, not of their product.
    """

    def direct(out: torch.Tensor, *rest: torch.Tensor) -> None:
        *moments, gradient, _ = rest
        if len(moments) == 1:
            out.copy_(moments[0])
        else:
            rows, columns, mean = moments
            out.copy_(rows)
            if is_rooted:
                out.div_(mean).mul_(columns)
            else:
                out.mul_(columns).div_(mean)
        out.clamp_(min=least).rsqrt_().mul_(gradient).mul_(sign)

    return direct


def _clipped(tensors: Pieces, direct: Callable[..., None], threshold: float, rate: Number, given: Given) -> Formula:
    """Return a formula whose direction is cut down where its root mean square is above `threshold`."""
    formula = Formula(tensors, direct)
    numel = max(given.local.numel(), 1)

    def prepare(pieces: Iterator[Pieces], dtype: torch.dtype) -> None:
        total = torch.zeros((), dtype=torch.float64, device=given.local.device)
        for one in pieces:
            out = torch.empty(one[0].shape, dtype=dtype, device=total.device)
            direct(out, *one, one[0])
            total += torch.linalg.vector_norm(out).double().square()
        size = (total / numel).sqrt() / threshold
        formula.scale = formula.scale * rate / size.clamp(min=1.0)

    formula.prepare = prepare
    return formula


def _smaller(a: Number, b: Number) -> Number:
    if isinstance(a, torch.Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, torch.Tensor) else min(a, b)


def _is_zero(value: Number) -> bool:
    return not isinstance(value, torch.Tensor) and value == 0.0


def _is_at_least_one(value: Number) -> bool:
    return not isinstance(value, torch.Tensor) and value >= 1.0


def is_cut_alike(tensor: Any, param: Any) -> bool:
    """Return whether a tensor is sharded over the ranks as a parameter is."""
    if is_dtensor(tensor) != is_dtensor(param):
        return False
    return not is_dtensor(param) or tuple(tensor.placements) == tuple(param.placements)


def _steps_as(optimizer: Any, kind: type) -> bool:
    """Return whether an optimizer steps by the method of `kind`; schedulers and profilers wrap it, subclasses change it."""
    own, known = getattr(type(optimizer), "step", None), getattr(kind, "step", None)
    return own is not None and inspect.unwrap(own) is inspect.unwrap(known)  # type: ignore[arg-type]
