"""`sentinel status`: where each run stands, read from its journal; the daemon may run or not."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.anomaly import Severity
from sentinel.cli.course import Course, course_in, course_of, course_report, why_nothing
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.places import find_run, runs_directory
from sentinel.daemon.absent_ranks import MissingRanks, PartialSteps
from sentinel.daemon.notes import Notes, note_lines
from sentinel.daemon.run_notices import FAILURES_FACT
from sentinel.errors import SentinelError
from sentinel.incident import Incident
from sentinel.ingest.run_losses import RunLosses
from sentinel.ingest.spool_room import NOTICED_SHARE, fullest
from sentinel.printable import printable
from sentinel.store.journal import Journal
from sentinel.store.lock import holder
from sentinel.store.run_paths import RunPaths, runs_in


@click.command()
@click.argument("where", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run.")
def status(where: str | None, as_json: bool) -> int:
    """Say where each run stands. WHERE: a run, its name, or a directory of runs. Default: $SENTINEL_DIR.

    Exit 1 when an incident that is a warning or worse is open, or when a run ended otherwise than in order.
    """
    home = runs_directory() if where is None else Path(where)
    runs = runs_in(home) or ([] if where is None else runs_in(find_run(where)))
    if not runs:
        to_stderr(f"{home}: no runs there")
    is_clean = True
    for run in runs:
        try:
            state = run_status(run)
        except (SentinelError, sqlite3.Error) as error:  # one broken journal hides no other run
            to_stderr(f"{printable(run.name)}: {error}")
            is_clean = False
            continue
        open_incidents = [one for one in state["incidents"] if one["state"] == "open"]
        course = course_in(state)
        is_clean = is_clean and not course.is_bad and not any(Severity(one["severity"]).level for one in open_incidents)
        if as_json:
            click.echo(json.dumps(state))
            continue
        click.echo("\n  ".join(status_lines(run, state)))
        for one in open_incidents:
            suspected = f"; suspected: {one['verdict']}" if one["verdict"] != "unknown" else ""
            click.echo(
                f"  {one['severity']:8} {one['title']} ({one['id']}), "
                f"first cause: {one['root_name'] or 'unknown'}{suspected}"
            )
    return CLEAN if is_clean else FOUND


def status_lines(run_dir: Path, state: dict[str, Any]) -> list[str]:
    """Return how a run stands in lines, without its incidents. state: as `run_status` returns it."""
    daemon = f"judged by process {state['daemon']}" if state["daemon"] else "no daemon"
    step = "nothing judged" if state["step"] is None else f"attempt {state['attempt']}, step {state['step']} judged"
    lines = [f"{printable(state['run'])}: {step}; {daemon}; {state['num_anomalies']} anomalies"]
    course = course_in(state)
    lines += [printable(line) for line in course.lines]
    if not course.num_steps and (nothing := why_nothing(run_dir, math.inf)):
        lines.append(printable(nothing))
    if state["missing_ranks"]:
        lines.append(f"missing: {printable(msgspec.convert(state['missing_ranks'], MissingRanks).words)}")
    if state["partial_steps"]:
        lines += [printable(line) for line in msgspec.convert(state["partial_steps"], PartialSteps).lines]
    if state["replicas"]:
        lines.append(f"replicas: {state['replicas']}")
    if state["spool"]:
        lines.append(f"spool: {state['spool']}" + ("" if state["daemon"] else f"; sentinel serve {state['directory']}"))
    if state["losses"]:
        lines.append(f"lost: {state['losses']}")
    lines += [printable(line) for line in (note_lines(msgspec.convert(state["notes"], Notes)) if state["notes"] else ())]
    if state["config"] and state["config"]["problem"]:
        lines.append(f"config: the newest edit is not in force: {printable(state['config']['problem'])}")
    return lines


def run_status(run_dir: Path) -> dict[str, Any]:
    """Return the state of a run from its journal, JSON-able; null: the journal does not have it."""
    paths = RunPaths.of(run_dir)
    state: dict[str, Any] = {
        "run": paths.name,
        "directory": str(paths.run_dir),
        "daemon": holder(paths.lock_directory),
        "attempt": None,
        "step": None,
        "num_decisions": 0,
        "num_judged": 0,
        "num_anomalies": 0,
        "replicas": None,
        "config": None,
        "spool": "",
        "losses": "",
        "missing_ranks": None,
        "partial_steps": None,
        "notes": None,
        "num_rows_lost": 0,
        "is_complete": True,
        **course_report(Course()),
        "incidents": [],
    }
    room = fullest(paths.run_dir)
    if room is not None and (room.share >= NOTICED_SHARE or room.is_cut):
        state["spool"] = room.words
    if not paths.journal.exists():
        return state
    journal = Journal(paths.journal, read_only=True)
    try:
        state["num_decisions"], state["num_judged"] = journal.last_seq, journal.judged
        state["num_anomalies"] = journal.found.num_onsets()
        state["replicas"] = journal.values.get("replicas")
        state |= course_report(course_of(journal))
        losses = recorded_losses(journal)
        state["losses"], state["num_rows_lost"], state["is_complete"] = losses.words, losses.num_rows, losses.is_complete
        partial, missing = PartialSteps.recalled(journal), MissingRanks.recalled(journal)
        state["partial_steps"] = msgspec.to_builtins(partial) if partial.lines else None
        # Who is heard is known while somebody listens, and of a run that is over nobody is.
        is_heard = state["daemon"] is not None and state["ended"] is None
        state["missing_ranks"] = msgspec.to_builtins(missing) if is_heard and missing.num_missing else None
        state["notes"] = json.loads(journal.values.get("notes") or "null")
        state["config"] = json.loads(journal.values.get("config") or "null")
        state["attempt"], state["step"] = judged_step(journal)
        incidents = [msgspec.json.decode(body, type=Incident) for body in journal.found.newest_incidents(100)]
        state["incidents"] = [
            {name: value for name, value in msgspec.to_builtins(one).items() if name not in ("members", "first_causes")}
            for one in incidents
        ]
    finally:
        journal.close()
    return state


def judged_step(journal: Journal) -> tuple[int | None, int | None]:
    """Return (attempt, step) of the newest judgement; None: nothing is judged, or no step of that attempt."""
    for _, _, body in journal.decisions(after=journal.judged - 1, until=journal.judged):
        newest = msgspec.msgpack.decode(body, type=_DecisionStep)
        # A rank may be found stale before any step is closed.
        return newest.attempt, newest.step if newest.step >= 0 else None
    return None, None


def recorded_losses(journal: Journal) -> RunLosses:
    """Return the rows and steps that were lost before they were judged, from the journal."""
    return msgspec.json.decode(journal.values.get("losses") or "{}", type=RunLosses)


def recorded_failures(journal: Journal) -> list[str]:
    """Return which rules the journal says are off because the code of others failed, and why."""
    return msgspec.json.decode(journal.values.get(FAILURES_FACT) or "[]", type=list[str])


class _DecisionStep(msgspec.Struct):
    attempt: int
    step: int
