"""A run with a router and an attention whose vectors ranks recorded: a load for each expert, an entropy for each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sentinel.messages import TensorInfo, Vector, Vectors
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import FrameType, encode_message

from .serving import small_run

NUM_EXPERTS, NUM_HEADS = 8, 4
IDLE_EXPERT = 5
"""Which gets no token from half of the steps on."""


def expert_run(run_dir: Path, *, router: str = "layers.1.mlp.router", **options: Any) -> SyntheticRun:
    """Return a run of which nothing is written yet; `write_with_vectors` writes. router: name of its module."""
    source = small_run(run_dir, ranks=(), **options)
    for rank in source._ranks:
        table = rank.table.descriptor.tensors
        first = 1 + max(one.id for one in table)
        more = (
            TensorInfo(id=first, name=f"{router}:load", kind="router", shape=(NUM_EXPERTS,), site_pos=1),
            TensorInfo(id=first + 1, name="layers.0.attn:entropy", kind="attention", shape=(NUM_HEADS,), site_pos=0),
        )
        rank.table.descriptor = msgspec.structs.replace(rank.table.descriptor, tensors=(*table, *more))
    for at in range(source.num_ranks):
        source.start(at)
    return source


def write_with_vectors(source: SyntheticRun, num_steps: int) -> None:
    """Write steps, each with the vectors of the first stage's ranks; `IDLE_EXPERT` gets nothing in the second half."""
    first = source.step
    for step in range(first, first + num_steps):
        for at in range(source.num_ranks):
            if source.place(at).pp_rank == 0:
                ids = [one.id for one in source.descriptor(at).tensors[-2:]]
                rng = np.random.default_rng((step, at))
                load = rng.integers(20, 60, NUM_EXPERTS).astype("<f4")
                if step >= first + num_steps // 2:
                    load[IDLE_EXPERT] = 0
                entropy = rng.uniform(1.0, 3.0, NUM_HEADS).astype("<f4")
                items = (
                    Vector(tensor=ids[0], statistic="load", axis="expert", shape=load.shape, values=load.tobytes()),
                    Vector(tensor=ids[1], statistic="entropy", axis="head", shape=entropy.shape, values=entropy.tobytes()),
                )
                source._write_message(source._ranks[at], FrameType.VECTOR, encode_message(Vectors(items=items)), step, 0)
        source.write(1)
