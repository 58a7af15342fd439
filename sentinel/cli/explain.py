"""`sentinel explain`: the story of one incident in plain words."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from pathlib import Path

import click

from sentinel.cli.main import CLEAN
from sentinel.cli.places import find_run, runs_directory
from sentinel.errors import MALFORMED, ConfigError, StoreError
from sentinel.explain.drawing import WIDTH
from sentinel.explain.story import SentAlert, Story, render, story_of
from sentinel.recorded_incidents import find_incident, incident_revisions, newest_revisions, worst_open
from sentinel.report.alert import Alert
from sentinel.store.run_paths import RunPaths, runs_in


@click.command()
@click.argument("incident", default="worst")
@click.option("-d", "--dir", "directory", help="A run, its name, or a directory of runs. Default: $SENTINEL_DIR.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: the incident, steps, diagnosis, reasons, to_do, facts, refined, root, first_causes, "
    "cascade and the rest of the text's parts, the text itself under text.",
)
def explain(incident: str, directory: str | None, as_json: bool) -> int:
    """Tell the story of an incident: what came first and where, how it spread, what followed, who was notified.

    INCIDENT is an id, the beginning of one, `worst` (the gravest that is open, where none is the newest
    that is more than a note; the default), or
    `latest`.
    """
    run_dir = run_with_incident(incident, directory)
    story: Story = story_of(run_dir, incident, alerts_of(run_dir))
    if as_json:
        click.echo(json.dumps(story.as_object(), allow_nan=False))
    else:
        # As wide as the terminal; into a pipe always the same.
        width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
        click.echo(render(story, max(60, width)))
    return CLEAN


def run_with_incident(incident: str, directory: str | None) -> Path:
    """Return the run that an incident belongs to; ConfigError when none, or several, have it."""
    home = runs_directory() if directory is None else Path(directory)
    if not home.is_dir() and directory is not None:
        home = find_run(directory)
    if (home / "incidents.jsonl").is_file():
        return home
    having: dict[Path, tuple[int, float, str]] = {}
    known: list[str] = []
    for run_dir in runs_in(home):
        revisions = incident_revisions(run_dir)
        known += sorted({one.id for one in revisions})
        try:
            which = find_incident(revisions, incident)
        except ConfigError:
            continue
        gravest = worst_open(newest_revisions(revisions).values()) if incident == "worst" else []
        rank = gravest[0].severity.level if gravest else -1
        having[run_dir] = (rank, max(one.time for one in revisions), which)
    if not having:
        names = f"; known: {', '.join(known[:8])}" if known else "; none is recorded there"
        raise ConfigError(f'"{incident}": no incident of a run in {home} has an id that begins so{names}')
    if incident in ("worst", "latest"):
        return max(having, key=lambda run_dir: having[run_dir])
    found = having
    if len(found) > 1:
        runs = ", ".join(sorted(run_dir.name for run_dir in found)[:8])
        raise ConfigError(f'"{incident}": {len(found)} runs have such an incident: {runs}; name one with -d RUN')
    return next(iter(found))


def alerts_of(run_dir: Path) -> list[tuple[str, SentAlert]]:
    """Return (incident id, alert) for all that the run's outbox ever queued, oldest first; none without a journal."""
    try:
        journal = RunPaths.of(run_dir).journal
    except StoreError:
        return []
    if not journal.is_file():
        return []
    try:
        database = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
    except sqlite3.Error:
        return []
    try:
        rows = database.execute("SELECT body, outcome FROM outbox WHERE topic LIKE 'alert:%' ORDER BY position").fetchall()
    except sqlite3.Error:
        return []
    finally:
        database.close()
    result = []
    for body, outcome in rows:
        try:
            alert = Alert.read(body)
        except MALFORMED:
            continue
        notified = SentAlert(
            sink=alert.sink,
            change=alert.change,
            revision=alert.incident.revision,
            is_page=alert.is_page,
            outcome=outcome,
            time=alert.created,
        )
        result.append((alert.incident.id, notified))
    return result
