"""`sentinel check-config`: is this file what the daemon or the trainer would take?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, LINT_ONLY
from sentinel.document import BrokenDocument, read_document
from sentinel.entry_points import named_parts
from sentinel.errors import ConfigError, RuleError
from sentinel.file_keys import DAEMON, FILES, RULE_TESTS, RULES, TRAINER, kind_of


@click.command("check-config")
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--for",
    "reader",
    type=click.Choice(list(FILES)),
    help="Who would read it. Default: read off the keys in the file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a file.")
def check_config(files: tuple[str, ...], reader: str | None, as_json: bool) -> int:
    """Check configuration FILES: the daemon's, a trainer's, rule packs, or files of rule tests.

    What a file names is looked up as by who would start here and now: secret files, environment variables and the addresses
    of sinks for the daemon, the probes of other packages for a trainer. Exit 1 when a file is wrong, 3 when something in it
    is only suspicious.
    """
    has_problem = has_warning = False
    kinds = {Path(name): reader or _kind(Path(name)) for name in files}
    packs = [path for path, kind in kinds.items() if kind == RULES]
    for name in files:
        path = Path(name)
        kind = kinds[path]
        problem, warnings = _found(path, kind, packs)
        has_problem, has_warning = has_problem or bool(problem), has_warning or bool(warnings)
        if as_json:
            click.echo(json.dumps({"file": name, "for": kind, "problem": problem or None, "suspicions": warnings}))
            continue
        for line in [*problem.splitlines(), *(f"{one} (suspicious)" for one in warnings)]:
            click.echo(line)
        if not problem and not warnings:
            click.echo(f"{name}: ok, for the {kind}")
    if has_problem:
        return FOUND if all(Path(name).exists() for name in files) else BAD_USAGE
    return LINT_ONLY if has_warning else CLEAN


def _kind(path: Path) -> str:
    if path.is_dir():
        return RULES
    try:
        document = read_document(path)
    except BrokenDocument:
        return DAEMON
    return kind_of(list(document.value) if document is not None and isinstance(document.value, dict) else [])


def _found(path: Path, kind: str, packs: list[Path]) -> tuple[str, list[str]]:
    """Return what is wrong, a line each, and what is suspicious. packs: those that are checked beside it."""
    try:
        if kind == RULES:
            from sentinel.judge.packs import RulePacks
            from sentinel.rules.language.listing import check_packs

            RulePacks([path]).load()
            return "", [f"{one.file}:{one.line}: {one.message}" for one in check_packs([path]).lint]
        elif kind == RULE_TESTS:
            from sentinel.rules.language.rule_test_file import read_rule_tests

            return "\n".join(map(str, read_rule_tests(path)[1])), []
        elif kind == TRAINER:
            from sentinel.monitor_config import load_config

            return "", [f"{path}: {one}" for one in _lacking_probes(load_config(path).outside_probes)]
        else:
            from sentinel.daemon.config_check import check_daemon_config

            found = check_daemon_config(path, os.environ, _rules(packs))
            return "\n".join(map(str, found.problems)), [str(one) for one in found.warnings]
    except (ConfigError, RuleError) as error:
        return str(error), []
    return "", []


def _lacking_probes(names: Sequence[str]) -> Iterator[str]:
    """Yield, in words, which probes of other packages a trainer that starts here could not load."""
    from sentinel.monitor_config import PROBE_GROUP

    for at, part in enumerate(named_parts(PROBE_GROUP, names, "probe")):
        if isinstance(part, str):
            yield f"outside_probes[{at}]: {part}"
        elif problem := part.problem():
            yield f"outside_probes[{at}]: {part.where} {problem}"


def _rules(packs: list[Path]) -> list[str]:
    """Return the names of all rules, the built-in ones too; of packs that are broken, which is said of them, none."""
    from sentinel.judge.packs import RulePacks

    try:
        pack = RulePacks(packs).load()
    except RuleError:
        pack = RulePacks([]).load()
    return [rule.name for rule in pack.rules]
