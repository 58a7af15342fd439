"""What can be asked of a daemon, and why it may not be answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from sentinel.control.acts import ActRequest
from sentinel.daemon.http.process_api import ProcessApi
from sentinel.daemon.http.run_questions import RunQuestions
from sentinel.daemon.run_status import RunChanges
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


class DaemonApi(ProcessApi, Protocol):
    """What can be asked of a daemon. Every method may be called from any thread and returns at once."""

    @property
    def questions(self) -> RunQuestions:
        """What is asked of what the runs have measured; only there an answer may take seconds."""
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

    def changes(self) -> Mapping[str, RunChanges]:
        """Return run -> numbers that are others once something of it is. Reads nothing and waits for nobody."""
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
