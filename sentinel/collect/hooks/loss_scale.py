"""The loss scale of GradScaler, by which gradients are multiplied until they are unscaled; rows are divided by it.

Source: torch/amp/grad_scaler.py, and torch/distributed/fsdp/sharded_grad_scaler.py, whose class overrides both methods.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from sentinel.collect.hooks.interception import Interception
from sentinel.collect.rows.buffer import scaled_kinds
from sentinel.collect.rows.scalars import on_its_way

SCALERS = (
    ("torch.amp.grad_scaler", "GradScaler"),
    ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
)


class LossScale:
    """What the loss of this step was multiplied by, and whether the weight gradients were divided again."""

    def __init__(self, on_unscaled: Callable[[], None], guard: Callable[[str, Exception], None]) -> None:
        """on_unscaled: called when the scaler has divided gradients, a write that is no clipping."""
        self.value: torch.Tensor | None = None
        """0-dim float64 on the host, or pinned and on its way there; None: this step's loss was not scaled."""
        self.on_device: torch.Tensor | None = None
        """The same where the scaler keeps it, for who measures gradients while they carry it."""
        self.is_unscaled = False
        """Weight gradients are those of the loss itself again."""
        self._on_unscaled = on_unscaled
        self._guard = guard
        self._version = -1

    def install(self) -> None:
        """Watch every GradScaler of the process."""
        _scalers.join(self)

    def remove(self) -> None:
        """Undo `install`."""
        _scalers.leave(self)

    def scaled(self, scale: torch.Tensor) -> None:
        """Note the factor, 0-dim on a device, that a loss was multiplied by. It changes between steps only, in place."""
        try:
            self.is_unscaled = False
            self.on_device = scale.detach()
            if self.value is None or self._version != scale._version:
                self.value, self._version = on_its_way("loss_scale", scale.detach()), scale._version
        except Exception as error:
            self._guard("loss_scale", error)

    def unscaled(self) -> None:
        """Note that the scaler divided the gradients of an optimizer by the loss scale."""
        try:
            self.is_unscaled = True
            self._on_unscaled()
        except Exception as error:
            self._guard("loss_scale", error)

    def take(self) -> tuple[torch.Tensor | None, bool]:
        """Return (loss scale or None, whether weight gradients were still multiplied by it) of the step that ends.

        The next step begins without a scale.
        """
        taken = self.value, not self.is_unscaled
        self.value = self.on_device = None
        return taken


def carried(kind: int) -> torch.Tensor | None:
    """Return the factor, 0-dim on the device, that gradients of a kind are multiplied by now; None: no scaler of torch's."""
    for user in _scalers.users:
        if user.on_device is not None and kind in scaled_kinds(not user.is_unscaled):
            return user.on_device
    return None


def _replace_all(scalers: Interception[LossScale]) -> None:
    for module, name in SCALERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and "scale" in vars(kind):
            scalers.replace(kind, "scale", _reporting_scale(kind.scale))
            scalers.replace(kind, "unscale_", _reporting_unscale(kind.unscale_))


_scalers: Interception[LossScale] = Interception(_replace_all)


def _reporting_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(scaler: Any, outputs: Any) -> Any:
        result = original(scaler, outputs)
        value = getattr(scaler, "_scale", None)
        if value is not None and scaler.is_enabled():
            for user in list(_scalers.users):
                user.scaled(value)
        return result

    return scale


def _reporting_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unscale_(scaler: Any, optimizer: Any) -> None:
        original(scaler, optimizer)
        if scaler.is_enabled():
            for user in list(_scalers.users):
                user.unscaled()

    return unscale_
