"""Which other processes keep a journal from being written, as the kernel lists its locks; and whether they are stopped."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def holders_in_words(journal: Path, locks: Path = Path("/proc/locks")) -> str:
    """Return who holds the journal's write lock, and what to do about one that is stopped; empty: the kernel names nobody.

    It names nobody of another machine, and nobody outside this container.
    """
    # Read from /proc: a descriptor of our own on that file, once closed, would give away SQLite's locks.
    try:
        inodes = {str(path.stat().st_ino) for path in (journal.with_name(f"{journal.name}-shm"), journal) if path.exists()}
        lines = locks.read_text("ascii", "replace").splitlines()
    except OSError:
        return ""
    pids = set()
    for fields in map(str.split, lines):
        # `7: POSIX ADVISORY WRITE 4711 08:01:131077 120 120`; one that waits for it has an arrow behind the number.
        if len(fields) == 8 and fields[1] == "POSIX" and fields[3] == "WRITE" and fields[5].rpartition(":")[2] in inodes:
            with contextlib.suppress(ValueError):
                pids.add(int(fields[4]))
    pids -= {0, -1, os.getpid()}
    return "; ".join(_said(pid) for pid in sorted(pids))


def _said(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return f"process {pid}"
    if state not in "Tt":
        return f"process {pid}"
    return f"process {pid}, which is stopped: kill -CONT {pid} resumes it, kill -9 {pid} ends it, and nothing is lost"
