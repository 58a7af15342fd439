"""RowsOfRuns: the digests of each run at the join, and the rows that its copies have not got."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

from sentinel.fleet.digest_book import ReadyRoom
from sentinel.fleet.fetched_rows import FetchedRows
from sentinel.fleet.heard_nodes import SILENT_S
from sentinel.fleet.run_copies import RunCopies


class RowsOfRuns:
    """Called under the lock of all runs; what it hands out asks `known` without it, of one entry each time."""

    def __init__(
        self,
        directory: Path,
        known: Callable[[str], RunCopies | None],
        *,
        is_refused: Callable[[], bool],
        clock: Callable[[], float],
        wait: Callable[[float], None],
    ) -> None:
        """directory: of the runs. known: a run's copies; None: there are none. clock: monotonic seconds. is_refused: as of
        `FetchedRows`, as wait."""
        self._directory, self._known = directory, known
        self._is_refused, self._clock, self._wait = is_refused, clock, wait
        self._rows: dict[str, FetchedRows] = {}
        self._room = ReadyRoom()

    def of(self, run: str) -> FetchedRows:
        """Return those of a run, which begin with this where there are none."""
        found = self._rows.get(run)
        if found is None:
            found = self._rows[run] = FetchedRows(
                self._directory / run, owner=functools.partial(self._owner, run),
                is_heard=functools.partial(self._is_heard, run), is_refused=self._is_refused, wait=self._wait,
                room=self._room,
            )  # fmt: skip
        return found

    def forget(self, run: str) -> None:
        """Let go of what nodes sent of a run, if they did."""
        if run in self._rows:
            self._rows[run].forget()

    def forget_all(self) -> None:
        """Let go of what nodes sent."""
        for rows in self._rows.values():
            rows.forget()

    def end(self, why: str) -> None:
        """Have nobody wait for rows any more. why: in words."""
        for rows in self._rows.values():
            rows.why_ended = why

    def counts(self) -> dict[str, int]:
        """Return how many steps were judged of digests, of how many rows were asked for, and how many frames were gone."""
        rows = self._rows.values()
        return {
            "digested_steps": sum(one.num_steps for one in rows),
            "fetched_steps": sum(one.num_fetched for one in rows),
            "gone_frames": sum(one.num_gone for one in rows),
        }

    def _owner(self, run: str, folder: str) -> str:
        known = self._known(run)
        return "" if known is None else known.owner(folder)

    def _is_heard(self, run: str, node: str) -> bool:
        known = self._known(run)
        return known is not None and self._clock() - known.heard.at.get(node, -math.inf) < SILENT_S
