"""`sentinel silence`: what nobody is told for a while; no daemon need run."""

from __future__ import annotations

import getpass
import time
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from sentinel.cli.act import parse_until
from sentinel.cli.main import CLEAN
from sentinel.cli.places import find_run, runs_directory
from sentinel.errors import ConfigError
from sentinel.report.silences import Silence, SilenceBook, SilenceRequest
from sentinel.store.run_paths import is_run

_DIR = click.option(
    "-d", "--dir", "directory", metavar="DIR", help="A run, its name, or a directory of runs. Default: $SENTINEL_DIR."
)
_STATE = click.option("--state-dir", metavar="DIR", help="The daemon's, where it was given one. Default: DIR/.daemon.")
_WHO = click.option("--who", metavar="NAME", help="Who does this. Default: the user's own name.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON objects, one a line.")


@click.group()
def silence() -> None:
    """Silence what you know of: it is not sent for a while.

    Whoever was told of an incident before is told its end. What is still open when the silence ends is told then.
    """


@silence.command()
@click.argument("matchers", nargs=-1, required=True)
@click.option("--for", "duration", metavar="TIME", help="For how long: 30min, 2h, 2d.")
@click.option("--until", metavar="TIME", help="Until when: 2026-11-22T18:00, in UTC.")
@click.option("--why", required=True, metavar="TEXT", help="Why, in a few words.")
@_WHO
@_DIR
@_STATE
@_JSON
def add(
    matchers: tuple[str, ...],
    duration: str | None,
    until: str | None,
    why: str,
    who: str | None,
    directory: str | None,
    state_dir: str | None,
    as_json: bool,
) -> int:
    """Silence what MATCHERS mean, all of which have to hold.

    A matcher is NAME=VALUE, NAME!=VALUE, NAME=~REGEX or NAME!~REGEX. Names: run, attempt, incident, severity, detector,
    module, segment, title, rank, host, job, label.NAME.
    """
    now = time.time()
    if (duration is None) is (until is None):
        raise ConfigError("silence: expected --for TIME or --until TIME, got " + ("neither" if until is None else "both"))
    home = _home(directory)
    if is_run(home):
        matchers = (*matchers, f"run={home.name}")
    request = SilenceRequest(matchers=matchers, why=why, who=who or "", until=parse_until(duration or until or "", now))
    made = request.begun(now)
    _book(home, state_dir).add(made, now)
    click.echo(_json(made) if as_json else f"{made.id} silenced until {_utc(made.until)}: {' '.join(made.matchers)}")
    return CLEAN


@silence.command("list")
@click.option("--all", "with_over", is_flag=True, help="Also those that ran out within the last seven days.")
@_DIR
@_STATE
@_JSON
def list_(with_over: bool, directory: str | None, state_dir: str | None, as_json: bool) -> int:
    """List the silences that hold now, the oldest first."""
    now = time.time()
    for one in _book(_home(directory), state_dir).all():
        if not with_over and one.until <= now:
            continue
        over = f", ended by {one.ended_by}" if one.ended_by else ", over" if one.until <= now else ""
        words = f"{one.id} until {_utc(one.until)}{over}: {' '.join(one.matchers)} ({one.who}: {one.why})"
        click.echo(_json(one) if as_json else words)
    return CLEAN


@silence.command()
@click.argument("silence_id", metavar="ID")
@_WHO
@_DIR
@_STATE
@_JSON
def end(silence_id: str, who: str | None, directory: str | None, state_dir: str | None, as_json: bool) -> int:
    """End a silence before its time. ID: as `sentinel silence list` shows it, or its beginning."""
    ended = _book(_home(directory), state_dir).end(silence_id, who or getpass.getuser(), time.time())
    click.echo(_json(ended) if as_json else f"{ended.id} ended: {' '.join(ended.matchers)}")
    return CLEAN


def _home(directory: str | None) -> Path:
    if directory is None:
        return runs_directory()
    return find_run(directory)


def _book(home: Path, state_dir: str | None) -> SilenceBook:
    return SilenceBook(Path(state_dir) if state_dir else home / ".daemon")


def _json(one: Silence) -> str:
    return msgspec.json.encode(one).decode()


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
