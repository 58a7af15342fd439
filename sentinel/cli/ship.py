"""`sentinel ship RUNS`: publishes the spools of this machine, for a join elsewhere to judge."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click

from sentinel.cli.broker_options import Command, broker_options, key_option
from sentinel.cli.log_lines import FORMATS, LEVELS, begin_log
from sentinel.cli.places import runs_directory
from sentinel.errors import ConfigError
from sentinel.fleet.broker import BrokerConfig, nats_client
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.run_key import RunKey
from sentinel.fleet.shipping import Shipping
from sentinel.fleet.subjects import TO_JOIN, TO_WORKERS, Ways
from sentinel.printable import printable


def publishing_options(command: Command) -> Command:
    """Add what `ship` and `node` take alike: which runs, the broker, our name and key, how to end, and the log."""
    options: list[Callable[[Command], Command]] = [
        click.argument("directory", required=False),
        broker_options,
        click.option("--node", metavar="NAME", help="What this machine is called in the fleet. Default: its host name."),
        key_option,
        click.option(
            "--drain-s", default=10.0, show_default=True, metavar="SECONDS", help="Longest time to end in after SIGTERM."
        ),
        click.option("--log-format", type=click.Choice(FORMATS), default="console", show_default=True, help="Of the log."),
        click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Of the log."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@publishing_options
@click.option("--to-workers", is_flag=True, help="For `sentinel worker` to make digests of, before a join gets them.")
def ship(
    directory: str | None,
    broker: BrokerConfig,
    node: str | None,
    key: RunKey | None,
    drain_s: float,
    log_format: str,
    log_level: str,
    to_workers: bool,
) -> int:
    """Publish the spools in DIRECTORY, a directory of runs on this machine, as they are written: all their frames.

    Default: $SENTINEL_DIR, else ./sentinel_runs. Trainers are not touched: what the broker does not take waits in their
    spools. SIGTERM and SIGINT wait until the join holds everything (exit code 0), or for --drain-s (1).
    """
    begin_log(sys.stderr, log_format, log_level)
    return publish(directory, broker, node, key, drain_s, None, TO_WORKERS if to_workers else TO_JOIN)


def publish(
    directory: str | None,
    broker: BrokerConfig,
    node: str | None,
    key: RunKey | None,
    drain_s: float,
    digested_kinds: frozenset[str] | None,
    ways: Ways = TO_JOIN,
    beside: Callable[[NodeRuns], AbstractContextManager[object]] = lambda runs: nullcontext(),
) -> int:
    """Publish until a signal; return the exit code. digested_kinds: as of `NodeRuns`; ways: as of `Shipping`; others as
    the options of `ship`. beside: entered meanwhile.
    """
    where = Path(directory).absolute() if directory else runs_directory()
    if not where.is_dir():
        raise ConfigError(f"{where}: expected a directory of runs, found none; training makes it, or mkdir -m 700")
    if not drain_s >= 0.0:
        raise ConfigError(f"--drain-s: expected 0 s at least, got {drain_s:g}; with 0 nothing is waited for")
    if node is not None and not node.strip():
        raise ConfigError(f'--node: expected a name, got "{printable(node)}"; without --node it is the host name')
    nats_client()
    problem = logging.getLogger("sentinel.fleet").warning
    runs = NodeRuns(
        where, node or socket.gethostname(), digested_kinds=digested_kinds, on_problem=problem, is_signed=key is not None
    )
    shipping = Shipping(runs, broker, drain_s=drain_s, key=key, ways=ways, says_unanswered=digested_kinds is None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: shipping.stop())
    # `sentinel fleet up` starts us with SIGTERM held back.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with beside(runs):
        return 0 if asyncio.run(shipping.run()) else 1
