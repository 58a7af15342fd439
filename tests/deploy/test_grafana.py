"""The dashboards: committed as the generator writes them, by the dashboard linter's rules, with data of a real daemon."""

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import msgspec
import pytest

from sentinel.messages import Heartbeat
from sentinel.testing import LossJump, Nan, SyntheticRun

from ..support.nats_broker import NatsBroker
from ..support.ports import free_port
from ..support.servers import Receiver, get, get_json, need, prometheus, run_tool
from ..support.serving import small_run
from ..support.waiting import wait_for
from ..support.warm import cli

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
PANELS = [
    pytest.param(board, panel, id=f"{name}-{panel['title']}".replace(" ", "-"))
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
NOT_CONFIGURED = {
    "Certificate ends": "the daemon of the test serves without TLS",
    "Mirrors": "the daemon of the test mirrors nothing",
}
"""Panel -> why it is empty there."""


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("grafana_dashboards", FOLDER / "dashboards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("grafana_json", None)


def test_what_is_committed_is_what_the_generator_writes(generator):
    made = {name: generator.as_text(make()) for name, make in generator.DASHBOARDS.items()}

    assert {name: (FOLDER / f"{name}.json").read_text() for name in BOARDS} == made


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_each_dashboard_lets_one_choose_source_job_and_daemon_and_leads_to_the_others(board):
    variables = {one["name"]: one for one in board["templating"]["list"]}

    assert board["title"] and board["description"] and board["uid"].startswith("sentinel-")
    assert not board["editable"]
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    for name in ("job", "instance"):
        assert variables[name]["multi"] and variables[name]["includeAll"] and variables[name]["allValue"] == ".+"
    for one in variables.values():
        assert one["label"] and one.get("datasource", {"uid": "${datasource}"})["uid"] == "${datasource}"
    assert [(link["tags"], link["includeVars"], link["keepTime"]) for link in board["links"]] == [(["sentinel"], True, True)]
    assert board["tags"] == ["sentinel"] and board["annotations"]["list"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_dashboards_have_names_of_their_own():
    assert len({board["uid"] for board in BOARDS.values()}) == len({board["title"] for board in BOARDS.values()}) == 5


@pytest.mark.parametrize(("board", "panel"), PANELS)
def test_each_panel_keeps_the_rules_of_the_dashboard_linter(board, panel):
    assert panel["title"] and panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in panel["targets"]:
        expression = target["expr"]
        selectors = re.findall(r"(?:sentinel_|process_|up|scrape_)\w*\{([^}]*)\}", expression)
        assert selectors and all('job=~"$job", instance=~"$instance"' in one for one in selectors), expression
        assert len(re.findall(r"\b(?:sentinel|process)_\w+", expression)) <= len(selectors) + expression.count("rule="), (
            expression
        )
        for window in re.findall(r"\b(?:rate|increase)\([^[]*\[([^\]]*)\]", expression):
            # One number over an hour is what "the last hour" is; everything drawn over time follows the resolution.
            assert window == "$__rate_interval" or (panel["type"] == "stat" and window == "1h"), expression
        assert not re.search(r"(?<!rate\()(?<!increase\()\bsentinel_\w+_total\{(?![^}]*\}\[)", expression), (
            "a counter needs a rate"
        )
        assert target["datasource"]["uid"] == "${datasource}"


def filled(expression):
    """Return an expression as Grafana asks it with everything chosen."""
    for name, value in {"$job": ".+", "$instance": ".+", "$run": ".+", "$kind": ".+", "$__rate_interval": "5s"}.items():
        expression = expression.replace(name, value)
    return expression


class ChattyRun(SyntheticRun):
    """A run whose trainer logs one scalar more than those that have panels of their own."""

    def observe(self, rank, step):
        rows, end_step = super().observe(rank, step)
        return rows, msgspec.structs.replace(end_step, scalars={**end_step.scalars, "tokens": 4096.0})


@pytest.mark.server
@pytest.mark.slow
def test_each_panel_shows_data_of_a_real_daemon_that_a_real_prometheus_scrapes(tmp_path):
    need("prometheus", "promtool", "nats-server")
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700)
    source = ChattyRun(runs / "run", pp=2, dp=2, layers=4, d_model=16, elements=8)
    # From step 60 on each loss is absurd beside the one before, so that some newest step has a score.
    source.plant(
        Nan(step=3, module="layers.2"), *(LossJump(step=step, factor=9.0 ** (step - 59)) for step in range(60, 200))
    )
    source.write(60)
    address = f"127.0.0.1:{free_port()}"
    rules = tmp_path / "rules.yml"
    rules.write_text("groups: []\n")

    with Receiver().running() as receiver:
        config = tmp_path / "sentinel.yml"
        config.write_text(
            f"notify:\n  sinks:\n    - {{type: webhook, url: '{receiver.url}'}}\n"
            f"    - {{type: alertmanager, urls: ['{receiver.url}']}}\n"
            f"heartbeat: {{url: '{receiver.url}', interval_s: 1}}\n"
        )
        arguments = [*cli(), "serve", str(runs), "--listen", address, "--open-reads", "--config", str(config)]
        with (tmp_path / "daemon.log").open("wb") as log:
            daemon = subprocess.Popen(arguments, stderr=log)
        try:
            wait_for(lambda: daemon.poll() is not None or b'judged_step{run="run"} 59.0' in scraped(address))
            assert run_tool("promtool", "check", "metrics", stdin=scraped(address)) == (0, "")
            with (
                NatsBroker(tmp_path / "broker") as broker,
                joined(tmp_path, broker.url) as (join, worker),
                prometheus(tmp_path, address, rules, also=[join, worker]) as url,
            ):
                waiting = [(param.values[1]["title"], one["expr"]) for param in PANELS for one in param.values[1]["targets"]]

                def is_whole():
                    source.write()
                    for rank in range(source.num_ranks):
                        source.report(rank, Heartbeat(step=source.step, call_id=0, activity="train"))
                    waiting[:] = [(title, one) for title, one in waiting if not results(url, filled(one))]
                    return {title for title, _ in waiting} <= NOT_CONFIGURED.keys()

                with contextlib.suppress(AssertionError):
                    wait_for(is_whole, interval_s=0.5)
                assert {title for title, _ in waiting} == NOT_CONFIGURED.keys(), waiting
                for board in BOARDS.values():
                    for one in board["annotations"]["list"]:
                        results(url, filled(one["expr"]))  # that Prometheus can read it
        finally:
            daemon.terminate()
            daemon.wait(240)


@contextlib.contextmanager
def joined(directory, broker):
    """Yield the addresses of a join to which a node ships a run of its own, in digests, and of a worker with another one."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    for name in ("node", "ship"):
        small_run(directory / name / f"run-{name}").write(20)
        (directory / name).chmod(0o700)
    commands = (
        ["join", str(directory / "joined"), "--server", broker, "--listen", addresses[0], "--open-reads"],
        ["worker", str(directory / "worker"), "--server", broker, "--listen", addresses[1], "--open-reads"],
        ["node", str(directory / "node"), "--server", broker, "--node", "node0"],
        ["ship", str(directory / "ship"), "--server", broker, "--node", "node1", "--to-workers"],
    )
    with contextlib.ExitStack() as stack:
        for verb in commands:
            log = stack.enter_context((directory / f"{verb[0]}.log").open("wb"))
            process = subprocess.Popen([*cli(), *verb], stderr=log)
            stack.callback(process.wait, 240)
            stack.callback(process.terminate)
        yield addresses


def scraped(address):
    try:
        return get(f"http://{address}/metrics")
    except OSError:
        return b""


def results(url, expression):
    found = get_json(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    assert found["status"] == "success", (expression, found)
    return found["data"]["result"]
