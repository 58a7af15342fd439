"""`sentinel.open`: recorded runs in notebooks and scripts, found as the command line finds them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sentinel.cli.places import find_runs

if TYPE_CHECKING:
    from sentinel.history.opened_runs import OpenedRuns


def open(*runs: str | os.PathLike[str]) -> OpenedRuns:
    """Return recorded runs to be asked: each a path, or a name in the directory of runs. None: the one last written to.

    Nothing is written, and a run that is at work may be asked as well. ConfigError, with the runs that are known, where
    there is none of a name. Loads pyarrow, and DuckDB with the first question that needs it; no torch.
    """
    from sentinel.history.opened_runs import OpenedRuns

    return OpenedRuns(find_runs([os.fspath(one) for one in runs]))
