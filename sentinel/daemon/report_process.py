"""`/api/v1/report`: the post-mortem as one file, written by a process of its own: bounded, behind everybody else, then gone.

It is `sentinel report`, which reads spools and anomaly files for seconds: no thread of the interpreter that judges does.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from sentinel.daemon.series_api import Busy
from sentinel.errors import NotThere, StoreError, TookTooLong
from sentinel.printable import printable
from sentinel.report.links import NO_LINKS, MessageLinks
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

LIMIT_S = 60.0
"""Seconds for one post-mortem, in which the process has to start too; then it is ended."""
WAIT_S = 20.0
"""One is written at a time; the next waits so long."""
MOST_BYTES = 64 * 2**20
"""Of one file; a bound on memory."""
_CODE = """
import json, os, signal, sys
sys.path[:], arguments, limit_s = json.loads(sys.argv[1])
# Whoever asked may be gone: nothing outlives its time.
signal.setitimer(signal.ITIMER_REAL, limit_s)
os.nice(10)
from sentinel.cli.main import run_cli
sys.exit(run_cli(arguments))
"""


class ReportFile(NamedTuple):
    """A post-mortem to be saved."""

    name: str
    """ASCII letters, digits and `._+-` alone."""
    body: bytes
    """HTML that loads nothing and holds no script."""


class ReportSource(Protocol):
    """What of a served run is asked."""

    name: str
    paths: RunPaths
    journal: Journal


class ReportQueries:
    """Answers requests from any thread, one at a time."""

    def __init__(self) -> None:
        self._asking = threading.Lock()

    def report(self, run: ReportSource, incident: str | None, links: MessageLinks = NO_LINKS) -> ReportFile:
        """Return the post-mortem of a run, or of one of its incidents, as it stands now. It takes seconds.

        links: the addresses that it leads to, as messages do.

        NotThere for an incident that the run does not have; TookTooLong where it is not written within `LIMIT_S`; StoreError
        where it cannot be; Busy while another is written.
        """
        if incident is not None and not run.journal.found.incident_revisions(incident):
            raise NotThere(
                f'incident "{incident[:80]}": expected one of run "{run.name}", got none; what is older than the '
                "retention is deleted"
            )
        if not self._asking.acquire(timeout=WAIT_S):
            raise Busy("another post-mortem is being written; try again in a moment")
        try:
            body = _written(run.paths.run_dir, incident, links)
        finally:
            self._asking.release()
        words = [re.sub(r"[^A-Za-z0-9._+-]+", "_", one)[:80] for one in (run.name, *([incident] if incident else []))]
        return ReportFile("-".join(["postmortem", *words]) + ".html", body)


def _written(run_dir: Path, incident: str | None, links: MessageLinks) -> bytes:
    by_hand = "sentinel report has no such limits"
    with tempfile.TemporaryDirectory(prefix="sentinel-report-") as folder:
        target = Path(folder) / "report.html"
        # The addresses in force, which the file of the daemon's configuration need not have any more.
        config = Path(folder) / "links.json"
        config.write_bytes(msgspec.json.encode({"notify": links}))
        # What follows `--` is no option, whatever it is called.
        about = [str(run_dir.absolute()), *([incident] if incident else [])]
        arguments = ["report", "-o", str(target), "--config", str(config), "--", *about]
        try:
            done = subprocess.run(
                [sys.executable, "-c", _CODE, json.dumps([sys.path, arguments, LIMIT_S])],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TookTooLong(
                f"no post-mortem within {LIMIT_S:g} s: the run is large, or its disk slow; {by_hand}"
            ) from None
        if not target.is_file():
            said = [line for line in done.stderr[-4000:].decode("utf-8", "replace").splitlines() if line.strip()]
            why = f": {printable(said[-1])[:500]}" if said else ""
            raise StoreError(f"the process that writes the post-mortem ended with {done.returncode}{why}; {by_hand}")
        if target.stat().st_size > MOST_BYTES:
            raise StoreError(f"the post-mortem has more than {MOST_BYTES >> 20} MiB; {by_hand}")
        return target.read_bytes()
