"""Metrics, rules and configurations in deploy/, before the real promtool, amtool and Prometheus."""

import contextlib
import math
import time
import urllib.parse
from pathlib import Path

import pytest

from sentinel.report.metrics import MetricsSnapshot, NormAggregate, RunMetrics
from sentinel.report.prometheus_page import MetricsCollector

from ..support.servers import Receiver, get_json, need, prometheus, run_tool
from ..support.snapshots import full_snapshot
from ..support.waiting import wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"

pytestmark = pytest.mark.server


def a_run(**changes):
    return RunMetrics(
        run='a "run"', newest_step=12, judged_step=11, last_record_time=time.time(), last_judged_time=time.time(),
        step_time_s=0.5, scalars={"loss": math.nan, "grad_norm": 1.0, "lr": 1e-4, "tokens": 4096.0},
        num_ranks_expected=4, ranks={"live": 4}, monitoring_acked_step=10, rules=("loss-spike", "nan"), top_scores=(2.0,),
        norms=(NormAggregate(pp_stage=0, kind="wgrad", max=math.inf, num_nan_total=3),), health={"disk_full": 1},
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("num_runs", [0, 1, 3])
def test_promtool_finds_nothing_to_complain_about(num_runs):
    need("promtool")
    runs = tuple(a_run() for _ in range(min(num_runs, 1))) + tuple(RunMetrics(run=f"r{n}") for n in range(1, num_runs))
    snapshot = full_snapshot(runs)
    body, _ = MetricsCollector(lambda: snapshot).render()

    assert run_tool("promtool", "check", "metrics", stdin=body) == (0, "")


def test_a_real_prometheus_scrapes_and_fires(tmp_path):
    need("prometheus")
    snapshots = [MetricsSnapshot(runs=(a_run(),), sinks=("slack",))]
    collector = MetricsCollector(lambda: snapshots[-1])
    rules = tmp_path / "rules.yml"
    # The shipped rules with their patience taken away.
    lines = (DEPLOY / "prometheus" / "sentinel.rules.yml").read_text().splitlines()
    rules.write_text("\n".join(line for line in lines if not line.strip().startswith("for:")))

    with contextlib.ExitStack() as stack:
        target = stack.enter_context(Receiver(page=lambda: collector.render("application/openmetrics-text")).running())
        url = stack.enter_context(prometheus(tmp_path, target.url.removeprefix("http://"), rules))

        def query(expression):
            found = get_json(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
            return [(one["metric"], one["value"][1]) for one in found["data"]["result"]]

        def firing():
            alerts = get_json(f"{url}/api/v1/alerts")["data"]["alerts"]
            return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

        wait_for(lambda: query('sentinel_judged_step{run="a \\"run\\""} == 11'))
        assert query("up")[0][1] == "1"
        wait_for(lambda: firing() == {"Watchdog"})
        # From zero on, so that `increase` sees the very first one.
        snapshots.append(
            MetricsSnapshot(runs=(a_run(num_rows_dropped=5),), sinks=("slack",), reload_failures=frozenset(["rules"]))
        )
        wait_for(lambda: {"SentinelBlind", "SentinelReloadFailed"} <= firing())
        num_series = int(query('count({job="sentinel", run!=""})')[0][1])
        targets = get_json(f"{url}/api/v1/targets")["data"]["activeTargets"]

    assert 50 < num_series < 500
    assert [one["lastError"] for one in targets] == [""]
