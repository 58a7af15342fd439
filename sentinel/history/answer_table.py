"""AnswerTable: what a question about runs is answered with; it shows itself, and goes over into other libraries' tables."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sentinel.errors import ConfigError
from sentinel.history.plots import plot_columns
from sentinel.printable import printable

if TYPE_CHECKING:
    import pandas
    import polars
    from matplotlib.axes import Axes

MOST_SHOWN = 20
"""Rows that are shown; the others are counted."""
MOST_COLUMNS = 40
MOST_CHARACTERS = 80
"""Of a cell that is shown."""


class AnswerTable:
    """Rows of an answer. `for row in table` gives each as a dictionary, `len(table)` how many there are."""

    def __init__(self, rows: pa.Table, draw: Callable[[pa.Table, Axes | None], Axes] = plot_columns, note: str = "") -> None:
        """draw: how rows of this kind are drawn. note: what their reader should know, in a sentence."""
        self.note = note
        """What is not in the rows, or is otherwise than one would think; empty: nothing."""
        self._rows = rows
        self._draw = draw

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._rows.column_names)

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._rows.to_batches(max_chunksize=4096):
            yield from batch.to_pylist()

    def __getitem__(self, column: str) -> list[Any]:
        """Return the values of a column. KeyError names the columns that there are."""
        if column not in self._rows.column_names:
            raise KeyError(f'expected a column, got "{column}"; known: {", ".join(self.columns)}')
        values: list[Any] = self._rows.column(column).to_pylist()
        return values

    def to_arrow(self) -> pa.Table:
        """Return the rows as a table of pyarrow."""
        return self._rows

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a DataFrame of pandas. ConfigError where pandas is not installed."""
        try:
            import pandas  # noqa: F401  # pyarrow imports it, and says less where it is not there
        except ImportError as error:
            raise ConfigError(f"to_pandas needs the package pandas ({error}); pip install pandas") from error
        return self._rows.to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """Return the rows as a DataFrame of polars. ConfigError where polars is not installed."""
        try:
            import polars
        except ImportError as error:
            raise ConfigError(f"to_polars needs the package polars ({error}); pip install polars") from error
        frame = polars.from_arrow(self._rows)
        assert isinstance(frame, polars.DataFrame), "a table with names of columns"
        return frame

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the rows, and return the axes they are drawn on. ax: those to draw on; None: new ones.

        A series is a line of its mean with a band from its least to its greatest value; steps in which something was not
        finite are marked. ConfigError where matplotlib is not installed, or where there is nothing that can be drawn.
        """
        return self._draw(self._rows, ax)

    def __repr__(self) -> str:
        heads = [_shortened(printable(name)) for name in self.columns[:MOST_COLUMNS]]
        rows = self._shown()
        widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
        ]
        return "\n".join([*lines, *self._below()])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{html.escape(_shortened(printable(name)))}</th>" for name in self.columns[:MOST_COLUMNS])
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in self._shown())
        below = "".join(f"<p>{html.escape(line)}</p>" for line in self._below())
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{below}"

    def _shown(self) -> list[list[str]]:
        rows = self._rows.select(self._rows.column_names[:MOST_COLUMNS]) if len(self.columns) > MOST_COLUMNS else self._rows
        columns = [[_cell(value) for value in column.to_pylist()] for column in rows.slice(0, MOST_SHOWN).columns]
        return [list(row) for row in zip(*columns, strict=True)]

    def _below(self) -> list[str]:
        num = len(self)
        said = f"{num:,} row{'' if num == 1 else 's'}" + (f", {MOST_SHOWN} shown" if num > MOST_SHOWN else "")
        if len(self.columns) > MOST_COLUMNS:
            said += f"; {MOST_COLUMNS} of {len(self.columns)} columns"
        return [said, self.note] if self.note else [said]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return _shortened(printable(text))


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
