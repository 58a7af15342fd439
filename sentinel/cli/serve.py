"""`sentinel serve DIR`: the daemon, in the foreground."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import click

from sentinel.cli.daemon_options import daemon_options
from sentinel.cli.listening import Listening
from sentinel.cli.log_lines import begin_log
from sentinel.cli.places import runs_directory
from sentinel.errors import ConfigError


@click.command()
@click.argument("directory", required=False)
@daemon_options
@click.option("--owned", is_flag=True, hidden=True, help="The daemon of `sentinel run`.")
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
