"""The epochs of leases that the journals in a directory of runs know: what no broker can lose."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path

from sentinel.errors import StoreError
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths, runs_in

log = logging.getLogger("sentinel.fleet")


def highest_epoch(directory: Path, state_dir: Path | None = None) -> int:
    """Return the highest epoch under which any run of a directory was judged; 0: none was under a lease.

    state_dir: as of `RunPaths.of`. A journal that cannot be read is said and passed over: who opens it refuses lower ones.
    """
    found = 0
    for run_dir in runs_in(directory):
        try:
            paths = RunPaths.of(run_dir, state_dir)
            if paths.journal.exists():
                with contextlib.closing(Journal(paths.journal, read_only=True)) as journal:
                    found = max(found, journal.epoch)
        except (StoreError, sqlite3.Error) as error:
            log.warning("run %s: its journal cannot be asked for its epoch: %s", run_dir.name, error)
    return found
