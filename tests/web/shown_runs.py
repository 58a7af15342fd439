"""A daemon over runs that nobody writes on any more, for a browser to look at however long that takes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from sentinel.daemon.config import DaemonConfig
from sentinel.history.config import HistoryConfig

from ..daemon.test_daemon import daemon, url
from ..support.waiting import wait_for

LONG_S = 120.0
"""Longest time for what the page and the daemon do on a machine on which much else runs."""
WITH_HISTORY = DaemonConfig(history=HistoryConfig(enabled=True, flush_s=0.2))


@contextmanager
def shown_runs(runs: Path, last_steps: Mapping[str, int]) -> Iterator[str]:
    """Yield the daemon's address, once all is judged and in the histories. last_steps: run -> the newest step of its."""
    for one in runs.iterdir():
        one.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        # However long the tests take no rank falls silent: that would end what is open, rules or none.
        patch.setattr("sentinel.ingest.liveness.MAX_LOOK_S", 0.0)
        patch.setattr("sentinel.daemon.live_ranks.LIVE_S", float("inf"))
        # A question that waits for another one is answered late; where it is refused the browser complains.
        patch.setattr("sentinel.daemon.history_api.WAIT_S", LONG_S)
        patch.setattr("sentinel.daemon.what_if_process.LIMIT_S", LONG_S)
        with daemon(runs, WITH_HISTORY) as one:
            found = url(runs)

            def are_there() -> bool:
                return all(_last_step(found, run) == step for run, step in last_steps.items())

            wait_for(lambda: one.api.is_ready() and are_there(), "the histories", timeout_s=LONG_S, interval_s=0.1)
            yield found


def _last_step(address: str, run: str) -> int:
    with urllib.request.urlopen(f"{address}/api/v1/history?run={run}", timeout=LONG_S) as answer:
        return int(json.load(answer)["last_step"])
