"""What rows of a plain log say of themselves in words: an evaluation's, another rank's, or one number of many."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sentinel.logs.columns import channels, is_aside, is_measured, named_role, normalised
from sentinel.logs.rows import CANONICAL, MISSING, Rows, number

SPLITS = ("split", "phase", "mode", "stage", "subset", "partition", "set", "prefix", "dataset_split", "data_split")
RANKS = ("rank", "global_rank", "process_index", "process_id", "worker_rank", "dp_rank")
TAGS = ("tag", "metric", "metric_name", "name", "key", "variable", "series", "scalar")
VALUES = ("value", "metric_value", "values", "scalar_value")


class RowLabels:
    """Names the numbers of a row by what the row says of itself: `val/loss`, `rank 3/loss`.

    The first rank that a log has keeps the plain names, so that a log of one rank is as it was.
    """

    def __init__(self) -> None:
        self._first_rank: str | None = None
        self.ranks: set[str] = set()

    def prefix(self, row: Iterable[tuple[str, Any]]) -> str:
        """Return what to put before the names of a row's measures; nothing where it is the training's own.

        row: its labels.
        """
        found = ""
        for name, said in row:
            kind, text = label_of(name), str(said).strip()
            if kind == "split" and isinstance(said, str) and is_aside(text):
                found += f"{text}/"
            elif kind == "rank" and text.isdigit():
                self._first_rank = text if self._first_rank is None else self._first_rank
                self.ranks.add(text)
                found += "" if text == self._first_rank else f"rank {text}/"
        return found

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the labels met."""
        others = len(self.ranks) - 1
        return (
            [] if others < 1 else [f"rows of {others + 1} ranks: loss is of rank {self._first_rank}, others are rank N/loss"]
        )


@lru_cache(maxsize=4096)
def label_of(name: str) -> str:
    """Return what a column tells of its row: `split`, `rank`, or nothing."""
    plain = normalised(name)
    return "split" if plain in SPLITS else "rank" if plain in RANKS else ""


def labelled(prefix: str, name: str) -> str:
    """Return what a measure of a row with that prefix is called; counters keep their names."""
    is_own = not is_measured(name) or label_of(name) or (is_aside(prefix) and is_aside(name))
    return name if is_own else f"{prefix}{name}"


def long_columns(names: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the columns (tag, value, step) of a table with one number a row; None for any other table."""
    plain = {normalised(name): name for name in names}
    tag = next((plain[one] for one in TAGS if one in plain), None)
    value = next((plain[one] for one in VALUES if one in plain), None)
    step = next((name for name in names if (role := named_role(name)) is not None and role[0] == "step"), None)
    return (tag, value, step) if tag and value and step else None


class LabelledPoints:
    """Single numbers (tag, step, value) of one run, in the order of the log. Memory: 24 bytes each."""

    def __init__(self) -> None:
        self._tags: dict[str, int] = {}
        self._of, self._steps, self._values = array("q"), array("q"), array("d")

    def __len__(self) -> int:
        return len(self._of)

    def add(self, tag: str, step: int, value: float) -> None:
        """Take the next one."""
        self._of.append(self._tags.setdefault(tag, len(self._tags)))
        self._steps.append(step)
        self._values.append(value)

    def add_text(self, row: Mapping[str, Any], of: tuple[str, str, str]) -> bool:
        """Take a row of a table with the columns `of`; whether it had a tag, a whole step and a number or nothing."""
        tag, value, step = (row.get(name) for name in of)
        try:
            measured, counted = number(str(value)), number(str(step))
        except ValueError:
            return False
        if not isinstance(tag, str) or tag.lower() in MISSING or counted is None or counted != counted // 1:
            return False
        if measured is not None:
            self.add(tag, int(counted), measured)
        return True

    def put(self, rows: Rows) -> None:
        """Make rows of them: one for each step that has a loss, grad_norm or lr.

        Values of other tags join the row of their step; a tag that counts otherwise (epochs) has no row to join.
        """
        in_order = list(self._tags)
        names = channels(in_order)
        main = {tag for tag, channel in names.items() if channel.rpartition("/")[2] in CANONICAL} or set(names)
        newest: dict[str, int] = {}
        last = -(1 << 63)
        row_of: dict[int, int] = {}
        newest_value: dict[str, float] = {}
        num_same = num_again = 0
        early: dict[int, list[tuple[str, float]]] = {}
        for at, step, value in zip(self._of, self._steps, self._values, strict=True):
            tag = in_order[at]
            if step == newest.get(tag):
                if value == newest_value[tag] or (value != value and newest_value[tag] != newest_value[tag]):
                    num_same += 1
                    continue
                num_again += 1
            is_again = tag in main and step <= newest.get(tag, -(1 << 63))
            if is_again:
                # The tag itself has had this step: the run went back to it.
                newest, row_of, early = {}, {}, {}
            if tag in main and (is_again or step > last):
                row_of[step] = rows.add()
                last = step
                rows.put("step", float(step))
                for other, earlier in early.pop(step, ()):
                    rows.put(other, earlier)
            if tag in main:
                newest[tag], newest_value[tag] = step, value
            if step in row_of:
                rows.put_at(row_of[step], tag, value)
            else:
                early.setdefault(step, []).append((tag, value))
        if num_same:
            rows.notes.append(f"{num_same} values are there twice, step and number: one of each counts")
        if num_again:
            rows.notes.append(f"{num_again} values are of a step that their series has already: each is a row of its own")
        num_left = sum(map(len, early.values()))
        if num_left:
            rows.notes.append(f"{num_left} values are of steps at which {', '.join(sorted(main)[:3])} is not told: left out")
