"""`sentinel doctor`: what this machine offers Sentinel, what is missing, and what that costs."""

from __future__ import annotations

import importlib.util
import json
import platform
import sqlite3
import sys
from pathlib import Path

import click

from sentinel.cli.main import CLEAN, FOUND
from sentinel.cli.places import runs_directory
from sentinel.errors import SentinelError
from sentinel.version import VERSION

OK, NOTE, BAD = "ok", "note", "bad"


@click.command()
@click.argument("where", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a finding.")
def doctor(where: str | None, as_json: bool) -> int:
    """Check this machine and WHERE, a run or a directory of runs (default: $SENTINEL_DIR). Exit 1 when something is bad."""
    findings = [
        _python(),
        _sqlite(),
        _kernel(),
        _torch(),
        *_directory(Path(where) if where else runs_directory()),
    ]
    for level, what, text in findings:
        if as_json:
            click.echo(json.dumps({"level": level, "what": what, "finding": text}))
        else:
            click.echo(f"{level:5}{what}: {text}")
    return FOUND if any(level == BAD for level, _, _ in findings) else CLEAN


def _python() -> tuple[str, str, str]:
    version = platform.python_version()
    return (OK if sys.version_info >= (3, 11) else BAD), "python", f"{version}, sentinel {VERSION}"


def _sqlite() -> tuple[str, str, str]:
    return OK, "sqlite", sqlite3.sqlite_version


def _kernel() -> tuple[str, str, str]:
    try:
        from sentinel import native
    except (ImportError, OSError) as error:
        return NOTE, "native", f"not loaded ({error}); numpy stands in, several times slower"
    if native.implementation == "numpy":
        return NOTE, "native", "not compiled; numpy stands in, several times slower"
    return OK, "native", f"compiled, {native.implementation}"


def _torch() -> tuple[str, str, str]:
    # Found, not imported: importing takes seconds, and a daemon's machine needs none.
    if importlib.util.find_spec("torch") is None:
        return NOTE, "torch", "not here: this machine can run the daemon, not a trainer"
    return OK, "torch", "here"


def _directory(home: Path) -> list[tuple[str, str, str]]:
    from sentinel.private_files import refuse_foreign
    from sentinel.store.disk import file_system, refuse_network
    from sentinel.store.run_paths import RunPaths, runs_in

    what = str(home)
    findings = []
    kind = file_system(home) or "unknown"
    try:
        refuse_network(home)
        findings.append((OK, what, f"lies on {kind}"))
    except SentinelError:
        findings.append((NOTE, what, f"lies on {kind}, a network file system: serve it with --state-dir on a local disk"))
    if not home.exists():
        return [*findings, (NOTE, what, "is not there yet; the first run makes it")]
    for run in [home, *runs_in(home)]:
        try:
            refuse_foreign(run, is_shared=run == home and run not in runs_in(home))
            RunPaths.of(run)
        except SentinelError as error:
            findings.append((BAD, str(run), str(error)))
    findings.append((OK, what, f"{len(runs_in(home))} runs"))
    return findings
