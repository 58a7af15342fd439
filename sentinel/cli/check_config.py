"""`sentinel check-config`: is this file what the daemon or the trainer would take?"""

from __future__ import annotations

import json
from pathlib import Path

import click

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND
from sentinel.errors import ConfigError, RuleError


@click.command("check-config")
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--for",
    "reader",
    type=click.Choice(["daemon", "trainer", "rules"]),
    help="Who would read it. Default: told from the sections in the file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a file.")
def check_config(files: tuple[str, ...], reader: str | None, as_json: bool) -> int:
    """Check configuration FILES: the daemon's, a trainer's, or rule packs. Exit 1 when one of them is wrong."""
    is_clean = True
    for name in files:
        path = Path(name)
        kind = reader or _kind(path)
        problem = _problem(path, kind)
        is_clean = is_clean and problem is None
        if as_json:
            click.echo(json.dumps({"file": name, "for": kind, "problem": problem}))
        else:
            click.echo(f"{name}: {problem or f'ok, for the {kind}'}")
    return CLEAN if is_clean else FOUND if all(Path(name).exists() for name in files) else BAD_USAGE


def _kind(path: Path) -> str:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return "daemon"
    if isinstance(content, dict) and "rules" in content:
        return "rules"
    from sentinel.daemon.config import DaemonConfig

    known = set(DaemonConfig.__struct_fields__)
    return "trainer" if isinstance(content, dict) and content and not known & set(content) else "daemon"


def _problem(path: Path, kind: str) -> str | None:
    try:
        if kind == "rules":
            from sentinel.judge.packs import RulePacks

            RulePacks([path]).load()
        elif kind == "trainer":
            from sentinel.monitor_config import load_config as load_trainer_config

            load_trainer_config(path)
        else:
            from sentinel.daemon.config import load_config

            load_config(path)
    except (ConfigError, RuleError) as error:
        return str(error)
    return None
