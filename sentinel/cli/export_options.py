"""Parsers of the options of `sentinel export`: steps, times, lists of words."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import click


def steps_of(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int]:
    """Return the first and last step that `A:B`, `A:`, `:B` or `A` names."""
    if value is None:
        return 0, 2**62
    first, colon, last = (word.strip() for word in value.partition(":"))
    words = [word for word in (first, last) if word]
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise click.BadParameter(f'expected steps like 100:200, 100:, :200 or 100, got "{value}"', ctx, param)
    low, high = int(first or 0), int(last) if last else 2**62 if colon else int(first)
    if high < low:
        raise click.BadParameter(f'expected the first step before the last, got "{value}"', ctx, param)
    return low, high


def words_of(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return the words of a comma-separated list; None: the option was not given."""
    return None if value is None else tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))


def moment_of(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return the seconds since the epoch that an ISO time or a number of seconds names; without a zone it is UTC."""
    if value is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII):
        return float(value)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f'expected a time like 2026-11-21T14:00:00+08:00, or seconds since 1970, got "{value}"', ctx, param
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
