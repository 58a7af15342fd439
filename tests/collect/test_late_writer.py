"""A writer thread that does not come round for a while: the trainer goes on, and no step is lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import sentinel
from sentinel.wire import spool

from ..support.nets import TinyModel, loss_of
from ..support.spools import Said


def train_while_stalled(
    run: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int, config: dict[str, object] | None = None
) -> Said:
    """Train so many steps while the disk does not answer, then let it."""
    answers, writev = threading.Event(), os.writev

    def stall(fd: int, buffers: list[bytes]) -> int:
        answers.wait(60)
        return writev(fd, buffers)

    monkeypatch.setattr(spool.os, "writev", stall)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = sentinel.attach(model, optimizer, config)
    for step in range(num_steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        if step == 3:
            model.blocks[1].fc1.weight.grad[0, 0] = float("nan")
            optimizer.zero_grad()  # The last chance to read it: the weights stay as they are.
        optimizer.step()
        monitor.log(loss=loss)
    answers.set()
    monitor.detach()
    return Said(run)


def test_steps_that_the_writer_is_late_for_all_arrive_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = train_while_stalled(run, monkeypatch, 60)

    assert [end.step for end in said.ends] == list(range(60))
    assert all(end.num_dropped_rows == 0 and end.num_rows == len(said.rows[end.step]) for end in said.ends)
    assert len({end.num_rows for end in said.ends[1:]}) <= 2, "no step has fewer rows than its neighbours"
    assert not said.health


def test_past_the_room_the_nan_the_borders_and_every_end_are_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train_while_stalled(run, monkeypatch, 6).ends[-1].num_rows
    # On a slow machine 300 steps are enough for `max_overhead` to lengthen intervals: then there would be room for all.
    said = train_while_stalled(run, monkeypatch, 300, {"spool": {"queue_bytes": 2**20}, "max_overhead": None})
    # The folders of the two trainings have random names: either may be read first.
    ends = said.ends[6:] if said.ends[5].step == 5 and said.ends[6].step == 0 else said.ends[:300]

    assert [end.step for end in ends] == list(range(300))
    assert all("loss" in end.scalars for end in ends)
    cut = [end for end in ends if end.num_dropped_rows]
    assert len(cut) > 100
    assert all(end.num_rows + end.num_dropped_rows == whole for end in cut[4:])
    assert all(end.num_finite_dropped == end.num_dropped_rows for end in cut)
    assert any(end.step == 3 for end in cut)
    bad = [tensor.name for tensor, row in said.rows[3] if row["num_nan"]]
    assert "blocks.1.fc1.weight" in bad
    assert {tensor.border for tensor, _ in said.rows[50]} >= {"block_input", "block_output"}
