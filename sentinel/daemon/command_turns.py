"""CommandTurns: when the commands of a run are followed, and which step its ranks are in by then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sentinel.daemon.commanding import Commanding
from sentinel.daemon.gauges import RunGauges
from sentinel.daemon.live_ranks import LiveRanks, StepStart
from sentinel.daemon.stages import RunStages
from sentinel.ingest.incarnation import SpoolRecord

LOOK_S = 0.05
"""The folder of commands is looked at so often when nothing else calls for it."""
MANY_RANKS = 1024
"""Of so many ranks something comes at each look, and a turn looks at all of them: it must not cost a core."""


class CommandTurns:
    """Of one run."""

    def __init__(self, commanding: Commanding, gauges: RunGauges) -> None:
        self._commanding, self._gauges = commanding, gauges
        self._live = LiveRanks()
        self._step_start = StepStart()
        self._due = self._rests_until = 0.0
        self._num_known = 0

    def receive(self, records: Iterable[SpoolRecord], mono: float) -> None:
        """Take note of who wrote. mono: monotonic seconds."""
        self._live.receive(records, mono)

    def turn(self, stages: RunStages, now: float, mono: float, *, is_due: bool) -> Mapping[int, int] | None:
        """Follow commands and proposals, now and then where it is not due.

        now: seconds since the epoch; mono: monotonic seconds.

        Returns the ranks that write now, each with the newest step that it ended; None: it was too early.
        """
        if (not is_due and mono < self._due) or mono < self._rests_until:
            return None
        self._due = mono + LOOK_S
        known = stages.follower.incarnations.values()
        self._num_known = len(known)
        live = self._live.now(known, mono)
        ended = live.ended
        at_work = [one.heartbeat.step for one in known if one.heartbeat and one.rank in ended]
        newest_ended = max(ended.values(), default=-1)
        newest_step = max([stages.assembler.newest_step, newest_ended, *at_work])
        self._step_start.take(newest_ended, mono)
        begun_s = self._step_start.begun_s(max(newest_step, newest_ended + 1), mono)
        if begun_s is not None:
            newest_step = newest_ended + 1
        self._commanding.turn(
            ended,
            newest_step,
            self._gauges.metrics.step_time_s,
            now,
            attempt=live.attempt,
            in_use=live.in_use,
            begun_s=begun_s,
        )
        return ended

    def rest(self, took_s: float, mono: float) -> None:
        """Say what a turn took, with what is told of it: of many ranks the next comes after twenty times as long.

        mono: monotonic seconds.
        """
        self._rests_until = mono + 20.0 * took_s if self._num_known >= MANY_RANKS else 0.0
