"""JudgedActs: what people did about the incidents of a run is judged, written down, and let go of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from sentinel.control.acts import ActInbox
from sentinel.daemon.stages import RunStages
from sentinel.decision import Tick
from sentinel.store.journal import Journal

log = logging.getLogger("sentinel.serving")

LOOK_S = 0.05
"""The folder of acts is looked at so often."""


class JudgedActs:
    """Of one run. An act leaves its folder once its judgement is committed, so that no crash loses it."""

    def __init__(self, run_dir: Path, journal: Journal) -> None:
        self.due = 0.0
        """When it is looked again, on the monotonic clock."""
        self._name, self._journal = run_dir.name, journal
        self._inbox = ActInbox(run_dir, log.warning)

    def turn(self, stages: RunStages, judge: Callable[[Tick], object], now: float) -> None:
        """Have what waits judged. judge: judges a moment and commits it. now: seconds since the epoch."""
        if time.monotonic() < self.due or stages.assembler.is_replaying:
            return
        self.due = time.monotonic() + LOOK_S
        for path, act in self._inbox.waiting():
            why = stages.judge.why_not(act)
            if why:
                log.warning("run %s: %s by %s is not done: %s", self._name, act.act, act.who, why)
            else:
                judge(stages.assembler.tick(stages.watch.facts(), stages.watch.tracker.now, (act,)))
            self._journal.audit.add(now, act.who, act.act, {"incident": act.incident, "why": act.why, "refused": why})
            self._inbox.take(path)
