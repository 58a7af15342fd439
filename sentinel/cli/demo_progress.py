"""How the demo's progress looks: lines for a log, a bar for a terminal."""

from __future__ import annotations

import re
import sys

import click


class Lines:
    """Progress as lines on stderr, for logs and pipes."""

    def line(self, text: str) -> None:
        """Write one line."""
        click.echo(text, err=True)

    def step(self, step: int, text: str) -> None:
        """Note that a step was done; one in twenty, and every skipped one, is a line."""
        if step % 20 == 0 or "skipped" in text:
            self.line(text)

    def close(self) -> None:
        """Nothing is left on the terminal."""


class DemoBar:
    """Progress as a bar on stderr with the lines above it."""

    def __init__(self, num_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=num_steps)
        self._bar.start()

    def line(self, text: str) -> None:
        """Write one line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def step(self, step: int, text: str) -> None:
        """Move the bar; skipped steps are lines too."""
        self._bar.update(self._task, completed=step + 1, description=re.sub(r"step\s+\d+\s+", "", text))
        if "skipped" in text:
            self.line(text)

    def close(self) -> None:
        """Take the bar off the terminal."""
        self._bar.stop()


def progress(num_steps: int) -> DemoBar | Lines:
    """Return the progress that suits stderr."""
    return DemoBar(num_steps) if sys.stderr.isatty() else Lines()
