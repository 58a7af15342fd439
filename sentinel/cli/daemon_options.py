"""How a daemon judges, tells, listens and ends: the options that `serve` and `join` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sentinel.cli.code import allow_code_option
from sentinel.cli.listening import listening_options
from sentinel.cli.log_lines import FORMATS, LEVELS

Command = Callable[..., Any]


def daemon_options(command: Command) -> Command:
    """Add them to a command, which gets each under its own name, those of `Listening` as `listening`."""
    options: list[Callable[[Command], Command]] = [
        click.option(
            "--state-dir", metavar="DIR", help="Journal, tokens and address: a local disk. Default: DIRECTORY/.daemon."
        ),
        click.option(
            "--rules", "packs", multiple=True, metavar="PATH", help="Rule pack: a file, a directory, or a built-in name."
        ),
        allow_code_option(),
        click.option("--config", metavar="FILE", help="Configuration: judging, notify and control sections."),
        listening_options("127.0.0.1:9464"),
        click.option("--no-http", is_flag=True, help="Listen nowhere."),
        click.option(
            "--late-after",
            type=int,
            metavar="STEPS",
            help="A rank this many steps behind the newest is late: its step closes without it. "
            "0 leaves only the time limit. Default: 2.",
        ),
        click.option(
            "--late-after-s",
            type=float,
            metavar="SECONDS",
            help="A rank that keeps the others waiting for so long is late. 0: none. Default: 30.",
        ),
        click.option(
            "--drain-s", default=10.0, show_default=True, metavar="SECONDS", help="Longest time to end in after SIGTERM."
        ),
        click.option("--dry-run-notifications", is_flag=True, help="Decide and log what would be sent; send nothing."),
        click.option("--log-format", type=click.Choice(FORMATS), default="console", show_default=True, help="Of the log."),
        click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Of the log."),
    ]
    for option in reversed(options):
        command = option(command)
    return command
