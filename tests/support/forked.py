"""Ranks for the tests, each a process of its own: forked off one import of torch, which takes longer than most tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "sentinel.collect.attach",
    "tests.layouts.first_steps",
)
CONTEXT.set_forkserver_preload([*PRELOADED, "tests.support.frozen"])


def start_ranks(function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int, *, join: bool = True) -> Any:
    """Run `function(rank, *arguments)` in as many processes; raises what one raises. join False: returns their handle.

    They have the environment that the first such process of this test run began with: hand in what differs.
    """
    return mp.start_processes(function, args=arguments, nprocs=num_ranks, join=join, start_method="forkserver")
