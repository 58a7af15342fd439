"""`sentinel join RUNS`: the daemon, beside what copies the spools of all nodes into RUNS for it to judge."""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path

import click

from sentinel.cli.broker_options import broker_options, key_option
from sentinel.cli.daemon_options import daemon_options
from sentinel.cli.listening import Listening
from sentinel.cli.log_lines import begin_log
from sentinel.errors import ConfigError, StoreError
from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig
from sentinel.fleet.run_key import RunKey


@click.command()
@click.argument("directory")
@broker_options
@click.option(
    "--stream-mib", default=STREAM_BYTES >> 20, show_default=True, metavar="MIB", help="Most that the stream holds."
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 5),
    default=1,
    show_default=True,
    metavar="N",
    help="Servers of a NATS cluster that each hold the streams: 3 outlive the loss of one.",
)
@click.option(
    "--takeover-s",
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="A standby takes over when the join that works was silent for so long; it stops itself after 60 % of that.",
)
@key_option
@daemon_options
def join(
    directory: str,
    broker: BrokerConfig,
    stream_mib: int,
    replicas: int,
    state_dir: str | None,
    packs: tuple[str, ...],
    config: str | None,
    listening: Listening,
    no_http: bool,
    takeover_s: float,
    key: RunKey | None,
    late_after: int | None,
    late_after_s: float | None,
    drain_s: float,
    dry_run_notifications: bool,
    log_format: str,
    log_level: str,
) -> int:
    """Judge the runs of all nodes that ship to the same broker, as `sentinel serve` judges those of one disk.

    DIRECTORY is made where it is missing, and holds the copies of the nodes' spools beside what was found. Of the joins on
    one broker one works, and the others stand by for it. One that lost its place to another ends, with exit code 1.
    """
    import logging

    from sentinel.daemon.config import placed, read_config
    from sentinel.daemon.daemon import Daemon, ServeOptions
    from sentinel.daemon.run_turns import SharedTurns
    from sentinel.fleet.broker import nats_client
    from sentinel.fleet.copied_runs import CopiedRuns
    from sentinel.fleet.join_intake import JoinIntake
    from sentinel.fleet.join_lease import JoinLease, LeaseTimes
    from sentinel.fleet.known_epochs import highest_epoch
    from sentinel.private_files import make_directory

    begin_log(sys.stderr, log_format, log_level)
    os.umask(0o077)  # whatever the shell says: nobody else reads, let alone writes, what is copied here
    where, config_file = Path(directory).absolute(), Path(config) if config else None
    if (where / "spool").is_dir():
        raise ConfigError(f"{where}: expected a directory of runs, got a run; copies of runs are made in DIRECTORY/NAME")
    make_directory(where)
    nats_client()
    broker.check()
    read = functools.partial(read_config, config_file, late_after, late_after_s)
    warn = logging.getLogger("sentinel.fleet").warning
    name = f"{socket.gethostname()}/{os.getpid()}"
    turns = SharedTurns()
    copies = CopiedRuns(where, name, on_problem=warn, wait=turns.wait)
    if not takeover_s >= 1.0:
        raise ConfigError(f"--takeover-s: expected 1 at least, got {takeover_s:g}")
    lease = JoinLease(
        name, LeaseTimes.of(takeover_s), floor=lambda: highest_epoch(where, Path(state_dir) if state_dir else None)
    )
    intake = JoinIntake(copies, broker, lease, stream_bytes=stream_mib << 20, replicas=replicas, key=key)
    options = ServeOptions(
        directory=where, state_dir=Path(state_dir) if state_dir else None, packs=packs, config=read(),
        config_file=config_file, read_config=read if config_file else None, is_dry_run=dry_run_notifications,
        http=None if no_http else listening.config(),
        drain_s=drain_s, arrivals=copies.arrivals, rows_from=copies.rows_of, standby_of=lambda: intake.standby_of,
        join_health=intake.health, epoch=lambda: intake.epoch, turns=turns, on_fenced=lease.take_fence,
    )  # fmt: skip
    try:
        daemon = Daemon(options, os.environ, sys.stderr)
    except ConfigError as error:
        raise placed(error, config_file) if config_file else error from error
    intake.start(daemon.stop)
    try:
        code = daemon.run()
    finally:
        intake.close()
    if intake.lost:
        raise StoreError(f"{where}: {intake.lost}; start it again, and it stands by")
    return code
