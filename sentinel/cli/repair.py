"""`sentinel repair`: rebuild the journal of a run from its spool and its files."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from sentinel.cli.code import allow_code_option
from sentinel.cli.main import CLEAN, FOUND
from sentinel.cli.places import find_run


@click.command()
@click.argument("run")
@click.option("--dry-run", is_flag=True, help="Change nothing: only say what is wrong and what would be done.")
@click.option("--state-dir", metavar="DIR", help="Where the journal is, if the run does not say so itself.")
@click.option("--rules", "packs", multiple=True, metavar="PATH", help="Rule packs, as of `sentinel serve`.")
@allow_code_option()
@click.option("--config", metavar="FILE", help="Configuration of the daemon: its judging section counts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def repair(run: str, dry_run: bool, state_dir: str | None, packs: tuple[str, ...], config: str | None, as_json: bool) -> int:
    """Rebuild the journal of RUN, a run's directory or name, where it is damaged, missing, or of another version.

    The former journal is moved aside, never deleted. Anomalies and incidents stay as the files have them; what the spool
    holds is judged anew, and adds what they lack. Refused while a daemon serves the run. Exit 1 with --dry-run when there is
    something to repair.
    """
    from sentinel.daemon.config import load_config
    from sentinel.daemon.rebuilding import repair as rebuild
    from sentinel.judge.packs import RulePacks
    from sentinel.store.run_paths import RunPaths

    paths = RunPaths.of(find_run(run), Path(state_dir) if state_dir else None)
    rules = RulePacks(packs)
    rules.load()
    result = rebuild(paths, load_config(Path(config) if config else None), rules, is_dry=dry_run)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(result)))
    else:
        for line in result.words:
            click.echo(line)
    return FOUND if dry_run and result.reason else CLEAN
