"""SpoolPruning: deletes judged files of processes that are gone; those that write keep their own spools in bounds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from sentinel.store.retention import RetentionConfig
from sentinel.wire.spool import read_ack
from sentinel.wire.spool_files import file_name, list_files

log = logging.getLogger("sentinel.serving")

LOOK_S = 600.0
"""Least seconds between two looks: thousands of spools must not cost a core."""


class SpoolPruning:
    """Of one run. The newest file of each process stays, and whatever no snapshot has left behind."""

    def __init__(self, name: str, spool_dir: Path, config: RetentionConfig) -> None:
        self._name, self._spool_dir, self._config = name, spool_dir, config
        self._due = 0.0

    def use(self, config: RetentionConfig) -> None:
        """Keep so much from now on."""
        self._config = config

    def turn(self, folders: Iterable[str], now: float) -> None:
        """Look if it is time to. folders: those of processes that are gone. now: seconds since the epoch."""
        if 0.0 <= now - self._due < LOOK_S:
            return
        self._due = now
        files = sorted(stated for folder in folders for stated in self._files(folder))
        left = sum(size for _, size, _, _ in files)
        oldest, most = now - self._config.age_s, self._config.spool_bytes
        num_bytes = 0
        for written, size, path, is_judged in files:
            if is_judged and (written < oldest or (most and left > most)):
                path.unlink(missing_ok=True)
                left, num_bytes = left - size, num_bytes + size
        if num_bytes:
            log.info("run %s: %.1f MiB of judged spool are deleted (retention)", self._name, num_bytes / 2**20)

    def _files(self, folder: str) -> Iterable[tuple[float, int, Path, bool]]:
        """Yield (when it was written, bytes, path, whether no snapshot needs it) of each file of a spool."""
        directory = self._spool_dir / folder
        indices = list_files(directory)
        acked, _ = read_ack(directory)
        for index in indices:
            path = directory / file_name(index)
            try:
                stat = os.stat(path, follow_symlinks=False)  # noqa: PTH116 -- what others put there is not followed
            except FileNotFoundError:
                continue
            yield stat.st_mtime, stat.st_size, path, index < min(acked, indices[-1])
