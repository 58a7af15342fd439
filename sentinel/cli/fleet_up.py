"""`sentinel fleet up [DIR] --nodes N`: a whole fleet on one machine, in the foreground."""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path
from types import FrameType

import click
import msgspec

from sentinel.cli.fleet_processes import LOOK_S, FleetProcesses, free_port
from sentinel.cli.listening import Listening, listening_options
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.handled_signals import handled

INTERRUPTED = 130


@click.command()
@click.argument("directory", metavar="[DIR]", default="sentinel_fleet")
@click.option(
    "--nodes", default=2, show_default=True, type=click.IntRange(1, 1000), metavar="N", help="Nodes that ship their spools."
)
@click.option(
    "--workers",
    default=0,
    show_default=True,
    type=click.IntRange(0, 64),
    metavar="N",
    help="Workers to which the nodes ship, and which send the join digests; 0: nodes ship to the join.",
)
@click.option(
    "--broker-port", default=4222, show_default=True, type=click.IntRange(0, 65535), metavar="PORT",
    help="Of 127.0.0.1, for the broker; 0: a free one.",
)  # fmt: skip
@click.option("--stream-mib", default=1024, show_default=True, metavar="MIB", help="Most that the broker holds.")
@click.option("--rules", "packs", multiple=True, metavar="PATH", help="Rule pack: a file, a directory, or a built-in name.")
@click.option("--config", metavar="FILE", help="Configuration of the join: judging, notify and control sections.")
@listening_options("127.0.0.1:9464")
@click.option("--json", "as_json", is_flag=True, help="Print where all of it is as one JSON object.")
def up(
    directory: str, nodes: int, workers: int, broker_port: int, stream_mib: int, packs: tuple[str, ...], config: str | None,
    listening: Listening, as_json: bool,
) -> int:  # fmt: skip
    """Start a broker, a shipper for each of N nodes and the join with its page on this machine, and keep them running.

    Everything lies in DIR (default: ./sentinel_fleet), which a later start goes on with: node-K/ is where the trainers of
    node K write, worker-K/ what worker K copies, joined/ what was found, credentials/ who may speak to the broker, logs/
    what each process says. The broker is a nats-server (apt install nats-server) at 127.0.0.1, with TLS and a user for each
    node that may publish as that node alone.

    Ctrl-C or SIGTERM ends all once the join holds and has judged what the spools hold (exit code 0), or could not in time
    (1); a second one ends all at once (130).
    """
    # Says who reads without a token, and refuses what cannot be, before anything is started.
    are_reads_open = listening.config().are_reads_open
    join_arguments = [*listening.arguments, "--stream-mib", str(stream_mib)]
    rules = [word for pack in packs for word in ("--rules", pack)]
    join_arguments += rules + (["--config", config] if config else [])
    pages = [msgspec.structs.replace(listening, listen=f"127.0.0.1:{free_port()}") for _ in range(workers)]
    fleet = FleetProcesses(
        Path(directory).absolute(), nodes, broker_port=broker_port, join_arguments=join_arguments, say=to_stderr,
        worker_arguments=[["--stream-mib", str(stream_mib), *rules, *one.arguments] for one in pages],
    )  # fmt: skip
    scheme = "https" if listening.tls_cert else "http"
    urls = {f"worker-{number}": f"{scheme}://{one.listen}" for number, one in enumerate(pages, 1)}
    num_signals = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1

    with handled((signal.SIGTERM, signal.SIGINT), stop):
        fleet.start(lambda: num_signals > 0)
        if not num_signals:
            click.echo(json.dumps(_places(fleet, urls)) if as_json else "\n".join(_lines(fleet, urls, are_reads_open)))
        while not num_signals:
            fleet.watch()
            time.sleep(LOOK_S)
        to_stderr("ending: shippers, workers, the join, then the broker; once more ends all at once")
        is_complete = fleet.finish(lambda: num_signals > 1)
    return INTERRUPTED if num_signals > 1 else CLEAN if is_complete else FOUND


def _places(fleet: FleetProcesses, workers: dict[str, str]) -> dict[str, object]:
    return {
        "page": fleet.url,
        "joined": str(fleet.joined),
        "nodes": {node: {"SENTINEL_DIR": str(path)} for node, path in fleet.nodes.items()},
        "workers": workers,
        "server": fleet.status_access.server,
        "credentials": str(fleet.credentials),
        "status": _status_command(fleet),
    }


def _lines(fleet: FleetProcesses, workers: dict[str, str], are_reads_open: bool) -> list[str]:
    nodes = list(fleet.nodes.items())
    key = "" if are_reads_open else "; its token: .daemon/tokens.json there"
    shown = nodes if len(nodes) <= 4 else [nodes[0], nodes[-1]]
    return [
        f"page         {fleet.url}  (runs in {fleet.joined}{key})",
        "trainers     the ranks of a node get its directory, and all ranks one name of the run:",
        *(f"  {node:<10} SENTINEL_DIR={shlex.quote(str(path))} SENTINEL_RUN=NAME" for node, path in shown),
        *(
            f"{name:<12} {url}  (/metrics, /healthz{'' if are_reads_open else f'; its token: {name}/tokens.json'})"
            for name, url in workers.items()
        ),
        f"credentials  {fleet.credentials}  (ca.pem, and a login of each node, of join, worker and status)",
        f"next         {_status_command(fleet)}",
    ]


def _status_command(fleet: FleetProcesses) -> str:
    access = fleet.status_access
    return shlex.join(
        ["sentinel", "fleet", "status", "--server", access.server, "--tls-ca", access.ca_file, "--login", access.login_file]
    )
