"""A tensor that a collective still writes, alone or as the shard of a DTensor: waited for, never read as it lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sentinel.collect.kernels.native import NativeKernel
from sentinel.collect.kernels.torch_ops import TorchKernel
from sentinel.collect.parallel.placements import arrived, is_async
from sentinel.collect.rows.buffer import StepRows
from sentinel.errors import SentinelError
from sentinel.record import Kind

collectives = pytest.importorskip("torch.distributed._functional_collectives")


def asynchronous(value: torch.Tensor) -> Any:
    return collectives.AsyncCollectiveTensor(value)


def test_the_shard_of_a_dtensor_may_be_on_its_way() -> None:
    # A DTensor that was redistributed without waiting: OLMo-core's embedding under tensor parallelism.
    on_its_way = SimpleNamespace(_local_tensor=asynchronous(torch.arange(3.0)))
    there = SimpleNamespace(_local_tensor=torch.arange(3.0))

    assert is_async(on_its_way) and not is_async(there)
    assert type(arrived(on_its_way)) is torch.Tensor
    assert arrived(on_its_way).tolist() == arrived(there).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("kernel", [NativeKernel(), TorchKernel()])
@pytest.mark.parametrize("num", [1, 2])
def test_a_wrapper_without_memory_is_refused_not_read(kernel: Any, num: int) -> None:
    rows = StepRows(num)
    for tensor in range(num):
        rows.add(tensor, Kind.ACTIVATION, 0, -1, tensor, 0)

    with pytest.raises(SentinelError, match="its memory was freed, or is not its own"):
        kernel.measure([asynchronous(torch.ones(3))] * num, rows, 0)
