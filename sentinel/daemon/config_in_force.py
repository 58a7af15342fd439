"""ConfigInForce: the daemon's configuration, read again when somebody asks. A broken one leaves the former one in force."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from sentinel.daemon.config import DaemonConfig, hash_of, placed
from sentinel.errors import ConfigError

log = logging.getLogger("sentinel.daemon")


class ConfigInForce:
    """What `read` gave, and gives again at a reload: the file `path` with what the command line says on top."""

    def __init__(self, config: DaemonConfig, path: Path | None, read: Callable[[], DaemonConfig] | None, now: float) -> None:
        """path, read: None where there is no file. now: seconds since the epoch, as of `reload`."""
        self.config = config
        self.problem = ""
        """Why the file as it was read last is not in force; empty: it is."""
        self.counts: dict[str, int] = {"ok": 0, "failed": 0}
        """Outcome -> reloads."""
        self.loaded_at = now
        """Seconds since the epoch of the last load that worked."""
        self._path, self._read = path, read

    @property
    def config_hash(self) -> str:
        """16 hex digits of the configuration in force."""
        return hash_of(self.config)

    def reload(self, now: float, exchange: Callable[[DaemonConfig, DaemonConfig], None]) -> None:
        """Read the file again and put it in force.

        exchange: takes the former and the new one, and acts on the difference; ConfigError where the new one cannot be
        used, before anything of the former is given up.
        """
        if self._read is None:
            return
        former = self.config
        try:
            new = self._read()
            self._put_in_force(former, new, exchange)
        except ConfigError as error:
            self.problem = str(error)
            self.counts = {**self.counts, "failed": self.counts["failed"] + 1}
            fields = {"event": "config.reload", "outcome": "failed", "problem": self.problem}
            words = "config: the former one stays in force, because the new one is broken:\n%s"
            log.error(words, self.problem, extra={"fields": fields})
            return
        self.config, self.problem, self.loaded_at = new, "", now
        self.counts = {**self.counts, "ok": self.counts["ok"] + 1}
        fields = {"event": "config.reload", "outcome": "ok", "config_hash": self.config_hash}
        log.info("config: in force (%s)", self.config_hash if new != former else "unchanged", extra={"fields": fields})

    def _put_in_force(
        self, former: DaemonConfig, new: DaemonConfig, exchange: Callable[[DaemonConfig, DaemonConfig], None]
    ) -> None:
        try:
            exchange(former, new)
        except ConfigError as error:
            raise placed(error, self._path) if self._path else error from error
