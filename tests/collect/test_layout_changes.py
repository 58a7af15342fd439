"""What a trainer says of its tensors when they change from step to step: once, and then only what is new."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

import sentinel
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.messages import Descriptor, EndStep
from sentinel.wire.frame import FrameType

WIDTH = 8


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(5))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, hidden: torch.Tensor, which: list[int]) -> torch.Tensor:
        hidden = self.stem(hidden)
        for at in which:
            hidden = hidden + self.blocks[at](hidden)
        return self.head(hidden)


class Run:
    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.run_dir = folder / "r"
        self.model = Deep()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        kinds = ["param", "wgrad", "activation", "activation_in", "dgrad", "saturation"]
        self.monitor = sentinel.attach(self.model, self.optimizer, {"directory": str(folder), "run": "r", "kinds": kinds})

    def step(self, length: int, which: list[int]) -> None:
        self.model(torch.randn(length, WIDTH), which).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.monitor.step()

    def records(self) -> list[SpoolRecord]:
        self.monitor.flush()
        follower, found = RunFollower(self.run_dir), []
        while records := follower.poll(final=True):
            found += records
        assert follower.num_undecodable == follower.num_lost == 0
        return found

    def described(self) -> list[str]:
        return [FrameType(one.frame.header.type).name for one in self.records() if isinstance(one.message, Descriptor)]


def test_a_shape_that_follows_the_batch_is_no_news_and_that_of_a_weight_is(tmp_path: Path) -> None:
    run, everything = Run(tmp_path), list(range(5))
    for length in (4, 4, 7, 2, 9):
        run.step(length, everything)
    reported = run.described()
    assert reported == ["DESCRIPTOR", "DESCRIPTOR"], "at attach, and when the first step has shown the sites"

    with torch.no_grad():
        run.model.stem.weight.set_(torch.randn(WIDTH, WIDTH + 1))
    run.model.stem.in_features = WIDTH + 1
    run.optimizer.zero_grad()
    for _ in range(2):
        run.model(torch.randn(3, WIDTH + 1), everything).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.monitor.step()
    records = run.records()
    run.monitor.detach()
    newest = [one for one in records if isinstance(one.message, Descriptor)][-1].message
    assert isinstance(newest, Descriptor)
    shapes = {(one.name, one.kind): one.shape for one in newest.tensors}
    assert shapes["stem.weight", "param"] == shapes["stem.weight", "wgrad"] == (WIDTH, WIDTH + 1)
    assert shapes["blocks.0.0", "activation"] == (4, WIDTH), "as seen first"


def test_layer_drop_and_switching_cost_what_is_new(tmp_path: Path) -> None:
    run, rng = Run(tmp_path), random.Random(0)
    for step in range(40):
        if step in (10, 20, 30):
            run.monitor.disable(["activation", "dgrad", "saturation", "activation_in"])
        if step in (15, 25, 35):
            run.monitor.enable(["activation", "dgrad", "saturation", "activation_in"])
        run.step(rng.randint(2, 6), [at for at in range(5) if rng.random() < 0.7] if step < 15 else list(range(5)))
    records = run.records()
    table = run.monitor.recorder.recording.table.infos()
    run.monitor.detach()

    reported = [one for one in records if isinstance(one.message, Descriptor)]
    types = [one.frame.header.type for one in reported]
    assert types.count(FrameType.DESCRIPTOR) <= 3 and types.count(FrameType.CHANGE) > 2
    sizes = {
        kind: [memoryview(one.frame.payload).nbytes for one in reported if one.frame.header.type == kind] for kind in types
    }
    assert sum(sizes[FrameType.CHANGE]) < max(sizes[FrameType.DESCRIPTOR])
    last_reported = next(at for at in range(len(records) - 1, 0, -1) if isinstance(records[at].message, Descriptor))
    after = [one.frame.header.step for one in records[last_reported:] if isinstance(one.message, EndStep)]
    assert len(after) >= 15, "to switch on and off again says nothing new"
    assert isinstance(reported[-1].message, Descriptor) and reported[-1].message.tensors == table
    num_rows = 0
    for one in records:
        if one.frame.header.type == FrameType.ROWS:
            assert one.descriptor is not None
            num_rows += one.frame.header.row_count
        elif isinstance(one.message, EndStep):
            assert one.message.num_rows == num_rows > 0
            num_rows = 0
