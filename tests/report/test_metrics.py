import math
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from sentinel.report.metrics import (
    AGGREGATES,
    COMMAND_STATES,
    MAX_SERIES_PER_RUN,
    OTHER,
    OUTCOMES,
    SEVERITIES,
    MetricsCollector,
    MetricsSnapshot,
    NormAggregate,
    RunMetrics,
)


def scrape(snapshot, collector=None):
    body, _ = (collector or MetricsCollector(lambda: snapshot)).render()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def a_full_run(name="run"):
    return RunMetrics(
        run=name, attempt=2, newest_step=12, judged_step=11, last_record_time=1e9, last_judged_time=1e9 + 1,
        step_time_s=0.5, scalars={"loss": 2.5, "grad_norm": 1.0, "lr": 1e-4, "tokens": 4096.0}, num_ranks_expected=4,
        is_monitoring=True, monitoring_acked_step=10, rules=("loss-spike",), top_scores=(2.0, 0.5),
        norms=(NormAggregate(pp_stage=0, kind="wgrad", min=0.1, mean=0.2, max=math.inf, num_nan_total=3),),
        anomalies={("loss-spike", "critical"): 2}, health={"disk_full": 1}, commands={"issued": 1},
    )  # fmt: skip


def test_counters_exist_at_zero_from_the_start():
    samples = scrape(MetricsSnapshot(runs=(RunMetrics(run="a", rules=("nan",)),), sinks=("slack",)))

    expected = [("sentinel_anomalies_total", (("rule", "nan"), ("run", "a"), ("severity", one))) for one in SEVERITIES]
    expected += [("sentinel_notifications_total", (("outcome", one), ("sink", "slack"))) for one in OUTCOMES]
    expected += [("sentinel_commands_total", (("run", "a"), ("state", one))) for one in COMMAND_STATES]
    expected += [("sentinel_reloads_total", (("outcome", one),)) for one in ("ok", "failed")]
    expected += [("sentinel_rows_dropped_total", (("run", "a"),)), ("sentinel_series_dropped_total", (("run", "a"),))]
    assert {key: samples.get(key) for key in expected} == dict.fromkeys(expected, 0.0)


def test_what_the_daemon_says_is_what_is_scraped():
    samples = scrape(MetricsSnapshot(runs=(a_full_run(),), notifications={("slack", "sent"): 7}))

    run = ("run", "run")
    assert samples["sentinel_judged_step", (run,)] == 11
    assert samples["sentinel_loss", (run,)] == 2.5
    assert samples["sentinel_scalar", (("name", "tokens"), run)] == 4096
    assert samples["sentinel_last_record_timestamp_seconds", (run,)] == 1e9
    assert samples["sentinel_monitoring_enabled", (run,)] == 1
    assert samples["sentinel_monitoring_acknowledged_step", (run,)] == 10
    stage = (("aggregate", "max"), ("kind", "wgrad"), ("pp_stage", "0"), run)
    assert samples["sentinel_norm", stage] == math.inf
    bad = (("kind", "wgrad"), ("pp_stage", "0"), run, ("value", "nan"))
    assert samples["sentinel_nonfinite_elements_total", bad] == 3
    assert samples["sentinel_notifications_total", (("outcome", "sent"), ("sink", "slack"))] == 7


def a_huge_run():
    norms = tuple(
        NormAggregate(pp_stage=stage, kind=kind)
        for stage in range(256)
        for kind in ("wgrad", "activation", "dgrad", "param")
    )
    rules = tuple(f"rule-{number}" for number in range(2000))
    return RunMetrics(
        run="huge", norms=norms, rules=rules, scalars={f"scalar_{number}": 1.0 for number in range(5000)},
        health={f"code-{number}": 1 for number in range(5000)}, top_scores=(1.0,) * 5000,
        anomalies={(f"unknown-{number}", "warning"): 1 for number in range(3000)}, newest_step=1, judged_step=1,
        last_record_time=1.0, last_judged_time=1.0, step_time_s=1.0, monitoring_acked_step=1,
    )  # fmt: skip


def test_metrics_within_budget():
    snapshot = MetricsSnapshot(runs=(a_huge_run(), a_full_run()))
    collector = MetricsCollector(lambda: snapshot)

    first = scrape(snapshot, collector)
    again = scrape(snapshot, collector)

    per_run = Counter(dict(labels).get("run") for _, labels in first)
    assert per_run["huge"] <= MAX_SERIES_PER_RUN
    assert per_run["run"] > 50
    # A series is left out once, however often it is scraped, and the same ones stay.
    dropped = ("sentinel_series_dropped_total", (("run", "huge"),))
    assert again == first
    assert again[dropped] > 10_000
    assert first["sentinel_series_dropped_total", (("run", "run"),)] == 0
    assert first["sentinel_anomalies_total", (("rule", OTHER), ("run", "huge"), ("severity", "warning"))] == 3000


def test_many_runs_are_bounded_newest_first():
    snapshot = MetricsSnapshot(runs=tuple(RunMetrics(run=f"r{n}", last_record_time=float(n)) for n in range(130)))

    samples = scrape(snapshot)

    shown = {dict(labels)["run"] for name, labels in samples if name == "sentinel_records_total"}
    assert shown == {f"r{n}" for n in range(30, 130)}
    assert samples["sentinel_runs_hidden", ()] == 30


def test_label_values_are_escaped():
    samples = scrape(MetricsSnapshot(runs=(RunMetrics(run='a"\\\n{}'),)))

    assert ("sentinel_records_total", (("run", 'a"\\\n{}'),)) in samples


def test_every_sample_of_a_group_is_there():
    samples = scrape(MetricsSnapshot(runs=(a_full_run(),)))

    shown = {dict(labels)["aggregate"] for name, labels in samples if name == "sentinel_norm"}
    assert shown == set(AGGREGATES)


def test_every_metric_is_in_the_docs(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "configuration.md").read_text()
    body, _ = MetricsCollector(lambda: MetricsSnapshot(runs=(a_full_run(),), start_time=1.0, last_reload_time=1.0)).render()

    names = {line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE")}

    assert sorted(name for name in names if f"`{name}`" not in text) == []
