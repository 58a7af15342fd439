"""What can be asked of what runs have measured, and of the rules that judged it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sentinel.daemon.history_api import HistoryRequest
from sentinel.daemon.pipeline_api import PipelineRequest
from sentinel.daemon.report_process import ReportFile
from sentinel.daemon.rules_api import WhatIfRequest
from sentinel.daemon.series_api import SeriesRequest
from sentinel.daemon.trace_api import TraceRequest


class RunQuestions(Protocol):
    """What can be asked of the data of runs. Every method may be called from any thread, and may take seconds."""

    def series(self, request: SeriesRequest) -> dict[str, Any]:
        """Return {"series": [{"run", "name", "kind", "statistic", "points": [[attempt, step, value], ...]}, ...], ...}.

        Seconds where steps are asked for that only the spool has; Busy when it cannot now.
        """
        ...

    def history(self, request: HistoryRequest) -> dict[str, Any]:
        """Return what the history of a run holds: steps, kinds, statistics, scalars and tensors.

        UnknownRun; SentinelError where there is no history, or DuckDB is not installed; Busy while another one is asked.
        """
        ...

    def history_series(self, request: HistoryRequest) -> dict[str, Any]:
        """Return single series in columns of steps: least, greatest, mean, last, and what was not finite."""
        ...

    def heatmap(self, request: HistoryRequest) -> dict[str, Any]:
        """Return one statistic of many tensors over steps."""
        ...

    def traces(self, request: TraceRequest) -> dict[str, Any]:
        """Return pictures of tensors that the ranks of a run have made: see `TraceQueries`."""
        ...

    def vectors(self, request: HistoryRequest) -> dict[str, Any]:
        """Return the value of each expert, or of each head, over steps, out of the history."""
        ...

    def pipeline(self, request: PipelineRequest) -> dict[str, Any]:
        """Return a step as its ranks ran it, with what was found in it in the causal order.

        UnknownRun; SentinelError for an incident that the run does not have; Busy while another step is looked up.
        """
        ...

    def report(self, run: str, incident: str | None) -> ReportFile:
        """Return the post-mortem of a run, or of one of its incidents, as a file; it takes seconds.

        UnknownRun; SentinelError for an incident that the run does not have, and where it takes too long; Busy while another
        is written.
        """
        ...

    def rules(self, run: str) -> dict[str, Any]:
        """Return the rules in force, what each said of a run, and what it is blind to. UnknownRun."""
        ...

    def what_if(self, request: WhatIfRequest) -> dict[str, Any]:
        """Return what a rule with other numbers would have said of a run; it takes seconds.

        UnknownRun; SentinelError for a change that no pack may have, and where the run cannot be judged again; Busy while
        another is asked.
        """
        ...

    def divergence(self, runs: Sequence[str], statistic: str) -> dict[str, Any]:
        """Return where two runs diverge, out of their histories; it may take seconds. As `history` else."""
        ...

    def marks(self, run: str) -> list[dict[str, Any]]:
        """Return restarts, checkpoints, changes of the rules and commands, in the order of steps. UnknownRun."""
        ...
