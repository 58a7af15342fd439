"""`sentinel.open`: recorded runs in notebooks and scripts, found as the command line finds them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sentinel.cli.places import find_run
from sentinel.errors import ConfigError

if TYPE_CHECKING:
    from sentinel.history.opened_runs import OpenedRuns
    from sentinel.history.remote_run import RunPlace


def open(*runs: str | os.PathLike[str]) -> OpenedRuns:
    """Return recorded runs to be asked: each a path, a name in the directory of runs, or a URL (`s3://bucket/runs/NAME`,
    `gs://`, `abfs://`, ...) under which its history was pushed. None: the one last written to.

    Nothing is written, and a run that is at work may be asked as well. ConfigError, with the runs that are known, where
    there is none of a name, or for a URL with credentials in it. Loads pyarrow, and DuckDB with the first question that
    needs it; no torch.
    """
    from sentinel.history.opened_runs import OpenedRuns

    return OpenedRuns(find_histories([os.fspath(one) for one in runs]))


def find_histories(given: Sequence[str]) -> dict[str, RunPlace]:
    """Return name -> where it lies of the runs that are meant: a URL as it is, others as `find_run` finds them; of none the
    newest.

    ConfigError when there is none, or two have one name.
    """
    from sentinel.history.remote_run import RemoteRun
    from sentinel.history.store_folder import is_url

    found: dict[str, RunPlace] = {}
    for one in given or (None,):
        place: RunPlace = RemoteRun(one) if one is not None and is_url(one) else find_run(one)
        other = found.setdefault(place.name, place)
        if str(other) != str(place):
            raise ConfigError(f'two runs are called "{place.name}": {other} and {place}; rename the directory of one')
    return found
