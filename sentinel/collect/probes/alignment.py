"""How far the gradient agrees with the momentum: the share of elements with the same sign, and the cosine.

Read just before the optimizer steps, while this gradient has not entered the momentum. Source of the share:
msProbe's mg_direction, sign(gradient) == sign(exp_avg).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sentinel.collect.parallel.placements import is_dense, local_of
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.optimizer_state import STATE_KEYS
from sentinel.collect.probes.piecewise_rows import ROOM, side_by_side
from sentinel.collect.probes.prepared_rows import device_shares
from sentinel.collect.probes.single_values import NUM_NAN, observe_words, value_words
from sentinel.collect.probes.stepped import Stepped, describe_formed, stepped_by
from sentinel.collect.probes.update_rules import adam, as_number, is_cut_alike, lion, muon, rule_of, sgd
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import NO_ANGLE, Kind

COSINE = ":cosine"
_NAME = "grad_momentum_alignment"
PRODUCTS = ("product", "gradient_squares", "momentum_squares")
"""Suffixes of the summands of a cosine whose parameter lies in shards: this rank's sums over its elements."""


class Alignment:
    """Two rows a parameter: the share, whose shards merge exactly, and the cosine, which the daemon forms of its shards'
    sums."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._rows: dict[int, int] = {}
        self._announced: set[int] = set()
        self._had_state: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        """Optimizer that steps with a closure -> parameters that had a momentum before the step that runs."""
        context.events.begun.subscribe(_NAME, self._begin)
        context.events.updating.subscribe(_NAME, self._before)
        context.events.updated.subscribe(_NAME, self._behind)

    def _begin(self) -> None:
        self._rows.clear()
        self._announced.clear()

    def _before(self, optimizer: Any) -> None:
        """The optimizer is about to step."""
        if self._context.plan.takes(Kind.GRAD_MOMENTUM_ALIGNMENT):
            self._announced.add(id(optimizer))
            self._measure([(one, momentum_of(one), 0.0) for one in stepped_by(optimizer, self._context.parameters)])

    def _behind(self, optimizer: Any) -> None:
        """It has stepped; with a closure, which made the gradients, there was no moment before it."""
        if id(optimizer) in self._announced or not self._context.plan.takes(Kind.GRAD_MOMENTUM_ALIGNMENT):
            return
        inner = getattr(optimizer, "optim", optimizer)
        known = self._had_state.setdefault(inner, set())
        found = []
        for one in stepped_by(optimizer, self._context.parameters):
            share = _share_of_gradient(inner, one)
            if share is None:
                name = type(inner).__name__
                message = f"{name} steps with a closure: what its momentum was before the gradient entered cannot be told"
                self._context.recording.report("unsupported", message, f"{_NAME} {name}")
            elif id(one.param) in known:
                found.append((one, momentum_of(one), share))
            known.add(id(one.param))
        self._measure(found)

    @torch.no_grad()
    def _measure(self, found: list[tuple[Stepped, torch.Tensor | None, Any]]) -> None:
        """Measure (parameter, its momentum, share of the gradient that is in there already)."""
        plan, table = self._context.plan, self._context.table
        by_device: dict[torch.device, list[tuple[TensorEntry, TensorEntry, tuple[TensorEntry, ...], torch.Tensor, int]]] = {}
        for stepped, momentum, share in found:
            if momentum is None or stepped.grad is None or momentum.numel() == 0:
                continue
            if not (is_dense(stepped.grad) and is_dense(momentum)):
                message = f"{stepped.one.entry.name}: the angle to a gradient that is sparse is not measured"
                self._context.recording.report("unsupported", message, f"{_NAME} {stepped.one.entry.name}")
                continue
            one = stepped.one.entry
            entry = table.entry(one.chunk, one.name, Kind.GRAD_MOMENTUM_ALIGNMENT)
            cosine = table.entry(one.chunk, one.name + COSINE, Kind.GRAD_MOMENTUM_ALIGNMENT)
            entry.site_pos = cosine.site_pos = one.site_pos
            if not (plan.measures(entry) or plan.measures(cosine)):
                continue
            held = stepped.held
            shape = held.shape if held.shape is not None else tuple(held.tensor.shape)
            shown = torch.empty(0)
            table.describe(entry, shown, held.placements, held.part, shape)
            parts = describe_formed(table, cosine, PRODUCTS, held, shown)
            sums = agreement(local_of(stepped.grad).detach(), momentum, share)
            by_device.setdefault(sums.device, []).append((entry, cosine, parts, sums, momentum.numel()))
        for mine in by_device.values():
            sums = torch.stack([one for *_, one, _ in mine])
            num_nan = sums[:, 1].long()
            numel = torch.tensor([number for *_, number in mine], dtype=torch.int64, device="cpu")
            numel = numel.to(sums.device, non_blocking=True) if sums.is_cpu else _on_device(numel, sums.device)
            words = device_shares(sums[:, 0].long(), numel - num_nan)
            words[:, NUM_NAN] = num_nan
            observe_words(self._context.recording, [entry for entry, *_ in mine], words, self._rows)
            norms = (sums[:, 3] * sums[:, 4]).sqrt()
            # A momentum of zeros has no direction.
            words = value_words((sums[:, 2] / norms).clamp(-1.0, 1.0), norms > NO_ANGLE)
            observe_words(self._context.recording, [cosine for _, cosine, *_ in mine], words, self._rows)
            cut = [at for at, (_, _, parts, *_) in enumerate(mine) if parts]
            if cut:
                mine_cut = (sums if len(cut) == len(mine) else torch.stack([sums[at] for at in cut]))[:, 2:].flatten()
                words = value_words(mine_cut, mine_cut.isfinite())
                observe_words(self._context.recording, [one for at in cut for one in mine[at][2]], words, self._rows)
            self._context.count({Kind.GRAD_MOMENTUM_ALIGNMENT.label: 2 * len(mine)})


def agreement(gradient: torch.Tensor, momentum: torch.Tensor, share: Any = 0.0) -> torch.Tensor:
    """Return [5] float64: elements of the same sign, elements that are NaN in either, dot product, both squared norms.

    gradient, momentum: of one shape, any float type, on one device; no wait. share: the gradient times this is subtracted
    from the momentum first. Zero has a sign of its own; an infinity has that of its side.
    """
    total = torch.zeros(5, dtype=torch.float64, device=gradient.device)
    for g, m in side_by_side([gradient, momentum], ROOM // 4):
        wide = torch.float64 if g.dtype is torch.float64 else torch.float32
        g, m = g.to(wide), m.to(wide)
        if isinstance(share, torch.Tensor) or share != 0.0:
            m = m - g * share
        alike = (g.sign() == m.sign()).sum()
        nan = (g.isnan() | m.isnan()).sum()
        sums = [(g * m).sum(dtype=torch.float64), g.square().sum(dtype=torch.float64), m.square().sum(dtype=torch.float64)]
        total += torch.stack([alike.double(), nan.double(), *sums])
    return total


def momentum_of(stepped: Stepped) -> torch.Tensor | None:
    """Return this rank's piece of the first moment, shaped like its gradient; None: there is none cut alike."""
    for key, kind in STATE_KEYS.items():
        tensor = stepped.state.get(key) if kind is Kind.EXP_AVG else None
        if isinstance(tensor, torch.Tensor) and stepped.grad is not None and is_cut_alike(stepped.grad, tensor):
            local = local_of(tensor)
            if local.is_floating_point() and local.shape == local_of(stepped.grad).shape:
                return local
    return None


def _share_of_gradient(optimizer: Any, stepped: Stepped) -> Any:
    """Return the share of the gradient in the momentum behind the step, up to its scale; None: not known."""
    rule, group, device = rule_of(optimizer), stepped.group, stepped.held.tensor.device
    has_l2 = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay")
    sign = -1.0 if group.get("maximize") else 1.0
    if rule is adam and not has_l2:
        return sign * (1 - as_number(group["betas"][0], device))
    if rule is lion:
        return sign * (1 - as_number(group["betas"][1], device))
    if rule is muon:
        return 1 - as_number(group["momentum"], device)
    if rule is sgd and not has_l2 and group.get("momentum"):
        return sign * (1 - as_number(group.get("dampening", 0.0), device))
    return None


def _on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return numbers of the host on a device, without waiting: from pinned memory."""
    return values.pin_memory().to(device, non_blocking=True)
