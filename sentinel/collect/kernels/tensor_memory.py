"""Reading a tensor: what can be measured, and in which pieces of contiguous memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sentinel.errors import SentinelError

CONVERTED: dict[torch.dtype, torch.dtype] = {
    torch.bool: torch.float32,
    torch.uint8: torch.float32,
    torch.int8: torch.float32,
    torch.int16: torch.float32,
    torch.uint16: torch.float32,
    torch.int32: torch.float64,
    torch.uint32: torch.float64,
    torch.int64: torch.float64,
    torch.uint64: torch.float64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""Dtypes that are measured as another one, which holds their values exactly (int64 to 53 bits)."""

MEASURED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes that are measured as they are."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local, dense tensor behind `tensor`, outside the graph. SentinelError where it cannot be measured.

    A DTensor gives its local shard, without a collective.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter and hasattr(tensor, "to_local"):
        tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor.to_local()
    dtype = tensor.dtype
    if tensor.layout is not torch.strided:
        raise SentinelError(f"cannot measure a tensor of layout {tensor.layout} and dtype {dtype}; expected a dense one")
    if tensor.is_meta:
        raise SentinelError(f"cannot measure a meta tensor of dtype {dtype}: it holds no values")
    if dtype not in MEASURED and dtype not in CONVERTED:
        raise SentinelError(f"cannot measure a tensor of dtype {dtype}; known: real floats, integers, bool")
    if tensor.numel() and not _has_memory(tensor):
        raise SentinelError(f"cannot measure a tensor of dtype {dtype}: its memory was freed, or is not its own")
    return tensor.detach()


def _has_memory(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return False
    try:
        # A wrapper subclass has a size and no memory of its own: reading there would end the trainer.
        return storage.data_ptr() != 0
    except RuntimeError:
        return False


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as one dimension, in the order in which it lies in memory. No copy."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def pieces(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor that is not dense as views of at most `most` elements each."""
    if tensor.numel() <= most:
        yield tensor
        return
    # The longest steps through memory outermost: the copies of the pieces then read it in order.
    axis = max((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=lambda d: tensor.stride()[d])
    slab = tensor.numel() // tensor.shape[axis]
    if slab > most:
        for i in range(tensor.shape[axis]):
            yield from pieces(tensor.select(axis, i), most)
        return
    yield from torch.split(tensor, most // slab, axis)
