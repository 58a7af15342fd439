"""`sentinel enable`, `disable` and `dump`: order monitoring, or raw tensors, in a run that trains; no daemon needed."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from sentinel.bounds import MAX_RANKS, MAX_STEP
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.places import find_run
from sentinel.cli.progress import RunProgress, progress_of
from sentinel.command import (
    ALARM_KINDS,
    DescribeStructure,
    DisableMonitoring,
    DumpTensors,
    EnableMonitoring,
    RequestAction,
    TraceTensors,
)
from sentinel.control.commands import RunCommands
from sentinel.control.edits import PERSON_LATENCY_S
from sentinel.control.policy import first_step
from sentinel.errors import ConfigError
from sentinel.monitor_config import MEASURED_LABELS
from sentinel.rank_list import ranks_in
from sentinel.record import KIND_LABELS

_KINDS = click.option("--kinds", metavar="KIND,...", help=f"What is meant, among {', '.join(KIND_LABELS)}.")
_RUN = click.option("-d", "--dir", "run", metavar="RUN", help="The run: its directory or name. Default: the newest one.")
_TARGETS = click.option(
    "--targets", metavar="GLOB,...", help="Names of modules, `layers.3` or `layers.*.mlp`. Default: all modules."
)
_AT_STEP = click.option(
    "--at-step", default="auto", show_default=True, metavar="N|auto",
    help="First step that is meant, as the trainer counts. auto: the first that every rank can still obey.",
)  # fmt: skip
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the command as one JSON object.")


@click.command()
@_RUN
@_KINDS
@_TARGETS
@_AT_STEP
@click.option("--for-steps", type=click.IntRange(0), default=20, show_default=True, metavar="N",
              help="Steps until the trainer switches it off by itself; 0: never, until told.")  # fmt: skip
@click.option("--per-micro-step", is_flag=True, help="One row per micro-step instead of one folded row a step.")
@_JSON
def enable(
    run: str | None,
    kinds: str | None,
    targets: str | None,
    at_step: str,
    for_steps: int,
    per_micro_step: bool,
    as_json: bool,
) -> int:
    """Switch monitoring on in a run that trains.

    Default: outputs, inputs and both their gradients of every module, for 20 steps. The ranks answer in their spools;
    a daemon that serves the run withdraws the command when not every rank could obey. Exit 1 when nobody listens.
    """
    run_dir, now = find_run(run), time.time()
    wanted = parse_kinds(kinds) or ALARM_KINDS
    progress = progress_of(run_dir, now)
    command = commands_of(run_dir, progress).enable(
        at_step=parse_step(run_dir, at_step, progress),
        kinds=wanted,
        targets=split(targets),
        per_micro_step=per_micro_step,
        for_steps=for_steps or None,
        reason="asked for at the command line",
        now=now,
    )
    show(run_dir, command, as_json)
    return warn_if_unresponsive(run_dir, progress)


@click.command()
@_RUN
@_KINDS
@_TARGETS
@_AT_STEP
@_JSON
def disable(run: str | None, kinds: str | None, targets: str | None, at_step: str, as_json: bool) -> int:
    """Switch off what was enabled in a run that trains. Default: all of it, as soon as every rank can.

    Exit 1 when nobody listens.
    """
    run_dir, now = find_run(run), time.time()
    progress = progress_of(run_dir, now)
    command = commands_of(run_dir, progress).disable(
        at_step=parse_step(run_dir, at_step, progress),
        kinds=parse_kinds(kinds),
        targets=split(targets),
        reason="asked for at the command line",
        now=now,
    )
    show(run_dir, command, as_json)
    return warn_if_unresponsive(run_dir, progress)


@click.command()
@click.argument("run", required=False)
@click.option("-d", "--dir", "directory", metavar="RUN", help="The same.")
@click.option("--kinds", default="wgrad", show_default=True, metavar="KIND,...",
              help=f"What is dumped, among {', '.join(MEASURED_LABELS)}.")  # fmt: skip
@click.option("--targets", metavar="GLOB,...", help="Names of modules or parameters, `layers.3`. Default: all.")
@_AT_STEP
@click.option("--for-steps", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Steps it stands.")
@click.option("--step-interval", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Dump every so many of them.")  # fmt: skip
@click.option("--first", "first_n", type=click.IntRange(0), default=0, show_default=True, metavar="N",
              help="Only the first N elements of each dimension of what a rank holds; 0: all.")  # fmt: skip
@click.option(
    "--ranks", metavar="R,...", help="Ranks that are meant, `0,8-15`. Default: all; shards of others are then missing."
)
@_JSON
def dump(
    run: str | None,
    directory: str | None,
    kinds: str,
    targets: str | None,
    at_step: str,
    for_steps: int,
    step_interval: int,
    first_n: int,
    ranks: str | None,
    as_json: bool,
) -> int:
    """Have each rank of RUN (default: the newest) write raw tensors into RUN/dumps, as safetensors with their placement.

    Obeyed only where the trainer's own config names DumpTensors in `allow_commands`, within its `dump.quota_bytes`. Join
    them with `sentinel export RUN --format tensors`. Exit 1 when nobody listens.
    """
    run_dir, now = find_run(run or directory), time.time()
    progress = progress_of(run_dir, now)
    command = commands_of(run_dir, progress).dump_tensors(
        at_step=parse_step(run_dir, at_step, progress),
        kinds=parse_measured(kinds),
        targets=split(targets),
        for_steps=for_steps,
        step_interval=step_interval,
        first_n=first_n or None,
        ranks=parse_ranks(ranks),
        reason="asked for at the command line",
        now=now,
    )
    show(run_dir, command, as_json)
    return warn_if_unresponsive(run_dir, progress)


def commands_of(run_dir: Path, progress: RunProgress) -> RunCommands:
    """Return the commands of a run, for the attempt that trains now; for any later one where no rank reads commands."""
    commands = RunCommands(run_dir)
    if not progress.why_unresponsive:
        commands.attempt = progress.attempt
    return commands


def warn_if_unresponsive(run_dir: Path, progress: RunProgress) -> int:
    """Write to stderr that no rank reads the command, if that is so; return the exit code."""
    if not progress.why_unresponsive:
        return CLEAN
    why = progress.why_unresponsive
    to_stderr(f"nobody listens: {why} in {run_dir}; a trainer that goes on with this run will find the command")
    return FOUND


def show(
    run_dir: Path,
    command: EnableMonitoring | DisableMonitoring | DumpTensors | TraceTensors | DescribeStructure | RequestAction,
    as_json: bool,
) -> None:
    """Print the command that was written, for people or as JSON."""
    path = run_dir / "control" / f"{command.seq:06d}.json"
    if as_json:
        click.echo(msgspec.json.encode(command).decode())
    else:
        click.echo(f"{command.id} from step {command.at_step}: {path}")


def split(text: str | None) -> tuple[str, ...]:
    """Return the words of a comma-separated list; None: no words."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def parse_kinds(text: str | None) -> tuple[str, ...]:
    """Return the kinds of a comma-separated list; ConfigError names a word that is no kind."""
    kinds = split(text)
    for kind in kinds:
        if kind not in KIND_LABELS:
            raise ConfigError(f'--kinds: unknown kind "{kind}"; known: {", ".join(KIND_LABELS)}')
    return kinds


def parse_measured(text: str) -> tuple[str, ...]:
    """Return the kinds of a list that a trainer can measure; ConfigError names a word that is none."""
    kinds = split(text)
    for kind in kinds:
        if kind not in MEASURED_LABELS:
            raise ConfigError(f'--kinds: unknown kind "{kind}"; known: {", ".join(MEASURED_LABELS)}')
    if not kinds:
        raise ConfigError(f"--kinds: expected some of {', '.join(MEASURED_LABELS)}, got none")
    return kinds


def parse_ranks(text: str | None) -> tuple[int, ...]:
    """Return the ranks that `--ranks` names, in order; none where nobody gave it. ConfigError as of `ranks_in`."""
    return ranks_in(text or "", "--ranks", MAX_RANKS)


def parse_step(run_dir: Path, text: str, progress: RunProgress) -> int:
    """Return the step that `--at-step` names: a number, or `auto`, the first at which every rank can obey.

    ConfigError for another word, and for `auto` where no spool has a step.
    """
    newest = progress.newest_step
    if text == "auto":
        if newest is None:
            raise ConfigError(f"{run_dir}: expected ranks that train, found no step in any spool; give --at-step N")
        return first_step(newest, progress.step_time_s, PERSON_LATENCY_S)
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(MAX_STEP)) or int(text) > MAX_STEP:
        raise ConfigError(f'--at-step: expected a number in [0, {MAX_STEP}] or auto, got "{text[:40]}"')
    if newest is not None and int(text) <= newest and not progress.why_unresponsive:
        to_stderr(f"step {text} is over or begun (newest known: {newest}); ranks will answer that they missed it")
    return int(text)
