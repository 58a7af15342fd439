"""`sentinel run -- CMD...`: any training command, with a daemon beside it that cannot hurt it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.anomaly import Severity
from sentinel.cli.child import Child
from sentinel.cli.code import allow_code_option
from sentinel.cli.companion import Companion
from sentinel.cli.course import Course, course_in, course_of, course_report, why_nothing
from sentinel.cli.listening import Listening, listening_options
from sentinel.cli.main import FOUND, to_stderr
from sentinel.cli.places import run_name, runs_directory
from sentinel.cli.report_forms import FORMS, HTML, PDF
from sentinel.cli.status import recorded_failures, recorded_losses
from sentinel.command_line import command_words
from sentinel.daemon.command_note import CommandNote, write_note
from sentinel.errors import MALFORMED, ConfigError, SentinelError, StoreError
from sentinel.exception_words import described
from sentinel.incident import Incident
from sentinel.ingest.run_losses import RunLosses
from sentinel.private_files import make_directory, refuse_foreign, tighten
from sentinel.report.alert import topic
from sentinel.run_name import folder_name
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths, further_runs

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a command that never began, as shells, `env` and `timeout` give them."""
POLL_S = 0.05
START_S = 10.0
"""Seconds beside --drain-s in which a daemon that was just started comes up, and one that is done lets go of everything."""


@click.command(
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="Example: sentinel run --fail-on critical -- torchrun --nproc-per-node 8 train.py",
)
@click.option("--dir", "directory", metavar="DIR", help="Directory of runs. Default: $SENTINEL_DIR, else ./sentinel_runs.")
@click.option("--name", metavar="NAME", help="Name of the run. Default: $SENTINEL_RUN, else the time of day.")
@click.option("--rules", "packs", multiple=True, metavar="PATH", help="Rule pack, file or directory; several add up.")
@allow_code_option(is_handed_on=True)
@click.option("--config", metavar="FILE", help="Configuration of the daemon (notify and control sections).")
@click.option("--state-dir", metavar="DIR", help="Where the journal lies: a local disk. Default: in the run directory.")
@listening_options("127.0.0.1:0")
@click.option(
    "--fail-on",
    type=click.Choice([one.value for one in Severity]),
    help="Exit 1 when the command ended well but an incident of this severity, or a worse one, was found, or when not "
    "everything was judged.",
)
@click.option(
    "--report", "report_file", metavar="FILE",
    help="Write the incident report there when the command ended: as JSON; where the name ends with .html, .md or .pdf, the "
    "post-mortem of the run (sentinel report).",
)  # fmt: skip
@click.option(
    "--drain-s",
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait, after the command ended, for the daemon to judge what is left.",
)
@click.option("--quiet", is_flag=True, help="Do not print the incident report.")
@click.argument("command", nargs=-1, required=True)
def run(
    directory: str | None,
    name: str | None,
    packs: tuple[str, ...],
    allow_code: bool,
    config: str | None,
    state_dir: str | None,
    listening: Listening,
    fail_on: str | None,
    report_file: str | None,
    drain_s: float,
    quiet: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND with a daemon beside it.

    The command gets SENTINEL_DIR and SENTINEL_RUN, its own stdin, stdout and stderr, and every signal sent to us. The exit
    code is its own (128 + n for a signal; 127 where there is no such program, 126 where we may not run it) unless --fail-on
    says otherwise: how the run ended counts, and a command that never attached is not clean. A daemon that dies is started
    again. One that cannot start, or a directory that cannot be used, does not keep the command from running: it runs
    unwatched, and that is said at once and at the end; with --fail-on the exit code is then 1, for nobody can say that the
    run was clean.
    """
    home, name = runs_directory(directory), run_name(name)
    if shutil.which(command[0]) is None:
        to_stderr(f'command "{command[0]}": expected a program that we may run, found none')
        return NOT_EXECUTABLE if Path(command[0]).exists() and os.sep in command[0] else NOT_FOUND
    run_dir = home / folder_name(name)
    state = Path(state_dir).absolute() if state_dir else run_dir / ".daemon"
    arguments = [str(run_dir), "--owned", *listening.arguments, "--drain-s", f"{drain_s:g}"]
    for pack in packs:
        arguments += ["--rules", str(Path(pack).absolute()) if Path(pack).exists() else pack]
    if allow_code:
        arguments.append("--allow-code")
    if config:
        arguments += ["--config", str(Path(config).absolute())]
    if state_dir:
        arguments += ["--state-dir", str(state)]

    # Whatever is wrong with the watch, the command runs. The child first: a process is forked safely only before it has
    # threads.
    problem = _prepare(run_dir)
    began, note = time.time(), CommandNote()
    typed = CommandNote(command=command_words(command), folder=_folder())
    try:
        child = Child(command, {**os.environ, "SENTINEL_DIR": str(home), "SENTINEL_RUN": name})
    except ConfigError as error:
        to_stderr(str(error))
        return NOT_EXECUTABLE
    try:
        companion = None
        if not problem:
            to_stderr(f"run {name} in {run_dir}; talk of the daemon in {state / 'daemon.log'}")
            companion = Companion(arguments, state / "daemon.log")
        is_reported = False
        while child.poll() is None:
            if companion is not None:
                companion.watch()
                problem = companion.problem or companion.setback
            if problem and not is_reported:
                is_reported = True
                to_stderr(f"the command runs on UNWATCHED: {problem}")
            note = _noted(run_dir, child, began, note, typed, is_used=not problem)
            time.sleep(POLL_S)
        _noted(run_dir, child, began, note, typed, is_used=companion is not None)
        is_drained = companion is not None and companion.finish(drain_s + START_S)
        problem = companion.problem if companion is not None else problem
    finally:
        child.close()
    code = child.code if child.code is not None else 1
    if not is_drained:
        to_stderr(f"NOT everything was watched: {problem}")
    report, *further = [_reported(one, code, is_drained) for one in (run_dir, *further_runs(run_dir))]
    nothing = why_nothing(run_dir, began)
    if nothing:
        to_stderr(nothing)
    if not quiet:
        for line in [line for one in (report, *further) for line in report_lines(one)]:
            to_stderr(line)
        to_stderr(closing_line(report))
    if report_file:
        _write_report(Path(report_file), run_dir, report | ({"further_runs": further} if further else {}))
    worst, is_clean = max(_worst(one) for one in (report, *further)), is_drained and not nothing
    if code == 0 and fail_on is not None and (not is_clean or worst >= Severity(fail_on).level):
        return FOUND
    return code


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it is gone
        return ""


def _noted(
    run_dir: Path, child: Child, began: float, note: CommandNote, typed: CommandNote, *, is_used: bool
) -> CommandNote:
    """Write for the daemon what it cannot see of the command, when that changed; return what was written.

    typed: how the command was given.
    """
    ended = 0.0 if child.code is None else time.time()
    new = msgspec.structs.replace(typed, pid=child.pid, began=began, ended=ended, signals=child.signals, code=child.code)
    if new != note and is_used:
        with contextlib.suppress(OSError, StoreError):  # the daemon then knows of the ranks alone
            write_note(run_dir, new)
    return new


def _prepare(run_dir: Path) -> str:
    """Make the run's directory, private; return in words why it cannot be used, empty where it can."""
    try:
        for one in (run_dir, run_dir / "spool"):
            make_directory(one)
            if said := tighten(one):
                to_stderr(said)
            refuse_foreign(one)
    except StoreError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or run_dir}: {error.strerror or error}; give --dir a directory that we may write"
    return ""


def _reported(run_dir: Path, code: int, is_drained: bool) -> dict[str, Any]:
    """Return the report; an incomplete one, reported on stderr, where its files cannot be read."""
    try:
        return make_report(run_dir, code, is_drained)
    except (OSError, ValueError, SentinelError, sqlite3.Error) as error:
        to_stderr(f"the report is not complete: {error}")
        return {
            "run": run_dir.name, "directory": str(run_dir), "exit_code": code, "is_complete": False,
            "num_anomalies": 0, "incidents": [],
        }  # fmt: skip


def make_report(run_dir: Path, exit_code: int, is_drained: bool) -> dict[str, Any]:
    """Return the report of a run whose command ended, JSON-able, with the newest revision of every incident.

    is_drained: the daemon had judged every step.
    """
    newest: dict[str, Incident] = {}
    path = run_dir / "incidents.jsonl"
    decode = msgspec.json.Decoder(Incident).decode
    if path.exists():
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(*MALFORMED):  # a line that a daemon was killed in; the journal has it whole
                incident = decode(line)
                newest[incident.id] = incident
    num_anomalies = sum(
        b'"event":"onset"' in line for file in sorted((run_dir / "anomalies").glob("*.jsonl")) for line in _lines(file)
    )
    losses, course, failures = RunLosses(), Course(), list[str]()
    notifications: dict[str, dict[str, int]] | None = {}
    paths = RunPaths.of(run_dir)
    if paths.journal.exists():
        journal = Journal(paths.journal, read_only=True)
        try:
            losses, course, failures = recorded_losses(journal), course_of(journal), recorded_failures(journal)
            notifications = {
                sink.removeprefix(topic("")): {outcome or "waiting": count for outcome, count in counts.items()}
                for sink, counts in sorted(journal.outbox.outcomes(topic("")).items())
            }
            if not notifications and journal.cut.seq:
                notifications = None  # What was sent may be among what retention has deleted.
        finally:
            journal.close()
    return {
        "run": run_dir.name,
        "directory": str(run_dir),
        "exit_code": exit_code,
        "is_complete": is_drained and losses.is_complete,
        "num_rows_lost": losses.num_rows,
        "losses": losses.words,
        **course_report(course),
        "failures": failures,
        "notifications": notifications,
        "num_anomalies": num_anomalies,
        "incidents": [msgspec.to_builtins(incident) for incident in newest.values()],
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return the report for people: one line for the run, one or two an incident, worst first."""
    incidents: Sequence[dict[str, Any]] = [one for one in report["incidents"] if one["state"] != "merged"]
    lines = [
        f"run {report['run']}: {_number(report['num_anomalies'], 'anomaly', 'anomalies')}, "
        f"{_number(len(incidents), 'incident', 'incidents')}"
    ]
    lines += [f"  {line}" for line in course_in(report).lines]
    lines += [f"  OFF      {failure}" for failure in report.get("failures", ())]
    if report.get("losses"):
        lines.append(f"  LOST     {report['losses']}: this report is not complete")
    ranked = sorted(incidents, key=lambda one: (-Severity(one["severity"]).level, one["opened_step"], one["id"]))
    for one in ranked[:20]:
        lines.append(f"  {one['severity'].upper():8} {one['title']} [{one['state']}, {one['id']}]")
        first = f"first cause: {one['root_name']}" if one["root_name"] else "first cause: unknown"
        suspected = f"; suspected: {one['verdict']}" if one["verdict"] != "unknown" else ""
        newest = max(one["last_step"], one["active_step"])
        lines.append(f"           steps {one['opened_step']} to {newest}; {first}{suspected}")
    if len(ranked) > 20:
        lines.append(f"  and {len(ranked) - 20} more: sentinel status {report['directory']}")
    return lines + [f"  {line}" for line in _undelivered(report, incidents)]


def _undelivered(report: dict[str, Any], incidents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield which sinks were not sent all that they were to be, and that nobody was to be sent a critical incident."""
    sinks: dict[str, dict[str, int]] | None = report.get("notifications")
    for sink, counts in (sinks or {}).items():
        missing = [f"{counts[one]} {one}" for one in ("failed", "expired", "dropped", "waiting") if counts.get(one)]
        if missing:
            serve = f"; what waits is sent by: sentinel serve {shlex.quote(report['directory'])}"
            yield f"NOT SENT {sink}: {', '.join(missing)}{serve if 'waiting' in counts else ''}"
    if sinks == {} and any(one["severity"] == "critical" for one in incidents):
        yield "NOT SENT to anybody: no sink takes these incidents (notify.sinks in the daemon's configuration)"


def closing_line(report: dict[str, Any]) -> str:
    """Return the last line for people: what was watched, what was found, and what to type next."""
    watched = [
        _number(report[f"num_{many}"], one, many)
        for one, many in (("step", "steps"), ("rank", "ranks"), ("tensor", "tensors"))
        if report.get(f"num_{many}")
    ]
    incidents = [one for one in report["incidents"] if one["state"] != "merged"]
    grave = sum(one["severity"] == "critical" for one in incidents)
    found = _number(len(incidents), "incident", "incidents") + (f" ({grave} critical)" if grave else "")
    where = shlex.quote(str(report["directory"]))
    following = f"sentinel explain worst -d {where}" if incidents else f"sentinel status {where}"
    what = f"watched {', '.join(watched)}" if watched else "watched nothing"
    return f"{what}; {found}; page: sentinel serve {where}; next: {following}"


def _write_report(path: Path, run_dir: Path, report: dict[str, Any]) -> None:
    try:
        if path.suffix.lower() in FORMS:
            _write_postmortem(path, run_dir)
        else:
            path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    except Exception as error:
        # The command's exit code matters more than our report, whatever is wrong with that; the run's files say the same.
        to_stderr(f"the report could not be written: {path}: {described(error)}; see {report['directory']}")


def _write_postmortem(path: Path, run_dir: Path) -> None:
    from sentinel.cli.report import report_bytes, write_file
    from sentinel.postmortem.pdf_form import find_browser

    form = FORMS[path.suffix.lower()]
    if form == PDF:
        try:
            find_browser()
        except ConfigError as error:
            to_stderr(f"{path}: {error}; HTML is written in its place")
            form, path = HTML, path.with_suffix(".html")
    write_file(path, report_bytes(run_dir, None, form))
    to_stderr(f"the post-mortem is in {path}")


def _worst(report: dict[str, Any]) -> int:
    return max((Severity(one["severity"]).level for one in report["incidents"]), default=-1)


def _number(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()
