"""Notebooks and sweeps: many models in one process, one after the other, side by side, the same again; nothing is left."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sentinel
from sentinel.collect.attempt import agree
from sentinel.collect.environment import read_environment
from sentinel.collect.parallel import waiting
from sentinel.monitor_config import MonitorConfig
from sentinel.wire.frame import decode_message
from sentinel.wire.spool_reader import SpoolReader

from ..support.training import train_on_ones

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in", "exp_avg", "exp_avg_sq"]},
    "parameters alone": {"kinds": ["param"], "black_box": False},
}


ENDS = ("out of scope", "close", "with")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def rule_test(directory: Path, end: str, **config: Any) -> list[weakref.ref[Any]]:
    """Train a model of its own, end as a cell or a trial of a sweep does, and return weak references to what it made."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = sentinel.attach(model, optimizer, {"directory": str(directory), **config})
    train_on_ones(model, optimizer)
    if end == "close":
        monitor.close()
    elif end == "with":
        with monitor:
            train_on_ones(model, optimizer, 1)
    return [weakref.ref(one) for one in (model, optimizer, monitor, next(iter(model.parameters())))]


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def settle(is_settled: Callable[[], bool]) -> None:
    """Give writer threads that were told to end the time to do so."""
    deadline = time.monotonic() + 30.0
    while not is_settled() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("end", "config", "num_trials"),
    [
        *(pytest.param(end, config, 5, id=f"{end}, {name}") for end in ENDS for name, config in CONFIGS.items()),
        pytest.param("out of scope", {}, 200, id="two hundred", marks=pytest.mark.long),
    ],
)
def test_many_attaches_leave_nothing(tmp_path: Path, end: str, config: dict[str, Any], num_trials: int) -> None:
    before = threading.active_count()
    rule_test(tmp_path, end, **config)  # what is loaded once
    settle(lambda: threading.active_count() <= before)
    threads, files = threading.active_count(), num_files()

    left = [one for _ in range(num_trials) for one in rule_test(tmp_path, end, **config)]
    settle(lambda: threading.active_count() <= threads)
    gc.collect()

    assert [one() for one in left if one() is not None] == []
    assert threading.active_count() <= threads
    assert num_files() <= files + 3, "what torch or the test run opened meanwhile is not one an attach"
    assert len(waiting.WORKS.users) == 0 and waiting.WORKS.names == frozenset()


def test_a_model_that_goes_out_of_scope_has_its_last_step_on_disk(tmp_path: Path) -> None:
    rule_test(tmp_path, "out of scope")
    gc.collect()
    settle(lambda: not any(one.name == "sentinel-writer" for one in threading.enumerate()))

    (folder,) = tmp_path.glob("*/spool/r*")
    messages = [type(decode_message(frame)).__name__ for frame in SpoolReader(folder).poll()]
    assert messages.count("EndStep") == 3
    assert messages[-1] == "Bye"


def test_a_model_that_nobody_holds_the_monitor_of_is_watched_as_long_as_it_lives(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel.attach(model, optimizer, {"directory": str(tmp_path), **CONFIGS["parameters alone"]})
    gc.collect()

    train_on_ones(model, optimizer, 4)
    del model, optimizer
    gc.collect()
    settle(lambda: not any(one.name == "sentinel-writer" for one in threading.enumerate()))

    (folder,) = tmp_path.glob("*/spool/r*")
    assert [type(decode_message(f)).__name__ for f in SpoolReader(folder).poll()].count("EndStep") == 4


def test_attaching_the_same_model_again_replaces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sentinel")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    first = sentinel.attach(model, optimizer, {"directory": str(tmp_path)})
    train_on_ones(model, optimizer)

    second = sentinel.attach(model, optimizer, {"directory": str(tmp_path)})
    train_on_ones(model, optimizer, 5)

    assert (first.is_alive, second.is_alive) == (False, True)
    assert (first.recorder.ended_steps, second.run != first.run) == (3, True)
    assert f"watched already, as run {first.run}" in caplog.text
    second.close()
    assert second.recorder.ended_steps == 5
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_with_block_that_raises_says_so_and_lets_it_pass(tmp_path: Path) -> None:
    monitor = sentinel.attach(net(), None, {"directory": str(tmp_path)})
    with pytest.raises(RuntimeError, match="diverged"), monitor:
        raise RuntimeError("diverged")

    assert not monitor.is_alive
    (folder,) = tmp_path.glob("*/spool/r*")
    assert decode_message(list(SpoolReader(folder).poll())[-1]).reason == "exception"


def test_a_disabled_monitor_is_a_context_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DISABLE", "1")

    with sentinel.attach(net()) as monitor:
        monitor.close()


def test_probes_that_replace_functions_put_them_back_when_their_model_is_gone(tmp_path: Path) -> None:
    before = torch.nn.functional.scaled_dot_product_attention
    everything = {"probes": {"attention": {}, "comm": {}, "router": {}}}

    left = rule_test(tmp_path, "out of scope", **everything)
    # Its writer thread may just be asking it something.
    settle(lambda: all(one() is None for one in left))

    assert [one() for one in left if one() is not None] == []
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_cells_started_in_one_second_are_runs_of_their_own(tmp_path: Path) -> None:
    runs = []
    for _ in range(3):
        model = net()
        with sentinel.attach(model, None, {"directory": str(tmp_path)}) as monitor:
            runs.append(monitor.run)

    assert len(set(runs)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(runs)
    assert all([path.name for path in (one / "attempts").iterdir()] == ["0.json"] for one in tmp_path.iterdir())


def test_two_models_side_by_side_under_one_name_are_two_runs_and_one_after_the_other_two_attempts(tmp_path: Path) -> None:
    config = {"directory": str(tmp_path), "run": "exp \u03b1"}
    student, teacher, later = net(), net(), net()

    with sentinel.attach(student, None, config) as one, sentinel.attach(teacher, None, config) as other:
        assert (one.run, other.run) == ("exp%20%CE%B1", "exp%20%CE%B1+2")
    with sentinel.attach(later, None, config) as third:
        assert third.run == one.run

    attempts = sorted((tmp_path / one.run / "attempts").iterdir())
    assert [path.name for path in attempts] == ["0.json", "1.json"]
    assert '"name":"exp \u03b1"' in attempts[0].read_text("utf-8")


def test_names_that_were_rewritten_alike_are_two_runs(tmp_path: Path) -> None:
    for name in ("exp \u03b1", "exp \u03b2"):
        sentinel.attach(net(), None, {"directory": str(tmp_path), "run": name}).close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["exp%20%CE%B1", "exp%20%CE%B2"]


def test_a_rank_that_attached_before_there_was_a_group_says_how_to_be_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")  # on several nodes: nothing says which run it is
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    with sentinel.attach(model, optimizer, {"directory": str(tmp_path)}):
        train_on_ones(model, optimizer)

    assert caplog.text.count("rank 1 of 8 attached before init_process_group") == 1
    assert "SENTINEL_RUN" in caplog.text


@pytest.mark.parametrize("named", ["SENTINEL_RUN", "parent"])
def test_ranks_of_one_launch_are_one_run_without_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, named: str
) -> None:
    runs = set()
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), *([(named, "exp")] if named != "parent" else [])):
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        # A process of its own has attached nothing yet.
        monkeypatch.setattr("sentinel.collect.attempt._attaches", itertools.count())
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        with sentinel.attach(model, optimizer, {"directory": str(tmp_path)}) as monitor:
            train_on_ones(model, optimizer)
        runs.add((monitor.run, monitor.session.attempt.attempt if named == "parent" else 0))

    assert len(runs) == 1
    assert "attached before" not in caplog.text


def test_ranks_of_one_process_group_say_that_they_began_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    starts, incarnations = [], []
    try:
        for rank in (0, 1):
            monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
            monkeypatch.setattr("sentinel.collect.attempt._attaches", itertools.count())
            incarnation = bytes([rank]) * 16
            found = agree(
                MonitorConfig(directory=str(tmp_path)), read_environment(), incarnation, lambda directory, run: False
            )
            starts.append(found.start)
            incarnations.append(incarnation.hex())
    finally:
        dist.destroy_process_group()

    assert starts == [incarnations[0], incarnations[0]]


def test_a_model_that_goes_out_of_scope_while_an_optimizer_steps_leaves_the_step_alone(tmp_path: Path) -> None:
    other = net()
    optimizer = torch.optim.AdamW(other.parameters())

    def collects(*_: Any) -> None:
        # As the collector does by itself, at any call: here between two hooks that torch goes through.
        gc.collect()

    handle = register_optimizer_step_pre_hook(collects)
    try:
        for _ in range(3):
            rule_test(tmp_path, "out of scope")
            train_on_ones(other, optimizer)
    finally:
        handle.remove()

    assert all(torch.isfinite(one).all() for one in other.parameters())
