"""Which signal a handler of the trainer's was called for, from the frames of what it did then."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sentinel.collect.lifecycle.signal_handlers import signal_of_error, signal_of_frame


class Stop(Exception):
    """What a trainer raises to leave its loop."""


def leave() -> None:
    found.append(signal_of_frame(sys._getframe()))
    raise Stop


def plain(number: int, frame: Any) -> None:
    leave()


def takes_all(*args: Any) -> None:
    leave()


def restores(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    leave()


def takes_more(server: str, number: int, frame: Any) -> None:
    leave()


class Trainer:
    def stop(self, number: int = 0, frame: Any = None) -> None:
        leave()

    def __call__(self, number: int, frame: Any) -> None:
        leave()


found: list[str] = []
HANDLERS: dict[str, Callable[..., Any]] = {
    "function": plain, "arguments": takes_all, "restores": restores, "method": Trainer().stop, "object": Trainer(),
    "partial": functools.partial(takes_more, "a"), "lambda": lambda number, frame: leave(),
}  # fmt: skip


@pytest.fixture(autouse=True)
def former() -> Iterator[None]:
    found.clear()
    kept = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", HANDLERS)
def test_what_a_handler_of_sigterm_raises_is_told_from_its_frames(name: str) -> None:
    signal.signal(signal.SIGTERM, HANDLERS[name])

    with pytest.raises(Stop) as caught:
        os.kill(os.getpid(), signal.SIGTERM)

    assert found == ["SIGTERM"], "in the midst of it"
    assert signal_of_error(caught.value) == "SIGTERM", "behind it"


def test_what_was_raised_from_it_is_told_too() -> None:
    signal.signal(signal.SIGTERM, plain)

    with pytest.raises(RuntimeError) as caught:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Stop as error:
            raise RuntimeError("the loop was left") from error

    assert signal_of_error(caught.value) == "SIGTERM"


def test_a_handler_that_the_trainer_calls_by_itself_is_no_signal() -> None:
    trainer = Trainer()
    signal.signal(signal.SIGTERM, trainer.stop)

    with pytest.raises(Stop) as caught:
        trainer.stop()
    with pytest.raises(Stop) as again:
        trainer.stop(15)

    assert found == ["", ""]
    assert signal_of_error(caught.value) == signal_of_error(again.value) == signal_of_error(None) == ""


def test_signals_that_ask_for_something_else_are_none_of_these() -> None:
    signal.signal(signal.SIGUSR1, plain)

    with pytest.raises(Stop) as caught:
        os.kill(os.getpid(), signal.SIGUSR1)

    assert found == [""] and signal_of_error(caught.value) == ""
