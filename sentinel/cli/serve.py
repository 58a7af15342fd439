"""`sentinel serve DIR`: the daemon, in the foreground."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import click

from sentinel.cli.code import allow_code_option
from sentinel.cli.listening import Listening, listening_options
from sentinel.cli.log_lines import FORMATS, LEVELS, begin_log
from sentinel.cli.places import runs_directory
from sentinel.errors import ConfigError


@click.command()
@click.argument("directory", required=False)
@click.option("--state-dir", metavar="DIR", help="Journal, tokens and address: a local disk. Default: DIRECTORY/.daemon.")
@click.option("--rules", "packs", multiple=True, metavar="PATH", help="Rule pack: a file, a directory, or a built-in name.")
@allow_code_option()
@click.option("--config", metavar="FILE", help="Configuration: judging, notify and control sections.")
@listening_options("127.0.0.1:9464")
@click.option("--no-http", is_flag=True, help="Listen nowhere.")
@click.option(
    "--late-after",
    type=int,
    metavar="STEPS",
    help="A rank this many steps behind the newest is late: its step closes without it. "
    "0 leaves only the time limit. Default: 2.",
)
@click.option(
    "--late-after-s",
    type=float,
    metavar="SECONDS",
    help="A rank that keeps the others waiting for so long is late. 0: none. Default: 30.",
)
@click.option("--drain-s", default=10.0, show_default=True, metavar="SECONDS", help="Longest time to end in after SIGTERM.")
@click.option("--dry-run-notifications", is_flag=True, help="Decide and log what would be sent; send nothing.")
@click.option("--owned", is_flag=True, hidden=True, help="The daemon of `sentinel run`.")
@click.option("--log-format", type=click.Choice(FORMATS), default="console", show_default=True, help="Of the log.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Of the log.")
def serve(
    directory: str | None,
    state_dir: str | None,
    packs: tuple[str, ...],
    config: str | None,
    listening: Listening,
    no_http: bool,
    late_after: int | None,
    late_after_s: float | None,
    drain_s: float,
    dry_run_notifications: bool,
    owned: bool,
    log_format: str,
    log_level: str,
) -> int:
    """Judge DIRECTORY as it is written: one run, or a directory of runs in which new ones may appear.

    Default: $SENTINEL_DIR, else ./sentinel_runs. SIGHUP reads rules and configuration again; SIGTERM and SIGINT judge
    what is left and end with 0.
    """
    from sentinel.daemon.config import placed, read_config
    from sentinel.daemon.daemon import Daemon, ServeOptions

    begin_log(sys.stderr, log_format, log_level)
    os.umask(0o077)  # whatever the shell says: nobody else reads, let alone writes, what the daemon makes
    where = Path(directory).absolute() if directory else runs_directory()
    if not where.is_dir():
        raise ConfigError(f"{where}: expected a run or a directory of runs, found none; training makes it, or mkdir -m 700")
    config_file = Path(config) if config else None
    read = functools.partial(read_config, config_file, late_after, late_after_s)
    http = None if no_http else listening.config()
    options = ServeOptions(
        directory=where,
        state_dir=Path(state_dir) if state_dir else None,
        packs=packs,
        config=read(),
        config_file=config_file,
        read_config=read if config_file else None,
        is_dry_run=dry_run_notifications,
        http=http,
        is_owned=owned,
        parent=os.getppid() if owned else 0,
        drain_s=drain_s,
    )
    try:
        daemon = Daemon(options, os.environ, sys.stderr)
    except ConfigError as error:
        raise placed(error, config_file) if config_file else error from error
    return daemon.run()
