"""MLflow: a run of its own for each run, with metrics, incidents as tags, and what was found as artifacts."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sentinel.mirrors.lacking_library import lacking_library
from sentinel.mirrors.mirror import MirrorBatch, MirroredIncident, MirrorParts
from sentinel.mirrors.mirror_select import MirrorSelect
from sentinel.printable import printable

KEY_TAG, LAST_TAG, INCIDENT_TAG = "sentinel.key", "sentinel.last_step", "sentinel.incident."
"""Tags: which run it is, `ATTEMPT STEP` of the newest step that is there, and what each incident says."""
ONSETS = "anomalies/onsets"
AT_ONCE = 1000
"""Metrics that MLflow takes in a request. Source: its REST API, `runs/log-batch`."""
MOST_INCIDENTS = 80
"""Incidents that are tags, the first ones; all of them are in the artifact. MLflow takes 100 tags in a request."""
MOST_CHARACTERS = 240
_UNFIT = re.compile(r"[^A-Za-z0-9_\-./ ]")


class MlflowConfig(msgspec.Struct, frozen=True, kw_only=True, tag="mlflow", forbid_unknown_fields=True):
    """Runs of MLflow."""

    name: str = "mlflow"
    """Name in metrics and messages."""

    tracking_uri: str = ""
    """Address of the tracking server, `http://mlflow:5000`; empty: as MLflow itself finds it, `MLFLOW_TRACKING_URI` first.
    Names and keys stand in MLflow's own environment variables."""

    experiment: str = "sentinel"
    """Experiment of the runs; made where there is none."""

    select: MirrorSelect = MirrorSelect()
    """What is mirrored."""

    def problem(self, environ: Mapping[str, str]) -> str:
        """Return that mlflow is not installed; empty: it is."""
        return lacking_library("mlflow", "mlflow")

    def build(self, parts: MirrorParts) -> MlflowMirror:
        """Return the mirror of a run, which begins or goes on in MLflow."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.tracking_uri or None)
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self.experiment)
        run_id, key = parts.mark, parts.key
        if not run_id and (known := client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)):
            run_id = known[0].info.run_id
        if not run_id:
            tags = {KEY_TAG: key, **{f"sentinel.label.{name}": value for name, value in parts.labels.items()}}
            run_id = client.create_run(experiment, run_name=parts.run, tags=tags).info.run_id
        return MlflowMirror(client, run_id, parts)


class MlflowMirror:
    """Logs metrics in batches, each with the step that is its last: what MLflow has already is not sent again.

    The mark is the id of the run in MLflow.
    """

    def __init__(self, client: Any, run_id: str, parts: MirrorParts) -> None:
        """client: MLflow's. run_id: of a run that is there."""
        from mlflow.entities import Metric, RunTag

        self._metric, self._tag = Metric, RunTag
        self._client, self._id, self._parts = client, run_id, parts
        tags = client.get_run(run_id).data.tags
        attempt, _, step = tags.get(LAST_TAG, "").partition(" ")
        self._last = (int(attempt), int(step)) if attempt.isdigit() and step.isdigit() else (-1, -1)
        self._incidents = {name for name in tags if name.startswith(INCIDENT_TAG)}

    def write(self, batch: MirrorBatch) -> str:
        """Log a batch. Whatever MLflow raises where it does not take it."""
        metrics: list[Any] = []
        last = self._last
        for step in batch.steps:
            if (step.attempt, step.step) <= self._last:
                continue
            if metrics and len(metrics) + len(step.values) > AT_ONCE:
                self._log(metrics, last)
                metrics = []
            at = int(step.time * 1000)
            metrics += [self._metric(_key(name), value, at, step.step) for name, value in step.values]
            last = step.attempt, step.step
        self._log(metrics, last)
        if batch.anomalies:
            times = {one.step: int(one.time * 1000) for one in batch.anomalies}
            counted = Counter(one.step for one in batch.anomalies)
            found = [self._metric(ONSETS, float(count), times[step], step) for step, count in counted.items()]
            for first in range(0, len(found), AT_ONCE):
                self._client.log_batch(self._id, metrics=found[first : first + AT_ONCE])
        self._tell(batch.incidents)
        return self._id

    def close(self, *, is_over: bool) -> None:
        """End the run in MLflow, with the files of anomalies and incidents as artifacts, where it is over."""
        if is_over:
            for path in self._parts.found_files:
                folder = path.parent.relative_to(self._parts.run_dir)
                self._client.log_artifact(self._id, str(path), str("sentinel" / folder))
            self._client.set_terminated(self._id)

    def _log(self, metrics: Sequence[Any], last: tuple[int, int]) -> None:
        """Log the metrics of some steps; one step of more than `AT_ONCE` in several requests, the last of which says so."""
        for first in range(0, len(metrics), AT_ONCE):
            part = metrics[first : first + AT_ONCE]
            is_whole = first + AT_ONCE >= len(metrics)
            tags = [self._tag(LAST_TAG, f"{last[0]} {last[1]}")] if is_whole else []
            self._client.log_batch(self._id, metrics=part, tags=tags)
        self._last = last

    def _tell(self, incidents: Sequence[MirroredIncident]) -> None:
        newest = {f"{INCIDENT_TAG}{one.incident.id}": one.incident for one in incidents}
        for name, one in newest.items():
            if name in self._incidents or len(self._incidents) < MOST_INCIDENTS:
                self._incidents.add(name)
                words = f"{one.severity.value}, {one.state}, steps {one.steps}: {one.title}; suspected: {one.suspected}"
                self._client.set_tag(self._id, name, printable(words)[:4000])


def _key(name: str) -> str:
    """Return a name as MLflow takes it for a metric: other characters are `_`, and a hash tells apart what becomes alike."""
    plain = "/".join(part for part in _UNFIT.sub("_", name).split("/") if part.strip(". "))
    if plain == name and len(plain) <= MOST_CHARACTERS:
        return plain
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{plain[: MOST_CHARACTERS - 9]}-{digest}"
