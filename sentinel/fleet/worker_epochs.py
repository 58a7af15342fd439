"""WorkerEpochs: the newest epoch under which a worker spoke of each node: the fence against one that lost its partition."""

from __future__ import annotations

from collections.abc import Callable

from sentinel.fleet.heard_nodes import SILENT_S


class WorkerEpochs:
    """Of one join, since it began. A node that speaks for itself has epoch 0."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        self._newest: dict[str, tuple[int, float]] = {}
        """Node -> (epoch, when it last spoke)."""

    def is_former(self, node: str, epoch: int) -> bool:
        """Return whether a newer epoch has spoken of a node, within `SILENT_S`; what has not is the newest from now on.

        A newer one that is silent holds up nobody: a broker that lost its records counts from the beginning, and a node may
        go over to speaking for itself.
        """
        now = self._clock()
        if epoch < self.newest(node):
            return True
        if epoch:
            self._newest[node] = (epoch, now)
        return False

    def newest(self, node: str) -> int:
        """Return the epoch that is the newest; 0: the node speaks for itself."""
        epoch, at = self._newest.get(node, (0, 0.0))
        return epoch if self._clock() - at < SILENT_S else 0

    def forget(self, node: str) -> None:
        """Take whoever speaks next: the node has left, and all that it had is here."""
        self._newest.pop(node, None)
