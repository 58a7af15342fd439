"""What a log calls its channels, as the verbs that read logs are told: --column and --header."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def column_options(command: _Command) -> _Command:
    """Give a command --column and --header: its arguments `columns` and `header`."""
    header = "Names of the columns of a table that has no header: step,loss,grad_norm."
    command = click.option("--header", metavar="NAMES", help=header)(command)
    what = "What logs call loss, grad_norm, lr."
    return click.option("--column", "columns", multiple=True, metavar="CHANNEL=NAME", help=what)(command)


def named_columns(given: Sequence[str]) -> dict[str, str]:
    """Return channel -> what the log calls it; UsageError for what is no CHANNEL=NAME."""
    found = {}
    for one in given:
        channel, equals, name = one.partition("=")
        if not (equals and channel and name):
            raise click.UsageError(f'--column: expected CHANNEL=NAME, such as loss=train/objective, got "{one}"')
        found[channel] = name
    return found


def header_names(given: str | None) -> tuple[str, ...]:
    """Return the names of --header; none where it is not given."""
    return tuple(name.strip() for name in given.split(",")) if given else ()
