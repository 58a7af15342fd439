"""`sentinel rules`: check packs, list rules, test and back-test them."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from sentinel.cli.backtest import backtest
from sentinel.cli.code import allow_code_option
from sentinel.cli.main import CLEAN, to_stderr
from sentinel.cli.rules_test import test


@click.group()
def rules() -> None:
    """Check, list, test and back-test rules."""


rules.add_command(backtest)
rules.add_command(test)


@rules.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--no-builtin", is_flag=True, help="Leave the built-in default pack out.")
@click.option("--run", metavar="RUN", help="A recorded run: globs that match no name in it are lint, with the nearest.")
@allow_code_option()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: errors, lint, num_rules, pack_hash.")
def check(paths: tuple[str, ...], no_builtin: bool, run: str | None, as_json: bool) -> int:
    """Check rule packs: files, directories of *.yaml, or names of packs that come with Sentinel.

    They are merged over the built-in default pack, as the daemon does. Every error is named with FILE:LINE.
    Exit codes: 0 clean, 1 errors, 3 lint only.
    """
    from sentinel.rules.language.listing import check_packs

    result = check_packs(paths, builtin=not no_builtin, names=None if run is None else _names_in(run))
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return result.exit_code
    for error in result.errors:
        click.echo(f"{error}")
    for note in result.lint:
        click.echo(f"{note} (lint)")
    if result.errors:
        to_stderr(f"{len(result.errors)} error{'s' if len(result.errors) > 1 else ''}")
    else:
        to_stderr(f"{result.num_rules} rules, pack {result.pack_hash}: {'lint only' if result.lint else 'clean'}")
    return result.exit_code


def _names_in(run: str) -> dict[str, set[str]]:
    """Return kind -> names of the tensors and scalars of a recorded run."""
    from sentinel.cli.places import find_run
    from sentinel.judge.recorded import RecordedRun
    from sentinel.store.run_paths import RunPaths

    found: dict[str, set[str]] = {}
    met: set[int] = set()
    layouts = []
    with RecordedRun(RunPaths.of(find_run(run))) as recorded:
        for view, _ in recorded.views():
            found.setdefault("scalar", set()).update(view.scalars)
            if id(view.layout) not in met:
                met.add(id(view.layout))
                layouts.append(view.layout)
                for tensor in (one for one in view.tensors if not one.is_part):
                    found.setdefault(tensor.kind, set()).update((tensor.name, *tensor.also))
    return found


@rules.command("list")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--no-builtin", is_flag=True, help="Leave the built-in default pack out.")
@click.option("--detectors", is_flag=True, help="Say what detectors do, their arguments and defaults; PATHs are names.")
@allow_code_option()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def list_(paths: tuple[str, ...], no_builtin: bool, detectors: bool, as_json: bool) -> int:
    """List the rules that are on once PATHs are merged over the built-in default pack."""
    from sentinel.rules.language.listing import list_detectors, list_rules
    from sentinel.rules.language.loader import load_pack

    if detectors:
        for one in _wanted(list_detectors(), paths):
            if as_json:
                click.echo(msgspec.json.encode(one).decode())
            else:
                _show_detector(one)
        return CLEAN
    for line in list_rules(load_pack(paths, builtin=not no_builtin)):
        if as_json:
            click.echo(msgspec.json.encode(line).decode())
        else:
            actions = "+".join(line.actions) or "no action"
            click.echo(f"{line.name}: {line.detector}, {line.severity}, {actions}: {line.watched}")
            click.echo(f"    {line.description} ({line.source})")
    return CLEAN


def _wanted(known: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the detectors of these names; without names all."""
    from sentinel.known_words import nearest

    every = [one["name"] for one in known]
    for name in names:
        if name not in every:
            raise click.UsageError(f'unknown detector "{name}"{nearest(name, every)}')
    return [one for one in known if not names or one["name"] in names]


def _show_detector(one: dict[str, Any]) -> None:
    watched = f" ({', '.join(one['statistics'])})" if one["statistics"] else ""
    click.echo(f"{one['name']}: {one['summary']}{watched}")
    for key, value in one["args"].items():
        default = "needed" if key in one["needed"] else _show(value)
        meaning = one["args_doc"][key]
        click.echo(f"    {key}: {default}" + (f"   {meaning}" if meaning else ""))
    if not one["args"]:
        click.echo("    no arguments")


def _show(value: object) -> str:
    return msgspec.json.encode(value).decode()
