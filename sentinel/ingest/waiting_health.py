"""WaitingHealth: health records of incarnations that wait for the end of the step which they came in."""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.messages import Health

MAX_HEALTH = 256
"""Health records of an incarnation that a closed step shows; more are dropped, but none that counts lost steps."""
MAX_WAITING_HEALTH = 16 * MAX_HEALTH
"""Health records of an incarnation that wait for the end of their steps; more are counted and dropped."""


class WaitingHealth:
    """The health records of each incarnation that came and are part of no closed step yet."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[tuple[int, Health, tuple[int, int]]]] = {}

    def add(self, incarnation: bytes, seq: int, health: Health, begin: tuple[int, int]) -> bool:
        """Keep a record, and where its frame begins; False: there is no room, it is lost."""
        waiting = self._waiting.setdefault(incarnation, [])
        if len(waiting) >= MAX_WAITING_HEALTH and health.code != "steps_dropped":
            return False
        waiting.append((seq, health, begin))
        return True

    def take(self, incarnation: bytes, last_seq: int) -> tuple[Health, ...]:
        """Return the records of an incarnation up to a frame's number, MAX_HEALTH at most beside lost steps; and let go of
        them."""
        waiting = self._waiting.pop(incarnation, None)
        if not waiting:
            return ()
        if left := [item for item in waiting if item[0] > last_seq]:
            self._waiting[incarnation] = left
        found = [message for seq, message, _ in waiting if seq <= last_seq]
        return tuple(one for at, one in enumerate(found) if at < MAX_HEALTH or one.code == "steps_dropped")

    def oldest(self) -> Iterator[tuple[bytes, tuple[int, tuple[int, int]]]]:
        """Yield, per incarnation, the number and the place of the first frame that is still needed."""
        for incarnation, waiting in self._waiting.items():
            if waiting:
                yield incarnation, (min(seq for seq, _, _ in waiting), min(begin for _, _, begin in waiting))
