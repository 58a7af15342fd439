"""OpenTelemetry: gauges and events of a run, posted to a collector as OTLP over HTTP."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.errors import ConfigError
from sentinel.mirrors.chosen_values import STEP_TIME
from sentinel.mirrors.lacking_library import lacking_library
from sentinel.mirrors.mirror import MirrorBatch, MirroredIncident, MirroredStep, MirrorError, MirrorParts
from sentinel.mirrors.mirror_select import MirrorSelect
from sentinel.printable import printable
from sentinel.report.sinks.delivery import HttpPoster, check_url
from sentinel.report.sinks.secret import read_secret
from sentinel.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("sentinel.mirrors")

POINTS_AT_ONCE = 20_000
"""Points of a request: 2 MB, where collectors take 20 MiB unless they are told otherwise."""
OWN_METRICS = {
    "loss": ("sentinel.loss", "1"), "grad_norm": ("sentinel.grad_norm", "1"), "lr": ("sentinel.learning_rate", "1"),
    STEP_TIME: ("sentinel.step.duration", "s"),
}  # fmt: skip
"""Series -> (metric, unit) of those that have one of their own."""
OTHER_METRIC = "sentinel.series"
"""Metric of all other series; its attribute `series` is the name."""
STEP_METRIC = "sentinel.step"
_SEVERITY_NUMBERS = {Severity.INFO: 9, Severity.WARNING: 13, Severity.CRITICAL: 17}
"""INFO, WARN and ERROR. Source: opentelemetry.proto.logs.v1.SeverityNumber."""


class OtlpConfig(msgspec.Struct, frozen=True, kw_only=True, tag="otlp", forbid_unknown_fields=True):
    """Metrics and events for an OpenTelemetry collector, by OTLP over HTTP."""

    endpoint: str = "http://localhost:4318"
    """Address of the collector; `/v1/metrics` and `/v1/logs` are added to it."""

    name: str = "otlp"
    """Name in metrics and messages."""

    service: str = "sentinel"
    """`service.name` of all that is sent; the run is `sentinel.run`."""

    headers_file: str = ""
    """File of one line with headers of each request, `name=value,name=value`: keys of a service."""

    headers_env: str = ""
    """Environment variable with the same."""

    ca_file: str = ""
    """Certificate authorities to trust, a PEM file; empty: the usual ones."""

    timeout_s: float = 10.0
    """For all of a request."""

    select: MirrorSelect = MirrorSelect()
    """What is mirrored."""

    def __post_init__(self) -> None:
        check_url(self.endpoint, f"mirrors.{self.name}.endpoint")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"mirrors.{self.name}.timeout_s must be above 0 and finite, got {self.timeout_s}")

    def problem(self, environ: Mapping[str, str]) -> str:
        """Return that the messages of OTLP are not installed, or what is named and is not there; empty: all is."""
        try:
            self._headers(environ)
        except ConfigError as error:
            return str(error).removeprefix(f"mirrors.{self.name}.")
        if self.ca_file and not Path(self.ca_file).is_file():
            return f"ca_file: {self.ca_file}: expected a PEM file, found none"
        return lacking_library("opentelemetry.proto", "otlp")

    def build(self, parts: MirrorParts) -> OtlpMirror:
        """Return the mirror of a run. ConfigError for headers that are none."""
        poster = HttpPoster(timeout_s=self.timeout_s, ca_file=self.ca_file)
        resource = {"service.name": self.service, "service.version": VERSION, **parts.labels, "sentinel.run": parts.run}
        return OtlpMirror(self.endpoint.rstrip("/"), self._headers(parts.environ), poster, resource)

    def _headers(self, environ: Mapping[str, str]) -> dict[str, str]:
        path = f"mirrors.{self.name}.headers"
        given = [one for one in read_secret(path, self.headers_file, self.headers_env, environ).split(",") if one.strip()]
        for one in given:
            if not one.partition("=")[0].strip() or "=" not in one or not one.isprintable():
                raise ConfigError(f"{path}: expected name=value,name=value, got other text of {len(one)} characters")
        return {name.strip(): value.strip() for name, _, value in (one.partition("=") for one in given)}


class OtlpMirror:
    """Posts a batch as metrics, then as logs: who is asked again takes a point of the same time twice, and an event once."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], poster: HttpPoster, resource: Mapping[str, str]) -> None:
        from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
        from opentelemetry.proto.common.v1 import common_pb2

        self._new_metrics: Callable[[], Any] = metrics_service_pb2.ExportMetricsServiceRequest
        self._new_logs: Callable[[], Any] = logs_service_pb2.ExportLogsServiceRequest
        self._key_value: Callable[..., Any] = common_pb2.KeyValue
        self._endpoint, self._headers, self._poster, self._resource = endpoint, dict(headers), poster, dict(resource)
        self._said = ""

    def write(self, batch: MirrorBatch) -> str:
        """Post a batch. MirrorError where the collector does not take it."""
        waiting: list[MirroredStep] = []
        num_points = 0
        for step in batch.steps:
            if waiting and num_points + len(step.values) > POINTS_AT_ONCE:
                self._post("metrics", self._metrics(waiting))
                waiting, num_points = [], 0
            waiting.append(step)
            num_points += len(step.values)
        if waiting:
            self._post("metrics", self._metrics(waiting))
        if batch.anomalies or batch.incidents:
            self._post("logs", self._logs(batch))
        return ""

    def close(self, *, is_over: bool) -> None:
        """Do nothing: no connection is held that would have to be ended."""

    def _post(self, what: str, request: Any) -> None:
        headers = {**self._headers, "Content-Type": "application/x-protobuf"}
        done = self._poster.post(f"{self._endpoint}/v1/{what}", request.SerializeToString(), headers, time.time())
        if done.outcome != "sent":
            raise MirrorError(f"{what} are not taken: {printable(done.detail)}")
        if done.answer and done.answer != self._said:
            # Of what is taken whole the answer is empty.
            self._said = done.answer
            log.warning("%s: a part of the %s was rejected: %s", self._endpoint, what, printable(done.answer))

    def _metrics(self, steps: Sequence[MirroredStep]) -> Any:
        request = self._new_metrics()
        scope = self._scope(request.resource_metrics.add(), "scope_metrics")
        metrics: dict[str, Any] = {}
        for step in steps:
            attributes = {"attempt": step.attempt}
            for name, value in (*step.values, (STEP_METRIC, float(step.step))):
                metric, unit = (name, "1") if name == STEP_METRIC else OWN_METRICS.get(name, (OTHER_METRIC, "1"))
                if metric not in metrics:
                    metrics[metric] = scope.metrics.add(name=metric, unit=unit)
                point = metrics[metric].gauge.data_points.add(time_unix_nano=_nanoseconds(step.time), as_double=value)
                named = {"series": name} if metric == OTHER_METRIC else {}
                point.attributes.extend(self._attributes({**attributes, **named}))
        return request

    def _logs(self, batch: MirrorBatch) -> Any:
        request = self._new_logs()
        scope = self._scope(request.resource_logs.add(), "scope_logs")
        for one in (*map(_of_anomaly, batch.anomalies), *map(_of_incident, batch.incidents)):
            record = scope.log_records.add(
                time_unix_nano=_nanoseconds(one.time), observed_time_unix_nano=time.time_ns(), event_name=one.event,
                severity_number=_SEVERITY_NUMBERS[one.severity], severity_text=one.severity.value.upper(),
            )  # fmt: skip
            record.body.string_value = printable(one.body)
            record.attributes.extend(self._attributes(one.attributes))
        return request

    def _scope(self, of_resource: Any, field: str) -> Any:
        of_resource.resource.attributes.extend(self._attributes(self._resource))
        scope = getattr(of_resource, field).add()
        scope.scope.name, scope.scope.version = "sentinel", VERSION
        return scope

    def _attributes(self, given: Mapping[str, str | int | float | None]) -> Iterator[Any]:
        for key, value in given.items():
            if value is not None and value != "":
                found = self._key_value(key=key)
                field = (
                    "string_value" if isinstance(value, str) else "int_value" if isinstance(value, int) else "double_value"
                )
                setattr(found.value, field, printable(value) if isinstance(value, str) else value)
                yield found


class _Event(msgspec.Struct):
    event: str
    time: float
    severity: Severity
    body: str
    attributes: dict[str, str | int | float | None]


def _of_anomaly(one: Anomaly) -> _Event:
    return _Event(
        "sentinel.anomaly", one.time, one.severity, one.message or f"{one.rule}: {one.tag_name}",
        {
            "sentinel.anomaly.id": one.id, "attempt": one.attempt, "step": one.step, "rule": one.rule,
            "detector": one.detector, "kind": one.kind, "series": one.tag_name, "statistic": one.statistic,
            "rank": one.rank, "value": one.value, "value_text": one.value_text, "baseline": one.baseline, "score": one.score,
        },
    )  # fmt: skip


def _of_incident(mirrored: MirroredIncident) -> _Event:
    one = mirrored.incident
    return _Event(
        f"sentinel.incident.{mirrored.change}", one.time, one.severity, one.title,
        {
            "sentinel.incident.id": one.id, "revision": one.revision, "attempt": one.attempt, "state": one.state,
            "opened_step": one.opened_step, "last_step": one.last_step, "num_anomalies": one.num_members,
            "suspected": one.suspected, "root": one.root_name, "to_do": one.to_do,
        },
    )  # fmt: skip


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)
