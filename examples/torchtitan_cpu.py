"""Lets torchtitan 0.3, which knows accelerators only, train on a machine without one: for trying things out and for tests.

Import it before torchtitan. On a machine with an accelerator it changes nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import Any

import torch
import torch._utils
import torch.distributed
from torch.distributed.fsdp import FSDPModule

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
"""The one module that needs triton as soon as it is imported; its kernels move experts' tokens between GPUs."""


class _Kernels(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _CPU(types.ModuleType):
    """torch.cpu with what torchtitan asks of an accelerator's module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(total_memory=1, name="cpu")

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


_set_factor = FSDPModule.set_gradient_divide_factor


def _sum_without_factor(module: FSDPModule, factor: float) -> None:
    """Divide beside the sum: gloo cannot multiply while it sums."""
    _set_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


if not hasattr(torch.distributed, "set_timeout"):  # A torch older than torchtitan 0.3 wants: time-outs stay as they are.
    torch.distributed.set_timeout = lambda timeout, group=None: None
if not torch.accelerator.is_available():
    os.environ.setdefault("LOCAL_RANK", "0")
    FSDPModule.set_gradient_divide_factor = _sum_without_factor
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: _CPU("torch.cpu")
    if importlib.util.find_spec("triton") is None:
        sys.modules[KERNELS] = _Kernels(KERNELS)
