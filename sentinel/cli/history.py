"""`sentinel history`: a run's history in other places."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from sentinel.cli.main import CLEAN, to_stderr
from sentinel.cli.places import find_run
from sentinel.cli.time_lengths import parse_duration
from sentinel.errors import ConfigError, StoreError
from sentinel.history.push import Pushed
from sentinel.history.push import push as push_history
from sentinel.history.remote_run import RemoteRun
from sentinel.history.store_folder import checked_url, is_url


@click.group()
def history() -> None:
    """Put the histories of runs where others read them."""


@history.command(epilog="Example: sentinel history push my-run s3://bucket/runs --every 60s")
@click.argument("runs_and_url", nargs=-1, required=True, metavar="[RUN]... URL")
@click.option("--every", metavar="TIME", help="Push again every so often (60s, 10min), until interrupted. Default: once.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each run that is pushed.")
def push(runs_and_url: tuple[str, ...], every: str | None, as_json: bool) -> int:
    """Put the histories of RUNs, by default of the run that was written to last, under URL, a directory of runs in a store
    (s3://bucket/runs, gs://, abfs://, ...): each as URL/NAME, which `sentinel sql` and `sentinel.open` take.

    Files that are there are not sent again; the manifest goes last, so that a reader has each step once at any instant. It
    may be interrupted at any point and be repeated as often as one likes, also while the run is written. Credentials are
    those that the store's client finds (AWS_PROFILE, ...); a URL that holds any is refused.
    """
    *named, url = runs_and_url
    if not is_url(url):
        raise ConfigError(f'"{url}": expected the URL of a directory of runs, as s3://bucket/runs')
    interval_s = None if every is None else parse_duration(every, "--every")
    if every is not None and interval_s is None:
        raise ConfigError(f'--every: expected a time like 60s, 10min, got "{every}"')
    homes = [find_run(name) for name in named or (None,)]
    pairs = [(home, RemoteRun(f"{checked_url(url)}/{home.name}")) for home in dict.fromkeys(homes)]
    while True:
        _push_all(pairs, as_json, is_repeated=interval_s is not None)
        if interval_s is None:
            return CLEAN
        time.sleep(interval_s)


def _push_all(pairs: list[tuple[Path, RemoteRun]], as_json: bool, *, is_repeated: bool) -> None:
    for home, remote in pairs:
        try:
            pushed = push_history(home, remote)
        except StoreError as error:
            if not is_repeated:
                raise
            # A store that is away is there again some time, and a run's history begins some time.
            to_stderr(str(error))
            continue
        if as_json:
            click.echo(msgspec.json.encode(pushed).decode())
        elif pushed.files or not is_repeated:
            click.echo(_words(pushed))


def _words(pushed: Pushed) -> str:
    steps = "no step yet" if pushed.last_step < 0 else f"steps up to {pushed.last_step}"
    gone = f", {pushed.deleted} old ones deleted" if pushed.deleted else ""
    return f"{pushed.url}: {steps}; {pushed.files} files, {pushed.bytes} bytes sent{gone}"
