"""What a collector is posted, read back by OpenTelemetry's own messages."""

from __future__ import annotations

import http.server
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from sentinel.errors import ConfigError
from sentinel.mirrors import otlp_mirror
from sentinel.mirrors.mirror import MirrorBatch, MirroredIncident, MirroredStep, MirrorError, MirrorParts
from sentinel.mirrors.otlp_mirror import OtlpConfig

from ..support.anomalies import a_nan, an_excursion, an_incident


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP; answers as a test says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.logs: list[ExportLogsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.status, self.answer = 200, b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def points(self) -> list[tuple[str, dict[str, Any], int, float]]:
        """(metric, attributes, time in ns, value)"""
        return [
            (metric.name, plain(point.attributes), point.time_unix_nano, point.as_double)
            for request in self.metrics
            for of_resource in request.resource_metrics
            for scope in of_resource.scope_metrics
            for metric in scope.metrics
            for point in metric.gauge.data_points
        ]

    @property
    def records(self) -> list[Any]:
        return [
            record
            for request in self.logs
            for of_resource in request.resource_logs
            for scope in of_resource.scope_logs
            for record in scope.log_records
        ]


class _Request(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(server, Collector)
        server.headers.append(dict(self.headers))
        if server.status == 200 and self.path == "/v1/metrics":
            server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        elif server.status == 200 and self.path == "/v1/logs":
            server.logs.append(ExportLogsServiceRequest.FromString(body))
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(server.answer)))
        self.end_headers()
        self.wfile.write(server.answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def parts(environ: dict[str, str] | None = None) -> MirrorParts:
    return MirrorParts(run="run-7", key="", run_dir=Path("/nowhere"), mark="", environ=environ or {}, labels={"team": "a"})


def a_step(step: int = 3, **values: float) -> MirroredStep:
    return MirroredStep(attempt=1, step=step, time=1e9 + step, values=tuple(values.items()))


def test_values_are_points_at_the_time_of_their_step(collector: Collector) -> None:
    mirror = OtlpConfig(endpoint=f"{collector.url}/").build(parts())

    mirror.write(MirrorBatch(steps=[a_step(3, loss=2.0, lr=math.nan, tokens=4.0), a_step(4, loss=1.5, step_time_s=0.25)]))

    first, second, of = 1_000_000_003 * 10**9, 1_000_000_004 * 10**9, {"attempt": 1}
    points = {(name, *sorted(attributes.items()), at): value for name, attributes, at, value in collector.points}
    assert math.isnan(points.pop(("sentinel.learning_rate", ("attempt", 1), first)))
    assert points == {
        ("sentinel.loss", *of.items(), first): 2.0, ("sentinel.loss", *of.items(), second): 1.5,
        ("sentinel.step.duration", *of.items(), second): 0.25,
        ("sentinel.series", *of.items(), ("series", "tokens"), first): 4.0,
        ("sentinel.step", *of.items(), first): 3.0, ("sentinel.step", *of.items(), second): 4.0,
    }  # fmt: skip
    (request,) = collector.metrics
    resource = plain(request.resource_metrics[0].resource.attributes)
    assert resource.items() >= {"service.name": "sentinel", "sentinel.run": "run-7", "team": "a"}.items()
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    assert {one.name: one.unit for one in metrics}["sentinel.step.duration"] == "s"
    assert len({one.name for one in metrics}) == len(metrics)
    assert not collector.logs


def test_what_was_found_are_events_with_their_severity(collector: Collector) -> None:
    mirror = OtlpConfig(endpoint=collector.url).build(parts())
    found = [a_nan(step=5, rank=3, message="blocks.0 \x1b[31mholds NaN"), an_excursion(step=6)]

    mirror.write(MirrorBatch(anomalies=found, incidents=[MirroredIncident(change="opened", incident=an_incident(2))]))

    nan, excursion, incident = collector.records
    assert (nan.event_name, nan.severity_number, nan.severity_text) == ("sentinel.anomaly", 17, "CRITICAL")
    assert nan.body.string_value == "blocks.0 \\u001b[31mholds NaN" and nan.time_unix_nano == 5 * 10**9
    assert plain(nan.attributes).items() >= {"step": 5, "rank": 3, "rule": "nan", "value_text": "nan"}.items()
    assert "value" not in plain(nan.attributes), "what is not known is left out"
    assert excursion.severity_number == 13
    assert plain(excursion.attributes).items() >= {"value": 9.0, "baseline": 1.0, "score": 2.0, "step": 6}.items()
    assert incident.event_name == "sentinel.incident.opened"
    assert plain(incident.attributes).items() >= {"sentinel.incident.id": "i2", "state": "open", "opened_step": 7}.items()
    assert not collector.metrics


def test_a_large_batch_is_several_requests(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_mirror, "POINTS_AT_ONCE", 5)
    mirror = OtlpConfig(endpoint=collector.url).build(parts())

    mirror.write(MirrorBatch(steps=[a_step(at, loss=1.0, lr=1.0) for at in range(7)]))

    assert len(collector.metrics) == 4
    assert sorted(value for name, _, _, value in collector.points if name == "sentinel.step") == list(map(float, range(7)))


@pytest.mark.parametrize("status", [400, 401, 503])
def test_a_collector_that_refuses_is_an_error_and_takes_the_batch_again(collector: Collector, status: int) -> None:
    collector.status, collector.answer = status, b"no \x1b[2Jroom"
    mirror = OtlpConfig(endpoint=collector.url).build(parts())

    with pytest.raises(MirrorError, match=rf"^metrics are not taken: http://127.0.0.1:\d+: HTTP {status} no .u001b"):
        mirror.write(MirrorBatch(steps=[a_step(loss=1.0)]))
    collector.status, collector.answer = 200, b""
    mirror.write(MirrorBatch(steps=[a_step(loss=1.0)]))

    assert len(collector.metrics) == 1


def test_what_a_collector_rejects_of_a_batch_is_said_once(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    answer = ExportLogsServiceResponse()
    answer.partial_success.rejected_log_records, answer.partial_success.error_message = 1, "too old"
    collector.answer = answer.SerializeToString()
    mirror = OtlpConfig(endpoint=collector.url).build(parts())

    for _ in range(2):
        mirror.write(MirrorBatch(anomalies=[a_nan()]))

    (said,) = [one.getMessage() for one in caplog.records]
    assert "a part of the logs was rejected" in said and "too old" in said and said.isprintable()


def test_keys_of_a_service_come_from_a_file_or_the_environment(collector: Collector, tmp_path: Path) -> None:
    config = OtlpConfig(endpoint=collector.url, headers_env="OTLP_HEADERS")
    environ = {"OTLP_HEADERS": "authorization=Bearer a=b, x-team = one"}

    config.build(parts(environ)).write(MirrorBatch(steps=[a_step(loss=1.0)]))

    assert config.problem(environ) == ""
    (headers,) = collector.headers
    assert {name.lower(): value for name, value in headers.items()}.items() >= {
        "authorization": "Bearer a=b", "x-team": "one", "content-type": "application/x-protobuf",
    }.items()  # fmt: skip
    assert "headers_env: expected the environment variable OTLP_HEADERS to be set" in config.problem({})
    broken = "headers: expected name=value,name=value, got other text of 6 characters"
    assert config.problem({"OTLP_HEADERS": "secret"}) == broken, "and the secret is not told"
    with pytest.raises(ConfigError, match="expected name=value"):
        config.build(parts({"OTLP_HEADERS": "secret"}))
    assert "expected a PEM file" in OtlpConfig(ca_file=str(tmp_path / "none")).problem({})
