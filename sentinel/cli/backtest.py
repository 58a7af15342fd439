"""`sentinel rules backtest`: what a pack would have said of recorded logs and runs."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from sentinel.cli.backtest_tables import show_alarms, show_difference, spelt
from sentinel.cli.code import allow_code_option
from sentinel.cli.log_columns import column_options, header_names, named_columns
from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, to_stderr
from sentinel.cli.outputs import no_stdout

if TYPE_CHECKING:
    from sentinel.judge.backtest import BacktestOutcome, BacktestSubject
    from sentinel.rules.language.schema import Pack

SEVERITIES = ("info", "warning", "critical")


@click.command()
@click.argument("subjects", nargs=-1, required=True, metavar="LOG|RUN...")
@click.option("--rules", "packs", multiple=True, metavar="PATH", help="Rules over the built-in default pack, as for serve.")
@click.option(
    "--against", multiple=True, metavar="PATH",
    help='Compare with these rules, merged over the default pack too; "default" is that pack alone.',
)  # fmt: skip
@click.option(
    "--reference", multiple=True, metavar="LOG|RUN",
    help="A reference run on the same data: scalar rules then judge what is left when the runs' median is taken out.",
)  # fmt: skip
@click.option(
    "--min-severity", type=click.Choice(SEVERITIES), default="warning", show_default=True,
    help="Least severity of the alarms that are shown, counted and compared; info is recorded, and nobody is notified.",
)  # fmt: skip
@column_options
@click.option(
    "-o", "--output", metavar="DIR", callback=no_stdout, help="Write anomalies/ and incidents.jsonl of each to DIR/NAME."
)
@click.option("--recompute", is_flag=True, help="Runs: decide anew which rows make a step, not as the journal says.")
@click.option("--state-dir", metavar="DIR", help="Where a run's journal is, if the run does not say so itself.")
@click.option("--config", metavar="FILE", help="Configuration of the daemon: its judging section counts.")
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, help="Processes. Default 0: one a core.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar. There is none either where stderr is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object an alarm; with --against, one object.")
@allow_code_option()
def backtest(
    subjects: tuple[str, ...],
    packs: tuple[str, ...],
    against: tuple[str, ...],
    reference: tuple[str, ...],
    min_severity: str,
    columns: tuple[str, ...],
    header: str | None,
    output: str | None,
    recompute: bool,
    state_dir: str | None,
    config: str | None,
    jobs: int,
    quiet: bool,
    as_json: bool,
) -> int:
    """Say what the rules would have said of LOGs and RUNs, row by row, with nothing known of the rows that follow.

    A LOG is CSV, JSON lines, Hugging Face's trainer_state.json, TensorBoard events (a file or a directory), an offline run
    of W&B (run-*.wandb or its directory), Neptune's Parquet, or what a trainer printed; gzipped or not; - is stdin. A RUN is
    a recorded run's directory or name. Of a directory all logs, or all runs, in it are taken.

    Exit codes: 0 no alarm, 1 alarms (with --against: the two packs differ), 2 something could not be read, or a detector
    of your own failed.
    """
    from sentinel.cli.backtest_jobs import judged
    from sentinel.daemon.config import load_config
    from sentinel.errors import SentinelError
    from sentinel.judge.backtest import Settings, read_reference_run

    with tempfile.TemporaryDirectory(prefix="sentinel-backtest-") as scratch:
        found = find_subjects(subjects, state_dir, Path(scratch))
        sides = [_pack(packs)] + ([_pack(_named(against))] if against else [])
        references = tuple(dict.fromkeys(str(path) for one in reference for path, _ in _subjects_at(one)))
        try:
            for path in references:
                read_reference_run(path)
        except SentinelError as error:
            raise click.UsageError(f"--reference: {error}") from error
        settings = [
            Settings(
                pack=pack,
                judging=load_config(Path(config) if config else None).judging,
                columns=named_columns(columns),
                header=header_names(header),
                recompute=recompute,
                reference=references,
                output=output or "" if at == 0 else "",
            )
            for at, pack in enumerate(sides)
        ]
        results = judged(found, settings, jobs or os.cpu_count() or 1, is_quiet=quiet)
        least = SEVERITIES.index(min_severity)
        if against:
            return show_difference(list(results), sides, least, as_json)
        return _print_result(results, least, as_json)


def _print_result(results: Iterator[list[BacktestOutcome | str]], least: int, as_json: bool) -> int:
    """Print alarms as they come, in the order of the subjects; return the exit code."""
    outcomes: list[BacktestOutcome] = []
    num_failed = num_alarms = 0
    for (outcome,) in results:
        if isinstance(outcome, str):
            to_stderr(outcome)
            num_failed += 1
            continue
        outcomes.append(outcome)
        for note in (*outcome.notes, *outcome.failures):
            to_stderr(f"{outcome.name}: {note}")
        reported = [alarm for alarm in outcome.alarms if alarm.severity.level >= least]
        num_alarms += len(reported)
        if as_json:
            for alarm in reported:
                click.echo(msgspec.json.encode(alarm).decode())
    if not as_json:
        show_alarms([(one, alarm) for one in outcomes for alarm in one.alarms if alarm.severity.level >= least])
    _sum_up(outcomes, least, num_failed)
    is_whole = not num_failed and not any(outcome.failures for outcome in outcomes)
    return FOUND if num_alarms and is_whole else CLEAN if is_whole else BAD_USAGE


def _sum_up(outcomes: Sequence[BacktestOutcome], least: int, num_failed: int) -> None:
    alarms = [(one.name, alarm) for one in outcomes for alarm in one.alarms]
    reported = [(name, alarm) for name, alarm in alarms if alarm.severity.level >= least]
    num_rows = sum(one.num_rows for one in outcomes)
    incidents = {(name, alarm.incident) for name, alarm in reported}
    rules = Counter(alarm.rule for _, alarm in reported)
    of_rules = ", ".join(f"{rule} {count}" for rule, count in sorted(rules.items(), key=lambda one: (-one[1], one[0])))
    text = f"{_count(len(outcomes), 'subject')}, {_count(num_rows, 'row')} judged: {_count(len(reported), 'alarm')}"
    if reported:
        text += f" in {_count(len(incidents), 'incident')} of {len({name for name, _ in reported})} ({of_rules})"
    if len(reported) < len(alarms):
        text += f"; {len(alarms) - len(reported)} of less than {SEVERITIES[least]} are not shown (--min-severity)"
    to_stderr(text + (f"; {num_failed} could not be judged" if num_failed else ""))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# -- what is judged ----------------------------------------------------------------------------------------------------


def find_subjects(given: Sequence[str], state_dir: str | None, scratch: Path) -> list[BacktestSubject]:
    """Return the logs and runs that the arguments name, each once, in their order. ConfigError for what is neither.

    scratch: a directory into which stdin is copied.
    """
    from sentinel.judge.backtest import BacktestSubject

    found: dict[str, bool] = {}
    for one in given:
        if one == "-":
            path = scratch / "stdin"
            with path.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            found[str(path)] = False
            continue
        if not one:
            raise click.UsageError(
                "expected a log or a recorded run, got an empty name; is a variable of the shell not set?"
            )
        if Path(one).is_fifo():
            # A pipe, as `<(zstdcat a.log.zst)` makes, is read once; logs are looked at twice.
            path = scratch / Path(one).name
            with Path(one).open("rb") as source, path.open("wb") as file:
                shutil.copyfileobj(source, file)
            found[str(path)] = False
            continue
        for path, is_run in _subjects_at(one):
            found.setdefault(str(path), is_run)
    names = _names([Path(path) for path in found])
    return [
        BacktestSubject(
            name=name,
            path=path,
            is_run=is_run,
            state_dir=state_dir or "" if is_run else "",
            run=spelt(Path(path).absolute().name),
        )
        for (path, is_run), name in zip(found.items(), names, strict=True)
    ]  # fmt: skip


def _subjects_at(given: str) -> list[tuple[Path, bool]]:
    from sentinel.cli.places import find_run
    from sentinel.errors import ConfigError
    from sentinel.logs.log_file import find_logs

    path = Path(given)
    if not path.exists():
        try:
            return [(find_run(given), True)]
        except ConfigError as error:
            raise click.UsageError(f'"{given}": expected a log or a recorded run, found none there') from error
    if (path / "spool").is_dir():
        return [(path, True)]
    if not path.is_dir():
        return [(path, False)]
    runs = sorted(one for one in path.iterdir() if not one.name.startswith(".") and (one / "spool").is_dir())
    if runs:
        return [(one, True) for one in runs]
    logs = find_logs(path)
    if not logs:
        raise click.UsageError(f'"{given}": expected logs or recorded runs in this directory, found none')
    return [(one, False) for one in logs]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return what to call each: its last part where no other has it, else its path."""
    last = [path.absolute().name for path in paths]
    times = Counter(last)
    return [spelt(name if times[name] == 1 else str(path)) for name, path in zip(last, paths, strict=True)]


def _named(against: Sequence[str]) -> tuple[str, ...]:
    # The default pack lies below all others: alone it is the one that no other is merged over.
    return tuple(one for one in against if one != "default")


def _pack(paths: Sequence[str]) -> Pack:
    from sentinel.judge.packs import RulePacks

    return RulePacks(paths).load()
