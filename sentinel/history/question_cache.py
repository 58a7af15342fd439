"""QuestionCache: what questions to the same histories share, so that the second one need not begin anew.

A connection takes as long to prepare as a small question to answer, and the newest files of a history hold single steps
that are not in buckets yet: a picture of a million steps would read more rows of the last thousand than of all others.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from sentinel.history.buckets import buckets_of
from sentinel.history.history_files import read_file
from sentinel.history.manifest import HistoryFile, Manifest
from sentinel.history.sql_views import Span
from sentinel.history.table_schemas import ORDER, SCHEMAS, WIDTHS, Columns, table_of

if TYPE_CHECKING:
    import duckdb

MOST_CONNECTIONS = 4
"""Prepared connections that are kept (chosen): of what a page shows at a time, with the list of what there is."""
MOST_BYTES = 2**25
"""Bytes of buckets that are kept: those of some twenty files, of which a thousand tensors have seven that are not merged."""
YOUNG = f"moments_{WIDTHS[0]}"
"""The table whose rows the newest files are put into."""
Attempts: TypeAlias = tuple[tuple[int, int], ...]


class QuestionCache:
    """Of one who asks again and again. Any thread may ask; a connection is handed to one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: OrderedDict[Hashable, duckdb.DuckDBPyConnection] = OrderedDict()
        self._buckets: OrderedDict[Hashable, pa.Table] = OrderedDict()

    @staticmethod
    def key(folders: Mapping[str, str], manifests: Mapping[str, Manifest], *options: Hashable) -> Hashable:
        """Return what a prepared connection depends on. folders: run -> where its history lies. manifests: of each run."""
        # A connection does not outlive a fork.
        about = ((run, folders[run], one.series, one.files, one.attempts) for run, one in manifests.items())
        return os.getpid(), options, tuple(about)

    def take(self, key: Hashable) -> duckdb.DuckDBPyConnection | None:
        """Return a connection that was given under this key, which nobody else has; None: there is none."""
        with self._lock:
            return self._connections.pop(key, None)

    def give(self, key: Hashable, connection: duckdb.DuckDBPyConnection) -> None:
        """Keep a connection for the next question; those that were given longest ago are closed."""
        with self._lock:
            former = self._connections.pop(key, None)
            self._connections[key] = connection
            left = [] if former is None else [former]
            while len(self._connections) > MOST_CONNECTIONS:
                left.append(self._connections.popitem(last=False)[1])
        for one in left:
            one.close()

    def young_buckets(self, folder: Path, manifest: Manifest, statistics: Sequence[str], span: Span | None) -> pa.Table:
        """Return the single steps of the files that are merged into no bucket yet, as rows of `YOUNG`, without those that a
        later attempt repeated. StoreError where a file cannot be read.

        statistics: which are asked for; the others are null. span: first and last step that are; None: all.
        """
        widest = WIDTHS[-1]
        asked = manifest if span is None else manifest.between(span[0] // widest * widest, (span[1] // widest + 1) * widest)
        young = [one for one in asked.of("moments") if one.level == 0]
        made = [self._of(folder, one, manifest.attempts, tuple(statistics)) for one in young]
        return pa.concat_tables([SCHEMAS[YOUNG].empty_table(), *made])

    def _of(self, folder: Path, file: HistoryFile, attempts: Attempts, statistics: tuple[str, ...]) -> pa.Table:
        key = str(folder), file, attempts, statistics
        with self._lock:
            if (kept := self._buckets.get(key)) is not None:
                self._buckets.move_to_end(key)
                return kept
        columns = (*ORDER, "nans", "pos_infs", "neg_infs", *statistics)
        rows = _standing(read_file(folder / file.name, "moments", columns), attempts)
        made = _whole(buckets_of(rows, WIDTHS[0], statistics))
        with self._lock:
            self._buckets[key] = made
            while sum(one.nbytes for one in self._buckets.values()) > MOST_BYTES and len(self._buckets) > 1:
                self._buckets.popitem(last=False)
        return made


def _whole(buckets: Columns) -> pa.Table:
    """Return buckets of some statistics as rows of `YOUNG`: of the others no step has a value."""
    num = len(buckets["step"])
    lacking = [field.name for field in SCHEMAS[YOUNG] if field.name not in buckets]
    others = {name: np.zeros(num, np.int64) if name.endswith("_num") else np.full(num, np.nan) for name in lacking}
    return table_of(YOUNG, {**buckets, **others}).replace_schema_metadata(None)


def _standing(rows: Columns, attempts: Attempts) -> Columns:
    """Return the rows that no later attempt repeated: those that `sql_views` shows."""
    stands = np.full(len(rows["step"]), not attempts)
    firsts = sorted(attempts)
    for at, (attempt, _) in enumerate(firsts):
        later = min((first for _, first in firsts[at + 1 :]), default=None)
        stands |= (rows["attempt"] == attempt) & (True if later is None else rows["step"] < later)
    return rows if stands.all() else {name: values[stands] for name, values in rows.items()}
