"""`sentinel fleet`: a fleet of one machine, and where the spools of all nodes stand, as nodes, workers and join say it."""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import msgspec

from sentinel.cli.broker_options import broker_options
from sentinel.cli.fleet_up import up
from sentinel.cli.main import to_stderr
from sentinel.errors import ConfigError, SentinelError, StoreError
from sentinel.fleet.broker import BrokerConfig, error_words, what_to_do, without_password
from sentinel.fleet.broker_users import RUN_CREDENTIALS, STATUS, nsc_command, user_of
from sentinel.fleet.overheard import NodeStatus, overhear
from sentinel.fleet.sealed import WorkerReport
from sentinel.fleet.users_conf import CREDENTIALS, let_in
from sentinel.fleet.users_conf import NAME as USERS_CONF
from sentinel.printable import printable

MAX_ERRORS = 4
"""Most errors of a connection that are said, each once."""
_REFUSED = re.compile(r'permissions violation for subscription to "([^"]+)"', re.IGNORECASE)


@click.group()
def fleet() -> None:
    """Look after a fleet: nodes that ship, and the join that judges."""


fleet.add_command(up)


@fleet.command()
@click.argument("directory", metavar="DIR")
@click.argument("nodes", metavar="NODE...", nargs=-1)
@click.option("--run", metavar="RUN", help="Logins that may speak of this run alone, by its name. Default: of any.")
def users(directory: str, nodes: tuple[str, ...], run: str | None) -> None:
    """Write a login for each NODE, for joins, workers and `fleet status` into DIR/credentials, and DIR/users.conf.

    A nats-server that includes users.conf lets in these users alone, and each node publishes as itself alone. Logins that
    are there keep their passwords, so that nodes can be added; a node that is not named any more is let in no more. With
    --run that is so of this run: its logins are DIR/run-credentials/NODE@RUN, none where no NODE is named; those of other
    runs, and of any, stay as they are.
    """
    if not nodes and run is None:
        raise ConfigError("fleet users: expected a NODE, got none; name each that is to be let in")
    where = Path(directory).absolute()
    try:
        let_in(where, nodes, run)
    except OSError as error:
        raise ConfigError(f"{where}: expected a directory that we may write, got: {error.strerror or error}") from error
    folder = where / (CREDENTIALS if run is None else RUN_CREDENTIALS)
    click.echo(f"{where / USERS_CONF}: include it in nats.conf; have a running server read it: nats-server --signal reload")
    click.echo(f"{folder}: hand each node its own file alone, mode 0600, for --login")


@fleet.command()
@click.argument("user", metavar="NODE|join|worker|status")
@click.option("--run", metavar="RUN", help="Rights to speak of this run alone, by its name. Default: of any.")
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "json", "nsc")),
    default="text",
    show_default=True,
    help="How they are printed.",
)
def rights(user: str, run: str | None, form: str) -> None:
    """Print which subjects a user of the broker needs, for a server whose users `fleet users` does not write.

    nsc: as the command by which the user of a server in operator mode is made. The name is a part of it, for the inbox is
    that of the name.
    """
    found = user_of(user, run)
    if form != "text":
        click.echo(nsc_command(found) if form == "nsc" else msgspec.json.encode(found).decode())
        return
    click.echo(f"user {printable(found.name)}")
    for verb, names in (("publish", found.publish), ("subscribe", found.subscribe)):
        for one in names:
            click.echo(f"{verb} {one}")


@fleet.command()
@broker_options
@click.option("--listen-s", default=1.5, show_default=True, metavar="SECONDS", help="How long nodes are listened to.")
@click.option("--json", "as_json", is_flag=True, help="One object a run and node, and one a worker.")
def status(broker: BrokerConfig, listen_s: float, as_json: bool) -> int:
    """Say, of each run and node, what waits to be held by the join, and what is blocked and why.

    Of each run of which a node speaks: which others are silent, as the join knows it, and for which it waits. Of each
    worker: which partitions of the nodes it has, the epochs of its leases, and what waits in them. Exit code 0: all goes
    on; 1: no node speaks, or one is silent or waited for, or something is blocked.
    """
    workers: dict[str, WorkerReport] = {}
    errors: list[Exception] = []
    heard_at = msgspec.structs.replace(broker, on_error=errors.append)
    try:
        found = asyncio.run(overhear(heard_at, listen_s, lambda report: workers.update({report.worker: report})))
    except TimeoutError as error:
        raise _unreached(broker, errors) from error
    for words in _other_words(error for error in errors if not _REFUSED.search(str(error))):
        to_stderr(f"{broker.shown}: {words}; it was tried again")
    if refused := _refused_words(broker, errors):
        if not found:
            raise ConfigError(refused)
        to_stderr(refused)
    if as_json:
        objects = [*found, *(_report(one) for _, one in sorted(workers.items()))]
        click.echo(b"\n".join(map(msgspec.json.encode, objects)).decode())
    elif not found:
        click.echo(f"no node spoke within {listen_s:g} s")
    else:
        for run, nodes in itertools.groupby(found, lambda one: one.run):
            together = list(nodes)
            for line in [*itertools.chain.from_iterable(map(_lines, together)), *_absent_lines(run, together[0])]:
                click.echo(line)
    if not as_json:
        for _, report in sorted(workers.items()):
            for line in _worker_lines(report):
                click.echo(line)
    is_wrong = any(one.blocked or one.num_silent or one.num_waited_for for one in found)
    return 1 if not found or is_wrong or any(one.blocked for one in workers.values()) else 0


def _unreached(broker: BrokerConfig, errors: Sequence[Exception]) -> SentinelError:
    """Return why there was no connection to a server in time. errors: with which each try ended."""
    for error in errors:
        if isinstance(error, ssl.SSLCertVerificationError):
            known_by = f'in --tls-ca "{broker.ca_file}"' if broker.ca_file else "that this system trusts, without --tls-ca"
            return ConfigError(
                f"{broker.shown}: expected a certificate by an authority {known_by}, got: {error.verify_message}; "
                f"{what_to_do(error, broker)}"
            )
        if mend := what_to_do(error, broker):
            return ConfigError(f"{broker.shown}: {without_password(error_words(error))}; {mend}")
    words = _other_words(errors)
    got = f": {'; '.join(words)}" if words else " no answer within 5 s"
    return StoreError(f"{broker.shown}: expected a NATS server, got{got}")


def _other_words(errors: Iterable[Exception]) -> list[str]:
    return list(dict.fromkeys(without_password(error_words(error)) for error in errors))[:MAX_ERRORS]


def _refused_words(broker: BrokerConfig, errors: Sequence[Exception]) -> str:
    """Return that the login may not hear what is asked for; empty: it may."""
    refused = [found[1] for error in errors if (found := _REFUSED.search(str(error)))]
    if not refused:
        return ""
    login = broker.login_file or broker.creds_file or "no --login"
    return (
        f"{broker.shown}: expected a login that may hear what nodes, joins and workers say, got {login}, which may not hear "
        f"{', '.join(dict.fromkeys(refused))}; give --login that of the user {STATUS} (`sentinel fleet users` writes it)"
    )


def _lines(one: NodeStatus) -> list[str]:
    waits = f"{one.waiting_bytes / 2**20:.1f} MiB wait, for {one.waiting_s:.1f} s" if one.waiting_bytes else "all is held"
    by = f"  by worker {printable(one.worker)}, partition {one.partition}, epoch {one.epoch}" if one.worker else ""
    lines = [f"{one.run}  node {one.node}  {one.num_spools} spools  {waits}  join {one.join or '-'}{by}"]
    if one.num_steps_of_digests or one.num_steps_of_rows:
        rows = f"the rows of {one.num_steps_of_rows} were asked for"
        lines.append(f"  {one.num_steps_of_digests} steps judged of digests; {rows}")
    for folder, (file, offset) in sorted(one.head.items()):
        held, at = one.held.get(folder, ("", 0))
        index, acked = one.acked.get(folder, (0, 0))
        lines.append(f"  {folder}  head {file or '-'} {offset}  held {held or '-'} {at}  committed {index:06d} {acked}")
    lines += [f"  found by this node alone, as no join answers: {printable(what)}" for what in one.found_alone]
    return lines + [f"  blocked: {why}" for why in one.blocked]


def _absent_lines(run: str, one: NodeStatus) -> list[str]:
    """Return what is said of the nodes of a run that do not speak. one: any node that does."""
    lines = [
        f"{run}  node {printable(node)}  silent: nothing was heard of it for {silent_s:.0f} s, and it is waited for no more;"
        " see whether its machine and its `sentinel node` or `sentinel ship` live, or wait: a"
        " machine that was given back is listed for an hour"
        for node, silent_s in one.silent.items()
    ]
    if one.num_silent > len(one.silent):
        lines.append(f"{run}  and {one.num_silent - len(one.silent)} more nodes are silent")
    if one.num_waited_for:
        more = one.num_waited_for - len(one.waited_for)
        names = ", ".join(map(printable, one.waited_for)) + (f" and {more} more" if more else "")
        lines.append(f"{run}  what others sent waits for {names}; see whether machine and shipper live")
    return lines


def _report(one: WorkerReport) -> dict[str, object]:
    return {
        "worker": one.worker,
        "num_workers": one.num_workers,
        "partitions": {
            str(number): {
                "epoch": epoch,
                "num_nodes": one.num_nodes.get(number, 0),
                "waiting_bytes": one.waiting_bytes.get(number, 0),
            }
            for number, epoch in sorted(one.partitions.items())
        },
        "num_refused": one.num_refused,
        "blocked": one.blocked,
    }


def _worker_lines(one: WorkerReport) -> list[str]:
    waiting = sum(one.waiting_bytes.values())
    waits = f"{waiting / 2**20:.1f} MiB wait" if waiting else "all is held"
    refused = f"  {one.num_refused} messages refused" if one.num_refused else ""
    nodes = sum(one.num_nodes.values())
    lines = [f"worker {printable(one.worker)}  {len(one.partitions)} partitions, of {nodes} nodes  {waits}{refused}"]
    lines += [f"  partitions {_ranges(numbers)}  epoch {epoch}" for epoch, numbers in _by_epoch(one.partitions)]
    return lines + ([f"  blocked: {one.blocked}"] if one.blocked else [])


def _by_epoch(partitions: dict[int, int]) -> list[tuple[int, list[int]]]:
    return [
        (epoch, sorted(number for number, other in partitions.items() if other == epoch))
        for epoch in sorted(set(partitions.values()))
    ]


def _ranges(numbers: list[int]) -> str:
    """Return rising numbers as they are said: `0-3, 7`."""
    begins = [one for one in numbers if one - 1 not in numbers]
    ends = [one for one in numbers if one + 1 not in numbers]
    return ", ".join(f"{one}-{other}" if other > one else str(one) for one, other in zip(begins, ends, strict=True))
