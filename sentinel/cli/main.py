"""`sentinel VERB`: finds the verb, loads only what it needs, and turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any, NoReturn

import click

from sentinel.errors import ConfigError, RuleError, SentinelError
from sentinel.printable import PrintableLines, printable_lines
from sentinel.version import VERSION

CLEAN, FOUND, BAD_USAGE, LINT_ONLY = 0, 1, 2, 3
"""Exit codes: nothing found, anomalies or errors found, bad usage of the command, only lint found."""

VERBS: dict[str, tuple[str, str]] = {
    "run": ("sentinel.cli.run:run", "Run a training command with a daemon beside it."),
    "serve": ("sentinel.cli.serve:serve", "Judge a run, or a directory of runs, as it is written."),
    "ship": ("sentinel.cli.ship:ship", "Publish the spools of this machine to a fleet's broker."),
    "node": ("sentinel.cli.node:node", "Publish what this machine's ranks come to, and its spools without their rows."),
    "worker": ("sentinel.cli.worker:worker", "Do for machines that only ship what `node` would do on them."),
    "join": ("sentinel.cli.join:join", "Judge the runs of all nodes that ship to a broker."),
    "fleet": ("sentinel.cli.fleet:fleet", "Start a fleet on one machine; make its users; say where its nodes stand."),
    "status": ("sentinel.cli.status:status", "Say where each run stands."),
    "watch": ("sentinel.cli.live_view:watch", "Show a run while it trains, in a terminal."),
    "topk": ("sentinel.cli.topk:topk", "Name the anomalies that came first."),
    "explain": ("sentinel.cli.explain:explain", "Tell the story of an incident."),
    "report": ("sentinel.cli.report:report", "Write the post-mortem of a run or of an incident."),
    "replay": ("sentinel.cli.replay:replay", "Judge a recorded run again."),
    "repair": ("sentinel.cli.repair:repair", "Rebuild a run's journal from its spool and files."),
    "export": ("sentinel.cli.export:export", "Write what a run recorded as a table, or as other tools read it."),
    "sql": ("sentinel.cli.sql:sql", "Ask questions in SQL over the history of runs."),
    "history": ("sentinel.cli.history:history", "Put the history of runs into an object store."),
    "open": ("sentinel.cli.open:open_", "Read a run directory that somebody else made, without trusting it."),
    "import": ("sentinel.cli.import_verbs:import_", "Read what another tool logged or recorded, or its configuration."),
    "rules": ("sentinel.cli.rules:rules", "Check, test, back-test and list rules."),
    "check-config": ("sentinel.cli.check_config:check_config", "Check configuration files."),
    "ack": ("sentinel.cli.act:ack", "Acknowledge an incident: somebody works on it."),
    "resolve": ("sentinel.cli.act:resolve", "Close an incident."),
    "reopen": ("sentinel.cli.act:reopen", "Open an incident again."),
    "silence": ("sentinel.cli.silence:silence", "Silence what you know of for a while."),
    "enable": ("sentinel.cli.control:enable", "Switch monitoring on in a run that trains."),
    "disable": ("sentinel.cli.control:disable", "Switch monitoring off again."),
    "dump": ("sentinel.cli.control:dump", "Have a run that trains write raw tensors."),
    "trace": ("sentinel.cli.tracing:trace", "Have a run that trains make small pictures of its tensors, live."),
    "request": ("sentinel.cli.ask_trainer:request", "Ask a trainer for a checkpoint, to skip batches, or to pause."),
    "struct": ("sentinel.cli.struct:struct", "Show a model's structure as its ranks see it."),
    "notify": ("sentinel.cli.notify:notify", "Try out notifications."),
    "doctor": ("sentinel.cli.doctor:doctor", "Say what this machine offers and what is missing."),
    "demo": ("sentinel.cli.demo:demo", "Train a small model, plant a fault, and find it."),
}
"""Verb -> (module:command, one line of help). The module is imported when the verb is used."""


class Verbs(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a verb, imported now; None: there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs without importing any of them."""
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; the nearest verbs are named when there is none."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], VERBS, 1)
            hint = f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(VERBS)}"
            raise click.UsageError(f'unknown verb "{args[0]}"{hint}', ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="sentinel", message="%(prog)s %(version)s")
def sentinel() -> None:
    """Watch training runs: which layer on which rank went bad first.

    Data goes to stdout, talk to stderr. Exit codes: 0 clean, 1 anomalies or errors found, 2 bad usage, 3 lint only.
    """


def run_cli(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of `sentinel ARGUMENTS`; never raises for a user's mistake.

    Names come from trainers and from files: what cannot be seen in them reaches no terminal.
    """
    with redirect_stdout(PrintableLines(sys.stdout)):
        return _exit_code(arguments)


def _exit_code(arguments: Sequence[str] | None) -> int:
    try:
        result: Any = sentinel.main(
            args=None if arguments is None else list(arguments), prog_name="sentinel", standalone_mode=False
        )
    except click.ClickException as error:
        error.show(sys.stderr)
        return BAD_USAGE if isinstance(error, click.UsageError) else error.exit_code
    except click.exceptions.Abort:
        to_stderr("interrupted")
        return 130
    except (ConfigError, RuleError) as error:
        to_stderr(str(error))
        return BAD_USAGE
    except SentinelError as error:
        to_stderr(str(error))
        return FOUND
    except BrokenPipeError:
        # Whoever read our output left; Python must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        to_stderr(f"{where}{error.strerror or error}")
        return FOUND
    except sqlite3.Error as error:
        to_stderr(f"journal: {error}")
        return FOUND
    return result if isinstance(result, int) else CLEAN


def to_stderr(text: str) -> None:
    """Write one line to stderr."""
    click.echo(f"sentinel: {printable_lines(text)}", err=True)


def main() -> NoReturn:
    """Entry point of the command `sentinel`."""
    sys.exit(run_cli())


if __name__ == "__main__":
    main()
