"""`sentinel report`: the post-mortem of a run, or of one of its incidents, as one file."""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from pathlib import Path

import click

from sentinel.cli.course import course_in
from sentinel.cli.explain import alerts_of
from sentinel.cli.main import CLEAN, to_stderr
from sentinel.cli.outputs import STDOUT
from sentinel.cli.places import find_run
from sentinel.cli.report_forms import MARKDOWN, PDF, form_of
from sentinel.cli.status import run_status, status_lines
from sentinel.errors import ConfigError, SentinelError
from sentinel.postmortem.composing import postmortem
from sentinel.postmortem.html_form import as_html
from sentinel.postmortem.markdown_form import as_markdown
from sentinel.postmortem.pdf_form import as_pdf, find_browser
from sentinel.postmortem.run_material import Standing
from sentinel.report.links import NO_LINKS, MessageLinks
from sentinel.store.run_paths import is_run, runs_in


@click.command()
@click.argument("run", required=False)
@click.argument("incident", required=False)
@click.option(
    "-o", "--out", metavar="FILE",
    help="File to write: .html, .md or .pdf (printed by the Chromium of the system). -: Markdown to stdout. "
    "Default: postmortem-RUN[-INCIDENT].html here.",
)  # fmt: skip
@click.option("--config", metavar="FILE", help="Configuration of the daemon, for the addresses of its notify section.")
def report(run: str | None, incident: str | None, out: str | None, config: str | None) -> int:
    """Write the post-mortem of RUN, or of one INCIDENT of it, as one file that needs nothing else.

    RUN is a directory or a name; default: the run written to last. INCIDENT is an id, the beginning of one, `worst` or
    `latest`; without it the run is told, with its gravest incidents.

    What happened, when and where, the diagnosis with its evidence, curves before and after, first causes and what followed,
    the timeline, what was done and what to do next, a replay plan, environment, rules and skip list. What the run did not
    record is said to be missing. The file holds no script and loads nothing. Nothing is written into the run.
    """
    run_dir = find_run(run)
    held = [] if is_run(run_dir) or (run_dir / "incidents.jsonl").is_file() else runs_in(run_dir)
    if held:
        raise ConfigError(f"{run_dir}: expected a run, got a directory of {len(held)}: name one, {held[0]}")
    target = None if out == STDOUT else Path(out or default_name(run_dir, incident))
    form = MARKDOWN if target is None else form_of(target)
    if form == PDF:
        find_browser()  # Before the work, for it may be missing.
    links = NO_LINKS
    if config is not None:
        from sentinel.daemon.config import load_config

        links = load_config(Path(config)).notify.links
    body = report_bytes(run_dir, incident, form, links)
    if target is None:
        click.echo(body.decode(), nl=False)
    else:
        write_file(target, body)
        to_stderr(f"{target}: {len(body):,} bytes")
    return CLEAN


def default_name(run_dir: Path, incident: str | None) -> str:
    """Return the name of the file in the current directory; run names may hold what no file name should."""
    words = [run_dir.name, *([incident] if incident else [])]
    return "-".join(["postmortem", *(re.sub(r"[^A-Za-z0-9._+-]+", "_", one)[:80] for one in words)]) + ".html"


def report_bytes(run_dir: Path, incident: str | None, form: str, links: MessageLinks = NO_LINKS) -> bytes:
    """Return the post-mortem as it stands now, in one of FORMS. ConfigError where there is no such incident."""
    made = postmortem(run_dir, incident, time.time(), _standing(run_dir), alerts_of(run_dir), links)
    if form == MARKDOWN:
        return as_markdown(made).encode()
    html = as_html(made)
    return as_pdf(html) if form == PDF else html.encode()


def write_file(path: Path, body: bytes) -> None:
    """Write a file whole or not at all. OSError where the disk refuses."""
    scratch = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    try:
        scratch.write_bytes(body)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _standing(run_dir: Path) -> Standing:
    try:
        state = run_status(run_dir)
    except (SentinelError, sqlite3.Error, ValueError) as error:
        return Standing(lines=(f"How it stands cannot be read: {error}",))
    return Standing(
        lines=tuple(status_lines(run_dir, state)),
        judged_by=state["daemon"] or "",
        is_over=course_in(state).ended is not None,
    )
