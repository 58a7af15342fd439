"""LoopRequests: what others ask of the daemon's loop: to stop, to read its files again, to come round at once."""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Iterator
from types import FrameType

from sentinel.handled_signals import handled


class LoopRequests:
    """Any thread may ask, and so may handlers of signals, which interrupt the loop anywhere; the loop alone pauses."""

    def __init__(self) -> None:
        self.is_stopping = False
        """The loop is to end."""
        self.wants_reload = False
        """Files are to be read again; the loop takes that back when it does."""
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each time that the loop's pause is to end at once.

        Signal handlers put some in. They may run while the loop is anywhere in its pause, with the lock of a
        threading.Event in hand say, which they would wait for for ever; this queue is made to be put into by them.
        """

    def stop(self) -> None:
        """Ask the loop to end."""
        self.is_stopping = True
        self._wakes.put(None)

    def reload(self) -> None:
        """Ask the loop to read its files again."""
        self.wants_reload = True
        self._wakes.put(None)

    def pause(self, longest_s: float) -> None:
        """Wait so long, or until something is asked."""
        with contextlib.suppress(queue.Empty):
            self._wakes.get(timeout=longest_s)
            for _ in range(self._wakes.qsize()):
                self._wakes.get_nowait()

    @contextlib.contextmanager
    def by_signals(self) -> Iterator[None]:
        """Take SIGHUP for a reload, and SIGTERM and SIGINT for a stop, as long as this lasts. In the main thread alone."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        with handled(numbers, self._take):
            # `sentinel run` starts us with SIGTERM held back.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            yield

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.reload()
        else:
            self.stop()
