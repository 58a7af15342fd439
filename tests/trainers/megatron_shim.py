"""Lets megatron-core 0.16 train on a CPU over gloo: its `cuda` calls answer as CPU. For tests and examples only."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "triu_indices", "linspace")


class Stream:
    """A stream that everything runs on already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return SimpleNamespace(wait=lambda *_: None, synchronize=lambda: None, record=lambda *_: None)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or getattr(device, "type", "") == "cuda"


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def install() -> None:
    """Change torch and megatron-core in this process, for good."""
    if getattr(torch.cuda, "_answers_as_cpu", False):
        return
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)  # There is one generator only.
    cuda: Any = torch.cuda
    cuda._answers_as_cpu = True
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.Stream = Stream
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_: 0
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in ("zeros_like", "empty_like", "ones_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    name_of = tensor.type

    def named(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return name_of(self, dtype, *args, **kwargs)
        return name_of(self).replace("torch.", "torch.cuda.")  # Megatron's optimizers compare these words.

    tensor.type = named
    move = tensor.to

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(CPU if _is_cuda(one) else one for one in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return move(self, *args, **kwargs)

    tensor.to = moved
    exchange = dist.all_to_all_single

    def all_to_all_single(output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kw: Any):
        # Megatron makes lists of the sizes when it moves them off the GPU.
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return exchange(output, input, *sizes, **kw)

    dist.all_to_all_single = all_to_all_single
    _patch_megatron()


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    patched: Any = random
    patched._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    patched._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 forgets the name where Transformer Engine is missing.
        moe_utils.te_general_gemm = None
    grouped: Any = grouped_gemm_util
    if grouped.grouped_gemm is None:
        grouped.ops = SimpleNamespace(gmm=_gmm)
        grouped.grouped_gemm = SimpleNamespace(ops=grouped.ops)


def _gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """The product of each group of rows with its own matrix, as the grouped_gemm package has it."""
    parts = a.split(batch_sizes.tolist())
    return torch.cat([part @ (one.t() if trans_b else one) for part, one in zip(parts, b, strict=True)])


def start(rank: int, world: int, port: int) -> None:
    """Join the ranks over gloo."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    install()
    dist.init_process_group("gloo", rank=rank, world_size=world)
