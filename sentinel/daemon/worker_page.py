"""WorkerPage: how a worker of a fleet is, over HTTP and for systemd. The page for people is the join's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from sentinel.daemon.daemon_health import STUCK_AFTER_S
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.server import HttpServer
from sentinel.daemon.meters import DaemonMeters
from sentinel.daemon.systemd import Systemd
from sentinel.report.metrics import MetricsSnapshot
from sentinel.report.prometheus_page import MetricsCollector
from sentinel.version import VERSION
from sentinel.worker_health import WorkerHealth

log = logging.getLogger("sentinel.daemon")

REFRESH_S = 1.0
"""Tokens and certificates that changed are taken in as often."""


class WorkerPage:
    """The `ProcessApi` of a worker, from `with` on. The loop of the worker calls `look`; any thread the rest."""

    def __init__(
        self,
        directory: Path,
        http: HttpConfig | None,
        environ: Mapping[str, str],
        worker: Callable[[], WorkerHealth],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the port; ConfigError where it cannot be had.

        directory: of the worker, and of its tokens. http: where to listen; None: nowhere. worker: how it was when it looked
        last. clock: monotonic seconds.
        """
        self._directory, self._worker, self._clock = directory, worker, clock
        self._meters, self._systemd = DaemonMeters(), Systemd.of(environ)
        self._collector = MetricsCollector(self._snapshot)
        self._server = None if http is None else HttpServer(self, http, Credentials(directory, http), has_page=False)
        self._started, self._looked_at, self._refresh_at = time.time(), clock(), 0.0
        self._http_problems: list[str] = []
        self._has_looked = self._is_stopping = False

    def __enter__(self) -> Self:
        if self._server is not None:
            self._server.start()
            log.info("worker: metrics and health are at %s", self._server.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._systemd.stopping()
        if self._server is not None:
            self._server.stop()

    def look(self) -> None:
        """Say that the loop of the worker comes round."""
        now = self._looked_at = self._clock()
        if self._server is not None and now >= self._refresh_at:
            self._refresh_at = now + REFRESH_S
            self._http_problems = self._server.refresh()
        self._meters.look_at_disks({"copies": self._directory})
        if not self._has_looked:
            self._has_looked = True
            self._systemd.ready()
        self._systemd.alive()

    # As `ProcessApi`.

    def health(self) -> dict[str, Any]:
        """Return the status and every problem in words, as `/healthz` has them."""
        worker, problems = self._worker(), self._problems()
        if self._is_stuck:
            status = "stuck"
        elif self._is_stopping:
            status = "stopping"
        else:
            status = "degraded" if problems else "ok"
        return {
            "status": status,
            "problems": problems,
            "standby_of": [],
            "version": VERSION,
            "num_partitions": len(worker.partitions),
            "num_workers": worker.num_workers,
            "num_nodes": worker.num_nodes,
        }

    def is_ready(self) -> bool:
        """Return whether the broker has its share of the partitions, renewed in time; of many workers it may be none."""
        worker = self._worker()
        return worker.is_connected and worker.is_renewed and not (self._is_stuck or self._is_stopping)

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return (body, content type) of a scrape."""
        return self._collector.render(accept)

    # Inside.

    def _problems(self) -> list[str]:
        stuck = [f"the loop has not come round for {self._clock() - self._looked_at:.0f} s"] if self._is_stuck else []
        return [*stuck, *self._http_problems, *self._worker().problems]

    @property
    def _is_stuck(self) -> bool:
        return self._clock() - self._looked_at > STUCK_AFTER_S

    def _snapshot(self) -> MetricsSnapshot:
        return MetricsSnapshot(
            start_time=self._started, num_problems=len(self._problems()), disks=self._meters.disks, worker=self._worker(),
            certificate_expiry_time=None if self._server is None else self._server.certificate_expires,
        )  # fmt: skip
