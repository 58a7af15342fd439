"""HistoryWriter: writes judged steps in a thread of its own, and keeps what it wrote compact."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sentinel.errors import SentinelError, StoreError
from sentinel.exception_words import described
from sentinel.exports.series import MergedStep
from sentinel.history.compaction import compacted, expired
from sentinel.history.config import HistoryConfig
from sentinel.history.found_rows import FoundRows, without_known
from sentinel.history.history_files import read_file, read_files, write_file
from sentinel.history.manifest import MANIFEST, HistoryFile, Manifest, Retired, delete_unnamed, publish, read_manifest, sweep
from sentinel.history.step_rows import SeriesIds, moments_rows, steps_rows
from sentinel.history.table_schemas import Columns, in_order
from sentinel.history.vector_rows import MeasuredVector, vector_rows
from sentinel.private_files import make_directory

log = logging.getLogger("sentinel.history")

FLUSH_ROWS = 100_000
"""Rows that are written at once, however young they are; a bound on memory: 10 MB of waiting steps."""
MOST_WAITING = 8 * FLUSH_ROWS
"""Rows that may wait for the disk. Whoever judges waits at this bound for a disk that works, and loses steps of the history
for one that does not."""
RETRY_S = 5.0
"""Seconds from a write that failed to the next (chosen): a full disk is not filled in less."""


class HistoryWriter:
    """Of one run. `take` is called by one thread; what else there is, by any."""

    def __init__(
        self,
        folder: Path,
        config: HistoryConfig,
        *,
        after: int,
        found: FoundRows | None = None,
        clock: Callable[[], float] = time.time,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """after: the last decision that will not be given again; what the files lack up to it is missing for good.
        found: where what was found is read; None: nothing is. is_ours: asked before each write; what another process has
        taken over is left as it is.

        StoreError when what is there cannot be read, OSError when nothing can be written there.
        """
        make_directory(folder)
        self.problem = ""
        """Why the newest steps are not on disk; empty: they are, or will be."""
        self._folder, self._config, self._found, self._clock, self._is_ours = folder, config, found, clock, is_ours
        self._manifest = read_manifest(folder)
        delete_unnamed(folder, self._manifest)
        if not self._manifest.id:
            self._manifest = msgspec.structs.replace(self._manifest, id=secrets.token_hex(8))
        self._ids = SeriesIds(read_file(folder / self._manifest.series, "series") if self._manifest.series else None)
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
        self._vectors: list[MeasuredVector] = []
        """Of the steps that wait."""
        self._is_closing = self._is_asked = False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"history {folder.parent.name}", daemon=True)
        self._thread.start()

    @property
    def decision(self) -> int:
        """The last decision that is on disk, or is given up for want of one: what a restart need not give again."""
        with self._moved:
            return self._taken if self.problem else self._manifest.decision

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that are published."""
        return self._manifest.num_bytes

    @property
    def num_missing(self) -> int:
        """Steps that could not be written, for want of disk."""
        return self._manifest.missing

    def take(self, step: MergedStep, vectors: Sequence[MeasuredVector] = ()) -> None:
        """Have a judged step written, once, with its vectors. It returns at once, but where the disk is slower for long."""
        with self._moved:
            if step.seq <= self._taken:
                return
            while self._num_waiting >= MOST_WAITING and not self.problem and not self._is_closing:
                self._moved.wait(1.0)
            while self._num_waiting >= MOST_WAITING:
                gone = self._waiting.pop(0)
                self._vectors = [one for one in self._vectors if one.step is not gone]
                self._num_waiting -= len(gone.stats) + len(gone.scalars)
                self._missing(1)
            self._taken = step.seq
            self._waiting.append(step)
            self._vectors += vectors
            self._num_waiting += len(step.stats) + len(step.scalars)
            if self._num_waiting >= FLUSH_ROWS:
                self._moved.notify_all()

    def pass_by(self, seq: int) -> None:
        """Take note of a decision that closed no step."""
        with self._moved:
            self._taken = max(self._taken, seq)

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
                vectors = list(self._vectors)
                newest = self._taken
            try:
                self._write(steps, vectors, newest)
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
                if self._found is not None:
                    self._found.close()
                return

    def _is_due(self) -> bool:
        return not self.problem and (self._is_asked or self._num_waiting >= FLUSH_ROWS)

    def _write(self, steps: Sequence[MergedStep], vectors: Sequence[MeasuredVector], newest: int) -> None:
        """Write steps with their vectors, and what was found since the last time; published up to the decision `newest`."""
        if not self._is_ours():
            raise StoreError(f"{self._folder}: another process has taken this run over, and writes its history")
        manifest = self._with_found(self._manifest)
        if steps:
            manifest = self._with_steps(manifest, steps, vectors)
        if manifest is not self._manifest or newest > manifest.decision:
            self._publish(msgspec.structs.replace(manifest, decision=newest))
        self._num_ids_written = len(self._ids)
        if steps:
            with self._moved:
                self._waiting = [one for one in self._waiting if one.seq > steps[-1].seq]
                self._vectors = [one for one in self._vectors if one.step.seq > steps[-1].seq]
                self._num_waiting = sum(len(one.stats) + len(one.scalars) for one in self._waiting)
                self._moved.notify_all()

    def _with_steps(self, manifest: Manifest, steps: Sequence[MergedStep], vectors: Sequence[MeasuredVector]) -> Manifest:
        first, last = steps[0].seq, steps[-1].seq
        rows = moments_rows(steps, self._ids)
        span = f"{first:012d}-{last:012d}.0.parquet"
        made = [
            write_file(self._folder, f"moments-{span}", "moments", rows),
            write_file(self._folder, f"steps-{span}", "steps", in_order("steps", steps_rows(steps))),
        ]
        if vectors and len((rows := vector_rows(vectors, self._ids))["series"]):
            made.append(write_file(self._folder, f"vectors-{span}", "vectors", rows))
        series, retired = manifest.series, manifest.retired
        if len(self._ids) > self._num_ids_written:
            retired = (*retired, Retired(series, self._clock())) if series else retired
            series = f"series-{last:012d}.parquet"
            write_file(self._folder, series, "series", self._ids.table())
        attempts = dict(manifest.attempts)
        for one in steps:
            attempts[one.attempt] = min(one.step, attempts.get(one.attempt, one.step))
        return msgspec.structs.replace(
            manifest,
            series=series,
            retired=retired,
            files=(*manifest.files, *made),
            attempts=tuple(sorted(attempts.items())),
        )

    def _with_found(self, manifest: Manifest) -> Manifest:
        if self._found is None:
            return manifest
        if manifest.journal != (journal := self._found.journal_id):
            # Repaired since: it is read from its beginning, and what the files have is left out.
            manifest = msgspec.structs.replace(self._read_anew(self._found, manifest), journal=journal)
        while rows := self._found.after(manifest.positions):
            for table, (position, columns) in rows.items():
                manifest = self._with_rows(manifest, table, position, columns)
        return manifest

    def _read_anew(self, found: FoundRows, manifest: Manifest) -> Manifest:
        positions: dict[str, int] = {}
        kept = manifest
        while rows := found.after(positions):
            for table, (position, columns) in rows.items():
                files = manifest.of(table)
                fresh = without_known(table, columns, read_files(self._folder, files)) if files else columns
                kept = self._with_rows(kept, table, position, fresh)
                positions[table] = position
        return msgspec.structs.replace(kept, positions=positions)

    def _with_rows(self, manifest: Manifest, table: str, position: int, columns: Columns) -> Manifest:
        positions, serial = {**manifest.positions, table: position}, manifest.serial + 1
        made: tuple[HistoryFile, ...] = ()
        if len(columns["json"]):
            made = (write_file(self._folder, f"{table}-{serial:012d}-{serial:012d}.0.parquet", table, columns),)
        return msgspec.structs.replace(manifest, positions=positions, serial=serial, files=(*manifest.files, *made))

    def _tidy(self) -> None:
        now = self._clock()
        tidied = compacted(self._folder, self._manifest, now)
        tidied = expired(self._folder, tidied, self._config, now)
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
