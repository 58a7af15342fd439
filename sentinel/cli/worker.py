"""`sentinel worker DIR`: does for machines that only ship what `sentinel node` would do on them, for a join to judge."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import click

from sentinel.cli.broker_options import broker_options, key_option
from sentinel.cli.listening import Listening, listening_options
from sentinel.cli.log_lines import FORMATS, LEVELS, begin_log
from sentinel.daemon.worker_page import WorkerPage
from sentinel.errors import ConfigError
from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, nats_client
from sentinel.fleet.join_lease import LeaseTimes
from sentinel.fleet.partition_leases import PartitionLeases
from sentinel.fleet.partition_worker import PartitionWorker
from sentinel.fleet.run_key import RunKey
from sentinel.private_files import make_directory
from sentinel.store.lock import LockHeld, RunLock

COPIES = "relayed"


@click.command()
@click.argument("directory")
@broker_options
@click.option(
    "--stream-mib",
    default=STREAM_BYTES >> 20,
    show_default=True,
    metavar="MIB",
    help="Most that the stream of frames holds.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 5),
    default=1,
    show_default=True,
    metavar="N",
    help="Servers of a NATS cluster that each hold the streams of workers.",
)
@click.option(
    "--rules", "packs", multiple=True, metavar="PATH", help="Rule packs of the join: a file, a directory, or a name."
)
@listening_options("", "metrics and health are")
@click.option(
    "--takeover-s",
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Another worker takes over when this one was silent for so long; it stops itself after 60 % of that.",
)
@key_option
@click.option("--log-format", type=click.Choice(FORMATS), default="console", show_default=True, help="Of the log.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Of the log.")
def worker(
    directory: str,
    broker: BrokerConfig,
    stream_mib: int,
    replicas: int,
    packs: tuple[str, ...],
    listening: Listening,
    takeover_s: float,
    key: RunKey | None,
    log_format: str,
    log_level: str,
) -> int:
    """Take the spools of machines that run `sentinel ship --to-workers`, and send the join digests of them.

    DIRECTORY, of this process alone, is made where it is missing, and holds copies of what the join has not committed: they
    are deleted at each start. The tokens of --listen lie there too. Start as many as you like: they share the machines, and
    take over from each other. Ends at once at SIGTERM and SIGINT; what the join has not got is still on the machines.
    """
    from sentinel.rules.engine import Engine
    from sentinel.rules.language.loader import load_pack

    begin_log(sys.stderr, log_format, log_level)
    os.umask(0o077)  # whatever the shell says: nobody else reads what is copied here
    where = Path(directory).absolute()
    if not takeover_s >= 1.0:
        raise ConfigError(f"--takeover-s: expected 1 at least, got {takeover_s:g}")
    http = listening.config() if listening.listen else None
    nats_client()
    kinds = Engine(load_pack(list(packs))).row_kinds
    make_directory(where)
    try:
        lock = RunLock(where, f"worker {where}")
    except LockHeld as error:
        raise ConfigError(f"{where}: another worker has it, process {error.holder}; give each a DIRECTORY") from error
    try:
        make_directory(where / COPIES)
        leases = PartitionLeases(f"{socket.gethostname()}/{os.getpid()}", LeaseTimes.of(takeover_s))
        page = WorkerPage(where, http, os.environ, lambda: works.health)
        works = PartitionWorker(
            where / COPIES, broker, leases, kinds=kinds, stream_bytes=stream_mib << 20, replicas=replicas, key=key,
            on_look=page.look,
        )  # fmt: skip
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: works.stop())
        # `sentinel fleet up` starts us with SIGTERM held back.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        with page:
            asyncio.run(works.run())
    finally:
        lock.close()
    return 0
