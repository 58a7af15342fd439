"""Traces that no training made: files as ranks write them, a step at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sentinel.collect.probes.trace_writer import StepTrace, TraceWriter
from sentinel.trace import Compressor, TracedTensor, TraceHead


class TracingRank:
    """A rank that traces one hidden state, one tensor that nobody asked for, and tokens, a step at a time."""

    def __init__(self, run_dir: Path, rank: int, name: str = "layers.3", attempt: int = 0) -> None:
        self.rank, self.name, self.attempt = rank, name, attempt
        self.writer = TraceWriter(run_dir, 2**20, lambda *said: pytest.fail(str(said)))

    def step(self, step: int) -> None:
        picture = torch.full((1, 2, 2), 100.0 * self.rank + step)
        picture[0, 0, 0], picture[0, 1, 1] = torch.nan, -torch.inf
        about = {"shape": (2, 16, 32), "dtype": "float32", "compressor": Compressor(size=4)}
        tensors = {
            "a": TracedTensor(kind="activation", name=self.name, **about),
            "b": TracedTensor(kind="activation", name="layers.3.mlp.fc1", **about),
            "c": TracedTensor(kind="tokens", name="", shape=(2, 16), dtype="int64", compressor=Compressor(name="none")),
        }
        head = TraceHead(run="train", attempt=self.attempt, rank=self.rank, step=step, time=1.0, tensors=tensors)
        data = {"a": picture, "b": picture, "c": torch.arange(32, dtype=torch.int32).reshape(2, 16)}
        self.writer.thread.submit(StepTrace(head, data, [], 160))
