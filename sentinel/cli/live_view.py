"""`sentinel watch`: a run as it trains, in a terminal; read from its files, so that neither daemon nor browser is needed."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import click

from sentinel.cli.main import CLEAN, FOUND
from sentinel.cli.picture_outputs import PictureOutput, output_on
from sentinel.cli.places import find_run, newest_run, runs_directory
from sentinel.cli.run_observer import RunObserver
from sentinel.cli.run_picture import ENDED, WAITING, RunPicture
from sentinel.errors import ConfigError
from sentinel.handled_signals import handled
from sentinel.store.run_paths import is_run

LEAST_S, MOST_S = 0.1, 3600.0
"""Bounds of --every, seconds."""
REST = 4.0
"""Times as long as a look took that is waited for the next one at least: a run of many ranks must not cost a core."""


class Watcher:
    """Looks at a run again and again: at one that is there, or is waited for."""

    def __init__(self, given: str | None) -> None:
        """given: what was typed; None: the newest run. ConfigError where there is none."""
        self._given = given
        self._observer: RunObserver | None = None
        self._run_dir = find_run(None) if given is None else None

    def look(self, now: float, mono: float) -> RunPicture:
        """Return the run as it is, or that it is not there. now: seconds since the epoch; mono: monotonic seconds."""
        run_dir = self._run_dir if self._run_dir is not None and self._run_dir.is_dir() else None
        note = ""
        if run_dir is None and self._given is not None:
            run_dir, note = self._find(self._given)
        if run_dir is None:
            if self._observer is not None:
                self._observer.close()
            self._observer = None
            where = self._run_dir or self._expected()
            return RunPicture(
                run=where.name, directory=str(where), time=now, state=WAITING, note=note or f"{where} is not there"
            )
        if self._observer is None or run_dir != self._run_dir:
            self._observer, self._run_dir = RunObserver(run_dir), run_dir
        return self._observer.look(now, mono)

    def close(self) -> None:
        """Look no more."""
        if self._observer is not None:
            self._observer.close()

    def _expected(self) -> Path:
        given = Path(self._given or "")
        return given.absolute() if given.is_absolute() or len(given.parts) > 1 else runs_directory() / given

    @staticmethod
    def _find(given: str) -> tuple[Path | None, str]:
        try:
            found = find_run(given)
        except ConfigError as error:
            return None, str(error)
        if is_run(found):
            return found, ""
        inside = newest_run(found)
        return (inside, "") if inside is not None else (None, f"{found}: expected a run, found no spool in it so far")


@click.command()
@click.argument("run", required=False)
@click.option(
    "--once", is_flag=True, help="Print one picture and end; exit 1 when the run is not well, as `sentinel status`."
)
@click.option(
    "--every", "every_s", type=click.FloatRange(LEAST_S, MOST_S), default=1.0, show_default=True, metavar="SECONDS",
    help="Time between two looks.",
)  # fmt: skip
@click.option("--until-end", is_flag=True, help="End when the run does; exit 1 when it is not well then.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a picture.")
def watch(run: str | None, once: bool, every_s: float, until_end: bool, as_json: bool) -> int:
    """Show RUN while it trains: loss, speed, ranks, open incidents, and where it is ill.

    RUN: a run, its name, or a directory of runs, whose newest is meant; one that is not there yet is waited for. Default:
    the newest run of $SENTINEL_DIR, of ./sentinel_runs or of the current directory. It reads what the ranks and the
    daemon write and writes nothing; without a daemon there are no incidents and no anomalies. Into a pipe a picture is
    printed whenever something changed. Ctrl-C ends it.

    Exit 0; with --once and --until-end 1 when an incident that is a warning or worse is open, or the run ended otherwise
    than in order.
    """
    watcher = Watcher(run)
    try:
        if once:
            picture = watcher.look(time.time(), time.monotonic())
            if picture.state == WAITING:
                raise ConfigError(picture.note)
            output_on(sys.stdout, as_json=as_json, is_live=False).show(picture)
        else:
            with stopped_in_order():
                picture = follow(watcher, output_on(sys.stdout, as_json=as_json, is_live=True), every_s, until_end=until_end)
        return CLEAN if picture.is_clean else FOUND
    except KeyboardInterrupt:
        return CLEAN
    finally:
        watcher.close()


def follow(
    watcher: Watcher,
    output: PictureOutput,
    every_s: float,
    *,
    until_end: bool,
    wall: Callable[[], float] = time.time,
    mono: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RunPicture:
    """Show a run again and again, and return the last picture: of its end, where that is asked for. KeyboardInterrupt ends
    it too, with the terminal as it was.

    wall, mono: clocks, in seconds.
    """
    picture: RunPicture | None = None
    try:
        while True:
            begun = mono()
            former, picture = picture, watcher.look(wall(), begun)
            output.show(picture)
            # Seen twice: a daemon ends incidents, in files of their own, a moment after it has written down the run's end.
            if until_end and picture.state == ENDED and former is not None and former.state == ENDED:
                return picture
            sleep(max(every_s, REST * (mono() - begun)))
    finally:
        output.close(picture)


@contextlib.contextmanager
def stopped_in_order() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit inside, so that the terminal is given back."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with handled((signal.SIGTERM, signal.SIGHUP), stop):
        yield
