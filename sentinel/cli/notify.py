"""`sentinel notify`: send one test message to every sink, now, or show what would be sent about an incident."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.errors import ConfigError
from sentinel.known_words import near

if TYPE_CHECKING:
    from sentinel.report.sinks.sink_table import SinkConfig


@click.group()
def notify() -> None:
    """Try out notifications."""


@notify.command()
@click.option("--config", required=True, metavar="FILE", help="Configuration of the daemon; its notify section counts.")
@click.option("--sink", "names", multiple=True, metavar="NAME", help="Only this sink; several add up. Default: all.")
@click.option("--end", "is_over", is_flag=True, help="Send the end of the test: where it stands open, it is closed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a sink.")
def test(config: str, names: tuple[str, ...], is_over: bool, as_json: bool) -> int:
    """Send a made-up critical incident that says it is a test to the configured sinks, whatever their routes ask for.

    Exit 1 when one of them did not take it. PagerDuty and Alertmanager keep it open until `--end` is sent.
    """
    from sentinel.daemon.config import load_config, placed
    from sentinel.exception_words import described
    from sentinel.report.sample_alert import sample_alert
    from sentinel.report.sinks.delivery import Delivery, checked
    from sentinel.report.sinks.sink_table import build_sink

    settings = load_config(Path(config)).notify
    chosen = _chosen(settings.sinks, names)
    if not chosen:
        to_stderr(f"{config} names no sinks under notify.sinks: nobody would be told")
        return FOUND
    is_clean = True
    for one in chosen:
        now = time.time()
        try:
            sink = build_sink(one, settings, os.environ, sys.stderr)
        except ConfigError as error:
            raise placed(error, Path(config)) from error
        try:
            delivery = checked(sink.deliver([sample_alert(one.name, now, is_over=is_over)], now))
        except Exception as error:  # another package's code may fail in any way
            delivery = Delivery(outcome="failed", detail=described(error))
        is_clean = is_clean and delivery.outcome == "sent"
        if as_json:
            click.echo(json.dumps({"sink": one.name, "outcome": delivery.outcome, "detail": delivery.detail}))
        else:
            click.echo(f"{one.name}: {delivery.outcome}" + (f": {delivery.detail}" if delivery.detail else ""))
    return CLEAN if is_clean else FOUND


@notify.command()
@click.argument("incident", default="worst")
@click.option("-d", "--dir", "--run", "directory", help="A run, its name, or a directory of runs. Default: $SENTINEL_DIR.")
@click.option("--config", metavar="FILE", help="Configuration of the daemon; its notify section counts. Default: no sinks.")
@click.option("--sink", "names", multiple=True, metavar="NAME", help="Only this sink; several add up. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a sink.")
def preview(incident: str, directory: str | None, config: str | None, names: tuple[str, ...], as_json: bool) -> int:
    """Show what each sink would be sent about an incident as it is now; nothing is sent, and no daemon need run.

    INCIDENT is an id, the beginning of one, `worst` (the gravest that is open; the default) or `latest`. Without sinks
    the message is shown as plain text. Exit 1 when a sink cannot be built.
    """
    from sentinel.cli.explain import run_with_incident
    from sentinel.daemon.config import load_config, placed
    from sentinel.daemon.recorded_alert import recorded_alert, recorded_orders
    from sentinel.report.message_writer import MessageWriter
    from sentinel.report.preview import Preview, Sending, plain_text
    from sentinel.report.sinks.sink_table import SINKS, build_sink

    settings = load_config(Path(config) if config else None).notify
    chosen = _chosen(settings.sinks, names)
    run_dir, now = run_with_incident(incident, directory), time.time()
    alert = recorded_alert(run_dir, incident, now)
    orders = recorded_orders(run_dir, alert)
    text = plain_text(MessageWriter(settings.links, lambda one: orders).write(alert))
    if not chosen:
        click.echo(json.dumps({"sink": None, "text": text}) if as_json else text)
    is_clean = True
    for one in chosen:
        taken, stream = Preview(), io.StringIO()
        if type(one) in SINKS.values():
            try:
                sink = build_sink(one, settings, os.environ, stream, lambda one: orders, capture=taken)
            except ConfigError as error:
                is_clean = False
                to_stderr(str(placed(error, Path(config or ""))))
                continue
            sink.deliver([msgspec.structs.replace(alert, sink=one.name, key=f"{one.name}{alert.key}")], now)
        else:
            # One of another package may send in ways of its own.
            taken.sendings.append(Sending(to=one.name, body=text))
        if stream.getvalue():
            taken.sendings.append(Sending(to="stderr", body=stream.getvalue().rstrip()))
        is_sent = one.route.matches(alert.incident) and one.route.takes(alert.context.labels)
        if as_json:
            shown = msgspec.to_builtins(taken.sendings)
            click.echo(json.dumps({"sink": one.name, "would_be_sent": is_sent, "sendings": shown}))
            continue
        click.echo(f"--- {one.name}" + ("" if is_sent else ": its route does not ask for this incident"))
        click.echo("\n\n".join(sending.in_words for sending in taken.sendings) + "\n")
    return CLEAN if is_clean else FOUND


def _chosen(sinks: Sequence[SinkConfig], names: Sequence[str]) -> list[SinkConfig]:
    """Return the sinks of these names, all where there are no names; ConfigError for one that is none."""
    known = [sink.name for sink in sinks]
    for name in names:
        if name not in known:
            hint = near(name, known) or f"; known: {', '.join(known) or 'none, name a configuration with --config'}"
            raise ConfigError(f'--sink "{name}": unknown{hint}')
    return [sink for sink in sinks if not names or sink.name in names]
