"""Rows of a plain log as they are read, and what becomes of them: columns of numbers, steps and attempts."""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.errors import LogError
from sentinel.logs.columns import best_columns, channels, is_aside, named_role

MISSING = frozenset({"", "none", "null", "na", "n/a", "-", "--", "<na>", "nil", "undefined"})
"""Cells that say there is no number. `nan` is not one of them: it is what the trainer logged."""
NO_NORM = -1
"""What DeepSpeed's optimizers return as the norm of a step that overflowed."""
_MSVC = {"1.#qnan": "nan", "-1.#qnan": "nan", "1.#ind": "nan", "-1.#ind": "nan", "-nan(ind)": "nan", "nan(ind)": "nan",
         "1.#inf": "inf", "-1.#inf": "-inf", "1.#snan": "nan"}  # fmt: skip
CANONICAL = ("loss", "grad_norm", "lr")
_OF_ALL = re.compile(r"\s*(\d+)\s*/\s*\d+\s*")
_IS_STEP = re.compile("step|iter|update", re.IGNORECASE)
MAX_STILL_SHARE = 0.9
"""Share of rows in which a column called step or iteration may stand still. Too small: logs to which several loggers or
ranks write have no step; too large: a constant is taken for one."""
_PLAINEST = 6
"""The first so many spellings of a role, which are listed from plain to vague, and can mean nothing else."""
MAX_BACK_SHARE = 0.05
"""Share of rows at which the step may go back. Too small: a run that was resumed often is refused; too large: a file that
several runs wrote at once is read as one that resumes."""


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """A plain log: one row a record of the file, in the order of the file."""

    path: str
    form: str
    """`csv`, `jsonl`, `json`, `trainer_state`, `tensorboard`, `wandb`, `neptune` or `text`."""
    steps: npt.NDArray[np.int64]
    """[rows] as the trainer counted; the row's own number where the log has no step."""
    attempts: npt.NDArray[np.int64]
    """[rows] 0, and one more each time the step goes back: the run was resumed."""
    columns: dict[str, npt.NDArray[np.float64]]
    """Channel -> [rows], NaN where a row has no number; `loss`, `grad_norm`, `lr`, and others by their own names."""
    present: dict[str, npt.NDArray[np.bool_]]
    """Channel -> [rows] whether the row has it: a NaN that is present was logged."""
    sources: dict[str, str]
    """Channel -> what the file calls it."""
    step_source: str = ""
    """What the file calls its step; empty: it has none, rows count."""
    notes: tuple[str, ...] = ()
    """What a reader of the file should know, in words."""

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return len(self.steps)


def number(text: str) -> float | None:
    """Return the number a cell says, None for a cell that says there is none. ValueError for other words."""
    try:
        return float(text)
    except ValueError:
        plain = text.strip().lower()
        if plain in MISSING:
            return None
        if plain in _MSVC:
            return float(_MSVC[plain])
        raise


class Rows:
    """What a reader puts in, row by row: memory is 16 bytes a number, nothing a missing one."""

    def __init__(self, path: str | Path, form: str) -> None:
        self.path, self.form = str(path), form
        self.num_rows = 0
        self.notes: list[str] = []
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._garbage: dict[str, tuple[int, str]] = {}
        self._lines = array("q")

    def add(self, line: int = 0) -> int:
        """Begin a row; return its number. line: where it is in the file, counted from 1; 0: in no line of its own."""
        self._lines.append(line)
        self.num_rows += 1
        return self.num_rows - 1

    def put(self, name: str, value: float) -> None:
        """Give the newest row a value; the last of several counts."""
        rows = self._rows.get(name)
        if rows is None:
            rows = self._rows[name] = array("q")
            self._values[name] = array("d")
        values = self._values[name]
        if rows and rows[-1] == self.num_rows - 1:
            values[-1] = value
            return
        rows.append(self.num_rows - 1)
        values.append(value)

    def put_at(self, row: int, name: str, value: float) -> None:
        """Give a row that is there already a value; the last of several counts."""
        self._rows.setdefault(name, array("q")).append(row)
        self._values.setdefault(name, array("d")).append(value)

    def has(self, name: str) -> bool:
        """Whether the newest row has a value of that name."""
        rows = self._rows.get(name)
        return bool(rows) and rows is not None and rows[-1] == self.num_rows - 1

    def put_text(self, name: str, text: str, line: int) -> None:
        """Give the newest row what a cell says; words are remembered, in case the column turns out to matter."""
        try:
            value = number(text)
        except ValueError:
            of_all = _OF_ALL.fullmatch(text)
            if of_all is not None and (role := named_role(name)) is not None and role[0] == "step":
                self.put(name, float(of_all[1]))  # 10/100: step 10 of them
                return
            self._garbage.setdefault(name, (line, text.strip()[:60]))
            return
        if value is not None:
            self.put(name, value)

    def finish(self) -> Log:
        """Return the log: channels named, steps and attempts found. LogError when there is nothing to judge."""
        mapped = channels(list(self._rows))
        for name in [*self._garbage]:
            self._refuse_words(name, mapped)
        if not mapped:
            wanted = "a column such as loss, train/loss, grad_norm or lr"
            found = f"found only {', '.join(sorted(self._rows)[:12])}" if self._rows else "found no numbers"
            raise LogError(f"{self.path}: expected {wanted}, {found}; name columns with --column CHANNEL=NAME")
        columns, present = {}, {}
        for name, channel in sorted(mapped.items(), key=lambda one: _order(one[1])):
            columns[channel], present[channel] = self._column(name)
            if channel.rpartition("/")[2] == "grad_norm":
                self._refuse_negative(name, columns[channel], present[channel])
        main = self._main_rows(present)
        steps, source = self._steps(main)
        attempts = self._attempts(steps, main, source)
        return Log(
            path=self.path,
            form=self.form,
            steps=steps,
            attempts=attempts,
            columns=columns,
            present=present,
            sources={channel: name for name, channel in mapped.items()},
            step_source=source,
            notes=tuple(self.notes),
        )

    def rename(self, wanted: dict[str, str]) -> None:
        """Call columns otherwise: channel -> the file's name. LogError for a column that is not there."""
        for channel, name in wanted.items():
            if name not in self._rows and name not in self._garbage:
                known = ", ".join(sorted(self._rows)[:20]) or "none"
                what = f'expected a column "{name}" (--column {channel}={name})'
                raise LogError(f"{self.path}: {what}, found none; known: {known}")
            for table in (self._rows, self._values, self._garbage):
                _rename(table, name, channel)

    def _refuse_words(self, name: str, mapped: dict[str, str]) -> None:
        role = named_role(name)
        # Of a column of nothing but words only the plainest names matter: a setting may be called "norm" as well.
        is_plain = name not in self._rows and role is not None and role[0] in CANONICAL and role[1] < _PLAINEST
        if mapped.get(name) in CANONICAL or is_plain:
            line, text = self._garbage[name]
            where = f"{self.path}:{line}" if line else self.path
            raise LogError(f'{where}: column "{name}": expected a number, nan, inf or nothing, got "{text}"')

    def _refuse_negative(self, name: str, values: npt.NDArray[np.float64], present: npt.NDArray[np.bool_]) -> None:
        """Take what stands for no norm for none, in place; LogError for a norm below zero."""
        no_norm = values == NO_NORM
        if no_norm.any():
            values[no_norm], present[no_norm] = np.nan, False
            num = int(no_norm.sum())
            self.notes.append(f'"{name}" is {NO_NORM} in {num} rows, which is how DeepSpeed says that it formed no norm')
        wrong = np.flatnonzero(values < 0)
        if len(wrong):
            row = int(wrong[0])
            where = f"{self.path}:{self._lines[row]}" if self._lines[row] else f"{self.path}: row {row}"
            raise LogError(
                f'{where}: column "{name}": expected a norm, which is 0 or more, got {values[row]:g}; if it is another '
                "quantity, name columns with --column CHANNEL=NAME"
            )

    def _column(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        rows = np.frombuffer(self._rows[name], np.int64) if self._rows[name] else np.zeros(0, np.int64)
        column = np.full(self.num_rows, np.nan)
        present = np.zeros(self.num_rows, np.bool_)
        column[rows] = np.frombuffer(self._values[name], np.float64) if len(rows) else 0.0
        present[rows] = True
        return column, present

    def _main_rows(self, present: dict[str, npt.NDArray[np.bool_]]) -> npt.NDArray[np.int64]:
        """Return the rows of the training itself, without evaluations: resumptions are found in these alone."""
        known = [present[channel] for channel in CANONICAL if channel in present]
        known = known or [held for channel, held in present.items() if not is_aside(channel)] or list(present.values())
        return np.flatnonzero(np.logical_or.reduce(known))

    def _steps(self, main: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], str]:
        """Return [rows] steps and the column they are from."""
        names = list(self._rows)
        for name in [*best_columns(names, "step"), *best_columns(names, "epoch")]:
            values, held = self._column(name)
            seen = values[main][held[main]]
            whole = np.isfinite(seen) & (np.abs(seen) < 2.0**62) & (seen == np.floor(np.where(np.isfinite(seen), seen, 0.5)))
            # A count that stands still or is a fraction is another thing: an epoch, a share, a constant.
            still = 0.0 if len(seen) < 3 else float(np.mean(np.diff(seen) == 0))
            if not len(seen) or not whole.all() or still > (MAX_STILL_SHARE if _IS_STEP.search(name) else 0.5):
                continue
            good = held & np.isfinite(values) & (np.abs(values) < 2.0**62)
            last = np.maximum.accumulate(np.where(good, np.arange(self.num_rows), -1))
            filled = np.where(last >= 0, values[np.maximum(last, 0)], values[np.argmax(good)])
            return np.floor(filled).astype(np.int64), name
        unusable = best_columns([*names, *self._garbage], "step")
        if unusable:
            line, text = self._garbage.get(unusable[0], (0, ""))
            got = f'holds words, such as "{text}" in line {line}' if text else "does not count in whole numbers"
            self.notes.append(f'"{unusable[0]}" {got}: rows are counted instead')
        return np.arange(self.num_rows, dtype=np.int64), ""

    def _attempts(self, steps: npt.NDArray[np.int64], main: npt.NDArray[np.int64], source: str) -> npt.NDArray[np.int64]:
        """Return [rows] the attempt; where `steps` count inside each epoch, they are made to go on instead, in place."""
        attempts = np.zeros(self.num_rows, np.int64)
        back = np.flatnonzero(np.diff(steps[main]) < 0) + 1
        if not len(back):
            return attempts
        epochs = [name for name in best_columns(list(self._rows), "epoch") if name != source]
        if epochs:
            epoch = self._column(epochs[0])[0][main]
            is_new_epoch = np.floor(epoch[back]) > np.floor(epoch[back - 1])
            if is_new_epoch.all() and (steps[main][back] <= steps[main][0] + 1).all():
                self._go_on(steps, main, back)
                self.notes.append(f'"{source}" begins anew with each "{epochs[0]}": steps are counted on')
                return attempts
        if len(back) > max(8, MAX_BACK_SHARE * len(main)):
            self.notes.append(f'"{source}" goes back {len(back)} times: rows are judged in their order, as of one attempt')
            return attempts
        attempts[main[back]] = 1
        resumed = np.cumsum(attempts)
        self.notes.append(f'"{source}" goes back {len(back)} times: attempts 0 to {len(back)}')
        return np.asarray(resumed, dtype=np.int64)

    @staticmethod
    def _go_on(steps: npt.NDArray[np.int64], main: npt.NDArray[np.int64], back: npt.NDArray[np.int64]) -> None:
        own = steps.copy()
        first = int(own[main[0]])
        for at in back:
            row = int(main[at])
            steps[row:] = own[row:] + (int(steps[main[at - 1]]) + 1 - first)


def _rename(table: dict[str, Any], name: str, channel: str) -> None:
    if channel in table and channel != name:
        table[f"{channel} (own)"] = table.pop(channel)
    if name in table:
        table[channel] = table.pop(name)


def _order(channel: str) -> tuple[int, str]:
    return (CANONICAL.index(channel), "") if channel in CANONICAL else (len(CANONICAL), channel)
