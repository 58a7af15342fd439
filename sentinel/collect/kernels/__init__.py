"""Kernels: from tensors to the statistics of their rows, each element read once, without waiting for the device.

In: tensors. Out: STATS words of rows. Never: copies a tensor whole, changes it, or raises for what can be measured.

    native          C, for CPU tensors
    triton_kernel   Triton, for GPUs; what runs there is triton_moments
    torch_ops       plain torch, any device, chunked: where there is nothing better

Tensors of any shape and strides: dense ones, transposes too, are read in the order in which they lie in memory;
others, broadcasts too, element by element of what they show. Booleans and integers are read as floats. Complex,
sparse, quantized and meta tensors raise SentinelError.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from sentinel.collect.kernels.native import NativeKernel
from sentinel.collect.kernels.torch_ops import TorchKernel
from sentinel.collect.rows.buffer import StepRows
from sentinel.native import implementation

log = logging.getLogger("sentinel")


class Kernel(Protocol):
    """Measures tensors into rows. Stateless between calls but for scratch memory; one thread at a time."""

    name: str
    """For people: `native (avx512)`, `triton`, `torch (cuda)`."""

    def measure(
        self,
        tensors: Sequence[torch.Tensor],
        rows: StepRows,
        first_row: int,
        *,
        zero_eps: float = 0.0,
        checksum: bool = False,
    ) -> None:
        """Write the statistics of tensors[i] into row first_row + i of `rows`; the caller has added those rows.

        No graph, no collective, no host sync; grad mode, RNG and version counters stay as they are. A tensor that cannot
        be measured raises SentinelError after all others were; its row stays empty.
        """
        ...


def choose_kernel(device: torch.device | str) -> Kernel:
    """Return the best kernel for tensors on `device`; it also measures tensors that turn out to be on the CPU."""
    kind = torch.device(device).type
    native = None if implementation == "numpy" else NativeKernel()
    if kind == "cpu":
        return native or TorchKernel(kind)
    if kind == "cuda" and torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        try:
            # Imported only here: a machine without a GPU has no use for it.
            from sentinel.collect.kernels.triton_kernel import TritonKernel

            return TritonKernel(on_cpu=native or TorchKernel("cpu"))
        except Exception as error:
            log.warning("sentinel: triton cannot be imported, torch operations measure instead: %s", error)
    return TorchKernel(kind, on_cpu=native)


__all__ = ["Kernel", "NativeKernel", "TorchKernel", "choose_kernel"]
