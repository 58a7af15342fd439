"""HTTP: who gets in, what is answered, and that nothing of it can be turned against its owner."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from sentinel.daemon.history_api import HistoryRequest
from sentinel.daemon.http.app import make_app
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.daemon_api import ShownIncident, Unavailable, UnknownIncident, UnknownRun
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.server import HttpServer
from sentinel.daemon.http.tokens import Scope, Tokens, load_tokens
from sentinel.daemon.pipeline_api import PipelineRequest
from sentinel.daemon.report_process import ReportFile
from sentinel.daemon.rules_api import WhatIfRequest
from sentinel.daemon.run_status import RunChanges
from sentinel.daemon.series_api import Busy, SeriesRequest
from sentinel.daemon.trace_api import TraceRequest
from sentinel.errors import ConfigError, NotThere, PackageMissing, RuleError, StoreError, TookTooLong
from sentinel.report.message import Link
from sentinel.report.silences import Silence, SilenceRequest

from ...support.anomalies import an_incident

TOKENS = Tokens(read="r" * 20, control="c" * 20, silence="s" * 20)
READ = {"Authorization": "Bearer " + TOKENS.read}
CONTROL = {"Authorization": "Bearer " + TOKENS.control}
SILENCE = {"Authorization": "Bearer " + TOKENS.silence}


FAILURES: dict[str, tuple[int, Exception]] = {
    "none": (404, NotThere("a: expected a run with a history")),
    "busy": (503, Busy("the history is being asked")),
    "slow": (504, TookTooLong("no answer within 10 s; ask for fewer steps")),
    "duckdb": (501, PackageMissing("questions in SQL need the package duckdb")),
    "disk": (500, StoreError("a/history/manifest.json: Input/output error")),
    "asked": (400, ConfigError("kind: expected one of wgrad")),
}
"""Part of a name that is looked for -> the status of the answer, and why there is none."""


def known(run: str | None) -> None:
    if run not in (None, "a"):
        raise UnknownRun(f'"{run}": expected a run served here')


class FakeQuestions:
    """What the data of that run is asked."""

    def __init__(self) -> None:
        self.requests: list[SeriesRequest] = []

    def series(self, request: SeriesRequest) -> dict[str, Any]:
        known(request.run)
        self.requests.append(request)
        if request.query.names == ("busy",):
            raise Busy("the spool is being read")
        return {"series": [{"run": "a", "name": "loss", "points": [[0, 1, float("nan")]]}], "truncated": False}

    def history(self, request: HistoryRequest) -> dict[str, Any]:
        return self._history("held", request)

    def history_series(self, request: HistoryRequest) -> dict[str, Any]:
        return self._history("series", request)

    def heatmap(self, request: HistoryRequest) -> dict[str, Any]:
        return self._history("heatmap", request)

    def vectors(self, request: HistoryRequest) -> dict[str, Any]:
        return self._history("vectors", request)

    def pipeline(self, request: PipelineRequest) -> dict[str, Any]:
        known(request.run)
        return msgspec.to_builtins(request)

    def divergence(self, runs: Sequence[str], statistic: str) -> dict[str, Any]:
        for run in runs:
            known(run)
        return {"runs": list(runs), "statistic": statistic}

    def report(self, run: str, incident: str | None) -> ReportFile:
        known(run)
        if incident == "busy":
            raise Busy("another post-mortem is being written")
        return ReportFile("postmortem-a.html", b"<!doctype html><title>a</title>")

    def rules(self, run: str) -> dict[str, Any]:
        known(run)
        return {"rules": [{"name": "<b>x</b>"}]}

    def what_if(self, request: WhatIfRequest) -> dict[str, Any]:
        known(request.run)
        if request.rule == "busy":
            raise Busy("another what-if is being judged")
        if request.rule == "bad":
            raise RuleError("what-if.yaml:4: k must be above 0")
        return msgspec.to_builtins(request)

    def marks(self, run: str) -> list[dict[str, Any]]:
        known(run)
        return [{"kind": "restart", "step": 3}]

    def _history(self, what: str, request: HistoryRequest) -> dict[str, Any]:
        known(request.run)
        if request.find in FAILURES:
            raise FAILURES[request.find][1]
        return {"what": what, "wanted": msgspec.to_builtins(request.wanted), "of": request.of}

    def traces(self, request: TraceRequest) -> dict[str, Any]:
        known(request.run)
        return {"steps": []}


class FakeApi:
    """A daemon with one run and one incident whose texts are hostile."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, str, dict[str, Any]]] = []
        self.questions = FakeQuestions()
        self.status = "ok"
        self.outcome = "ok"
        self.changed: dict[str, RunChanges] = {"a": RunChanges((1,), (0,))}

    def health(self) -> dict[str, Any]:
        return {"status": self.status, "problems": ["<b>rules</b>"], "standby_of": ["<i>7</i> on a"], "version": "0"}

    def is_ready(self) -> bool:
        return self.status == "ok"

    def runs(self) -> list[dict[str, Any]]:
        return [{"run": "<script>alert(1)</script>", "attempt": 0, "judged_step": 7, "scalars": {"loss\"'>": 1.5}}]

    def anomalies(self, run: str | None, *, limit: int, before: int | None, step: int | None) -> list[bytes]:
        known(run)
        return [b'{"id":"a"}', b'{"id":"b"}'][:limit]

    def incidents(self, run: str | None, *, limit: int, is_open: bool) -> list[bytes]:
        known(run)
        incident = {"id": "i1", "severity": 'critical"onload=', "title": "<img src=x onerror=alert(1)>", "ranks": [0]}
        return [json.dumps(incident).encode()]

    def incident(self, run: str | None, incident: str) -> ShownIncident:
        known(run)
        if incident != "i1":
            raise UnknownIncident(f'incident "{incident}": there is none')
        evil = "<img src=x onerror=alert(1)>\x1b[2J"
        opened = an_incident(run=evil, title=evil, root_name=evil, suspected=evil, evidence=(f"suspected x: {evil}",))
        over = msgspec.structs.replace(opened, revision=2, state="resolved")
        links = (Link("runbook", 'https://w/"onload=x'),)
        anomaly = b'{"id":"a1","tag_name":"<img src=x onerror=alert(1)>"}'
        return ShownIncident(revisions=(opened, over), orders=(evil,), links=links, anomalies=(anomaly,))

    def changes(self) -> dict[str, RunChanges]:
        return self.changed

    def audit(self, run: str | None, *, limit: int) -> list[dict[str, Any]]:
        return []

    def silences(self) -> list[Silence]:
        evil = "<img src=x onerror=alert(1)>"
        return [Silence(id="s1", matchers=(f"title={evil}",), who=evil, why=evil, begun=0.0, until=3600.0)]

    def silence(self, request: SilenceRequest) -> Silence:
        self.orders.append(("", "silence", msgspec.to_builtins(request)))
        return request.begun(0.0)

    def end_silence(self, wanted: str, who: str) -> Silence:
        self.orders.append(("", "end", {"wanted": wanted, "who": who}))
        return self.silences()[0]

    def control(self, run: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        known(run)
        if request.get("kinds") == ["nonsense"]:
            raise ConfigError("kinds: unknown")
        self.orders.append((run, action, dict(request)))
        return {"ok": True}

    def reload(self) -> dict[str, Any]:
        return {"outcome": self.outcome}

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return b"sentinel_up 1\n", "text/plain; version=0.0.4; charset=utf-8"


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


def client_of(api: FakeApi, listen: str = "127.0.0.1:9464", **options: Any) -> TestClient:
    config = HttpConfig.parse(listen, **options)
    return TestClient(make_app(api, RequestGate(config, TOKENS)), base_url="http://127.0.0.1:9464")


READS = [
    "/", "/incidents/i1", "/assets/app.js", "/api/v1/incidents/i1", "/api/v1/history?run=a",
    "/api/v1/history/series?run=a", "/api/v1/history/heatmap?run=a", "/api/v1/history/vectors?run=a",
    "/api/v1/pipeline?run=a", "/metrics", "/api/v1/runs", "/api/v1/anomalies", "/api/v1/incidents", "/api/v1/series",
    "/api/v1/control", "/api/v1/silences", "/api/v1/rules?run=a", "/api/v1/marks?run=a",
    "/api/v1/history/divergence?run=a&run=a",
]  # fmt: skip


@pytest.mark.parametrize("path", [*READS, "/healthz", "/readyz"])
def test_loopback_reads_need_no_token(api: FakeApi, path: str) -> None:
    assert client_of(api).get(path).status_code == 200


@pytest.mark.parametrize("path", READS)
def test_reads_on_other_addresses_need_a_token(api: FakeApi, path: str) -> None:
    client = client_of(api, "0.0.0.0:9464", has_insecure_tokens=True)

    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get(path, headers=READ).status_code == 200
    assert client_of(api, "0.0.0.0:9464", has_open_reads=True, has_insecure_tokens=True).get(path).status_code == 200


def test_probes_are_answered_without_a_token_everywhere(api: FakeApi) -> None:
    client = client_of(api, "0.0.0.0:9464", has_insecure_tokens=True)

    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


@pytest.mark.parametrize("path", ["/api/v1/control", "/-/reload"])
def test_control_needs_the_control_token_even_on_loopback(api: FakeApi, path: str) -> None:
    order = {"run": "a", "action": "enable"}
    client = client_of(api)

    assert client.post(path, json=order).status_code == 401
    assert client.post(path, json=order, headers=READ).status_code == 403
    assert client.post(path, json=order, headers=CONTROL).status_code == 200


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:9464", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]:1", "localhost:80@evil.example",
    "localhost:evil", "localhost:", "localhost/evil", "localhost#", "user@localhost", "[::1", "[::1]evil", "::1]",
    "localhost:1:1",
])  # fmt: skip
def test_a_foreign_host_header_is_refused(api: FakeApi, host: str) -> None:
    assert client_of(api).get("/", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("path", ["/metrics/", "/api/v1/runs/", "/-/reload/"])
def test_nothing_is_redirected(api: FakeApi, path: str) -> None:
    for host in ("evil.example", "localhost"):
        answer = client_of(api).get(path, headers={"Host": host}, follow_redirects=False)
        assert answer.status_code == 404 and "location" not in answer.headers


@pytest.mark.parametrize("host", ["localhost", "localhost:9464", "127.0.0.1:1", "[::1]:9464", "LOCALHOST"])
def test_loopback_names_are_ours(api: FakeApi, host: str) -> None:
    assert client_of(api).get("/healthz", headers={"Host": host}).status_code == 200


def test_allowed_hosts_and_addresses_of_a_wildcard(api: FakeApi) -> None:
    client = client_of(api, "0.0.0.0:9464", has_insecure_tokens=True, allowed_hosts=("sentinel.cluster.local",))

    assert client.get("/healthz", headers={"Host": "sentinel.cluster.local:9464"}).status_code == 200
    assert client.get("/healthz", headers={"Host": "10.1.2.3:9464"}).status_code == 200
    assert client.get("/healthz", headers={"Host": "rebound.example"}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1234"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_posts_from_other_pages_are_refused_even_with_the_token(api: FakeApi, headers: dict[str, str]) -> None:
    answer = client_of(api).post("/-/reload", headers={**CONTROL, **headers})

    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_posts_from_our_own_page_are_let_in(api: FakeApi) -> None:
    own = {"Origin": "http://127.0.0.1:9464", "Sec-Fetch-Site": "same-origin"}

    assert client_of(api).post("/-/reload", headers={**CONTROL, **own}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "//etc/passwd",
        "/../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
    ],
)
def test_no_path_leads_to_a_file(api: FakeApi, path: str) -> None:
    answer = client_of(api).get(path)

    assert answer.status_code == 404
    assert "root:" not in answer.text


@pytest.mark.parametrize("run", ["../../etc", "/etc/passwd", "b", "a/../../x"])
def test_runs_are_names_not_paths(api: FakeApi, run: str) -> None:
    client = client_of(api)

    assert client.get("/api/v1/anomalies", params={"run": run}).status_code == 404
    order = {"run": run, "action": "enable"}
    assert client.post("/api/v1/control", json=order, headers=CONTROL).status_code == 404


def test_the_page_escapes_everything_and_runs_its_own_script_alone(api: FakeApi) -> None:
    answer = client_of(api).get("/")

    assert "<script>alert" not in answer.text
    assert "<img" not in answer.text
    assert "<b>rules" not in answer.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert re.findall(r' src="([^"]*)"', answer.text) == ["assets/app.js"]
    assert re.findall(r' href="([^"]*)"', answer.text) == ["assets/icon.svg", "assets/app.css", "incidents/i1?run="]
    assert not re.findall(r"<style|style=|<script[^>]*>[^<]", answer.text)


def test_every_answer_carries_the_guarding_headers(api: FakeApi) -> None:
    for path in (*READS, "/healthz", "/nothing"):
        headers = client_of(api).get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]


def test_json_is_strict(api: FakeApi) -> None:
    answer = client_of(api).get("/api/v1/series")

    assert "NaN" not in answer.text
    assert answer.json()["series"][0]["points"] == [[0, 1, None]]


def test_lists_are_json_and_bounded(api: FakeApi) -> None:
    client = client_of(api)

    assert client.get("/api/v1/anomalies?limit=1").json() == {"anomalies": [{"id": "a"}]}
    assert client.get("/api/v1/incidents?state=open").json()["incidents"][0]["id"] == "i1"
    assert client.get("/api/v1/anomalies?limit=-1").status_code == 400
    assert client.get("/api/v1/incidents?state=closed").status_code == 400


def test_bad_orders_are_answered_with_400(api: FakeApi) -> None:
    client = client_of(api)

    for body in (
        b"",
        b"[]",
        b"{",
        b'{"run": 1}',
        b'{"run": "a", "action": "explode"}',
        b'{"run":"a","action":"enable","kinds":["nonsense"]}',
    ):
        assert client.post("/api/v1/control", content=body, headers=CONTROL).status_code == 400, body
    assert api.orders == []
    assert client.post("/api/v1/control", content=b"x" * 70_000, headers=CONTROL).status_code == 413


def test_an_order_that_cannot_be_written_down_is_503(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: str, action: str, request: Any) -> dict[str, Any]:
        raise Unavailable("nothing can be written: disk is full")

    client = client_of(api)
    order = {"run": "a", "action": "enable"}
    assert client.post("/api/v1/control", json=order, headers=CONTROL).status_code == 200
    monkeypatch.setattr(api, "control", full)

    answer = client.post("/api/v1/control", json=order, headers=CONTROL)

    assert (answer.status_code, answer.json()) == (503, {"error": "nothing can be written: disk is full"})


def test_wrong_methods_are_405(api: FakeApi) -> None:
    client = client_of(api)

    assert client.delete("/api/v1/control", headers=CONTROL).status_code == 405
    assert client.get("/-/reload").status_code == 405


def test_health_and_reload_say_what_is_wrong(api: FakeApi) -> None:
    client = client_of(api)

    api.outcome = "failed"
    assert client.post("/-/reload", headers=CONTROL).status_code == 422
    api.status = "degraded"
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 503
    api.status = "stuck"
    assert client.get("/healthz").status_code == 503


def test_a_server_answers_on_a_free_port(api: FakeApi, tmp_path: Path) -> None:
    config = HttpConfig.parse("127.0.0.1:0")
    credentials = Credentials(tmp_path, config)
    server = HttpServer(api, config, credentials)
    server.start()
    try:
        with urllib.request.urlopen(server.url + "/healthz", timeout=10) as answer:
            assert json.load(answer)["status"] == "ok"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "//etc/passwd", timeout=10)
        with pytest.raises(ConfigError, match=r"http\.listen"):
            HttpServer(api, HttpConfig(port=server.port), credentials)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:80", "::1", 80),
        (":9464", "127.0.0.1", 9464),
        ("0.0.0.0:1", "0.0.0.0", 1),
    ],
)
def test_listen_addresses(listen: str, host: str, port: int) -> None:
    config = HttpConfig.parse(listen, has_insecure_tokens=True)

    assert (config.host, config.port) == (host, port)


@pytest.mark.parametrize("listen", ["", "127.0.0.1", "a:b", "127.0.0.1:99999"])
def test_nonsense_addresses_are_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.(listen|port)"):
        HttpConfig.parse(listen)


def test_tokens_are_made_once_and_kept_private(tmp_path: Path) -> None:
    made = load_tokens(tmp_path)
    path = tmp_path / "tokens.json"

    assert load_tokens(tmp_path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert made.scope("Bearer " + made.control) is Scope.CONTROL
    assert made.scope("Bearer " + made.read) is Scope.READ
    assert made.scope("Basic " + made.read) is Scope.NOTHING
    assert made.scope("") is Scope.NOTHING
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_tokens(tmp_path)


def test_broken_token_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    for text in ("{}", "x", '{"read": "short", "control": "cccccccccccccccccccc"}'):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError):
            load_tokens(tmp_path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(ConfigError):
        load_tokens(tmp_path)


def test_a_request_for_series_that_cannot_be_answered_now_says_try_again(api: FakeApi) -> None:
    client = client_of(api)

    assert client.get("/api/v1/series?name=loss").json()["series"][0]["points"] == [[0, 1, None]]
    busy = client.get("/api/v1/series?name=busy")
    assert busy.status_code == 503
    assert busy.json() == {"error": "the spool is being read"}
    assert [one.query.names for one in api.questions.requests] == [("loss",), ("busy",)]


@pytest.mark.parametrize("body", [b"[" * 60_000, b'{"a":' * 12_000, b'{"run": "a\xff"}'])
def test_a_body_that_is_no_order_is_the_callers_mistake(body: bytes) -> None:
    client = TestClient(make_app(FakeApi(), RequestGate(HttpConfig(), TOKENS)), base_url="http://127.0.0.1")

    assert client.post("/api/v1/control", content=body, headers=CONTROL).status_code == 400


def test_the_page_of_an_incident_that_is_over_shows_it_with_everything_escaped(api: FakeApi) -> None:
    answer = client_of(api).get("/incidents/i1?run=a")

    assert answer.status_code == 200 and "text/html" in answer.headers["content-type"]
    assert "WARNING resolved" in answer.text and "How it went on" in answer.text
    assert "<img" not in answer.text and '"onload' not in answer.text
    assert "\x1b" not in answer.text.split("How it went on")[0]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "refresh" not in answer.text, "nothing of it changes any more"


def test_an_incident_that_nobody_has_is_404_in_words(api: FakeApi) -> None:
    for path in ("/incidents/i2", "/incidents/i1?run=b", "/incidents/i1/x", "/incidents/"):
        answer = client_of(api).get(path)
        assert answer.status_code == 404 and answer.json()["error"]


def test_silences_are_listed_begun_and_ended_by_who_may(api: FakeApi) -> None:
    client, path = client_of(api), "/api/v1/silences"
    asked = {"matchers": ["run=a"], "for_s": 60.0, "why": "known", "who": "ana"}

    assert client.get(path).json()["silences"][0]["id"] == "s1"
    assert client.post(path, json=asked, headers=READ).status_code == 403
    begun = client.post(path, json=asked, headers=SILENCE)
    assert (begun.status_code, begun.json()["until"], begun.json()["who"]) == (202, 60.0, "ana")
    assert client.post(path, json={"end": "s1", "who": "bob"}, headers=SILENCE).status_code == 202
    assert api.orders[1] == ("", "end", {"wanted": "s1", "who": "bob"})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"matchers": ["rnu=a"], "for_s": 60.0, "why": "known"}, 'did you mean \\"run\\"?'),
        ({"matchers": ["run=a"], "why": "known"}, "until or for_s"),
        ({"matchers": ["run=a"], "for_s": 60.0, "why": "known", "wo": "ana"}, "wo"),
        ({"end": 7}, "expected"),
        ({"end": "s1", "what": "x"}, "expected"),
    ],
)
def test_what_is_no_silence_is_refused_in_words(api: FakeApi, asked: dict[str, Any], words: str) -> None:
    answer = client_of(api).post("/api/v1/silences", json=asked, headers=SILENCE)

    assert answer.status_code == 400
    assert words in answer.text


def test_the_page_shows_silences_and_escapes_them(api: FakeApi) -> None:
    page = client_of(api).get("/").text

    assert "<h2>Silences</h2>" in page and "1970-01-01 01:00 UTC" in page
    assert "<img src=x" not in page


def test_an_incident_is_told_as_json_with_its_anomalies(api: FakeApi) -> None:
    told = client_of(api).get("/api/v1/incidents/i1?run=a").json()

    assert "WARNING resolved" in told["headline"]
    assert told["incident"]["revision"] == 2 and [one["revision"] for one in told["revisions"]] == [2, 1]
    assert ["began with", "<img src=x onerror=alert(1)>\\u001b[2J"] in told["fields"]
    assert told["anomalies"] == [{"id": "a1", "tag_name": "<img src=x onerror=alert(1)>"}]
    assert client_of(api).get("/api/v1/incidents/i2").status_code == 404


def test_files_of_the_page_are_answered_once_and_nothing_beside_them(api: FakeApi) -> None:
    client = client_of(api)

    for name, kind in (("app.js", "text/javascript"), ("app.css", "text/css"), ("icon.svg", "image/svg+xml")):
        answer = client.get(f"/assets/{name}")
        assert answer.status_code == 200 and answer.content and answer.headers["content-type"].startswith(kind)
        assert client.get(f"/assets/{name}", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    for name in ("", "app.jsx", "..%2f__init__.py", "../__init__.py", "APP.JS"):
        assert client.get(f"/assets/{name}").status_code == 404


def test_an_incidents_page_leads_to_the_files_beside_the_daemons_address(api: FakeApi) -> None:
    assert 'src="../assets/app.js"' in client_of(api).get("/incidents/i1?run=a").text


@pytest.mark.parametrize(("path", "what"), [("", "held"), ("/series", "series"), ("/heatmap", "heatmap")])
def test_the_history_is_asked_as_the_address_says(api: FakeApi, path: str, what: str) -> None:
    asked = "run=a&kind=wgrad&statistic=kurtosis&name=a*&name=b&series=7&from=10&to=20&columns=99999&of=min"
    told = client_of(api).get(f"/api/v1/history{path}?{asked}").json()

    wanted = {
        "kind": "wgrad",
        "statistic": "kurtosis",
        "names": ["a*", "b"],
        "series": [7],
        "first_step": 10,
        "last_step": 20,
    }
    assert (told["what"], told["of"]) == (what, "min")
    assert told["wanted"].items() >= wanted.items() and told["wanted"]["columns"] == 4000


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("", "run: expected the name of a run"),
        ("run=a&nme=x", 'did you mean "name"'),
        ("run=a&from=-1", "from must be a whole number"),
        ("run=a&from=20&to=10", "to: expected a step from 20 on, got 10"),
        ("run=a&series=x", "series must be a whole number"),
        ("run=a&of=most", "of: expected one of extreme"),
        ("run=a&kind=x&kind=y", "kind: expected it once, got it 2 times"),
    ],
)
def test_what_no_history_can_answer_is_refused_in_words(api: FakeApi, asked: str, words: str) -> None:
    answer = client_of(api).get(f"/api/v1/history/heatmap?{asked}")

    assert answer.status_code == 400 and words in answer.json()["error"]
    assert client_of(api).get("/api/v1/history?run=b").status_code == 404


@pytest.mark.parametrize("find", FAILURES)
def test_whose_fault_it_is_that_there_is_no_answer_is_its_status(api: FakeApi, find: str) -> None:
    status, error = FAILURES[find]

    answer = client_of(api).get(f"/api/v1/history?run=a&find={find}")

    assert (answer.status_code, answer.json()["error"]) == (status, str(error))
    assert ("retry-after" in answer.headers) == (find == "busy"), "asked again it would take as long again"


def test_a_post_mortem_is_saved_by_whoever_may_read_and_begun_by_no_other_page(api: FakeApi) -> None:
    path = "/api/v1/report?run=a"
    answer = client_of(api).get(path)

    assert answer.status_code == 200 and answer.content == b"<!doctype html><title>a</title>"
    assert answer.headers["content-disposition"] == 'attachment; filename="postmortem-a.html"'
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "sandbox" in policy and "script-src" not in policy
    assert client_of(api).get(path, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client_of(api).get("/api/v1/report").status_code == 400
    assert client_of(api).get("/api/v1/report?run=nobody").status_code == 404
    assert client_of(api).get(f"{path}&incident=busy").status_code == 503


WHAT_IF = "/api/v1/rules/what-if"


def test_a_what_if_is_asked_by_whoever_may_read_and_by_no_other_page(api: FakeApi) -> None:
    asked = {"run": "a", "rule": "loss-spike", "numbers": {"k": 9.5}}
    client = client_of(api)

    assert client.post(WHAT_IF, json=asked).json() == asked
    assert client.post(WHAT_IF, json=asked, headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.post(WHAT_IF, json=asked, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.get(WHAT_IF).status_code == 405
    guarded = client_of(api, has_token_reads=True)
    assert guarded.post(WHAT_IF, json=asked).status_code == 401
    assert guarded.post(WHAT_IF, json=asked, headers=READ).json() == asked


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"run": "b", "rule": "x", "numbers": {}}, 404, "expected a run served here"),
        ({"run": "a", "rule": "busy", "numbers": {"k": 1}}, 503, "another what-if"),
        ({"run": "a", "rule": "bad", "numbers": {"k": 1}}, 400, "what-if.yaml:4: k must be above 0"),
        ({"run": "a", "rule": "x", "numbers": {"k": "1"}}, 400, "numbers"),
        ({"run": "a", "rule": "x", "numbers": {"k": 1e301}}, 400, "below 1e300"),
        ({"run": "a", "rule": "x", "numbers": {}, "path": "/etc"}, 400, "path"),
        ({}, 400, "run"),
    ],
)
def test_what_cannot_be_asked_is_answered_in_words(api: FakeApi, asked: dict[str, Any], status: int, words: str) -> None:
    answer = client_of(api).post(WHAT_IF, json=asked)

    assert answer.status_code == status and words in answer.json()["error"]


@pytest.mark.parametrize("path", ["/api/v1/rules", "/api/v1/marks"])
def test_rules_and_marks_are_of_a_run_that_is_named_and_served(api: FakeApi, path: str) -> None:
    client = client_of(api)

    assert client.get(f"{path}?run=a").status_code == 200
    assert client.get(path).status_code == 400 and "name of a run" in client.get(path).json()["error"]
    assert client.get(f"{path}?run=b").status_code == 404


def test_two_runs_are_compared_as_the_address_says(api: FakeApi) -> None:
    client = client_of(api)

    told = client.get("/api/v1/history/divergence?run=a&run=a&statistic=mean").json()
    assert told == {"runs": ["a", "a"], "statistic": "mean"}
    assert client.get("/api/v1/history/divergence?run=a&run=b").status_code == 404
