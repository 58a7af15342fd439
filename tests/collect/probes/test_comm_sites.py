"""Whose line a collective is recorded at, whatever stands between, and every way to wait for one."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sentinel

from ...support.nets import TinyModel, loss_of
from .test_comm import Received, single

HERE = f"probes/{Path(__file__).name}"


def recorded(run: Path, body: Callable[[], object]) -> Received:
    """What was recorded of a step that ends with `body`."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ["comm"], "black_box": False})
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        body()
        optimizer.step()
    monitor.detach()
    return Received(run, 0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    single(tmp_path)
    yield
    dist.destroy_process_group()


def line_of(body: Callable[..., object], behind: int = 1) -> int:
    return body.__code__.co_firstlineno + behind


def sites(ears: Received) -> set[str]:
    return {name.partition("@")[2].rpartition(":")[0] for name in ears.rows[0]}


class Quietly(ContextDecorator):
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_calls_through_what_torch_deprecates_are_the_callers(run: Path, group: None) -> None:
    def body() -> None:
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(3))
        dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3))
        Quietly()(functools.partial(dist.all_reduce))(torch.ones(3))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        ears = recorded(run, body)

    assert sites(ears) == {f"{HERE}:{line_of(body, number)}" for number in (1, 2, 3)}


def test_a_wrapper_of_the_users_own_is_the_users_code(run: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = dist.all_reduce

    @functools.wraps(original)
    def mine(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def body() -> None:
        dist.all_reduce(torch.ones(3))

    monkeypatch.setattr(dist, "all_reduce", mine)
    ears = recorded(run, body)

    assert sites(ears) == {f"{HERE}:{line_of(mine, 2)}"}


PACKAGE = """
import functools
def watched(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
def reduced(tensor):
    import torch.distributed as dist
    dist.all_reduce(tensor)
"""


def test_a_package_that_stands_in_the_place_of_torchs_own_function_is_passed_over(
    run: Path, group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lib" / "site-packages" / "watcher_of_calls"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(folder.parent))
    package = importlib.import_module("watcher_of_calls")
    monkeypatch.setattr(dist, "all_reduce", package.watched(package.watched(dist.all_reduce)))

    def body() -> None:
        dist.all_reduce(torch.ones(3))
        package.reduced(torch.ones(3))

    ears = recorded(run, body)
    del sys.modules["watcher_of_calls"]

    assert sites(ears) == {f"{HERE}:{line_of(body)}", "watcher_of_calls/__init__.py:10"}


def then_wait(work: Any) -> None:
    work.get_future().then(lambda future: future.value()[0]).wait()


def wait_all(work: Any) -> None:
    other: torch.futures.Future[int] = torch.futures.Future()
    other.set_result(3)
    torch.futures.wait_all([other, work.get_future()])


def collect_all(work: Any) -> None:
    torch.futures.collect_all([work.get_future(), work.get_future()]).wait()


def wait_twice(work: Any) -> None:
    future = work.get_future()
    future.wait()
    future.wait()
    work.wait()


WAITS: dict[str, Callable[[Any], object]] = {
    "wait": lambda work: work.wait(),
    "future": lambda work: work.get_future().wait(),
    "value": lambda work: (work.wait(), work.get_future().value()),
    "synchronize": lambda work: work.synchronize(),
    "then": then_wait,
    "wait_all": wait_all,
    "collect_all": collect_all,
    "twice": wait_twice,
}


@pytest.mark.parametrize("way", WAITS)
def test_every_way_to_wait_counts_once(way: str, run: Path, group: None) -> None:
    def body() -> None:
        WAITS[way](dist.all_reduce(torch.full((3,), 2.0), async_op=True))

    ears = recorded(run, body)

    assert {name.rpartition(":")[2]: int(row["num_folded"]) for name, row in ears.rows[0].items()} == {"in": 1, "out": 1}
    assert [values[0, 4] for (_, what), found in ears.vectors.items() if what == "calls" for values in found] == [1.0, 1.0]
    assert not ears.health


def test_a_future_that_nobody_waits_for_is_said(run: Path, group: None) -> None:
    def body() -> None:
        kept.append(torch.ones(3))
        dist.all_reduce(kept[-1], async_op=True).get_future()

    kept: list[torch.Tensor] = []
    ears = recorded(run, body)

    assert {one.code for one in ears.health} == {"comm_unread"}
    assert {name.rpartition(":")[2] for name in ears.rows[0]} == {"in"}


def test_torch_is_as_before_and_futures_of_other_kinds_are_left_alone(run: Path, group: None) -> None:
    before = {name: vars(torch._C.Future)[name] for name in ("wait", "value", "then")}

    def body() -> None:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(3)
        assert future.wait() == 3 and future.then(lambda one: one.value() + 1).wait() == 4

    ears = recorded(run, body)

    assert not ears.rows[0] and not ears.health
    assert {name: vars(torch._C.Future)[name] for name in before} == before
