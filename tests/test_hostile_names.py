"""Names that a trainer chose to harm whoever reads them: no output shows what moves a cursor, ends a line or is run."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from sentinel.cli.main import run_cli
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.http.app import make_app
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.tokens import Tokens
from sentinel.daemon.notifying import Notifying
from sentinel.daemon.served_api import ServedApi
from sentinel.incident import Incident
from sentinel.printable import printable, printable_lines
from sentinel.report.alert import Alert
from sentinel.report.silences import Silences
from sentinel.report.sinks.console import ConsoleConfig
from sentinel.report.sinks.delivery import SinkParts

from .support.hostile_run import EVIL, write_hostile_run
from .support.serving import catch_up, loaded_packs, served

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judged run whose module, parameter and value names are all hostile, and in which one of them goes bad."""
    run_dir = tmp_path_factory.mktemp("hostile") / "run"
    write_hostile_run(run_dir)
    one = served(run_dir)
    catch_up(one)
    one.close()
    return run_dir


def harmless(text: str) -> str:
    """The text, of which nothing may be unseen."""
    assert UNSEEN.search(text) is None, ascii(UNSEEN.search(text))
    assert "\nERROR forged line" not in text
    return text


@pytest.mark.parametrize(
    "verb",
    [
        ["status", "{run}"],
        ["status", "{run}", "--json"],
        ["watch", "{run}", "--once"],
        ["watch", "{run}", "--once", "--json"],
        ["topk", "-d", "{run}"],
        ["topk", "-d", "{run}", "--json"],
        ["explain", "-d", "{run}"],
        ["explain", "-d", "{run}", "--json"],
        ["export", "{run}", "--kind", "wgrad", "--statistic", "norm"],
        ["export", "{run}", "--kind", "wgrad", "--statistic", "norm", "--json"],
        ["export", "{run}", "--kind", "wgrad", "--name", "layers.1.nothing"],
        ["open", "--untrusted", "{run}", "topk"],
        ["report", "{run}", "-o", "-"],
        ["report", "{run}", "worst", "-o", "-"],
    ],
    ids=lambda verb: " ".join(verb),
)
def test_no_verb_prints_what_cannot_be_seen(hostile: Path, verb: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    run_cli([word.format(run=hostile) for word in verb])

    out, err = capfd.readouterr()
    harmless(err)
    assert "layers.1" in harmless(out) + err
    if "--json" in verb:
        for line in out.splitlines():
            json.loads(line)


def test_no_cell_of_a_table_is_a_formula(hostile: Path, tmp_path: Path) -> None:
    run_cli(["export", str(hostile), "--kind", "wgrad", "--statistic", "norm", "-o", str(tmp_path / "t.csv")])

    rows = list(csv.reader(io.StringIO(harmless((tmp_path / "t.csv").read_text()))))
    cells = [cell for row in rows for cell in row]
    assert any("layers.1" in cell for cell in cells)
    assert not [cell for cell in cells if cell.startswith(("=", "@", "\t", "\r", "+cmd"))]


def test_page_metrics_and_api_show_it_harmless(hostile: Path) -> None:
    run = served(hostile)
    config = DaemonConfig()
    notifying = Notifying(config.notify, {}, io.StringIO())
    api = ServedApi(loaded_packs(), ConfigInForce(config, None, None, 0.0), notifying, Silences(), print)
    api.publish([run], {}, {}, is_caught_up=True)
    tokens = Tokens(read="r" * 16, control="c" * 16)
    client = TestClient(make_app(api, RequestGate(HttpConfig(), tokens)), base_url="http://127.0.0.1")
    try:
        incidents = client.get("/api/v1/incidents").json()["incidents"]
        pages = ["/", *(f"/incidents/run/{one['id']}" for one in incidents)]
        others = ("/metrics", "/healthz", "/api/v1/runs", "/api/v1/anomalies")
        texts = {path: client.get(path).text for path in (*pages, *others)}
    finally:
        run.close()

    assert incidents
    for path, text in texts.items():
        assert "\x1b" not in text and "\x00" not in text and "\x9b" not in text, path
        assert "<script>alert" not in text or path.startswith(("/api", "/metrics", "/healthz")), path
    assert any("forged line" in texts[path] for path in pages)
    for line in texts["/metrics"].splitlines():
        assert not line.startswith("ERROR"), line


def test_messages_show_it_harmless(hostile: Path) -> None:
    lines = (hostile / "incidents.jsonl").read_bytes().splitlines()
    incidents = [msgspec.json.decode(line, type=Incident) for line in lines]
    alerts = [Alert(key=one.id, sink="console", change="opened", incident=one) for one in incidents]
    stream = io.StringIO()

    ConsoleConfig().build(SinkParts(environ={}, stream=stream)).deliver(alerts, 0.0)

    assert alerts and "forged line" in harmless(stream.getvalue())


@pytest.mark.parametrize("text", [EVIL, EVIL * 10_000, "\ud800", "a\u2028b", "\U000e0041", "\n"])
def test_whatever_is_made_printable_is_one_visible_line(text: str) -> None:
    assert printable(text).isprintable()
    assert printable("plain é 字 text") == "plain é 字 text"


def test_lines_stay_lines_and_json_stays_the_same_json() -> None:
    whole = json.dumps({"name": EVIL}, ensure_ascii=False)

    assert json.loads(printable_lines(whole)) == {"name": EVIL}
    assert printable_lines("a\tb\nc") == "a\tb\nc"
