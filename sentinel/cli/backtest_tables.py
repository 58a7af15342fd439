"""Tables of a back-test: alarms, and two packs side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, to_stderr
from sentinel.cli.text_table import show_table

if TYPE_CHECKING:
    from sentinel.judge.backtest import Alarm, BacktestOutcome, RuleDifference
    from sentinel.rules.language.schema import Pack

ALARM_COLUMNS = ("file", "row", "step", "channel", "value", "usual", "score", "rule", "diagnosis", "severity")
MAX_LISTED = 10
"""Most new alarms, and most lost ones, that are listed, so that both fit a screen; --json has all."""


def show_alarms(alarms: Sequence[tuple[BacktestOutcome, Alarm]]) -> None:
    """Print alarms as a table: aligned text into a pipe, with colours on a terminal.

    The diagnosis is the incident's last one: at the onset of a spike its course is not known yet.
    """
    if alarms:
        rows = [_alarm_cells(alarm, outcome.last_suspected(alarm)) for outcome, alarm in alarms]
        show_table(ALARM_COLUMNS, rows, right=(1, 2, 4, 5, 6))


def _alarm_cells(alarm: Alarm, suspected: str) -> tuple[str, ...]:
    channel = alarm.channel if alarm.kind == "scalar" else f"{alarm.kind} {alarm.channel} {alarm.statistic}"
    where = f"{alarm.step}" if alarm.attempt == 0 else f"{alarm.step}, attempt {alarm.attempt}"
    channel += f" rank {alarm.rank}" if alarm.rank is not None and alarm.kind != "scalar" else ""
    numbers = (alarm.value_text or _number(alarm.value), _number(alarm.baseline), _number(alarm.score))
    return (alarm.file, str(alarm.i), where, channel, *numbers, alarm.rule, suspected, alarm.severity.value)


def spelt(name: str) -> str:
    """Return a file's name with bytes that are not UTF-8 escaped, for JSON cannot hold them."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# -- two packs ---------------------------------------------------------------------------------------------------------


def show_difference(
    results: Sequence[Sequence[BacktestOutcome | str]], packs: Sequence[Pack], least: int, as_json: bool
) -> int:
    """Print how the alarms of two packs on the same subjects differ, by rule and by subject; return the exit code.

    least: level of the least severity that counts.
    """
    from sentinel.judge.backtest import compare, new_alarms

    failed = [one for pair in results for one in pair if isinstance(one, str)]
    for problem in dict.fromkeys(failed):
        to_stderr(problem)
    pairs = [(new, old) for new, old in results if not isinstance(new, str) and not isinstance(old, str)]
    news = [[alarm for alarm in new.alarms if alarm.severity.level >= least] for new, _ in pairs]
    olds = [[alarm for alarm in old.alarms if alarm.severity.level >= least] for _, old in pairs]
    rules = list(dict.fromkeys(rule.name for pack in packs for rule in pack.rules))
    total = compare([alarm for one in news for alarm in one], [alarm for one in olds for alarm in one], rules)
    beside = list(zip(pairs, news, olds, strict=True))
    gained = [(side, alarm) for (side, _), new, old in beside for alarm in new_alarms(new, old)]
    lost = [(side, alarm) for (_, side), new, old in beside for alarm in new_alarms(old, new)]
    by_subject = [(side, compare(new, old, ())[-1]) for (side, _), new, old in beside]
    if as_json:
        bare = [[alarm for _, alarm in alarms] for alarms in (gained, lost)]
        click.echo(msgspec.json.encode(_as_data(packs, total, by_subject, *bare)).decode())
    else:
        show_table(
            ("rule", "onsets", "was", "pages", "was", "incidents", "was", "first row", "was", "new", "lost"),
            [_difference_cells(one) for one in total if any(one.onsets) or one.rule == "all"],
            right=range(1, 11),
        )
        click.echo("")
        show_table(
            ("file", "rows", "onsets", "was", "pages", "was", "incidents", "was", "first row", "was", "new", "lost"),
            [(side.name, str(side.num_rows), *_difference_cells(one)[1:]) for side, one in by_subject],
            right=range(1, 12),
        )
        for what, alarms in (("only these rules", gained), ("only those it is held against", lost)):
            if alarms:
                click.echo(f"\n{what}:")
                show_alarms(alarms[:MAX_LISTED])
                if len(alarms) > MAX_LISTED:
                    click.echo(f"and {len(alarms) - MAX_LISTED} more")
    hashes = " against ".join(f"{pack.pack_hash} ({len(pack.rules)} rules)" for pack in packs)
    num_rows = sum(side.num_rows for side, _ in by_subject)
    subjects = f"{len(pairs)} subject{'' if len(pairs) == 1 else 's'}"
    to_stderr(f"{subjects}, {num_rows} rows judged twice: pack {hashes}: {len(gained)} new, {len(lost)} lost alarms")
    return BAD_USAGE if failed else FOUND if gained or lost else CLEAN


def _difference_cells(one: RuleDifference) -> tuple[str, ...]:
    numbers = [str(count) for pair in (one.onsets, one.pages, one.incidents) for count in pair]
    first = ["" if row is None else str(row) for row in one.first]
    return (one.rule, *numbers, *first, str(one.num_new), str(one.num_lost))


def _as_data(
    packs: Sequence[Pack],
    total: Sequence[RuleDifference],
    by_subject: Sequence[tuple[BacktestOutcome, RuleDifference]],
    gained: Sequence[Alarm],
    lost: Sequence[Alarm],
) -> dict[str, Any]:
    return {
        "packs": [pack.pack_hash for pack in packs],
        "rules": list(total),
        "files": [
            {
                "file": side.name,
                "path": spelt(side.path),
                "num_rows": side.num_rows,
                **msgspec.to_builtins(one),
            }
            for side, one in by_subject
        ],
        "new": list(gained),
        "lost": list(lost),
    }
