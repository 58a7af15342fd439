"""`sentinel ack`, `resolve` and `reopen`: what a person does about an incident; no daemon need run."""

from __future__ import annotations

import getpass
import time
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from sentinel.cli.explain import run_with_incident
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.time_lengths import parse_duration
from sentinel.control.acts import ActRequest, leave_act
from sentinel.errors import ConfigError
from sentinel.incident import CLOSED_STATES, Incident, IncidentAct
from sentinel.incidents.tracker_state import MAX_CLOSED
from sentinel.recorded_incidents import find_incident, incident_revisions, newest_revisions

WAIT_S = 3.0
"""Seconds that a daemon has to take an act before the command says that it waits. Daemons look several times a second; where
none runs, a person waits this long."""

_DIR = click.option("-d", "--dir", "directory", help="A run, its name, or a directory of runs. Default: $SENTINEL_DIR.")
_WHO = click.option("--who", metavar="NAME", help="Who does this. Default: the user's own name.")
_WHY = click.option("--why", default="", metavar="TEXT", help="Why, in a few words; sent with it.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the incident's newest revision as one JSON object.")


@click.command()
@click.argument("incident", default="worst")
@_DIR
@_WHO
@_WHY
@click.option("--until", metavar="TIME", help="Until when: 30min, 4h, 2d, or 2026-11-22T18:00 in UTC. Default: its end.")
@_JSON
def ack(incident: str, directory: str | None, who: str | None, why: str, until: str | None, as_json: bool) -> int:
    """Acknowledge an incident: you work on it, and others need not. Who was notified of it is notified once.

    INCIDENT is an id, the beginning of one, `worst` (the gravest that is open; the default) or `latest`. What makes it
    graver or several times worse is sent all the same.
    """
    now = time.time()
    return _do(incident, "ack", directory, who, why, parse_until(until, now) if until else 0.0, now, as_json)


@click.command()
@click.argument("incident")
@_DIR
@_WHO
@_WHY
@_JSON
def resolve(incident: str, directory: str | None, who: str | None, why: str, as_json: bool) -> int:
    """Close an incident: it is over, says a person. What comes after is another one."""
    return _do(incident, "resolve", directory, who, why, 0.0, time.time(), as_json)


@click.command()
@click.argument("incident")
@_DIR
@_WHO
@_WHY
@_JSON
def reopen(incident: str, directory: str | None, who: str | None, why: str, as_json: bool) -> int:
    """Open an incident again that was closed, or went quiet, too early."""
    return _do(incident, "reopen", directory, who, why, 0.0, time.time(), as_json)


def _do(
    wanted: str, act: str, directory: str | None, who: str | None, why: str, until: float, now: float, as_json: bool
) -> int:
    run_dir = run_with_incident(wanted, directory)
    incident = _newest(run_dir, find_incident(incident_revisions(run_dir), wanted))
    is_over = incident.state in CLOSED_STATES
    if is_over is (act != "reopen"):
        what = "one that is over" if act == "reopen" else "one that is open"
        raise ConfigError(f"{incident.id}: expected {what}, this one is {incident.state}: {incident.title}")
    done = ActRequest(incident=incident.id, act=act, who=who or getpass.getuser(), why=why, until=until).begun(now)
    leave_act(run_dir, done)
    taken = _await(run_dir, done)
    if as_json:
        click.echo(msgspec.json.encode(taken or incident).decode())
    if taken is None:
        to_stderr(
            f"no daemon has taken it within {WAIT_S:g} s: it waits in {run_dir / 'acts'} for the next one that serves the "
            f"run; of incidents that ended it knows the last {MAX_CLOSED}"
        )
        return FOUND
    if not as_json:
        click.echo(f"{taken.id} {_DONE[act]} by {done.who}: {taken.title}")
    return CLEAN


_DONE = {"ack": "acknowledged", "resolve": "closed", "reopen": "reopened"}


def _newest(run_dir: Path, incident: str) -> Incident:
    return newest_revisions(incident_revisions(run_dir))[incident]


def _await(run_dir: Path, act: IncidentAct) -> Incident | None:
    """Return the revision that shows an act; None when none does in time."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        now = _newest(run_dir, act.incident)
        if any(one.id == act.id for one in now.acts):
            return now
        time.sleep(0.05)
    return None


def parse_until(text: str, now: float) -> float:
    """Return the seconds since the epoch that `4h`, `30min`, `2d` or an ISO time (UTC unless it says else) mean."""
    if (seconds := parse_duration(text, "--until")) is not None:
        return now + seconds
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f'--until: expected 30min, 4h, 2d or 2026-11-22T18:00, got "{text}"') from error
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
