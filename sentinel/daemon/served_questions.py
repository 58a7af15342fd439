"""The questions to what the runs that are served have measured, and whom each goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.daemon_health import DaemonHealth
from sentinel.daemon.history_api import HistoryQueries, HistoryRequest
from sentinel.daemon.http.daemon_api import UnknownRun
from sentinel.daemon.pipeline_api import PipelineQueries, PipelineRequest
from sentinel.daemon.report_process import ReportFile, ReportQueries
from sentinel.daemon.rules_api import RuleQueries, WhatIfRequest
from sentinel.daemon.series_api import SeriesQueries, SeriesRequest
from sentinel.daemon.serving import ServedRun
from sentinel.daemon.trace_api import TraceQueries, TraceRequest
from sentinel.judge.packs import RulePacks


class ServedQuestions:
    """The `RunQuestions` of HTTP over the runs that are served."""

    def __init__(self, health: DaemonHealth, packs: RulePacks, config: ConfigInForce) -> None:
        """health: says which runs are served."""
        self._health, self._config = health, config
        self._series, self._history, self._pipeline = SeriesQueries(), HistoryQueries(), PipelineQueries()
        self._rules, self._traces, self._reports = RuleQueries(packs), TraceQueries(), ReportQueries()

    def series(self, request: SeriesRequest) -> dict[str, Any]:
        """Return values of tensors, groups of them or scalars: see `SeriesQueries`."""
        return self._series.answer(chosen(self._health.runs, request.run), request)

    def history(self, request: HistoryRequest) -> dict[str, Any]:
        """Return what the history of a run holds."""
        return self._history.held(self._run_dir(request.run), request)

    def history_series(self, request: HistoryRequest) -> dict[str, Any]:
        """Return single series over steps, out of the history."""
        return self._history.series(self._run_dir(request.run), request)

    def heatmap(self, request: HistoryRequest) -> dict[str, Any]:
        """Return one statistic of many tensors over steps, out of the history."""
        return self._history.heatmap(self._run_dir(request.run), request)

    def traces(self, request: TraceRequest) -> dict[str, Any]:
        """Return pictures of tensors that the ranks of a run have made."""
        return self._traces.traced(self._run_dir(request.run), request)

    def vectors(self, request: HistoryRequest) -> dict[str, Any]:
        """Return the value of each expert, or of each head, over steps, out of the history."""
        return self._history.vectors(self._run_dir(request.run), request)

    def pipeline(self, request: PipelineRequest) -> dict[str, Any]:
        """Return a step as its ranks ran it, with what was found in it in the causal order."""
        [one] = chosen(self._health.runs, request.run)
        return self._pipeline.answer(one, request, one.status.metrics().judged_step)

    def report(self, run: str, incident: str | None) -> ReportFile:
        """Return the post-mortem of a run, or of one of its incidents."""
        [one] = chosen(self._health.runs, run)
        return self._reports.report(one, incident, self._config.config.notify.links)

    def divergence(self, runs: Sequence[str], statistic: str) -> dict[str, Any]:
        """Return where two runs diverge, out of their histories."""
        return self._history.divergence({run: self._run_dir(run) for run in runs}, statistic)

    def rules(self, run: str) -> dict[str, Any]:
        """Return the rules in force, and what each said of a run."""
        [one] = chosen(self._health.runs, run)
        return self._rules.rules(one)

    def what_if(self, request: WhatIfRequest) -> dict[str, Any]:
        """Return what a rule with other numbers would have said of a run."""
        [one] = chosen(self._health.runs, request.run)
        return self._rules.what_if(one, request, self._config.config.judging)

    def marks(self, run: str) -> list[dict[str, Any]]:
        """Return what happened to a run beside its values, each at its step."""
        [one] = chosen(self._health.runs, run)
        marks: list[dict[str, Any]] = msgspec.to_builtins(one.marks())
        return marks

    def _run_dir(self, run: str) -> Path:
        [one] = chosen(self._health.runs, run)
        return one.paths.run_dir


def chosen(runs: Mapping[str, ServedRun], run: str | None) -> list[ServedRun]:
    """Return the run of a name; None: all of them, by name. UnknownRun."""
    if run is None:
        return [one for _, one in sorted(runs.items())]
    if run not in runs:
        known = ", ".join(sorted(runs)[:20]) or "none"
        raise UnknownRun(f'run "{run[:200]}": expected one that is served here; known: {known}')
    return [runs[run]]
