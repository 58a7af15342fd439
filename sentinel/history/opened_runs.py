"""OpenedRuns: recorded runs as notebooks and scripts ask them. Read only; an answer is of what was there when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from sentinel.aggregate import matches, nearest_names
from sentinel.errors import ConfigError, StoreError
from sentinel.history import found_records, histogram_question, run_summary, series_question, trace_question
from sentinel.history.answer_table import AnswerTable
from sentinel.history.config import FOLDER
from sentinel.history.histogram_question import HistogramQuestion
from sentinel.history.manifest import MANIFEST
from sentinel.history.plots import plot_anomalies, plot_histogram, plot_incidents, plot_series
from sentinel.history.question_cache import QuestionCache
from sentinel.history.questions import answered, asking
from sentinel.history.remote_run import RemoteRun, RunPlace, manifest_of, once_more_if_vanished
from sentinel.history.series_question import BOUNDS, MOST_STEPS, SeriesQuestion
from sentinel.history.sql_views import Span
from sentinel.history.table_schemas import WIDTHS
from sentinel.history.trace_question import TraceQuestion, TraceTable
from sentinel.known_words import nearest

if TYPE_CHECKING:
    import duckdb

Answer = TypeVar("Answer")

ALL = (None, None)
_MET = (
    f"(SELECT run, series, sum(num_steps)::BIGINT AS num_steps, max(last_step) AS last_step, sum(nans)::BIGINT AS nans, "
    f"sum(infs)::BIGINT AS infs, sum(bad_steps)::BIGINT AS bad_steps, min(mean_min) AS min, max(mean_max) AS max, "
    f"arg_max(mean_last, last_step) AS last FROM moments_{WIDTHS[-1]} GROUP BY run, series)"
)
"""What the widest buckets say of each series."""


class OpenedRuns:
    """One recorded run, or several that are asked together: every answer has a column `run`.

    A run that is being written may be asked again and again: each answer has every step once that was published then.
    """

    def __init__(self, runs: Mapping[str, RunPlace]) -> None:
        """runs: name -> directory, or what a URL leads to."""
        self.places = dict(runs)
        """Name of each run -> where it lies."""
        self._cache = QuestionCache()

    def series(
        self,
        name: str,
        statistic: str | None = None,
        *,
        kind: str | None = None,
        steps: tuple[int | None, int | None] = ALL,
        points: int | None = MOST_STEPS,
    ) -> AnswerTable:
        """Return a statistic of tensors, or scalars, over the steps: a row for each step, or for a bucket of steps.

        name: of a tensor or scalar, or a glob of such (`layers.*.mlp.*`). kind: `wgrad`, `param`, ...; None: all that
        have the name. steps: first and last, both included; None: no bound. points: about the most rows of a series:
        past it buckets of 16, 256 and 4,096 steps are taken; None: single steps wherever they are kept.

        statistic: mean, std, min, max, skew, kurtosis, var, rms, absmax, norm, count, zeros; of a scalar `value`. None:
        `value`, or of a tensor `std`, of one of a single element `mean`. Of var, rms and absmax the least and greatest of a
        bucket whose steps are no longer kept are bounds that hold every value, and of norm, count and zeros nothing is
        known there; `is_bound` says so.

        A row has `min`, `avg`, `max` and `last` of its `num_steps` steps from `step` to `last_step`, all the same where
        it is one step; null where none was finite. `nans` and `infs` count elements, `bad_steps` the steps that had any.
        """
        question = SeriesQuestion(name=name, statistic=statistic, kind=kind, steps=_span("series", steps), points=points)

        def answer(connection: duckdb.DuckDBPyConnection) -> pa.Table:
            # Read behind the manifest that the questions see: an attempt begins at most earlier there.
            attempts = {run: manifest_of(place).attempts for run, place in self.places.items()}
            return series_question.answer(question, connection, attempts)

        rows = self._asked(answer, question.span, self._cache)
        return AnswerTable(rows, plot_series, _note(rows))

    def tensors(self, name: str = "*", *, kind: str | None = None) -> AnswerTable:
        """Return the tensors that were measured: a row for each name, kind and place, with how many steps have it.

        name: a glob. `bad_steps` are steps in which something in it was not finite, `nans` and `infs` its elements.
        """
        return self._listed(
            "tensors",
            "SELECT s.run, s.name, s.kind, s.place, s.dtype, s.num_elements, s.pp_stage, s.vpp_stage, s.depth, "
            f"m.num_steps, m.last_step, m.nans, m.infs, m.bad_steps FROM series s LEFT JOIN {_MET} m USING (run, series) "
            "WHERE s.kind <> 'scalar' ORDER BY s.run, s.depth, s.site_pos, s.name, s.kind, s.place",
            name,
            kind,
        )

    def scalars(self, name: str = "*") -> AnswerTable:
        """Return the scalars that were logged: a row for each name, with its least, greatest and last value."""
        return self._listed(
            "scalars",
            "SELECT s.run, s.name, m.num_steps, m.last_step, m.min, m.max, m.last, m.nans, m.infs, m.bad_steps "
            f"FROM series s LEFT JOIN {_MET} m USING (run, series) WHERE s.kind = 'scalar' ORDER BY s.run, s.name",
            name,
            None,
        )

    def anomalies(
        self,
        *,
        rule: str | None = None,
        severity: str | None = None,
        steps: tuple[int | None, int | None] = ALL,
    ) -> AnswerTable:
        """Return what the rules found: a row for each anomaly, by attempt and step. It needs no history.

        rule: of this rule alone. severity: `info`, `warning` or `critical`, and worse. steps: first and last, both included.
        """
        wanted = _span("anomalies", steps)
        rows = once_more_if_vanished(
            lambda: found_records.anomalies(self.places, rule=rule, severity=severity, steps=wanted)
        )
        return AnswerTable(rows, plot_anomalies)

    def incidents(self, *, state: str | None = None) -> AnswerTable:
        """Return the incidents as they stand: the open ones first, the gravest of them before. It needs no history.

        state: `open`, `resolved`, `settled`, `ended` or `closed` alone.
        """
        rows = once_more_if_vanished(lambda: found_records.incidents(self.places, state=state))
        return AnswerTable(rows, plot_incidents)

    def histogram(self, name: str, *, step: int | None = None, kind: str | None = None) -> AnswerTable:
        """Return the histograms that ranks recorded of a tensor: a row for each bin, with the `count` of its elements.

        name: a tensor's, or a glob. step: None: the newest that has one. A bin is from `low` to `high`. They lie in the
        spool, which keeps the newest steps, and of a run in a store in its history; ConfigError says which there are where
        none is of that name and step. It needs no history of a run that lies on a disk.
        """
        question = HistogramQuestion(name=name, step=step, kind=kind)
        rows = once_more_if_vanished(lambda: histogram_question.answer(question, self.places))
        return AnswerTable(rows, plot_histogram)

    def traces(
        self,
        name: str = "*",
        *,
        kind: str | None = None,
        steps: tuple[int | None, int | None] = ALL,
        rank: int | None = None,
    ) -> TraceTable:
        """Return the pictures of tensors that ranks made: a row for each, and `arrays()` has them as numpy arrays.

        name: a tensor's on its rank, or a glob. kind: `activation`, `tokens`, ...; None: all. steps: first and last, both
        included. rank: of this one alone. They lie in the rings of the ranks, which keep the newest steps. `part` is empty
        for the picture itself, and names what belongs to it (`indices` of `top_k`). It needs no history.
        """
        if rank is not None and (isinstance(rank, bool) or not hasattr(rank, "__index__")):
            raise ConfigError(f"traces: rank must be a whole number or None, got {rank!r}")
        question = TraceQuestion(name=name, kind=kind, steps=_span("traces", steps), rank=rank)
        here = {run: place for run, place in self.places.items() if not isinstance(place, RemoteRun)}
        if away := sorted(self.places.keys() - here.keys()):
            raise ConfigError(
                f"traces: expected runs on a disk, got {', '.join(away)} in a store; rings of ranks are not pushed"
            )
        return trace_question.answer(question, here)

    def sql(self, query: str) -> AnswerTable:
        """Return the answer to a query, as `sentinel sql` gives it: the same views, no other file, no network.

        ConfigError where it cannot be answered.
        """
        # What a query of anybody's leaves in a connection, the next one must not find.
        return AnswerTable(self._asked(lambda connection: answered(connection, query), cache=None))

    def __repr__(self) -> str:
        return run_summary.as_text(self.places)

    def _repr_html_(self) -> str:
        return run_summary.as_html(self.places)

    def _asked(
        self,
        question: Callable[[duckdb.DuckDBPyConnection], Answer],
        span: Span | None = None,
        cache: QuestionCache | None = None,
    ) -> Answer:
        for place in self.places.values():
            if not isinstance(place, RemoteRun) and not (place / FOLDER / MANIFEST).is_file():
                raise StoreError(
                    f"{place}: expected a run with a history, there is none in {place / FOLDER}; the daemon writes "
                    "it unless its configuration says history: {enabled: false}. Without it anomalies(), incidents(), "
                    "histogram(...) and traces(...) work, and sentinel export reads the spool"
                )

        def answer() -> Answer:
            with asking(self.places, span=span, cache=cache) as connection:
                return question(connection)

        return once_more_if_vanished(answer)

    def _listed(self, what: str, query: str, glob: str, kind: str | None) -> AnswerTable:
        rows = self._asked(lambda connection: answered(connection, query), cache=self._cache)
        names, kinds = rows.column("name").to_pylist(), rows.column("kind").to_pylist() if kind is not None else []
        if kind is not None and kinds and kind not in kinds:
            raise ConfigError(f'{what}: unknown kind "{kind}"{nearest(kind, sorted(set(kinds)))}')
        is_met = [glob == "*" or matches(glob, name) for name in names]
        if names and not any(is_met):
            near = ", ".join(f'"{one}"' for one in nearest_names([glob], names))
            raise ConfigError(f'{what}: "{glob}" matches no name; nearest: {near}')
        if kind is not None:
            is_met = [one and other == kind for one, other in zip(is_met, kinds, strict=True)]
        return AnswerTable(rows.filter(pa.array(is_met, pa.bool_())))


def _span(what: str, steps: Any) -> tuple[int | None, int | None]:
    is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2
    if not is_pair or any(one is not None and (isinstance(one, bool) or not hasattr(one, "__index__")) for one in steps):
        raise ConfigError(f"{what}: steps must be (first, last), both included, each a whole number or None, got {steps!r}")
    first, last = (None if one is None else one.__index__() for one in steps)
    return first, last


def _note(rows: pa.Table) -> str:
    """Return what the rows of series do not say by themselves."""
    found = set(pc.unique(rows.filter(rows.column("is_bound")).column("statistic")).to_pylist())
    said = []
    if bounds := sorted(found & BOUNDS.keys()):
        said.append(f"of {', '.join(bounds)} min and max are bounds where is_bound, and avg is that of the averages")
    if single := sorted(found - BOUNDS.keys()):
        said.append(f"of {', '.join(single)} nothing is known where is_bound: only single steps are kept of it")
    return "; ".join(said)
