"""PictureCells: rows of a history put into the cells of a picture, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sentinel.history.buckets import starts_of

COLUMNS = ("at", "step", "newest", "least", "greatest", "mean", "last", "nans", "infs", "steps")
"""Of a batch. at: row of the picture. step: begin of what the row of the history stands for, newest: its last step. steps:
how many it stands for. Null of a number: no step of it has a finite value."""

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class PictureCells:
    """Arrays [rows, columns] of what was measured; NaN: nothing that is finite.

    Here and not in SQL, for most cells are made of one or two rows, and a hash table of all cells costs three times as much.
    """

    def __init__(self, num_rows: int, num_columns: int, first: int, width: int) -> None:
        """first: step of the first column. width: steps of a column."""
        self._shape, self._first, self._width = (num_rows, num_columns), first, width
        num = num_rows * num_columns
        self._least, self._greatest, self._last = np.full((3, num), np.nan)
        self._total = np.zeros(num)
        self._counted, self._nans, self._infs, self._steps = np.zeros((4, num), np.int64)
        self._newest = np.full(num, -1)
        """Step that `_last` is of."""

    def add(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Put in rows that have `COLUMNS`, in any order."""
        for batch in batches:
            if batch.num_rows:
                self._add({name: batch.column(name).to_numpy(zero_copy_only=False) for name in COLUMNS})

    def _add(self, rows: dict[str, npt.NDArray[np.float64]]) -> None:
        column = (rows["step"] - self._first) // self._width
        cell = rows["at"].astype(np.int64) * self._shape[1] + column.astype(np.int64)
        if (cell[1:] < cell[:-1]).any():
            # Of each file the rows are in order: few runs to merge.
            order = np.argsort(cell, kind="stable")
            cell, rows = cell[order], {name: values[order] for name, values in rows.items()}
        starts = starts_of(cell)
        at = cell[starts]
        # Of one batch each cell is in `at` once, so that it may be an index of what is written.
        self._least[at] = np.fmin(self._least[at], np.fmin.reduceat(rows["least"], starts))
        self._greatest[at] = np.fmax(self._greatest[at], np.fmax.reduceat(rows["greatest"], starts))
        is_known = ~np.isnan(rows["mean"])
        self._total[at] += np.add.reduceat(np.where(is_known, rows["mean"] * rows["steps"], 0.0), starts)
        self._counted[at] += np.add.reduceat(np.where(is_known, rows["steps"], 0), starts)
        for total, name in ((self._nans, "nans"), (self._infs, "infs"), (self._steps, "steps")):
            total[at] += np.add.reduceat(rows[name], starts)
        when = np.where(np.isnan(rows["last"]), -1, rows["newest"])
        self._newest[at] = np.maximum(self._newest[at], np.maximum.reduceat(when, starts))
        is_newest = (when >= 0) & (when == self._newest[cell])
        self._last[cell[is_newest]] = rows["last"][is_newest]

    @property
    def least(self) -> Numbers:
        """Least value of any step of a cell."""
        return self._least.reshape(self._shape)

    @property
    def greatest(self) -> Numbers:
        """Greatest value of any step of a cell."""
        return self._greatest.reshape(self._shape)

    @property
    def mean(self) -> Numbers:
        """Mean over the steps of a cell that have one."""
        made = np.full(len(self._total), np.nan)
        np.divide(self._total, self._counted, out=made, where=self._counted > 0)
        return made.reshape(self._shape)

    @property
    def last(self) -> Numbers:
        """Value of the newest step of a cell that has one."""
        return self._last.reshape(self._shape)

    @property
    def nans(self) -> Counts:
        """Elements that were NaN."""
        return self._nans.reshape(self._shape)

    @property
    def infs(self) -> Counts:
        """Elements that were infinite."""
        return self._infs.reshape(self._shape)

    @property
    def steps(self) -> Counts:
        """Steps in which anything was measured."""
        return self._steps.reshape(self._shape)
