"""WriterSchedule: when the writer thread says that it lives, when it looks for commands, and how long it may sleep."""

from __future__ import annotations

HEARTBEAT_S = 1.0
CONTROL_POLL_S = 0.02
"""Least seconds between looks into the control folder while something is trained. Smaller: more calls of the file system;
larger: a command needs to be given for a later step."""
LOOK_SHARE = 100
"""Times what a look took until the next one: a remote folder, slow to look at, is asked less often."""
PULSE_S = 0.02
"""Longest time without a beat while something is trained. Steps that follow each other faster need no waking for it."""
IDLE_POLL_S = 0.25
"""How often the control folder is looked at while nobody trains."""

_NS = 1_000_000_000
BUSY_NS = _NS
"""Something is trained for so long after a step came, whatever the heartbeats say."""


class WriterSchedule:
    """No clock: `now_ns`, monotonic nanoseconds, is handed in."""

    def __init__(self, heartbeat_s: float = HEARTBEAT_S, control_poll_s: float = CONTROL_POLL_S) -> None:
        self.activity = "init"
        """What the rank does, as its newest heartbeat says."""
        self._heartbeat_ns, self._control_poll_ns = int(heartbeat_s * _NS), int(control_poll_s * _NS)
        self._busy_until_ns = 0
        self._next_heartbeat_ns = self._next_look_ns = 0

    def note_step(self, now_ns: int) -> None:
        """Take note that a step came."""
        self._busy_until_ns = now_ns + BUSY_NS

    def is_heartbeat_due(self, now_ns: int) -> bool:
        """Return whether a heartbeat is due; the next one is due from then on."""
        if now_ns < self._next_heartbeat_ns:
            return False
        self._next_heartbeat_ns = now_ns + self._heartbeat_ns
        return True

    def is_look_due(self, now_ns: int) -> bool:
        """Return whether it is time to look for commands; the next look is counted from then on."""
        if now_ns < self._next_look_ns:
            return False
        self._next_look_ns = now_ns + (self._control_poll_ns if self._is_training(now_ns) else int(IDLE_POLL_S * _NS))
        return True

    def note_look(self, took_ns: int, now_ns: int) -> None:
        """Put the next look off where the last one was slow."""
        self._next_look_ns = max(self._next_look_ns, now_ns + min(LOOK_SHARE * took_ns, int(IDLE_POLL_S * _NS)))

    def pause_s(self, now_ns: int) -> float:
        """Return how long the thread may sleep unless it is woken, seconds."""
        due_ns = min(self._next_heartbeat_ns, self._next_look_ns)
        longest_s = PULSE_S if self._is_training(now_ns) else IDLE_POLL_S
        return min(max(0.001, (due_ns - now_ns) / _NS), longest_s)

    def _is_training(self, now_ns: int) -> bool:
        return self.activity == "train" or now_ns < self._busy_until_ns
