"""What a notebook's cell raises is told where it is the trainer's, and only there."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.messages import Bye
from sentinel.wire.frame import FrameType, decode_message
from sentinel.wire.spool_reader import SpoolReader

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(at=-1):
    for step in range(5):
        if step == at:
            raise ValueError("no such token: 50257")
        loss = model(torch.randn(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LOOP = """
for step in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


class Events:
    """As IPython has them."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[..., None]]] = {"post_run_cell": []}

    def register(self, event: str, function: Callable[..., None]) -> None:
        self.callbacks[event].append(function)

    def unregister(self, event: str, function: Callable[..., None]) -> None:
        self.callbacks[event].remove(function)


class Shell:
    """A stand-in for IPython's: statements are compiled one by one, and what a cell raises ends nothing."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.events = Events()

    def run_cell(self, text: str) -> None:
        error: BaseException | None = None
        try:
            for node in ast.parse(text).body:
                exec(compile(ast.Module([node], []), "<cell>", "exec"), self.user_ns)
        except BaseException as raised:
            error = raised
        for function in self.events.callbacks["post_run_cell"][:]:
            function(types.SimpleNamespace(error_in_exec=error, error_before_exec=None))

    @property
    def num_callbacks(self) -> int:
        return len(self.events.callbacks["post_run_cell"])


@pytest.fixture(params=["stand-in", "IPython"])
def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path / "runs"))
    if request.param == "stand-in":
        one = Shell()
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: one))
        yield one
        return
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    config = pytest.importorskip("traitlets.config").Config()
    config.HistoryManager.enabled = False
    former = sys.excepthook
    one = interactive.instance(config=config)
    yield one
    interactive.clear_instance()
    sys.excepthook = former


def raised_in(shell: Any, *cells: str) -> Bye | None:
    """Run the cells behind those that attach, and return what the next heartbeat will say was raised."""
    shell.run_cell(SETUP)
    shell.run_cell("import sentinel\nmonitor = sentinel.attach(model, optimizer)")
    for text in cells:
        shell.run_cell(text)
    monitor = shell.user_ns["monitor"]
    assert isinstance(monitor, sentinel.Monitor)
    said = monitor.runner.position().raised
    monitor.close()
    return said


def test_what_the_training_raises_is_told(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = raised_in(shell, "train(at=3)")

    assert said is not None
    assert (said.reason, said.error, said.message) == ("exception", "ValueError", "no such token: 50257")


def test_a_notebook_that_is_taken_down_behind_its_cell_says_what_that_raised(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (SETUP, "import sentinel\nmonitor = sentinel.attach(model, optimizer)", "train(at=3)"):
        shell.run_cell(text)
    monitor = shell.user_ns["monitor"]

    monitor.session.ending._at_exit()

    (folder,) = (monitor.directory / "spool").glob("r*")
    (said,) = [decode_message(one) for one in SpoolReader(folder).poll(final=True) if one.header.type == FrameType.BYE]
    assert isinstance(said, Bye)
    assert (said.reason, said.error) == ("exception", "ValueError")


def test_a_loop_in_the_cell_itself_is_the_training(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = raised_in(shell, LOOP + "    step / (step - 1)\n")

    assert said is not None and said.error == "ZeroDivisionError"


@pytest.mark.parametrize(
    "cells",
    [
        ("train()", "plto(losses)"),
        ("train()\nplto(losses)",),
        ("plto(losses)",),
        ("train(",),
        ("train(at=3)", "train()"),
        ("train()", "raise KeyboardInterrupt"),
        ("model.eval()\nplto(losses)",),
    ],
    ids=["another cell", "behind the loop", "before any", "syntax", "trained since", "interrupt", "evaluation"],
)
def test_what_other_code_raises_is_not(shell: Any, cells: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert raised_in(shell, *cells) is None


def test_an_interrupt_by_hand_is_no_exception(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert raised_in(shell, LOOP + "    raise KeyboardInterrupt\n") is None


def test_nothing_is_left_in_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Shell()
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: one))
    model = nn.Linear(4, 4)
    with sentinel.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        one.user_ns |= {"model": model, "torch": torch}
        one.run_cell("model(torch.randn(2, 4)).sum().backward()")

        assert one.num_callbacks == 0
