"""`sentinel request`: ask the trainer for what only it can do on all ranks alike; no daemon needed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from sentinel.cli.control import commands_of, parse_step, show, warn_if_unresponsive
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.places import find_run
from sentinel.cli.progress import progress_of
from sentinel.cli.time_lengths import parse_duration
from sentinel.command import RequestAction, WithdrawCommand
from sentinel.errors import ConfigError

if TYPE_CHECKING:
    from sentinel.command import TrainerAction

_RUN = click.option("-d", "--dir", "run", metavar="RUN", help="The run: its directory or name. Default: the newest one.")
_AT_STEP = click.option(
    "--at-step", default="auto", show_default=True, metavar="N|auto",
    help="First step before which it is handed out. auto: the first at which every rank can have it.",
)  # fmt: skip
_WHY = click.option("--why", default="asked for at the command line", metavar="TEXT", help="Why; the trainer is told.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the command as one JSON object.")


@click.group()
def request() -> None:
    """Ask a trainer for a checkpoint, to skip batches, or to pause.

    It reaches trainers that call `monitor.requests()` between their steps (docs/commands.md); every other one refuses.
    """


@request.command()
@_RUN
@_AT_STEP
@_WHY
@_JSON
def checkpoint(run: str | None, at_step: str, why: str, as_json: bool) -> int:
    """Have the trainer save a checkpoint now."""
    return _ask(run, "checkpoint", at_step, why, as_json)


@request.command()
@click.argument("batches", type=click.IntRange(1))
@_RUN
@_AT_STEP
@_WHY
@_JSON
def skip(batches: int, run: str | None, at_step: str, why: str, as_json: bool) -> int:
    """Have the trainer pass over the batches of the next BATCHES steps."""
    return _ask(run, "skip_batches", at_step, why, as_json, num_batches=batches)


@request.command()
@_RUN
@click.option("--for", "duration", default="1h", show_default=True, metavar="TIME", help="When it is over: 90s, 10min, 2h.")
@_AT_STEP
@_WHY
@_JSON
def pause(run: str | None, duration: str, at_step: str, why: str, as_json: bool) -> int:
    """Have the trainer wait before its next step, until `sentinel request resume` or for a while."""
    return _ask(run, "pause", at_step, why, as_json, for_s=_seconds(duration))


@request.command()
@_RUN
@_WHY
def resume(run: str | None, why: str) -> int:
    """End every pause that was asked for. Exit 1 when there was none."""
    run_dir, now = find_run(run), time.time()
    commands = commands_of(run_dir, progress_of(run_dir, now))
    commands.scan(now)
    known = [status.command for status in commands.known.statuses()]
    withdrawn = {one.withdraws for one in known if isinstance(one, WithdrawCommand)}
    pauses = [one for one in known if isinstance(one, RequestAction) and one.action == "pause" and one.id not in withdrawn]
    for one in pauses:
        commands.withdraw(one.id, now=now, reason=why, source="cli")
        click.echo(f"{one.id}: over")
    if not pauses:
        to_stderr(f"{run_dir}: no pause was asked for")
    return CLEAN if pauses else FOUND


def _ask(
    run: str | None, action: TrainerAction, at_step: str, why: str, as_json: bool, num_batches: int = 0, for_s: float = 0.0
) -> int:
    run_dir, now = find_run(run), time.time()
    progress = progress_of(run_dir, now)
    command = commands_of(run_dir, progress).request(
        action, at_step=parse_step(run_dir, at_step, progress), now=now, num_batches=num_batches, for_s=for_s, reason=why
    )
    show(run_dir, command, as_json)
    return warn_if_unresponsive(run_dir, progress)


def _seconds(text: str) -> float:
    """Return the seconds of `90s`, `10min`, `2h`; ConfigError for anything else."""
    seconds = parse_duration(text, "--for")
    if seconds is None:
        raise ConfigError(f'--for: expected a time above 0 like 90s, 10min, 2h, got "{text[:40]}"')
    return seconds
