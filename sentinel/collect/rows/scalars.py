"""Scalars of the current step: noted without waiting for a device, made numbers on the writer thread."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import reprlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sentinel.collect.parallel.placements import ORDINARY
from sentinel.collect.rows.pinned import PINNED
from sentinel.collect.rows.samples import Samples

SAMPLE_IDS = "sample_ids"
"""The name under which no number is logged, but which samples the step was trained on."""

MAX_GROUPS = 8
"""Groups of an optimizer whose learning rates are recorded; a bound on scalars and on time in each step."""


NOT_ARRIVED = 0x7FF8_5E17_7E1A_77ED
"""The bits of pinned memory into which nothing was copied yet: of a NaN that no arithmetic makes."""

_NUMBERS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
"""Types whose elements C reads as they are."""


class Scalars:
    """What was logged since the step began."""

    def __init__(self) -> None:
        self.samples = Samples()
        self._values: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        self._rates: dict[str, Any] = {}
        self._optimizers: dict[int, tuple[weakref.ref[Any], str]] = {}
        """id of an optimizer -> (itself, the name of its learning rate)."""
        self._apart: set[str] = set()
        """Learning rates that have differed from the first of their optimizer."""

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def names(self) -> frozenset[str]:
        """Names of what is noted of the running step, by whomever."""
        return frozenset((*self._values, *self._defaults))

    def note(self, name: str, value: Any) -> None:
        """Take a number, or a tensor of one element, which is copied and not synchronised; None is nothing.

        ValueError, with the name, for what is no number; a number beyond all floats is an infinity.
        """
        if name == SAMPLE_IDS:
            self.samples.note(value)
            return
        if isinstance(value, torch.Tensor):
            number = number_of(value)
            self._values[name] = on_its_way(name, value.detach()) if number is None else number
        elif value is not None:
            try:
                self._values[name] = float(value)
            except OverflowError:
                self._values[name] = math.inf if value > 0 else -math.inf
            except (TypeError, ValueError):
                raise ValueError(
                    f"monitor.log({name}=...): expected a number or a tensor of one element, got {_brief(value)}"
                ) from None

    def note_default(self, name: str, value: Any) -> None:
        """Take what was seen without the trainer saying it: it counts unless the trainer logs its own."""
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            self._defaults[name] = value.detach()  # Copied when the step ends: it may be noted at every micro-step.
        elif value is not None and not isinstance(value, torch.Tensor):
            self._defaults[name] = float(value)

    def note_rates(self, optimizer: Any) -> None:
        """Take the learning rates with which an optimizer has just stepped, unless anybody else names them.

        `lr` is that of the first group; `lr_group1` and on where they have differed from it; `lr_1` the second optimizer's.
        """
        groups = getattr(optimizer, "param_groups", None)
        if not groups:
            return
        known = self._optimizers.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            gone = [key for key, (one, _) in self._optimizers.items() if one() is None]
            taken = {name for _, name in (self._optimizers.pop(key) for key in gone)}
            number = len(self._optimizers)
            name = min(taken, default="lr" if not number else f"lr_{number}")
            known = self._optimizers[id(optimizer)] = (weakref.ref(optimizer), name)
        base = known[1]
        first = groups[0].get("lr")
        self._rates[base] = first
        for at in range(1, min(len(groups), MAX_GROUPS)):
            rate, name = groups[at].get("lr"), f"{base}_group{at}"
            # A tensor is compared with nothing: that would wait for its device.
            if name in self._apart or isinstance(rate, torch.Tensor) or isinstance(first, torch.Tensor) or rate != first:
                self._apart.add(name)
                self._rates[name] = rate

    def note_total_norm(self, norm: torch.Tensor) -> None:
        """Take the norm that clipping used: the step's `grad_norm`, unless the trainer logs its own."""
        self.note_default("grad_norm", norm)

    def take(self) -> Mapping[str, Any]:
        """Hand out the scalars of the step that ends and begin anew.

        After a device assert those that nobody logged and that lie on the device are out of reach, and left out.
        """
        for name, value in itertools.chain(self._defaults.items(), self._rates.items()):
            if name not in self._values and (not isinstance(value, torch.Tensor) or value.numel() == 1):
                with contextlib.suppress(RuntimeError):
                    self.note(name, value)
        taken, self._values, self._defaults = self._values, {}, {}
        self._rates.clear()
        return taken


def resolver(
    scalars: Mapping[str, Any], usage: Callable[[], Mapping[str, float]] = dict
) -> Callable[[], Mapping[str, float]]:
    """Return what the writer thread calls once the rows are complete: it gives the scalars as numbers.

    usage: more scalars, asked for on that thread; what was logged under the same name wins.
    """

    def prepare() -> Mapping[str, float]:
        return {**usage(), **{name: float(value) for name, value in scalars.items() if has_arrived(value)}}

    return prepare


def _brief(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"[:80]


def number_of(tensor: torch.Tensor) -> float | None:
    """Return the number in a plain tensor of one element on the host; None: it is another one, and a copy must be made.

    Read where it lies, in a tenth of the time of a copy; and torch's own ways are those that wait for a device, so that a
    trainer may count them.
    """
    kind = _NUMBERS.get(tensor.dtype)
    if kind is None or type(tensor) not in ORDINARY or not tensor.is_cpu or tensor.numel() != 1:
        return None
    if tensor.layout is not torch.strided or tensor.is_neg() or not (at := tensor.data_ptr()):
        return None
    return float(kind.from_address(at).value)


def on_its_way(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, or a pinned one on its way there."""
    value = getattr(value, "_local_tensor", value)
    if value.numel() != 1:
        raise ValueError(f"monitor.log({name}=...): expected one element, got a tensor of shape {tuple(value.shape)}")
    if value.is_complex():
        raise ValueError(f"monitor.log({name}=...): expected a real number, got a tensor of {value.dtype}")
    if value.device.type == "cpu":
        return value.to(torch.float64, copy=True)
    pinned = PINNED.empty((), torch.float64)
    pinned.view(torch.int64).fill_(NOT_ARRIVED)
    pinned.copy_(value.reshape(()), non_blocking=True)
    return pinned


def has_arrived(value: Any) -> bool:
    """Whether a number that was `on_its_way` is there, once whoever waits for the device has waited: it may have failed."""
    return not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or int(value.view(torch.int64)) != NOT_ARRIVED
