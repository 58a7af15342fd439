"""What can be asked of a daemon, and why it may not be answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from sentinel.control.acts import ActRequest
from sentinel.daemon.history_api import HistoryRequest
from sentinel.daemon.pipeline_api import PipelineRequest
from sentinel.daemon.rules_api import WhatIfRequest
from sentinel.daemon.run_status import RunChanges
from sentinel.daemon.series_api import SeriesRequest
from sentinel.daemon.trace_api import TraceRequest
from sentinel.errors import SentinelError
from sentinel.incident import Incident
from sentinel.report.alert_context import AlertContext
from sentinel.report.message import Link
from sentinel.report.silences import Silence, SilenceRequest


class UnknownRun(SentinelError):
    """A request for a run that is not served here."""


class UnknownIncident(SentinelError):
    """A request for an incident that no run here has."""


class ShownIncident(msgspec.Struct, frozen=True, kw_only=True):
    """All that its page shows of an incident."""

    revisions: tuple[Incident, ...]
    """Oldest first; at least one."""
    context: AlertContext = AlertContext()
    orders: tuple[str, ...] = ()
    """What was ordered because of it, in words."""
    links: tuple[Link, ...] = ()
    """Runbook and dashboard."""
    anomalies: tuple[bytes, ...] = ()
    """Lines of JSON: the first causes, and of the anomalies that joined them those of the newest revisions."""


class Unavailable(SentinelError):
    """A request that is right and cannot be done now: the journal or the control folder cannot be written."""


class DaemonApi(Protocol):
    """What can be asked of a daemon. Every method may be called from any thread and returns at once."""

    def health(self) -> dict[str, Any]:
        """Return {"status": "ok" | "degraded" | "standby" | "stopping" | "stuck", "problems": [...], "standby_of": [...],
        "version": ...}. standby_of: the processes that serve runs in our place."""
        ...

    def is_ready(self) -> bool:
        """Return whether rules are loaded and every run there was at the start has been read to its end once; never of a
        standby."""
        ...

    def runs(self) -> list[dict[str, Any]]:
        """Return one object per run: name, attempt, newest and judged step, ranks, open incidents, scalars."""
        ...

    def anomalies(self, run: str | None, *, limit: int, before: int | None, step: int | None) -> list[bytes]:
        """Return lines of JSON, newest first. UnknownRun for a run not served."""
        ...

    def incidents(self, run: str | None, *, limit: int, is_open: bool) -> list[bytes]:
        """Return the newest revision of each incident as lines of JSON, the last changed first."""
        ...

    def incident(self, run: str | None, incident: str) -> ShownIncident:
        """Return an incident, open or over. UnknownRun; UnknownIncident where none, or several runs, have one of this id."""
        ...

    def series(self, request: SeriesRequest) -> dict[str, Any]:
        """Return {"series": [{"run", "name", "kind", "statistic", "points": [[attempt, step, value], ...]}, ...], ...}.

        The one method that may take seconds, when steps are asked for that only the spool has; Busy when it cannot now.
        """
        ...

    def history(self, request: HistoryRequest) -> dict[str, Any]:
        """Return what the history of a run holds: steps, kinds, statistics, scalars and tensors.

        Like the two below it may take seconds. UnknownRun; SentinelError where there is no history, or DuckDB is not
        installed; Busy while another one is asked.
        """
        ...

    def history_series(self, request: HistoryRequest) -> dict[str, Any]:
        """Return single series in columns of steps: least, greatest, mean, last, and what was not finite."""
        ...

    def heatmap(self, request: HistoryRequest) -> dict[str, Any]:
        """Return one statistic of many tensors over steps."""
        ...

    def traces(self, request: TraceRequest) -> dict[str, Any]:
        """Return pictures of tensors that the ranks of a run have made: see `trace_api.traced`."""
        ...

    def vectors(self, request: HistoryRequest) -> dict[str, Any]:
        """Return the value of each expert, or of each head, over steps, out of the history."""
        ...

    def pipeline(self, request: PipelineRequest) -> dict[str, Any]:
        """Return a step as its ranks ran it, with what was found in it in the causal order.

        It may take seconds. UnknownRun; SentinelError for an incident that the run does not have; Busy while another step is
        looked up.
        """
        ...

    def changes(self) -> Mapping[str, RunChanges]:
        """Return run -> numbers that are others once something of it is. Reads nothing and waits for nobody."""
        ...

    def rules(self, run: str) -> dict[str, Any]:
        """Return the rules in force, what each said of a run, and what it is blind to. UnknownRun."""
        ...

    def what_if(self, request: WhatIfRequest) -> dict[str, Any]:
        """Return what a rule with other numbers would have said of a run; it takes seconds.

        UnknownRun; SentinelError for a change that no pack may have, and where the run cannot be judged again; Busy while
        another is asked.
        """
        ...

    def divergence(self, runs: Sequence[str], statistic: str) -> dict[str, Any]:
        """Return where two runs diverge, out of their histories; it may take seconds. As `history` else."""
        ...

    def marks(self, run: str) -> list[dict[str, Any]]:
        """Return restarts, checkpoints, changes of the rules and commands, in the order of steps. UnknownRun."""
        ...

    def audit(self, run: str | None, *, limit: int) -> list[dict[str, Any]]:
        """Return the newest entries of the audit, newest first."""
        ...

    def control(self, run: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do one of `commanding.ACTIONS`; SentinelError when it cannot be, Unavailable when not now."""
        ...

    def act(self, run: str, request: ActRequest) -> dict[str, Any]:
        """Take what a person does about an incident; SentinelError when it cannot be, Unavailable when not now."""
        ...

    def silences(self) -> list[Silence]:
        """Return the silences that hold now, the oldest first."""
        ...

    def silence(self, request: SilenceRequest) -> Silence:
        """Begin a silence; SentinelError when it cannot be, Unavailable when not now."""
        ...

    def end_silence(self, wanted: str, who: str) -> Silence:
        """End a silence, by its id; SentinelError when there is none, Unavailable when not now."""
        ...

    def reload(self) -> dict[str, Any]:
        """Read configuration and rule packs again: {"outcome": "ok" | "failed", "problem": ..., "pack_hash": ...}."""
        ...

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return (body, content type) of a scrape."""
        ...
