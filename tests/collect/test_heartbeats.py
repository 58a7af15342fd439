"""What the writer thread asks of a monitor, from its first beat on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel
from sentinel.collect import assembly
from sentinel.collect.lifecycle.standstill import AFTER
from sentinel.collect.writing.handover import Handover

from ..support.nets import TinyModel


def test_a_beat_before_attach_has_returned_says_where_the_rank_stands(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = []

    def begins_and_beats(*args: Any, **keys: Any) -> Handover:
        handover = Handover(*args, **keys)
        reported.append(keys["position"]())
        return handover

    monkeypatch.setattr(assembly, "Handover", begins_and_beats)
    model = TinyModel()
    sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1)).detach()

    assert [(one.step, one.call_id, one.site) for one in reported] == [(0, 0, "")]


def test_a_rank_that_stands_still_says_the_line_of_the_thread_that_trains(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    release, is_there = threading.Event(), threading.Event()

    def stands_in_its_step() -> None:
        model(torch.zeros(1, 5, dtype=torch.long))
        is_there.set()
        release.wait()

    thread = threading.Thread(target=stands_in_its_step)
    thread.start()
    is_there.wait()
    reported = [monitor.runner.position().site for _ in range(AFTER + 2)]
    release.set()
    thread.join()
    monitor.detach()

    assert reported[-1].startswith("collect/test_heartbeats.py:") and reported[-1].endswith("stands_in_its_step)")
