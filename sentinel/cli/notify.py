"""`sentinel notify test`: send one message to every sink, now, and print the outcomes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import click

from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.errors import ConfigError


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
    known = [sink.name for sink in settings.sinks]
    for name in names:
        if name not in known:
            raise ConfigError(f'--sink "{name}": unknown; known: {", ".join(known) or "none"}')
    if not known:
        to_stderr(f"{config} names no sinks under notify.sinks: nobody would be told")
        return FOUND
    is_clean = True
    for one in settings.sinks:
        if names and one.name not in names:
            continue
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
