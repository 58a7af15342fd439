"""RunHistory: the history of a served run, where one is written; and what a restart must give it again.

A snapshot is taken once the history has what the one before it stands for. So of the two that a journal keeps the older one
has nothing behind it that the history lacks and the spool may have let go of.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sentinel.decision import Tick
from sentinel.errors import SentinelError
from sentinel.exports.series import MergedStep
from sentinel.history.config import FOLDER, HistoryConfig
from sentinel.messages import Vectors

if TYPE_CHECKING:
    from sentinel.history.vector_rows import UnjudgedVectors
    from sentinel.history.writer import HistoryWriter
    from sentinel.ingest.incarnation import SpoolRecord

log = logging.getLogger("sentinel.serving")


class RunHistory:
    """Of one run. Called by the loop. A history that cannot be read or made is a problem that is said; the run is judged."""

    def __init__(
        self, run_dir: Path, journal: Path, config: HistoryConfig, *, is_ours: Callable[[], bool] = lambda: True
    ) -> None:
        """is_ours: whether no other process has taken the run over."""
        self._is_ours = is_ours
        self._folder, self._journal, self._config = run_dir / FOLDER, journal, config
        self._writer: HistoryWriter | None = None
        self._vectors: UnjudgedVectors | None = None
        self._obstacle = ""
        self.decision: int | None = None
        """The last decision that the history had when it was opened; None: none is written, or it begins now."""
        if config.enabled:
            from sentinel.history.manifest import MANIFEST, read_manifest

            with self._noting_obstacles():
                if (self._folder / MANIFEST).exists():
                    self.decision = read_manifest(self._folder).decision

    def begin(self, after: int) -> None:
        """Write from now on. after: the last decision that is not judged again."""
        if self._config.enabled and not self._obstacle:
            from sentinel.history.found_rows import FoundRows
            from sentinel.history.vector_rows import UnjudgedVectors
            from sentinel.history.writer import HistoryWriter

            with self._noting_obstacles():
                self._writer = HistoryWriter(
                    self._folder, self._config, after=after, found=FoundRows(self._journal), is_ours=self._is_ours
                )
                self._vectors = UnjudgedVectors()

    def attempts(self) -> tuple[tuple[int, int], ...]:
        """Return (attempt, its first step) as far as there is a history, rising. For any thread."""
        if not self._config.enabled or self._obstacle:
            return ()
        from sentinel.history.manifest import read_manifest

        with contextlib.suppress(SentinelError):
            return tuple(sorted(read_manifest(self._folder).attempts))
        return ()

    @contextlib.contextmanager
    def _noting_obstacles(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SentinelError) as error:
            self._obstacle = str(error) if isinstance(error, SentinelError) else f"{self._folder}: {error.strerror or error}"
            log.warning("the history is not written: %s", self._obstacle)

    def use(self, config: HistoryConfig) -> None:
        """Say where another configuration asks for something else: a history is what it was when its run was opened."""
        if config != self._config:
            log.warning("%s: the section history has changed; in force when the daemon is started anew", self._folder)

    @property
    def problem(self) -> str:
        """Why the newest steps are not in it, in words; empty: they are, or will be."""
        why = self._obstacle or (self._writer.problem if self._writer is not None else "")
        return f"the history is not written: {why}" if why else ""

    @property
    def num_bytes(self) -> int:
        """Bytes of its files; 0: none is written."""
        return self._writer.num_bytes if self._writer is not None else 0

    @property
    def num_missing(self) -> int:
        """Judged steps that it lacks for want of disk."""
        return self._writer.num_missing if self._writer is not None else 0

    def has(self, decision: int) -> bool:
        """Return whether a restart need not give it again what was decided up to a decision."""
        return self._writer is None or self._writer.decision >= decision

    def receive(self, records: Iterable[SpoolRecord]) -> None:
        """Take in the vectors of steps that are not judged yet."""
        if self._vectors is not None:
            for one in records:
                if isinstance(one.message, Vectors):
                    self._vectors.receive(one.frame.header.step, one.incarnation.rank, one.incarnation.id, one.message)

    def take(self, step: MergedStep) -> None:
        """Take in a judged step; what it has already it leaves. What was found in it, it reads in the journal."""
        if self._writer is not None and self._vectors is not None:
            self._writer.take(step, self._vectors.take(step))

    def pass_by(self, tick: Tick) -> None:
        """Take note of a decision that closed no step."""
        if self._writer is not None:
            self._writer.pass_by(tick.seq)

    def flush(self) -> None:
        """Have what waits written soon."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what waits, and end."""
        if self._writer is not None:
            self._writer.close()
