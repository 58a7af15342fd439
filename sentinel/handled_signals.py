"""Signals that a block of code handles, and nobody after it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have signals handled until the block ends, then as before. In the main thread alone (ValueError elsewhere)."""
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
