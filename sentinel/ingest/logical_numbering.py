"""LogicalNumbering: which logical tensor each rank's tensor is, numbered in the order in which ranks first name them."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from sentinel.ingest.placing import Coordinates, Placed, PlacedTable
from sentinel.ingest.row_tables import table_of
from sentinel.step_view import LogicalTensor


class LogicalNumbering:
    """Takes rank by rank, rising. Ranks that are alike and stand at the same coordinates hold the same tensors: they are
    looked at once.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, Coordinates], int] = {}
        """(canonical name, kind, coordinates kept apart) -> number: ranks that have it hold the same logical tensor."""
        self._first: list[tuple[PlacedTable, Placed, Coordinates]] = []
        """[numbers] where each was named first."""
        self._groups: dict[tuple[Hashable, tuple[Coordinates, ...]], _Group] = {}
        self._held_by: list[list[int]] = []
        """[numbers] the groups that hold it; one that holds it twice is there twice."""

    def take(
        self, rank: int, alike: Hashable, table: PlacedTable, apart: tuple[Coordinates, ...]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the numbers of a rank's tensors, [tensors], and its table of them, [local ids], -1 where there is none.

        alike: as of `placing.alike`. table, apart: of the rank, as of `PlacedTable.coordinates`.
        """
        group = self._groups.get((alike, apart))
        if group is None:
            at = np.array(
                [
                    self._number(table, part, apart[cut])
                    for part, cut in zip(table.parts, table.cut_of.tolist(), strict=True)
                ],
                np.int32,
            )
            for number in at.tolist():
                self._held_by[number].append(len(self._groups))
            group = self._groups[alike, apart] = _Group(at, table_of(table.ids, at))
        group.ranks.append(rank)
        return group.at, group.table

    def tensors(self) -> list[LogicalTensor]:
        """Return the logical tensors, by their numbers."""
        groups, ranks = list(self._groups.values()), dict[tuple[int, ...], tuple[int, ...]]()
        found = []
        for number, ((table, part, apart), held_by) in enumerate(zip(self._first, map(tuple, self._held_by), strict=True)):
            if held_by not in ranks:
                ranks[held_by] = tuple(sorted(rank for group in held_by for rank in groups[group].ranks))
            found.append(table.logical(part, apart, number, ranks[held_by]))
        return found

    def _number(self, table: PlacedTable, part: Placed, apart: Coordinates) -> int:
        number = self._numbers.setdefault((part.name, part.tensor.kind, apart), len(self._first))
        if number == len(self._first):
            self._first.append((table, part, apart))
            self._held_by.append([])
        return number


class _Group:
    """Ranks that hold the same logical tensors under the same ids."""

    __slots__ = ("at", "ranks", "table")

    def __init__(self, at: npt.NDArray[np.int32], table: npt.NDArray[np.int32]) -> None:
        self.at, self.table = at, table
        self.ranks: list[int] = []
