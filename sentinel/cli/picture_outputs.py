"""Where pictures of a run go: over a terminal, one behind the other into a pipe, or as JSON."""

from __future__ import annotations

import os
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live

from sentinel.cli.picture_text import Page, picture_lines
from sentinel.cli.run_picture import RunPicture
from sentinel.explain.drawing import WIDTH
from sentinel.report.files import json_line


class PictureOutput(Protocol):
    """Shows pictures of a run, one after the other."""

    def show(self, picture: RunPicture) -> None:
        """Show the newest picture."""
        ...

    def close(self, last: RunPicture | None) -> None:
        """Leave the terminal as it was, with the last picture in it; None: there was none."""
        ...


class WholeTerminal:
    """One picture at a time over the whole terminal, in the size that it has by then; what was there comes back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def show(self, picture: RunPicture) -> None:
        """Show a picture in place of the former one."""
        self._live.start()
        page = Page(self._console.width, self._console.encoding)
        self._live.update(Group(*picture_lines(picture, page, self._console.height)), refresh=True)

    def close(self, last: RunPicture | None) -> None:
        """Bring back what was there, with the last picture below it."""
        self._live.stop()
        if last is not None:
            print_picture(last, self._console)


class OnePerChange:
    """A picture behind the other, for pipes and logs; one that shows nothing but that time went by is left out."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        self._console, self._as_json = console, as_json
        self._former: RunPicture | None = None

    def show(self, picture: RunPicture) -> None:
        """Write a picture, if it shows anything new."""
        timeless = picture.without_clocks()
        if timeless == self._former:
            return
        if self._as_json:
            self._console.file.write(json_line(picture).decode() + "\n")
        else:
            if self._former is not None:
                self._console.print()
            print_picture(picture, self._console)
        self._console.file.flush()
        self._former = timeless

    def close(self, last: RunPicture | None) -> None:
        """Nothing is left to do."""


def output_on(stream: TextIO, *, as_json: bool, is_live: bool) -> PictureOutput:
    """Return what suits a stream. is_live: pictures take each other's place, where the stream can do that."""
    is_terminal = stream.isatty()
    has_colours = is_terminal and "NO_COLOR" not in os.environ
    options: dict[str, Any] = {} if is_terminal else {"width": WIDTH}
    console = Console(
        # Lines went through `Page.seen`: a terminal gets our own control codes, and no others, unescaped.
        file=getattr(stream, "unfiltered", stream) if is_terminal and not as_json else stream,
        force_terminal=is_terminal, color_system="auto" if has_colours else None, highlight=False, **options,
    )  # fmt: skip
    if is_live and is_terminal and not console.is_dumb_terminal and not as_json:
        return WholeTerminal(console)
    return OnePerChange(console, as_json=as_json)


def print_picture(picture: RunPicture, console: Console) -> None:
    """Print all lines of a picture, however many there are."""
    for line in picture_lines(picture, Page(console.width, console.encoding)):
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
