"""HistoryWriter: writes judged steps in a thread of its own, and keeps what it wrote compact."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sentinel.errors import SentinelError
from sentinel.exception_words import described
from sentinel.exports.series import MergedStep
from sentinel.history.compaction import compacted, expired
from sentinel.history.config import HistoryConfig
from sentinel.history.history_files import read_file, write_file
from sentinel.history.manifest import MANIFEST, Manifest, Retired, delete_unnamed, publish, read_manifest, sweep
from sentinel.history.step_rows import SeriesIds, moments_rows, steps_rows
from sentinel.history.table_schemas import in_order
from sentinel.private_files import make_directory

log = logging.getLogger("sentinel.history")

FLUSH_ROWS = 100_000
"""Rows that are written at once, however young they are; a bound on memory: 10 MB of waiting steps."""
MOST_WAITING = 8 * FLUSH_ROWS
"""Rows that may wait for the disk. Whoever judges waits at this bound for a disk that works, and loses steps of the history
for one that does not."""
RETRY_S = 5.0
"""Seconds from a write that failed to the next (chosen): a full disk is not filled in less."""
MOST_ONSETS = 100_000
"""Steps with anomalies that are remembered, the newest: what lies about older ones goes with its time."""


class HistoryWriter:
    """Of one run. `take` is called by one thread; what else there is, by any."""

    def __init__(self, folder: Path, config: HistoryConfig, *, after: int, clock: Callable[[], float] = time.time) -> None:
        """after: the last decision that will not be given again; what the files lack up to it is missing for good.

        StoreError when what is there cannot be read, OSError when nothing can be written there.
        """
        make_directory(folder)
        self.problem = ""
        """Why the newest steps are not on disk; empty: they are, or will be."""
        self._folder, self._config, self._clock = folder, config, clock
        self._manifest = read_manifest(folder)
        delete_unnamed(folder, self._manifest)
        self._ids = SeriesIds(read_file(folder / self._manifest.series) if self._manifest.series else None)
        self._num_ids_written = len(self._ids)
        if not (folder / MANIFEST).exists():
            # Says from where on a restart must give again what was not written in time.
            self._manifest = msgspec.structs.replace(self._manifest, decision=after)
            publish(folder, self._manifest)
        elif self._manifest.decision < after:
            self._missing(after - self._manifest.decision)
        self._taken = max(self._manifest.decision, after)
        self._waiting: list[MergedStep] = []
        self._num_waiting = 0
        self._onsets: list[int] = []
        self._is_closing = self._is_asked = False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"history {folder.parent.name}", daemon=True)
        self._thread.start()

    @property
    def decision(self) -> int:
        """The last decision that is on disk, or is given up for want of one: what a restart need not give again."""
        with self._moved:
            return self._taken if self.problem else self._manifest.decision

    def take(self, step: MergedStep) -> None:
        """Have a judged step written, once. It returns at once, but where the disk is slower than judging for long."""
        with self._moved:
            if step.seq <= self._taken:
                return
            while self._num_waiting >= MOST_WAITING and not self.problem and not self._is_closing:
                self._moved.wait(1.0)
            while self._num_waiting >= MOST_WAITING:
                gone = self._waiting.pop(0)
                self._num_waiting -= len(gone.stats) + len(gone.scalars)
                self._missing(1)
            self._taken = step.seq
            self._waiting.append(step)
            self._num_waiting += len(step.stats) + len(step.scalars)
            if self._num_waiting >= FLUSH_ROWS:
                self._moved.notify_all()

    def pass_by(self, seq: int) -> None:
        """Take note of a decision that closed no step."""
        with self._moved:
            self._taken = max(self._taken, seq)

    def take_onsets(self, steps: Sequence[int]) -> None:
        """Keep what lies about these steps when its time is over: anomalies began there."""
        with self._moved:
            self._onsets = [*self._onsets, *steps][-MOST_ONSETS:]

    def flush(self) -> None:
        """Have what waits written soon, and published up to which decision that is."""
        with self._moved:
            self._is_asked = True
            self._moved.notify_all()

    def close(self) -> None:
        """Write what waits, once, and end."""
        with self._moved:
            self._is_closing = True
            self._moved.notify_all()
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        while True:
            with self._moved:
                until = time.monotonic() + (RETRY_S if self.problem else self._config.flush_s)
                while not (self._is_closing or self._is_due()) and (left := until - time.monotonic()) > 0:
                    self._moved.wait(left)
                steps, is_last, self._is_asked = list(self._waiting), self._is_closing, False
                newest = self._taken
            try:
                if steps:
                    self._write(steps, newest)
                elif newest > self._manifest.decision:
                    self._publish(msgspec.structs.replace(self._manifest, decision=newest))
                self.problem = ""
                if not is_last:
                    self._tidy()
            except Exception as error:  # whatever it is, it must be said: who judges would wait for this thread for ever
                known = isinstance(error, (OSError, SentinelError))
                why = f"{self._folder}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
                why = why if known else f"{self._folder}: {described(error)}"
                if why != self.problem:
                    log.warning("the history is not written: %s", why)
                with self._moved:
                    self.problem = why
                    self._moved.notify_all()
            if is_last:
                return

    def _is_due(self) -> bool:
        return not self.problem and (self._is_asked or self._num_waiting >= FLUSH_ROWS)

    def _write(self, steps: Sequence[MergedStep], newest: int) -> None:
        first, last = steps[0].seq, steps[-1].seq
        rows = in_order(moments_rows(steps, self._ids))
        span = f"{first:012d}-{last:012d}.0.parquet"
        made = [
            write_file(self._folder, f"moments-{span}", "moments", rows),
            write_file(self._folder, f"steps-{span}", "steps", in_order(steps_rows(steps))),
        ]
        manifest = self._manifest
        series, retired = manifest.series, manifest.retired
        if len(self._ids) > self._num_ids_written:
            retired = (*retired, Retired(series, self._clock())) if series else retired
            series = f"series-{last:012d}.parquet"
            write_file(self._folder, series, "series", self._ids.table())
        attempts = dict(manifest.attempts)
        for one in steps:
            attempts[one.attempt] = min(one.step, attempts.get(one.attempt, one.step))
        self._publish(
            msgspec.structs.replace(
                manifest,
                decision=newest,
                series=series,
                retired=retired,
                files=(*manifest.files, *made),
                attempts=tuple(sorted(attempts.items())),
            )
        )
        self._num_ids_written = len(self._ids)
        with self._moved:
            self._waiting = [one for one in self._waiting if one.seq > last]
            self._num_waiting = sum(len(one.stats) + len(one.scalars) for one in self._waiting)
            self._moved.notify_all()

    def _tidy(self) -> None:
        now = self._clock()
        tidied = compacted(self._folder, self._manifest, now)
        with self._moved:
            onsets = list(self._onsets)
        tidied = expired(self._folder, tidied, self._config, onsets, now)
        if tidied is not self._manifest:
            self._publish(tidied)
        stays = sweep(self._folder, self._manifest, now)
        if len(stays) < len(self._manifest.retired):
            self._publish(msgspec.structs.replace(self._manifest, retired=stays))

    def _publish(self, manifest: Manifest) -> None:
        publish(self._folder, manifest)
        with self._moved:
            self._manifest = msgspec.structs.replace(manifest, missing=max(manifest.missing, self._manifest.missing))

    def _missing(self, num: int) -> None:
        missing = self._manifest.missing + num
        self._manifest = msgspec.structs.replace(self._manifest, missing=missing)
