"""Rows under their heads: aligned text into a pipe, with colours on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

import click

from sentinel.printable import printable

LONG = ("file", "channel", "name", "rule")
_COLOURS = {"critical": "bold red", "warning": "yellow"}


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print rows under their heads; `right` are the columns of numbers."""
    # Names come from files: nothing in them may move a terminal's cursor.
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        _show_rich(columns, rows, right)
        return
    table = [list(columns), *rows]
    widths = [max(len(row[at]) for row in table) for at in range(len(columns))]
    for row in table:
        cells = [cell.rjust(width) if at in right else cell.ljust(width)
                 for at, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        click.echo("  ".join(cells).rstrip())


def _show_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Ten columns have to fit into eighty signs: no frame, and only what may be long is folded.
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for at, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if at in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in LONG)
    for row in rows:
        # A tensor's name may hold square brackets: Text is not read as markup.
        table.add_row(*(Text(cell, style=_COLOURS.get(row[-1], "")) for cell in row))
    Console(file=getattr(sys.stdout, "unfiltered", sys.stdout)).print(table)
