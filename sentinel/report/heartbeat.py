"""Heartbeat: a request now and then that says "the daemon lives"; whoever takes it pages when none came for too long.

Everything else here needs the daemon, or somebody who scrapes it, to say that something is wrong. A dead man's switch
(healthchecks.io, Dead Man's Snitch, Uptime Kuma, ...) needs neither.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from sentinel.errors import ConfigError
from sentinel.report.metrics import HEARTBEAT_OUTCOMES
from sentinel.report.sinks.delivery import Poster, check_url, host_of
from sentinel.report.sinks.secret import read_secret

MIN_INTERVAL_S = 1.0
METHODS = ("POST", "GET")

log = logging.getLogger("sentinel.heartbeat")


class HeartbeatConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dead man's switch: an address that is called as long as the daemon judges. Off without an address."""

    url: str = ""
    """What to call; give url_file or url_env instead, for whoever knows the address can say that we live."""

    url_file: str = ""
    """File that holds the address."""

    url_env: str = ""
    """Environment variable that holds the address."""

    method: str = "POST"
    """POST or GET."""

    interval_s: float = 60.0
    """Seconds between two calls. Whoever takes them should wait for two or three before paging."""

    timeout_s: float = 10.0
    """Longest a whole request may take."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"heartbeat.method must be POST or GET, got {self.method!r}")
        if not MIN_INTERVAL_S <= self.interval_s < math.inf:
            raise ConfigError(f"heartbeat.interval_s must be at least {MIN_INTERVAL_S:g} and finite, got {self.interval_s}")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"heartbeat.timeout_s must be above 0 and finite, got {self.timeout_s}")
        if sum(map(bool, (self.url, self.url_file, self.url_env))) > 1:
            raise ConfigError("heartbeat.url must be given once, as url, url_file or url_env, got several of them")

    def address(self, environ: Mapping[str, str]) -> str:
        """Return what to call, empty: nobody. ConfigError when the secret is not there, or is no address."""
        url = self.url or read_secret("heartbeat.url", self.url_file, self.url_env, environ)
        return check_url(url, "heartbeat.url") if url else ""


class HeartbeatSender:
    """Calls the address in a thread of its own, as long as `is_alive` says so.

    poster: sends by the method that is configured. is_alive: whether the daemon does its work now.
    """

    def __init__(self, url: str, interval_s: float, poster: Poster, is_alive: Callable[[], bool]) -> None:
        self.counts = dict.fromkeys(HEARTBEAT_OUTCOMES, 0)
        self.problem = ""
        """Why the last call failed; empty after one that did not."""
        self.last_taken: float | None = None
        """Seconds since the epoch of the last call that was taken."""
        self._url, self._interval_s = url, interval_s
        self._poster, self._is_alive = poster, is_alive
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sentinel-heartbeat", daemon=True)

    def start(self) -> None:
        """Call at once, and from then on every interval."""
        self._thread.start()

    def beat(self, now: float) -> None:
        """Call once, unless the daemon does not do its work. now: seconds since the epoch."""
        if not self._is_alive():
            return
        delivery = self._poster.post(self._url, b"", {}, now)
        is_taken = delivery.outcome == "sent"
        self.counts["sent" if is_taken else "failed"] += 1
        if is_taken:
            self.last_taken, self.problem = now, ""
            return
        # Never the detail's path: the address is a secret.
        problem = delivery.detail or host_of(self._url)
        if not self.problem:
            log.warning("heartbeat: not taken, tried again every %g s: %s", self._interval_s, problem)
        self.problem = problem

    def close(self) -> None:
        """Call no more; whoever takes the calls learns of it by their absence."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.beat(time.time())
            except Exception as error:  # judging must not end with it, and the next may be taken
                self.counts["failed"] += 1
                self.problem = f"a defect of Sentinel: {type(error).__name__}: {error}"
                log.exception("heartbeat")
            self._closing.wait(self._interval_s)
