"""PageAddress: where commands look for the page of a directory of runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentinel.errors import StoreError
from sentinel.store.lock import LockHeld, RunLock
from sentinel.store.run_paths import write_whole
from sentinel.store.trouble import disk_trouble

log = logging.getLogger("sentinel.daemon")


class PageAddress:
    """`http.json`, of one daemon at a time: a standby leaves that of the daemon that it stands by for."""

    def __init__(self, state: Path, directory: Path) -> None:
        """state: where it is left. directory: of the runs, for messages."""
        self._state = state
        self._directory = directory
        self._lock: RunLock | None = None
        """Held while it is there."""
        self._problem = ""
        """Why it is not; empty: it is, or another daemon's is."""

    def leave(self, address: Mapping[str, Any]) -> None:
        """Leave the page's address, unless it is there. What keeps it from being left is said once; judging goes on."""
        if self._lock is not None:
            return
        try:
            lock = RunLock(self._state / "page", f"the page of {self._directory}")
        except LockHeld:
            return
        except StoreError as error:
            self._say(str(error))
            return
        try:
            write_whole(self._state / "http.json", json.dumps(address) + "\n")
        except OSError as error:
            lock.close()
            self._say(str(disk_trouble(self._state / "http.json", error)))
            return
        self._lock, self._problem = lock, ""

    def close(self) -> None:
        """Take it away, where it is ours."""
        if self._lock is not None:
            (self._state / "http.json").unlink(missing_ok=True)
            self._lock.close()

    def _say(self, why: str) -> None:
        if why != self._problem:
            self._problem = why
            log.error("the page's address cannot be left where commands look for it: %s", why)
