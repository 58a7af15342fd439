"""`sentinel node RUNS`: publishes what the ranks of this machine come to, step by step, for a join elsewhere to judge."""

from __future__ import annotations

import sys

import click

from sentinel.cli.log_lines import begin_log
from sentinel.cli.ship import publish, publishing_options
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.run_key import RunKey


@click.command()
@publishing_options
@click.option(
    "--rules", "packs", multiple=True, metavar="PATH", help="Rule packs of the join: a file, a directory, or a name."
)
def node(
    directory: str | None,
    broker: BrokerConfig,
    node: str | None,
    key: RunKey | None,
    packs: tuple[str, ...],
    drain_s: float,
    log_format: str,
    log_level: str,
) -> int:
    """Publish what the ranks of this machine come to in each step, and their spools without the rows.

    DIRECTORY is as of `sentinel ship`, and so is what holds. The join comes to the same, for it asks for the rows of what it
    looks at closely. --rules says of which kinds it always does: a join with other rules asks more often. While no join
    answers the ranks of this machine are judged here, for the log and `sentinel fleet status`. SIGTERM and SIGINT wait until
    the join has every row that it has not committed (exit code 0), or for --drain-s (1).
    """
    from sentinel.cli.lone_watch import LoneWatch
    from sentinel.judge.lone_runs import LoneRuns
    from sentinel.rules.engine import Engine
    from sentinel.rules.language.loader import load_pack

    begin_log(sys.stderr, log_format, log_level)
    pack = load_pack(list(packs))
    kinds = Engine(pack).row_kinds
    return publish(
        directory, broker, node, key, drain_s, kinds,
        beside=lambda runs: LoneWatch(runs, LoneRuns(runs.directory, pack)),
    )  # fmt: skip
