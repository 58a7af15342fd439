"""What would be sent about an incident of a run on disk now, with the daemon up or down; writes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sentinel.control.command_status import CommandStatus
from sentinel.control.command_words import orders_in_words
from sentinel.daemon.alert_contexts import identities_of
from sentinel.daemon.commanding import COMMANDS_FACT
from sentinel.errors import ConfigError, StoreError
from sentinel.incident import CLOSED_STATES
from sentinel.ingest.follow import RunFollower
from sentinel.recorded_incidents import find_incident, incident_revisions
from sentinel.report.alert import Alert
from sentinel.report.alert_context import context_of
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths


def recorded_alert(run_dir: Path, wanted: str, now: float) -> Alert:
    """Return the alert, of no sink yet, of an incident's newest revision. ConfigError where there is none.

    wanted: an id, the beginning of one, `worst` or `latest`. now: seconds since the epoch.
    """
    revisions = incident_revisions(run_dir)
    known = [one for one in revisions if one.id == find_incident(revisions, wanted)]
    newest = max(known, key=lambda one: one.revision)
    follower = RunFollower(run_dir, on_problem=lambda problem: None)
    follower.poll()
    identities = identities_of(follower.incarnations.values(), newest.attempt)
    is_over = newest.state in CLOSED_STATES
    return Alert(
        key=f":{newest.run}:{newest.id}:{newest.revision}",
        sink="",
        change=newest.state if is_over else "opened",
        incident=newest,
        is_page=newest.paged and not is_over,
        was_severity=newest.severity if is_over else None,
        created=now,
        context=context_of(newest, identities, known[0].time),
    )


def recorded_orders(run_dir: Path, alert: Alert) -> Sequence[str]:
    """Return in words what was ordered because of an incident, as the journal has it; nothing where there is no journal."""
    with contextlib.suppress(StoreError, ConfigError, msgspec.DecodeError):
        with contextlib.closing(Journal(RunPaths.of(run_dir).journal, read_only=True)) as journal:
            kept = journal.values.get(COMMANDS_FACT)
        if kept:
            return orders_in_words(msgspec.json.decode(kept, type=list[CommandStatus]), alert.incident)
    return ()
